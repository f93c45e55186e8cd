"""The experiment on grids: what is sent, and how a replay is made of what ran."""

from __future__ import annotations

import pytest
from waiting_grid import LAYERS, Waits

from gpipe_bench.experiments.beyond import grid
from gpipe_bench.pipeline import Kind
from gpipe_bench.planner.collectives import all_reduce_s


def test_a_link_is_that_of_which_two_sums_took_as_long() -> None:
    link = grid.link_of((1e-3, 9e-3), "made up")
    assert [all_reduce_s(size, 2, link) for size in grid.SUM_BYTES] == pytest.approx([1e-3, 9e-3])


def test_the_replay_of_what_ran_has_the_sums_behind_what_they_cannot_hide_in() -> None:
    """Four forwards of 1 s and backwards of 2 s, the last one of 3 s, since a sum is inside of it; the second
    bucket's sum is behind it. The other replica needs half as long.
    """
    job = grid.Job(2, 1, "smoke", 0)
    half = grid.BUCKET_BYTES
    backwards_s = (3.0, 2.0, 2.0, 2.0)  # GPipe's last one is of the first micro-batch
    actions_s = {(0, "B", m): each for m, each in enumerate(backwards_s)} | {
        (0, "F", m): 1.0 for m in range(4)
    }
    quick_s = {action: seconds / 2 for action, seconds in actions_s.items()}
    slow, quick = (
        grid.Ran([13.0], [each], [[[half], [half]]], 0, (0.0, 0.0)) for each in (actions_s, quick_s)
    )
    link = grid.link_of((grid.SUM_BYTES[0] * 1e-7, grid.SUM_BYTES[1] * 1e-7), "made up")
    sum_s = half * 1e-7
    assert sum_s < 1
    assert grid.laid_out_s(job, [quick, slow], link) == pytest.approx(4 * 3 + 1 + sum_s)


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
