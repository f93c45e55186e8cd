"""Re-materialization chosen per stage: one form, everywhere the same choice, and refusals."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import random_remat
from torch import nn

from gpipe_bench.pipeline import (
    NAMED,
    SLOTS,
    Kind,
    Pipeline,
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
from gpipe_bench.pipeline.plan.edges import rings_of
from gpipe_bench.pipeline.plan.remat import REMAT_MODES, Remat, from_text, of_stages, to_text

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 7))


@st.composite
def remats(draw: st.DrawFn) -> tuple[Remat, int, int]:
    """A choice with its numbers of stages and micro-batches."""
    num_stages, num_microbatches = draw(SIZES)
    generator = random.Random(draw(st.integers(0, 10**6)))
    return random_remat(generator, num_stages), num_stages, num_microbatches


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(str(action)[1:] for action in row) for row in schedule.actions]


def test_a_choice_per_stage() -> None:
    assert rows(gpipe(3, 3, remat=("always", "never", "except_last"))) == [
        "F0 F1 F2 R2 B2 R1 B1 R0 B0",
        "F0 F1 F2 B2 B1 B0",
        "F0 F1 F2 B2 R1 B1 R0 B0",
    ]
    assert rows(one_f_one_b(2, 3, remat=("except_last", "never"))) == [
        "F0 F1 R0 B0 F2 R1 B1 B2",
        "F0 B0 F1 B1 F2 B2",
    ]
    assert rows(naive(2, 2, remat=("never", "except_last"))) == ["F0 B0 F1 B1", "F0 R0 B0 F1 B1"]
    assert rows(named("zb-h1", 2, 1, remat=("always", "never"))) == ["F0 R0 I0 W0", "F0 I0 W0"]


def test_the_picture_of_a_choice_per_stage() -> None:
    assert draw(replay(gpipe(3, 3, remat=("always", "except_last", "never")), SLOTS)).splitlines() == [
        "stage 0 | F0 F1 F2 R2 .  .  .  .  .  B2 B2 R1 B1 B1 R0 B0 B0",
        "stage 1 | .  F0 F1 F2 .  .  .  B2 B2 R1 B1 B1 R0 B0 B0",
        "stage 2 | .  .  F0 F1 F2 B2 B2 B1 B1 B0 B0",
    ]


@given(remats())
def test_a_choice_is_the_same_as_text(of: tuple[Remat, int, int]) -> None:
    remat, num_stages, num_microbatches = of
    schedule = one_f_one_b(num_stages, num_microbatches, remat=remat)
    assert one_f_one_b(num_stages, num_microbatches, remat=from_text(to_text(schedule.remat))) == schedule


@settings(max_examples=25)
@given(remats())
def test_what_a_schedule_recomputes_are_the_actions_in_its_rows(of: tuple[Remat, int, int]) -> None:
    remat, num_stages, num_microbatches = of
    for name, (_, per_worker) in NAMED.items():
        if num_stages % (per_worker or 1) == 0:
            schedule = named(
                name, num_stages // (per_worker or 1), num_microbatches, remat=remat,
                stages_per_worker=per_worker or 1,
            )  # fmt: skip
            validate(schedule)
            wanted = {(s, m) for s in range(num_stages) for m in range(num_microbatches)
                      if schedule.recomputes(m, s)}  # fmt: skip
            assert wanted == {(a.stage, a.microbatch) for a in schedule if a.kind is Kind.R}


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("name", NAMED)
def test_the_same_choice_for_each_stage_is_that_choice_for_all(name: str, remat: str) -> None:
    one = named(name, 2, 3, remat=remat)
    assert named(name, 2, 3, remat=[remat] * one.num_stages) == one
    assert one.remat == remat


@given(remats())
def test_a_file_says_what_is_recomputed(of: tuple[Remat, int, int]) -> None:
    remat, num_stages, num_microbatches = of
    schedule = gpipe(num_stages, num_microbatches, remat=remat)
    found = from_csv(to_csv(schedule), "gpipe")
    assert found.recomputed == schedule.recomputed
    assert found.actions == schedule.actions
    validate(found)


@settings(max_examples=25)
@given(remats(), st.booleans())
def test_generated_schedules_recompute_what_is_asked_for(of: tuple[Remat, int, int], split: bool) -> None:
    """With times for a recomputation only where there is one."""
    remat, num_stages, num_microbatches = of
    again = of_stages(remat, num_stages, num_microbatches)
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    times = {(s, kind): 1.0 + s for s in range(num_stages) for kind in kinds}
    times |= {(s, Kind.R): 1.0 for s in range(num_stages) if again[s]}
    place = tuple(range(num_stages))
    schedule = generate(place, num_microbatches, times, remat=remat, split=split)
    validate(schedule)
    assert schedule.recomputed == again


def test_a_file_that_recomputes_other_micro_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"micro-batches 1 of 2 are recomputed; a stage recomputes all"):
        from_csv("0F0,0F1,0R1,0B1,0B0")


def test_buffers_of_a_stage_follow_its_own_choice() -> None:
    """One buffer for gradients where a recomputation hides the next one's transfer, else two."""
    schedule = gpipe(5, 4, remat=("always", "never", "except_last", "never", "always"))
    assert [rings_of(schedule)[stage, True].tight.num_slots for stage in range(4)] == [1, 2, 1, 2]


def test_an_argument_of_the_pipeline() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    pipeline = Pipeline(
        model, num_stages=3, num_microbatches=2, schedule="1f1b", remat=["always", "except_last", "never"]
    )
    seen: list[str] = []
    for index, stage in enumerate(pipeline.stages):
        stage.layers[0].register_forward_hook(
            lambda *_, index=index: seen.append(f"{index}{'' if torch.is_grad_enabled() else ' no graph'}")
        )
    batch = torch.ones(2, 2)
    pipeline.step(batch, batch, nn.functional.mse_loss)  # the first forwards find out about gradients
    seen.clear()
    pipeline.step(batch, batch, nn.functional.mse_loss)
    assert {text: seen.count(text) for text in seen} == {
        "0 no graph": 2, "0": 2, "1": 2, "1 no graph": 1, "2": 2,
    }  # fmt: skip
