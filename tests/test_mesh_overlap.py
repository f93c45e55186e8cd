"""Sums over replicas leave inside the last backward and run beside it: waiting layers and their replay."""

from __future__ import annotations

import pytest

from gpipe_bench.experiments.grid.machine import LAYERS, Waits
from gpipe_bench.pipeline import Kind

pytestmark = pytest.mark.alone  # steps of four processes are timed


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
