"""The experiment on grids, what is sent; and sums over replicas beside the backward."""

from __future__ import annotations

import pytest
from records import ran
from waiting_grid import LAYERS, Waits

from gpipe_bench.experiments.beyond import grid
from gpipe_bench.experiments.beyond.grid import EXPERIMENT
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.pipeline import Kind

PLACES = {(cell.table, cell.row, cell.column) for cell in load_paper() if cell.source == "others"}


def test_a_small_amoebanet_sends_more_as_a_pipeline() -> None:
    """Images of 67 x 67 pixels, ten classes and no second head, on four ranks."""
    found = ran(EXPERIMENT, {"part": grid.MODELLED, "model": "AmoebaNet-D (3, 32)"})
    assert found.metric("pipeline over data parallelism").value > 1
    (entry,) = EXPERIMENT.cells([found])
    assert entry.place in PLACES
    assert entry.question == "as published"
    assert "4 accelerators" in EXPERIMENT.tables([found])


def test_every_column_of_the_sentences_is_answered() -> None:
    columns = {subject.column for subject in (*grid.FULL_SIZE.values(), *grid.SMALL.values())}
    assert {column for table, row, column in PLACES if table == "grid" and row.startswith("bytes")} == columns


def test_traffic_by_hand() -> None:
    """Four layers of equal cost: with K = 2 the cut is after the second, with K = 4 after each."""
    four = grid.Shape((5, 5, 5, 5), (1, 1, 1, 997), (10, 20, 30, 40), (10, 16, 30, 40))
    assert grid.pipeline_bytes(four, 2, four.flops) == 20
    assert grid.pipeline_bytes(four, 2, four.parameters) == 30  # the cut is before the last
    assert grid.pipeline_bytes(four, 4, four.flops) == 30 + 16  # the third: its output, and a gradient back
    assert [grid.replica_bytes(4000, ranks) for ranks in (2, 4)] == [4000, 6000]


def test_shapes_of_the_zoo() -> None:
    found = grid.shape("transformer-lm", {"num_layers": 3})
    assert sum(found.parameters) == 282_178_816
    assert found.output_bytes[:4] == (1024 * 2048 * 4,) * 4  # sequence x width x float32
    assert found.output_bytes[4] == 1024 * 32_000 * 4
    assert found.output_gradient_bytes == found.output_bytes
    assert found.flops[1] == found.flops[3] > 0


def test_a_tensor_that_stands_twice_is_sent_once() -> None:
    """AmoebaNet's stem, 32 channels of 31 x 31, hands the same tensor on as both inputs of the first cell."""
    options = {"num_layers": 3, "num_filters": 16, "image_size": 64, "num_classes": 10, "aux_head": False}
    found = grid.shape("amoebanet-d", options)
    assert found.output_bytes[0] == found.output_gradient_bytes[0] == 31 * 31 * 32 * 4


# Sums over replicas leave inside the last backward and run beside it


@pytest.mark.alone
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_reaches_nine_tenths_of_the_replays_speed(schedule: str) -> None:
    """Which it cannot without overlap: all sums behind the backward would take longer than that allows."""
    case = Waits(schedule)
    replayed_s = case.replayed().makespan_s
    assert replayed_s / case.replayed(overlap=False).makespan_s < 0.9
    # The machine is busy with other things, too, which can only make a step slower.
    step_s, timeline = case._replace(num_steps=20, enough_s=replayed_s / 0.9).measure()
    assert replayed_s / step_s >= 0.9, timeline
    for stage in range(2):
        last = [event for event in timeline.of_stage(stage) if event.action.kind is Kind.B][-1]
        sums = [span for span in timeline.collectives if span.stage == stage]
        assert len(sums) == LAYERS
        # All but the last layer's run while the backward goes on.
        inside = [span for span in sums if last.start_s < span.start_s and span.end_s < last.end_s]
        assert len(inside) >= LAYERS - 2
        assert sums[-1].end_s > last.end_s
