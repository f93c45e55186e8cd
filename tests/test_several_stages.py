"""Workers with several stages, in one process: the plain model's numbers, and the same bits as one stage."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch
from covering import pairwise
from random_schedules import random_placement, random_schedule
from tiny_models import CapturedLoss, Plain, everything, everything_batch, plain_step, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline, checkpoint
from gpipe_bench.pipeline.plan.named import NAMED, named
from gpipe_bench.pipeline.plan.remat import REMAT_MODES
from gpipe_bench.pipeline.plan.schedule import Schedule

TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}
# Those that the other tests of the engine do not know.
SEVERAL = [name for name in NAMED if name not in ("naive", "gpipe", "1f1b")]
cross_entropy = nn.functional.cross_entropy


@functools.cache
def reference(num_microbatches: int) -> Plain:
    batch, target = everything_batch(3 + num_microbatches)
    return plain_step(seeded(everything), batch, target, cross_entropy, num_microbatches)


def check(schedule: Schedule) -> None:
    """One step of a schedule against the plain model."""
    plain = reference(schedule.num_microbatches)
    batch, target = everything_batch(3 + schedule.num_microbatches)
    pipeline = Pipeline(
        seeded(everything),
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule,
        cost=[1] * 12,
    )
    loss_fn = CapturedLoss(cross_entropy)
    loss = pipeline.step(batch, target, loss_fn)
    torch.testing.assert_close(loss, plain.loss, **TOLERANCE)
    gradients = {name: p.grad for name, p in pipeline.named_parameters()}
    assert gradients.keys() == plain.gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, plain.gradients[name], **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(
    ("num_microbatches", "num_workers", "name", "remat"),
    pairwise((1, 2, 4, 7, 8), (1, 2, 4), SEVERAL, REMAT_MODES, keep=[(1, 1, "zb-v", "always")]),
)
def test_outputs_and_gradients_equal_the_plain_model(
    num_microbatches: int, num_workers: int, name: str, remat: str
) -> None:
    check(named(name, num_workers, num_microbatches, remat=remat))


@pytest.mark.parametrize("seed", range(12))
def test_random_rows_on_random_placements(seed: int) -> None:
    generator = random.Random(seed)
    num_stages = generator.randint(1, 6)
    placement = random_placement(generator, num_stages)
    check(random_schedule(generator, num_stages, generator.randint(1, 5), placement=placement))


def train(schedule: Schedule) -> dict[str, Tensor]:
    """float32 weights and averages after five steps of momentum, with dropout and batch normalization."""
    torch.manual_seed(0)
    pipeline = Pipeline(
        everything(),
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule,
        cost=[1] * 12,
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        batch, target = everything_batch(7, seed=step)
        image, ids = batch
        pipeline.step((image.float(), ids), target, cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in pipeline.state_dict().items()}


@functools.cache
def trained_in_one_stage(name: str) -> dict[str, Tensor]:
    return train(named(name, 1, 4))


@pytest.mark.parametrize("name", SEVERAL)
def test_weights_have_the_bits_of_one_stage(name: str) -> None:
    """Weights' gradients are added in the order of the micro-batches, as by 1F1B; breadth-first drains in
    reverse, as GPipe does.
    """
    wanted = trained_in_one_stage("gpipe" if name == "breadth-first" else "1f1b")
    for remat in ("never", "always"):
        found = train(named(name, 2, 4, remat=remat))
        assert found.keys() == wanted.keys()
        assert not [key for key in wanted if not torch.equal(found[key], wanted[key])]


def test_evaluation_checkpoint_and_timeline_of_a_v(tmp_path: Path) -> None:
    model = seeded(everything)
    pipeline = Pipeline(
        model, num_stages=4, num_microbatches=3, schedule="zb-v", remat="never", cost=[1] * 12
    )
    assert (pipeline.schedule.num_workers, pipeline.schedule.name) == (2, "zb-v")
    batch, target = everything_batch(5)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    pipeline.step(batch, target, cross_entropy)
    optimizer.step()
    timeline = pipeline.timeline
    assert timeline.placement == (0, 1, 1, 0)
    assert [len(timeline.of_worker(worker)) for worker in (0, 1)] == [2 * 3 * 3] * 2
    checkpoint.save(tmp_path / "run", pipeline, optimizer)
    other = Pipeline(everything().double(), num_stages=2, num_microbatches=3, cost=[1] * 12)
    again = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    checkpoint.load(tmp_path / "run", other, again)
    pipeline.eval()
    other.eval()
    torch.testing.assert_close(pipeline(batch), other(batch), **TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zb-v", "num_stages": 3}, "num_stages=3 cannot|'zb-v' has 2 stages per worker"),
        ({"schedule": "zb-v", "num_stages": 4, "num_workers": 4}, "'zb-v' has 2 stages per worker, so"),
        ({"schedule": "interleaved", "num_stages": 5, "num_workers": 2}, "num_stages=5 cannot be shared by"),
        ({"schedule": "gpipe", "num_stages": 4, "num_workers": 2}, "'gpipe' has 1 stage per worker, so"),
        ({"schedule": named("zb-v", 2, 3), "num_stages": 4, "num_workers": 4}, "for 2 workers, not for"),
        ({"schedule": "zb-w", "num_stages": 4}, "choose one of naive, gpipe, 1f1b, interleaved"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pipeline(everything(), num_microbatches=3, cost=[1] * 12, **options)


def test_interleaving_shares_the_stages_among_the_workers() -> None:
    pipeline = Pipeline(
        everything(), num_stages=6, num_microbatches=3, schedule="interleaved", num_workers=2, cost=[1] * 12
    )
    assert pipeline.schedule.placement == (0, 1, 0, 1, 0, 1)
