"""Schedules are data: what they contain, in which order, what follows from them, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_bench.pipeline import (
    SLOTS,
    Action,
    Kind,
    Schedule,
    draw,
    from_csv,
    gpipe,
    naive,
    one_f_one_b,
    replay,
    to_csv,
    validate,
)
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.remat import REMAT_MODES
from gpipe_bench.pipeline.plan.schedule import Transfer, dependencies, execution_order


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    make = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    sizes = draw(st.tuples(st.integers(1, 6), st.integers(1, 8)))
    return make(*sizes, remat=draw(st.sampled_from(REMAT_MODES)))


def row(schedule: Schedule, stage: int) -> str:
    return " ".join(str(action) for action in schedule.actions[stage])


def test_rows_as_in_the_paper() -> None:
    """Figure 2(c) of the paper, with the recomputations written out."""
    schedule = gpipe(2, 3, remat="always")
    assert row(schedule, 0) == "0F0 0F1 0F2 0R2 0B2 0R1 0B1 0R0 0B0"
    assert row(schedule, 1) == "1F0 1F1 1F2 1R2 1B2 1R1 1B1 1R0 1B0"
    assert row(gpipe(2, 3, remat="except_last"), 1) == "1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0"
    assert row(gpipe(2, 2, remat="never"), 0) == "0F0 0F1 0B1 0B0"
    assert row(naive(2), 1) == "1F0 1B0"
    assert row(naive(2, 2, remat="always"), 0) == "0F0 0R0 0B0 0F1 0R1 0B1"
    assert row(one_f_one_b(3, 4), 0) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert row(one_f_one_b(3, 4), 2) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert row(one_f_one_b(3, 1), 0) == "0F0 0B0"


def test_drawing() -> None:
    assert draw(replay(gpipe(3, 3, remat="except_last"), SLOTS)).splitlines() == [
        "stage 0 | F0 F1 F2 .  .  .  .  .  .  B2 B2 R1 B1 B1 R0 B0 B0",
        "stage 1 | .  F0 F1 F2 .  .  .  B2 B2 R1 B1 B1 R0 B0 B0",
        "stage 2 | .  .  F0 F1 F2 B2 B2 R1 B1 B1 R0 B0 B0",
    ]
    assert draw(replay(gpipe(2, 1, remat="never"), {**SLOTS, Kind.F: 2})).splitlines() == [
        "stage 0 | F0 F0 .  .  .  .  B0 B0",
        "stage 1 | .  .  F0 F0 B0 B0",
    ]


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "late", "early", "kept"),
    [
        (2, 1, 8, 7, 6),
        (2, 4, 20, 19, 18),
        (4, 4, 28, 25, 24),
        (4, 16, 76, 73, 72),
        (8, 8, 60, 53, 52),
        (8, 32, 156, 149, 148),
    ],
)
def test_length_of_a_step_in_slots(
    num_stages: int, num_microbatches: int, late: int, early: int, kept: int
) -> None:
    """Recomputing before the gradient arrives saves K - 1 forwards, keeping the last micro-batch 1."""
    assert replay(gpipe(num_stages, num_microbatches, remat="always"), SLOTS).makespan_s == early
    assert replay(gpipe(num_stages, num_microbatches, remat="except_last"), SLOTS).makespan_s == kept
    # An engine that recomputes inside the backward takes R and B as one action, after the gradient is there.
    both = {**SLOTS, Kind.B: SLOTS[Kind.R] + SLOTS[Kind.B]}
    inside = replay(gpipe(num_stages, num_microbatches, remat="never"), both)
    assert inside.makespan_s == late


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@given(num_stages=st.integers(1, 8), num_microbatches=st.integers(1, 16))
def test_bubble_is_the_papers(make, num_stages: int, num_microbatches: int) -> None:
    timeline = replay(make(num_stages, num_microbatches, remat="never"), SLOTS)
    assert timeline.bubble == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))


def test_one_worker_consumes_before_it_produces_again() -> None:
    assert " ".join(map(str, execution_order(gpipe(3, 2, remat="except_last")))) == (
        "0F0 1F0 2F0 0F1 1F1 2F1 2B1 1B1 0B1 2R0 2B0 1R0 1B0 0R0 0B0"
    )


@given(schedules())
def test_micro_batches_in_flight(schedule: Schedule) -> None:
    for stage in range(schedule.num_stages):
        most = {
            "naive": 1,
            "gpipe": schedule.num_microbatches,
            "1f1b": min(schedule.num_microbatches, schedule.num_stages - stage),
        }
        assert schedule.in_flight(stage) == most[schedule.name]


def test_text_form_of_an_action() -> None:
    assert str(Action(2, Kind.F, 0)) == "2F0"
    assert Action.parse(" 12W34 ") == Action(12, Kind.W, 34)
    assert Action.parse("0F1") < Action.parse("1F0")
    assert str(Transfer(Action.parse("0F1"), Action.parse("1F1"))) == "0F1->1F1"


@given(schedules())
def test_a_table_without_words_says_what_is_recomputed(schedule: Schedule) -> None:
    recognised = from_csv(to_csv(schedule))
    assert recognised.actions == schedule.actions
    validate(recognised)


def written(*rows: str, remat: str = "never") -> Schedule:
    return from_csv("\n".join(row.replace(" ", ",") for row in rows), remat=remat)


def test_a_split_backward_is_valid() -> None:
    split = written("0F0 0F1 0I1 0I0 0W1 0W0", "1F0 1F1 1I1 1I0 1W1 1W0")
    validate(split)
    assert split.in_flight(0) == 2
    # The gradient leaves before the weights' half: 8 stages, 8 micro-batches, last one kept.
    rows = []
    for s in range(8):
        row = [f"{s}F{m}" for m in range(8)]
        for m in reversed(range(8)):
            row += ([f"{s}R{m}"] if m < 7 else []) + [f"{s}I{m}", f"{s}W{m}"]
        rows.append(" ".join(row))
    assert replay(written(*rows, remat="except_last"), SLOTS).makespan_s == 45


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("0F0 0B0|1B0 1F0", "worker 1 stands at 1B0 and needs 1F0, which stands behind it in the same row"),
        (
            "0F0 0B0 0F1 0B1|1F0 1F1 1B0 1B1",
            "worker 1 stands at 1F1 and needs 0F1, which worker 0 takes only",
        ),
        ("0F0 0F1 0B0 0B1|1F1 1F0 1B0 1B1", "stage 0 sends 0F0 to stage 1, which waits for 0F1 first"),
        ("0F0 0F1 0B0 0B1|1F0 1F1 1B0", "stage 1 takes micro-batch 1 through F; .* it needs F B"),
        ("0F20000000", "no action is of micro-batch 0, but one is of micro-batch 20000000"),
        ("0F1000000000 7B0", "no action is of stage 1, but one is of stage 7"),
    ],
)
def test_what_cannot_be_executed_says_why(rows: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        validate(written(*rows.split("|")))


def test_a_recomputation_needs_nothing_but_its_forward() -> None:
    """It starts before the gradient arrives, on whatever stage."""
    for action, needs in dependencies(gpipe(3, 4, remat="always")).items():
        if action.kind is Kind.R:
            assert needs == (Action(action.stage, Kind.F, action.microbatch),)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_worker_holds_one_recomputed_micro_batch_at_a_time(name: str) -> None:
    """Between R and its B nothing else is recomputed, whatever other stages could go on with."""
    for num_stages, num_microbatches in itertools.product(range(1, 6), repeat=2):
        recomputed: Action | None = None
        for action in execution_order(SCHEDULES[name](num_stages, num_microbatches, remat="always")):
            if action.kind is Kind.R:
                assert recomputed is None, f"{recomputed} is not used up before {action}"
                recomputed = action
            elif action.kind is Kind.B:
                assert recomputed == Action(action.stage, Kind.R, action.microbatch)
                recomputed = None
