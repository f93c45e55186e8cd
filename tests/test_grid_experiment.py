"""The experiment on grids: what is sent, how a replay is made of what ran, every grid of accelerators."""

from __future__ import annotations

import itertools
import math

import pytest
from records import ran

from gpipe_bench.experiments.grid import accelerators, machine
from gpipe_bench.experiments.grid.experiment import EXPERIMENT
from gpipe_bench.experiments.grid.machine import LAYERS, Waits
from gpipe_bench.experiments.grid.side_by_side import OURS, SIZES, TORCHS, Job, lines, work
from gpipe_bench.experiments.timed.steps import run_processes
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.unknowns import load_unknowns
from gpipe_bench.pipeline import Kind
from gpipe_bench.planner.collectives import all_reduce_s

PLACES = {(cell.table, cell.row, cell.column) for cell in load_paper() if cell.source == "others"}


def test_a_small_amoebanet_sends_more_as_a_pipeline() -> None:
    """Images of 67 x 67 pixels, ten classes and no second head, on four ranks."""
    found = ran(EXPERIMENT, {"part": machine.MODELLED, "model": "AmoebaNet-D (3, 32)"})
    assert found.quantity("pipeline over data parallelism").value > 1
    (entry,) = EXPERIMENT.cells([found])
    assert entry.place in PLACES
    assert entry.question == "as published"
    assert "4 accelerators" in EXPERIMENT.tables([found])


def test_every_column_of_the_sentences_is_answered() -> None:
    columns = {subject.column for subject in (*machine.SUBJECTS.values(), *machine.SMALL.values())}
    columns |= {f"{model.title}, K=8" for model in accelerators.MODELS.values()}
    assert {place[2] for place in PLACES if place[0] == "grid"} == columns


def test_a_link_is_that_of_which_two_sums_took_as_long() -> None:
    link = machine.link_of((1e-3, 9e-3), "made up")
    assert [all_reduce_s(size, 2, link) for size in machine.SUM_BYTES] == pytest.approx([1e-3, 9e-3])


def test_the_replay_of_what_ran_has_the_sums_behind_what_they_cannot_hide_in() -> None:
    """Four forwards of 1 s and backwards of 2 s, the last one of 3 s, since a sum is inside of it; the second
    bucket's sum is behind it. The other replica needs half as long.
    """
    job = machine.Job(2, 1, "smoke", 0)
    half = machine.BUCKET_BYTES
    backwards_s = (3.0, 2.0, 2.0, 2.0)  # GPipe's last one is of the first micro-batch
    actions_s = {(0, "B", m): each for m, each in enumerate(backwards_s)} | {
        (0, "F", m): 1.0 for m in range(4)
    }
    quick_s = {action: seconds / 2 for action, seconds in actions_s.items()}
    slow, quick = (
        machine.Ran([13.0], [each], [[[half], [half]]], 0, (0.0, 0.0)) for each in (actions_s, quick_s)
    )
    link = machine.link_of((machine.SUM_BYTES[0] * 1e-7, machine.SUM_BYTES[1] * 1e-7), "made up")
    sum_s = half * 1e-7
    assert sum_s < 1
    assert machine.laid_out_s(job, [quick, slow], link) == pytest.approx(4 * 3 + 1 + sum_s)


def test_grids_are_all_powers_of_two_and_only_transformers_are_divided() -> None:
    found = accelerators.Grids("transformer", 8, quick=True).places()
    assert len(found) == len(set(found)) == 10
    assert all(place.dp * place.pp * place.tp == 8 for place in found)
    assert {place.tp for place in accelerators.Grids("amoebanet", 64, quick=True).places()} == {1}


def test_settings_are_the_geometric_middle_and_every_corner_of_what_is_not_stated() -> None:
    names = ("share_of_peak", "link_bytes_per_s", "link_latency_s")
    ends = [load_unknowns().find("table2-transformer", name).ends for name in names]
    middle, *corners = accelerators.settings()
    assert tuple(middle) == pytest.approx([math.sqrt(low * high) for low, high in ends])
    assert {tuple(corner) for corner in corners} == set(itertools.product(*ends))
    assert len(corners) == 8


def test_a_tiny_transformer_on_eight_accelerators() -> None:
    found = ran(EXPERIMENT, {"part": accelerators.PART, "model": "transformer", "accelerators": 8}, "smoke")

    def peak(level: str) -> float:
        return found.quantity("peak memory", dp=8, pp=1, tp=1, level=level).value

    assert peak("dp") > peak("ZeRO-2") > peak("ZeRO-3") > 0
    for span in found.details["ranges"]:
        where = {name: span[name] for name in ("dp", "pp", "tp", "level")}
        assert span["steps_s"][0] == found.quantity("step", **where).value
        assert min(span["steps_s"]) <= span["steps_s"][0] <= max(span["steps_s"])
    assert {quantity.provenance for quantity in found.quantities} == {"modelled"}
    assert "fastest of" in EXPERIMENT.tables([found])
    assert [plot.name for plot in EXPERIMENT.figures([found])] == ["grid-accelerators"]


# Replicas beside those of torch


SMALL = {
    **SIZES,
    "num_layers": 1,
    "d_model": 16,
    "ffn_dim": 16,
    "num_heads": 2,
    "vocab_size": 11,
    "seq_len": 4,
}


@pytest.mark.parametrize("zero", [None, 2, 3])
def test_both_compute_the_same_gradients_and_take_turns(zero: int | None) -> None:
    job = Job(examples=4, num_microbatches=2, num_rounds=2, zero=zero, sizes=SMALL)
    found = run_processes(work, job.replicas, job)
    for each in found:
        assert each.details["difference"] < 1e-5
        assert {name: len(samples) for name, samples in each.times.items()} == {OURS: 4, TORCHS: 4}
    first, *_, last = lines(job, found)
    assert ("fully_shard" in first) == (zero is not None)
    assert last.startswith("ours / torch's ")


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
