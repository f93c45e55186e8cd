"""The attribution of device-seconds against steps computed by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.pipeline import FREE, SLOTS, Kind, Link, gpipe, one_f_one_b, replay
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.remat import REMAT_MODES
from gpipe_bench.planner.breakdown import PARTS, Breakdown, breakdown


def parts(found: Breakdown) -> dict[str, float]:
    """The parts that are not zero."""
    assert tuple(found.seconds) == PARTS
    return {part: float(seconds) for part, seconds in found.seconds.items() if seconds}


def times(forward: tuple[float, ...], backward: tuple[float, ...], recompute: tuple[float, ...] = ()):
    """By (stage, kind)."""
    found = {(stage, Kind.F): value for stage, value in enumerate(forward)}
    found |= {(stage, Kind.B): value for stage, value in enumerate(backward)}
    return found | {(stage, Kind.R): value for stage, value in enumerate(recompute)}


def test_communication_that_computation_hides_costs_nothing() -> None:
    """Stage 1 takes the first micro-batch from 2 to 10, and the second one's message arrives at 3."""
    uneven = times((1, 8), (1, 8))
    schedule = gpipe(2, 2, "never")
    free, slow = (
        breakdown(schedule, uneven),
        breakdown(schedule, uneven, Link("slow", 0, 1), activation_bytes=[1]),
    )
    # First message: on the critical path, 1 s. Second: hidden. Gradients: the last one alone counts, 1 s.
    assert slow.makespan_s == free.makespan_s + 2
    assert slow.seconds["communication"] == 4
    assert slow.seconds["load imbalance"] == free.seconds["load imbalance"]
    assert slow.seconds["bubble"] == free.seconds["bubble"]


def test_setup_counts_with_the_waiting_for_it() -> None:
    """The first stage divides the inputs for 1 s, while the second one waits."""
    found = breakdown(gpipe(2, 1, "never"), SLOTS, setup_s=[1, 0])
    assert found.makespan_s == 7
    assert parts(found) == {"computation": 6, "setup": 2, "bubble": 6}


def test_setup_in_a_bubble_keeps_nobody_waiting() -> None:
    """The last stage reshapes its targets for 1 s, and would be idle for that second anyway."""
    found = breakdown(gpipe(2, 1, "never"), SLOTS, setup_s=[0, 1])
    assert found.makespan_s == 6
    assert parts(found) == {"computation": 6, "setup": 1, "bubble": 5}


def test_the_weight_update_of_the_first_stage_ends_the_step() -> None:
    """1: F0 1-2, B0 2-4, update 4-5; 0: F0 0-1, B0 4-6, update 6-7."""
    found = breakdown(gpipe(2, 1, "never"), SLOTS, update_s=[1, 1])
    assert found.makespan_s == 7
    assert parts(found) == {"computation": 6, "weight update": 2, "bubble": 6}


def test_uneven_stages_that_are_faster_than_even_ones_lose_nothing() -> None:
    """The longer update is on the stage that is through first: 7 s, with even updates of 2 s 8 s."""
    found = breakdown(gpipe(2, 1, "never"), SLOTS, update_s=[1, 3])
    assert found.makespan_s == 7
    assert parts(found) == {"computation": 6, "weight update": 4, "bubble": 4}


def test_all_reasons_at_once() -> None:
    """K = 2, M = 2 by hand, the last micro-batch kept, 1 s for a message, the set-up and each weight update.

    stage 0: set-up 0-1, F0 1-2, F1 2-3, B1 14-15, R0 15-16, B0 20-21, update 21-22
    stage 1:             F0 3-6, F1 6-9, B1 9-13, R0 13-15, B0 15-19, update 19-20
    """
    found = breakdown(
        gpipe(2, 2, "except_last"), times((1, 3), (1, 4), (1, 2)), Link("slow", latency_s=1),
        setup_s=[1, 0], update_s=[1, 1],
    )  # fmt: skip
    assert found.makespan_s == 22
    # Free link: 20. Without set-up: 19. Even stages (F 2, R 1.5, B 2.5): 3 x 4.5 + 1.5, update 1: 16.
    assert parts(found) == {
        "computation": 2 * (1 + 1) + 2 * (3 + 4), "recompute": 3, "weight update": 2, "setup": 2,
        "communication": 4, "load imbalance": 2 * (19 - 16), "bubble": 44 - 18 - 3 - 2 - 2 - 4 - 6,
    }  # fmt: skip


numbers = st.floats(0, 10, allow_nan=False)


@settings(max_examples=60)
@given(st.data())
def test_the_parts_add_up_exactly(data: st.DataObject) -> None:
    make = SCHEDULES[data.draw(st.sampled_from(sorted(SCHEDULES)))]
    num_stages, num_microbatches = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 6)))
    schedule = make(num_stages, num_microbatches, remat=data.draw(st.sampled_from(REMAT_MODES)))
    duration = {
        (stage, kind): data.draw(numbers) for stage in range(num_stages) for kind in (Kind.F, Kind.R, Kind.B)
    }
    setup_s, update_s = (
        data.draw(st.lists(numbers, min_size=num_stages, max_size=num_stages)) for _ in range(2)
    )
    link = data.draw(
        st.sampled_from([FREE, Link("slow", 0.1, 3.0), Link("shared", 0, 2, shares_directions=True)])
    )
    costs = {"activation_bytes": [1.5] * (num_stages - 1), "setup_s": setup_s, "update_s": update_s}
    found = breakdown(schedule, duration, link, **costs)
    assert all(seconds >= 0 for seconds in found.seconds.values())
    total = sum(found.seconds.values())
    assert sum(found.shares.values()) == (1 if total else 0)
    assert float(total) == pytest.approx(num_stages * replay(schedule, duration, link, **costs).makespan_s)
    busy = sum(Fraction(duration[action.stage, action.kind]) for action in schedule)
    assert found.seconds["computation"] + found.seconds["recompute"] == busy
    assert found.seconds["weight update"] == sum(map(Fraction, update_s))
    assert found.seconds["setup"] >= sum(map(Fraction, setup_s))
    if link is FREE:
        assert found.seconds["communication"] == 0
    assert found.timeline.makespan_s == pytest.approx(found.makespan_s)


@given(st.integers(1, 6), st.integers(1, 8), numbers, numbers)
def test_even_stages_have_no_imbalance(num_stages: int, num_microbatches: int, f: float, b: float) -> None:
    for make in (gpipe, one_f_one_b):
        found = breakdown(make(num_stages, num_microbatches, "never"), {Kind.F: f, Kind.B: b})
        assert found.seconds["load imbalance"] == 0
        if f + b:
            assert found.shares["bubble"] == Fraction(num_stages - 1, num_microbatches + num_stages - 1)


def test_a_step_that_takes_no_time_has_no_shares() -> None:
    found = breakdown(gpipe(2, 1), dict.fromkeys(SLOTS, 0))
    assert set(found.shares.values()) == {0}
