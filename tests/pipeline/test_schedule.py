"""Schedules are data: what they contain, in which order, what follows from them, what they recompute, and
what is refused.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import random_remat

from gpipe_bench.pipeline import (
    NAMED,
    SLOTS,
    Action,
    Kind,
    Schedule,
    draw,
    from_csv,
    generate,
    gpipe,
    naive,
    named,
    one_f_one_b,
    replay,
    to_csv,
    validate,
)
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES, Remat, from_text, of_stages, to_text
from gpipe_bench.pipeline.plan.walk import Transfer, execution_order


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
    by_stage = gpipe(3, 3, remat=("always", "never", "except_last"))
    assert row(by_stage, 1) == "1F0 1F1 1F2 1B2 1B1 1B0"
    assert row(by_stage, 2) == "2F0 2F1 2F2 2B2 2R1 2B1 2R0 2B0"
    assert row(one_f_one_b(2, 3, remat=("except_last", "never")), 0) == "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0B2"
    assert row(named("zb-h1", 2, 1, remat=("always", "never")), 0) == "0F0 0R0 0I0 0W0"


def test_drawing() -> None:
    assert draw(replay(gpipe(3, 3, remat=("always", "except_last", "never")), SLOTS)).splitlines() == [
        "stage 0 | F0 F1 F2 R2 .  .  .  .  .  B2 B2 R1 B1 B1 R0 B0 B0",
        "stage 1 | .  F0 F1 F2 .  .  .  B2 B2 R1 B1 B1 R0 B0 B0",
        "stage 2 | .  .  F0 F1 F2 B2 B2 B1 B1 B0 B0",
    ]
    assert draw(replay(gpipe(2, 1, remat="never"), {**SLOTS, Kind.F: 2})).splitlines() == [
        "stage 0 | F0 F0 .  .  .  .  B0 B0",
        "stage 1 | .  .  F0 F0 B0 B0",
    ]


def test_one_worker_consumes_before_it_produces_again() -> None:
    assert " ".join(map(str, execution_order(gpipe(3, 2, remat="except_last")))) == (
        "0F0 1F0 2F0 0F1 1F1 2F1 2B1 1B1 0B1 2R0 2B0 1R0 1B0 0R0 0B0"
    )


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


# Files, and what cannot be executed


def written(*rows: str, remat: str = "never") -> Schedule:
    return from_csv("\n".join(row.replace(" ", ",") for row in rows), remat=remat)


def test_a_split_backward_is_valid() -> None:
    split = written("0F0 0F1 0I1 0I0 0W1 0W0", "1F0 1F1 1I1 1I0 1W1 1W0")
    validate(split)
    assert split.in_flight(0) == 2


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


def test_a_file_that_recomputes_other_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"micro-batches 1 of 2 are recomputed; a stage recomputes all"):
        from_csv("0F0,0F1,0R1,0B1,0B0")


# What is recomputed: one choice, or one per stage


@st.composite
def remats(draw: st.DrawFn) -> tuple[Remat, int, int]:
    """A choice with its numbers of stages and micro-batches."""
    num_stages, num_microbatches = draw(st.tuples(st.integers(1, 5), st.integers(1, 7)))
    generator = random.Random(draw(st.integers(0, 10**6)))
    return random_remat(generator, num_stages), num_stages, num_microbatches


@settings(max_examples=25)
@given(remats(), st.booleans())
def test_what_is_asked_for_is_recomputed_and_written_to_files(
    of: tuple[Remat, int, int], split: bool
) -> None:
    """By named and generated schedules, the latter with times for a recomputation only where there is one."""
    remat, num_stages, num_microbatches = of
    again = of_stages(remat, num_stages, num_microbatches)
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    times = {(s, kind): 1.0 + s for s in range(num_stages) for kind in kinds}
    times |= {(s, Kind.R): 1.0 for s in range(num_stages) if again[s]}
    made = [generate(tuple(range(num_stages)), num_microbatches, times, remat=remat, split=split)]
    for name, (_, per_worker) in NAMED.items():
        per_worker = per_worker or 1
        if num_stages % per_worker == 0:
            workers = num_stages // per_worker
            made.append(named(name, workers, num_microbatches, remat=remat, stages_per_worker=per_worker))
    for schedule in made:
        validate(schedule)
        assert schedule.recomputed == again
        found = {(a.stage, a.microbatch) for a in schedule if a.kind is Kind.R}
        assert found == {(s, m) for s in range(num_stages) for m in again[s]}
        if schedule.name == "gpipe":
            read = from_csv(to_csv(schedule), "gpipe")
            assert (read.recomputed, read.actions) == (schedule.recomputed, schedule.actions)
    wanted = one_f_one_b(num_stages, num_microbatches, remat=remat)
    text = to_text(wanted.remat)
    assert one_f_one_b(num_stages, num_microbatches, remat=from_text(text)) == wanted


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("name", NAMED)
def test_the_same_choice_for_each_stage_is_that_choice_for_all(name: str, remat: str) -> None:
    one = named(name, 2, 3, remat=remat)
    assert named(name, 2, 3, remat=[remat] * one.num_stages) == one
    assert one.remat == remat
