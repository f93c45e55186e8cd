"""Measured actions laid out on devices: against hand-made times, closed forms and real steps."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from gpipe_bench.experiments.table2 import bound_shares
from gpipe_bench.experiments.timed.replay import (
    TimedActions,
    balanced,
    check_ran,
    lay_out,
    samples_of,
    take_apart,
)
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.replay import replay
from gpipe_bench.pipeline.plan.schedule import Kind, gpipe
from gpipe_bench.pipeline.plan.timeline import Event, Timeline


def timed(
    num_stages: int = 2, num_microbatches: int = 4, slow: float = 1.0, unit_s: float = 0.01, **more: object
) -> TimedActions:
    """F and R take a unit, B two; the last stage `slow` times as long."""
    base = {Kind.F: unit_s, Kind.R: unit_s, Kind.B: 2 * unit_s}
    samples = {
        (stage, kind): (seconds * (slow if stage == num_stages - 1 else 1.0),) * 3
        for stage in range(num_stages)
        for kind, seconds in base.items()
    }
    per_stage = 8 // num_stages
    given = {
        "partition": tuple(range(k * per_stage, (k + 1) * per_stage) for k in range(num_stages)),
        "num_microbatches": num_microbatches,
        "remat": "always",
        "samples_s": samples,
        "update_s": (0.0,) * num_stages,
        "setup_s": 0.0,
        "activation_bytes": (1000,) * (num_stages - 1),
        "gradient_bytes": (1000,) * (num_stages - 1),
    }
    return TimedActions(**{**given, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_stages", "num_microbatches", "slots"), [(2, 4, 18), (4, 16, 72), (8, 8, 52)])
def test_even_stages_take_the_slots_of_the_schedule(
    num_stages: int, num_microbatches: int, slots: int
) -> None:
    even = timed(num_stages, num_microbatches, remat="except_last")
    assert lay_out(even).makespan_s == pytest.approx(slots * 0.01)
    assert balanced(even).makespan_s == pytest.approx(slots * 0.01)


def test_a_slow_stage_costs_and_the_balanced_step_has_the_same_work() -> None:
    uneven = timed(slow=1.5)
    step, even = lay_out(uneven), balanced(uneven)
    assert even.makespan_s < step.makespan_s
    busy = [sum(each.busy_s(stage) for stage in range(2)) for each in (step, even)]
    assert busy[0] == pytest.approx(busy[1])


def test_a_step_can_be_laid_out_with_more_micro_batches_than_were_run() -> None:
    few = timed(num_microbatches=2)
    assert lay_out(few, num_microbatches=4).makespan_s == pytest.approx(lay_out(timed()).makespan_s)
    assert balanced(few, 4).makespan_s == pytest.approx(lay_out(timed()).makespan_s)


def test_link_update_and_setup_lengthen_the_step() -> None:
    plain = lay_out(timed()).makespan_s
    slow = Link("slow", latency_s=0.0, bandwidth_bytes_per_s=1e5)
    assert lay_out(timed(), slow).makespan_s > plain
    assert lay_out(timed(update_s=(0.005, 0.005))).makespan_s == pytest.approx(plain + 0.005)
    assert lay_out(timed(setup_s=0.003)).makespan_s == pytest.approx(plain + 0.003)


def test_parts_of_a_step_add_up_to_exactly_one() -> None:
    found = take_apart(timed(slow=1.7, setup_s=0.001, update_s=(0.002, 0.004)), Link("slow", 1e-4, 1e6))
    assert sum(found.shares.values()) == Fraction(1)
    assert found.shares["load imbalance"] > 0
    assert found.shares["communication"] > 0
    assert found.shares["setup"] > 0


def test_records_keep_what_a_step_is_laid_out_from() -> None:
    whole = timed(4, 8, slow=1.3, setup_s=0.001, update_s=(0.1, 0.2, 0.3, 0.4))
    data = json.loads(json.dumps(whole.to_data()))
    again = TimedActions.from_data(data)
    assert lay_out(again).makespan_s == pytest.approx(lay_out(whole).makespan_s)
    assert again.partition == whole.partition
    assert data["actions_ms"]["0F"] == {"median": 10.0, "low": 10.0, "high": 10.0, "samples": 3}


def test_samples_come_by_stage_and_kind() -> None:
    step = lay_out(timed(num_microbatches=3))
    found = samples_of([step, step])
    assert {key: len(values) for key, values in found.items()} == {
        (stage, kind): 6 for stage in (0, 1) for kind in (Kind.F, Kind.R, Kind.B)
    }
    assert found[1, Kind.B] == pytest.approx((0.02,) * 6)


def test_a_step_that_forgot_something_is_refused() -> None:
    schedule = gpipe(2, 4, "always")
    step = replay(schedule, {Kind.F: 1, Kind.R: 1, Kind.B: 2})
    assert check_ran(step, schedule) == {"F": 8, "R": 8, "B": 8}
    without = Timeline.of([e for e in step.events if str(e.action) != "1R2"], 2)
    with pytest.raises(RuntimeError, match="ran 23 actions where gpipe.*has 24; look at 1R2"):
        check_ran(without, schedule)
    twice = Timeline.of([*step.events, Event(step.events[0].action, 50.0, 51.0)], 2)
    with pytest.raises(RuntimeError, match="ran 25 actions"):
        check_ran(twice, schedule)
    with pytest.raises(RuntimeError, match="ran 24 actions where gpipe.*has 16"):
        check_ran(step, gpipe(2, 4, "never"))
    second = [event for event in step.events if event.action.stage == 1]
    assert check_ran(Timeline.of(second, 2), schedule, 1) == {"F": 4, "R": 4, "B": 4}
    with pytest.raises(RuntimeError, match="stage 0 ran 12 actions where .* has 12; look at 0B0"):
        check_ran(Timeline.of(second, 2), schedule, 0)


def test_spread_is_the_interquartile_range_of_a_typical_action() -> None:
    assert timed().spread() == 0
    wide = dict.fromkeys(timed().samples_s, (0.9, 1.0, 1.1, 1.2))
    assert 0 < timed(samples_s=wide).spread() < 0.3


def test_partition_rules_are_held_against_even_stages() -> None:
    even = bound_shares([1.0] * 8, 4, 8)
    assert even["bottleneck"] == even["variance"] == pytest.approx(1.0)
    uneven = bound_shares([1, 1, 1, 1, 1, 1, 1, 9], 4, 8)
    assert isinstance(uneven["bottleneck"], float)
    assert uneven["bottleneck"] < 0.6
    assert isinstance(uneven["cumulative"], str)  # leaves stages empty
