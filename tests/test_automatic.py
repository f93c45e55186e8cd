"""schedule="auto": what is chosen for which times, and that the weights depend on neither."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from tiny_models import everything, everything_batch, mlp, mlp_batch, plain_step, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import SLOTS, Kind, Link, Pipeline, Schedule, named, replay, validate
from gpipe_bench.pipeline.plan.generate import (
    Calibration,
    automatic,
    fused,
    link_s_of,
    most_alive_of,
    times_of,
)
from gpipe_bench.pipeline.plan.remat import REMAT_MODES
from gpipe_bench.pipeline.plan.schedule import ends_of
from gpipe_bench.pipeline.plan.vee import shared_by, vee

cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss
STEPS_OF_CALIBRATION = 5


def slots(*, split: float = 1.0) -> dict[Kind, float]:
    """Equal stages; I and W together take `split` times what B takes."""
    return {**SLOTS, Kind.I: split, Kind.W: split}


def kinds(schedule: Schedule) -> set[Kind]:
    return {action.kind for action in schedule}


# The choice


def test_the_backward_is_split_only_where_it_pays() -> None:
    cheap, dear = (automatic(shared_by(4, 4), 4, slots(split=split)) for split in (1.0, 1.6))
    assert replay(cheap, SLOTS).makespan_s == 15  # as ZB-H1
    assert kinds(dear) == {Kind.F, Kind.B}
    assert replay(dear, SLOTS).makespan_s == 21  # as 1F1B; with I and W at 1.6 any other takes longer
    assert automatic(shared_by(4, 4), 4, {Kind.F: 1, Kind.B: 2}) == dear
    assert Kind.B not in kinds(automatic(shared_by(4, 4), 4, {Kind.F: 1, Kind.I: 1, Kind.W: 1}))


def test_random_times() -> None:
    """In order, under the cap, and no longer than any schedule of the placement that takes them in order."""
    draw = random.Random(1)
    for _ in range(25):
        num_workers, per_worker, size = draw.randint(1, 4), draw.randint(1, 2), draw.randint(1, 8)
        remat, link_s = draw.choice(REMAT_MODES), draw.choice([0, 0.4])
        place = shared_by(num_workers, num_workers * per_worker)
        times = {(s, kind): draw.choice([0.5, 1, 2, 3]) for s in range(len(place)) for kind in Kind}
        known = [
            schedule
            for name in (("1f1b", "zb-h1", "zb-h2") if per_worker == 1 else ("zb-v", "v-half", "v-min"))
            if (schedule := named(name, num_workers, size, remat=remat))
        ]
        cap = draw.choice([None, max(max(map(most_alive_of, each.actions)) for each in known)])
        found = automatic(place, size, times, link_s=link_s, remat=remat, most_alive=cap)
        validate(found)
        assert found.name == "auto"
        assert cap is None or max(map(most_alive_of, found.actions)) <= cap
        for stage in range(found.num_stages):
            ends = [action.microbatch for action in ends_of(found.row(stage))]
            assert ends == sorted(ends)
        link = Link("link", link_s)
        best_s = min(replay(each, times, link).makespan_s for each in known)
        assert replay(found, times, link).makespan_s <= best_s + 1e-9


def test_halves_that_need_not_be_apart_are_joined() -> None:
    schedule = named("zb-h1", 3, 5)
    found = fused(schedule, slots(split=1.1))
    assert replay(found, slots(split=1.1)).makespan_s < replay(schedule, slots(split=1.1)).makespan_s
    assert {action.kind for action in found.row(0)} == {Kind.F, Kind.B}  # nobody waits for its I
    assert Kind.I in {action.kind for action in found.row(2)}  # the others do for that of the last stage
    validate(found)


def test_halves_stay_apart_where_the_one_is_waited_for() -> None:
    """Two micro-batches, the second after the first: each I is waited for, with a W right behind it."""
    schedule = replace(named("naive", 2, 2), name="halves")
    halved = [
        [half for a in row for half in ([a] if a.kind is Kind.F else [a._replace(kind=k) for k in "IW"])]
        for row in schedule.actions
    ]
    rows = tuple(tuple(a._replace(kind=Kind(a.kind)) for a in row) for row in halved)
    found = fused(replace(schedule, actions=rows), slots(split=1.1))
    assert found.actions == (schedule.actions[0], rows[1])


def test_times_and_link_are_found_in_a_timeline() -> None:
    place = vee(3)
    times = {(stage, kind): 1.0 + stage / 8 + i / 4 for stage in range(6) for i, kind in enumerate("FIW")}
    times = {(stage, Kind(kind)): seconds for (stage, kind), seconds in times.items()}
    schedule = automatic(place, 5, times, link_s=0.25)
    timeline = replay(schedule, times, Link("link", 0.25))
    assert times_of([timeline]) == pytest.approx(times)
    assert link_s_of([timeline, timeline]) == pytest.approx(0.25)
    assert link_s_of([replay(named("1f1b", 1, 3), SLOTS)]) == 0


def test_the_choice_is_made_for_what_was_timed() -> None:
    """The warm-up takes other times, and a split that does not pay."""
    calibration = Calibration(shared_by(2, 2), 4, "never")
    times = slots(split=1.6)
    for number in range(STEPS_OF_CALIBRATION):
        taken = replay(calibration.schedule, SLOTS if number == 0 else times)
        assert calibration.note(taken) is (number == STEPS_OF_CALIBRATION - 1)
    assert calibration.choose() == automatic(shared_by(2, 2), 4, times)
    assert kinds(calibration.choose()) == {Kind.F, Kind.B}


# Training


def train(model: nn.Sequential, num_steps: int = 8, **options: object) -> tuple[Pipeline, list[Schedule]]:
    """Steps of momentum in float32, with dropout and batch normalization."""
    pipeline = Pipeline(model, cost=[1] * 12, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05, momentum=0.9)
    taken = []
    for step in range(num_steps):
        (image, ids), target = everything_batch(7, seed=step)
        pipeline.step((image.float(), ids), target, cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
        taken.append(pipeline.schedule)
    return pipeline, taken


def weights(pipeline: Pipeline) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in pipeline.state_dict().items()}


def float32_model() -> nn.Sequential:
    torch.manual_seed(0)
    return everything()


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize(("num_stages", "num_workers"), [(1, 1), (2, 2), (4, 2)])
def test_weights_and_averages_have_the_bits_of_one_stage(
    num_stages: int, num_workers: int, remat: str
) -> None:
    """Through the steps that are timed, the choice, and the steps after it."""
    one, _ = train(float32_model(), num_stages=1, num_microbatches=4, schedule="1f1b", remat=remat)
    pipeline, taken = train(
        float32_model(), num_stages=num_stages, num_microbatches=4, num_workers=num_workers,
        schedule="auto", remat=remat,
    )  # fmt: skip
    assert_same(weights(pipeline), weights(one))
    split, whole = taken[:3], taken[3:STEPS_OF_CALIBRATION]
    assert all(kinds(schedule) >= {Kind.I, Kind.W} for schedule in split)
    assert all(Kind.B in kinds(schedule) for schedule in whole)
    assert len(set(map(id, taken[STEPS_OF_CALIBRATION:]))) == 1
    assert {schedule.placement for schedule in taken} == {taken[0].placement}


def test_every_gradient_of_every_step_equals_the_plain_model() -> None:
    pipeline = Pipeline(
        seeded(everything), num_stages=4, num_microbatches=3, schedule="auto", remat="never", cost=[1] * 12
    )
    assert pipeline.schedule.placement == (0, 1, 1, 0)
    batch, target = everything_batch(7)
    plain = plain_step(seeded(everything), batch, target, cross_entropy, 3)
    for _ in range(STEPS_OF_CALIBRATION + 2):
        fresh = Pipeline(
            seeded(everything), num_stages=4, num_microbatches=3, schedule=pipeline.schedule, cost=[1] * 12
        )
        fresh.step(batch, target, cross_entropy)
        for name, parameter in fresh.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.gradients[name], rtol=1e-12, atol=1e-14)
        pipeline.step(batch, target, cross_entropy)


def test_a_copy_goes_on_where_the_original_was() -> None:
    pipeline, _ = train(float32_model(), 2, num_stages=4, num_microbatches=4, schedule="auto")
    twin = copy.deepcopy(pipeline)
    for each in (pipeline, twin):
        for step in range(6):
            (image, ids), target = everything_batch(7, seed=step)
            each.step((image.float(), ids), target, cross_entropy)
    gradients = [
        {n: p.grad for n, p in each.named_parameters() if p.grad is not None} for each in (pipeline, twin)
    ]
    assert_same(*gradients)


def test_a_step_that_fails_is_not_timed_nor_a_short_one() -> None:
    pipeline = Pipeline(seeded(mlp), num_stages=2, num_microbatches=2, num_workers=2, schedule="auto")
    first = pipeline.schedule
    for _ in range(2):
        pipeline.step(*mlp_batch(4), mse_loss)
    for _ in range(9):
        with pytest.raises(ValueError, match="empty"):
            pipeline.step(*mlp_batch(0), mse_loss)
        pipeline.step(*mlp_batch(1), mse_loss)
    assert pipeline.schedule is first
    for _ in range(STEPS_OF_CALIBRATION - 2):
        pipeline.step(*mlp_batch(4), mse_loss)
    assert kinds(pipeline.schedule) >= {Kind.B}


def test_times_that_are_given_need_no_steps() -> None:
    pipeline = Pipeline(
        seeded(mlp), num_stages=4, num_workers=4, num_microbatches=4, schedule="auto", remat="never",
        action_s=lambda action: SLOTS[action.kind] * (3, 2, 1, 1)[action.stage], most_alive=4,
    )  # fmt: skip
    chosen = pipeline.schedule
    assert max(map(most_alive_of, chosen.actions)) <= 4
    for _ in range(STEPS_OF_CALIBRATION + 1):
        pipeline.step(*mlp_batch(8), mse_loss)
    assert pipeline.schedule is chosen
