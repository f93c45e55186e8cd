"""At fixed M and schedule the number of stages changes no bit, with dropout, drop path and batch
normalization on.

Float32, real models, several optimizer steps: whatever is drawn, summed or laid out differently in one place
shows up in all weights after that.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from tiny_models import EXACT, everything, everything_batch, seeded
from torch import Tensor, nn

from gpipe_bench import models
from gpipe_bench.models import set_drop_path
from gpipe_bench.pipeline import NAMED, InProcess, Pipeline, Schedule, checkpoint, named

AMOEBANET = {
    "num_layers": 3, "num_filters": 16, "num_classes": 10, "image_size": 67, "aux_head": True, "dropout": 0.2,
}  # fmt: skip
TRANSFORMER = {
    "num_layers": 6, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "vocab_size": 50, "seq_len": 6,
    "dropout": 0.2,
}  # fmt: skip
NUM_STEPS = 3
cross_entropy = nn.functional.cross_entropy


def train(
    name: str,
    options: dict[str, object],
    num_stages: int,
    schedule: str,
    remat: str,
    device: str = "cpu",
    bfloat16: bool = False,
) -> dict[str, Tensor]:
    """The state of a model after NUM_STEPS RMSProp steps of uneven micro-batches."""
    torch.manual_seed(0)
    model = models.MODELS[name](**options)
    set_drop_path(model, 0.7)
    pipeline = Pipeline(
        model,
        num_stages=num_stages,
        num_microbatches=3,
        schedule=schedule,
        remat=remat,
        cost=[1] * len(model),
        devices=device,
    )
    optimizer = torch.optim.RMSprop(pipeline.parameters(), lr=1e-3, momentum=0.9)
    loss_fn = models.loss_fn(name, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        batch, target = models.example_batch(name, 7, generator=generator, **options)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bfloat16):
            pipeline.step(batch, target, loss_fn)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in pipeline.state_dict().items()}


@functools.cache
def one_stage(name: str, schedule: str) -> dict[str, Tensor]:
    options = AMOEBANET if name == "amoebanet-d" else TRANSFORMER
    return train(name, options, 1, schedule, "always")


def assert_same_bits(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(ours[name], wanted[name])]
    assert not different


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize(("schedule", "remat"), [("gpipe", "except_last"), ("1f1b", "never")])
@pytest.mark.parametrize(("name", "options"), [("amoebanet-d", AMOEBANET), ("transformer-lm", TRANSFORMER)])
def test_weights_do_not_depend_on_the_number_of_stages(
    name: str, options: dict[str, object], schedule: str, remat: str, num_stages: int
) -> None:
    """Nor, on the way, on re-materialization: the reference recomputes everything."""
    wanted = one_stage(name, schedule)
    assert_same_bits(train(name, options, num_stages, schedule, remat), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize(("name", "options"), [("amoebanet-d", AMOEBANET), ("transformer-lm", TRANSFORMER)])
def test_nor_do_they_on_a_gpu(
    name: str, options: dict[str, object], bfloat16: bool, request: pytest.FixtureRequest
) -> None:
    """Operations whose result depends on the order in which threads arrive have their deterministic forms,
    where torch has one.
    """
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True, warn_only=True)
    for remat in ("always", "never"):
        wanted = train(name, options, 1, "gpipe", remat, "cuda", bfloat16)
        for num_stages in (2, 4):
            assert_same_bits(train(name, options, num_stages, "gpipe", remat, "cuda", bfloat16), wanted)


@pytest.mark.parametrize("cut", range(1, 12))
def test_no_cut_changes_a_bit(cut: int) -> None:
    """Also behind a layer that gives the same tensor twice, and across memory layouts, with copied
    boundaries.
    """
    batch, target = everything_batch(9, torch.float32)
    gradients = []
    for partition in ([12], [cut, 12 - cut]):
        pipeline = Pipeline(
            seeded(everything, torch.float32),
            num_microbatches=4,
            partition=partition,
            transport=InProcess(copy=True),
        )
        pipeline.step(batch, target, nn.functional.cross_entropy)
        gradients.append({name: p.grad for name, p in pipeline.named_parameters()})
    assert_same_bits(gradients[1], gradients[0])


def test_clipping_by_the_total_norm_does_not_depend_on_the_number_of_stages() -> None:
    batch, target = everything_batch(9, torch.float32)
    norms, gradients = [], []
    for num_stages in (1, 3):
        pipeline = Pipeline(
            seeded(everything, torch.float32), num_stages=num_stages, num_microbatches=4, cost=[1] * 12
        )
        pipeline.step(batch, target, nn.functional.cross_entropy)
        norms.append(pipeline.clip_grad_norm_(0.01))
        gradients.append({name: p.grad for name, p in pipeline.named_parameters()})
    assert torch.equal(norms[0], norms[1])
    assert_same_bits(gradients[1], gradients[0])
    clipped = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients[0].values()]))
    torch.testing.assert_close(clipped, torch.tensor(0.01), rtol=1e-3, atol=0.0)


def trained(pipeline: Pipeline, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    for step in steps:
        pipeline.step(*everything_batch(7, torch.float32, seed=step), cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in pipeline.state_dict().items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it should be: one process
def test_a_saved_run_continues_with_another_number_of_stages(tmp_path: Path) -> None:
    """With dropout and batch normalization, bit for bit as if it had never stopped."""

    def make(num_stages: int, seed: int = 0) -> tuple[Pipeline, torch.optim.Optimizer]:
        model = seeded(everything, torch.float32, seed)
        pipeline = Pipeline(model, num_stages=num_stages, num_microbatches=4, cost=[1] * 12)
        return pipeline, torch.optim.RMSprop(pipeline.parameters(), lr=1e-3, momentum=0.9)

    wanted = trained(*make(1), range(3))
    before, after = make(2), make(4, seed=9)
    trained(*before, range(2))
    checkpoint.save(tmp_path, *before)
    checkpoint.load(tmp_path, *after)
    assert_same_bits(trained(*after, range(2, 3)), wanted)


SEVERAL = [name for name in NAMED if name not in ("naive", "gpipe", "1f1b")]


def trained_everything(schedule: Schedule) -> dict[str, Tensor]:
    """float32 weights and averages after five steps of momentum, with dropout and batch normalization."""
    torch.manual_seed(0)
    pipeline = Pipeline(
        everything(), num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches,
        schedule=schedule, cost=[1] * 12,
    )  # fmt: skip
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05, momentum=0.9)
    return trained(pipeline, optimizer, range(5))


@functools.cache
def trained_in_one_stage(name: str) -> dict[str, Tensor]:
    return trained_everything(named(name, 1, 4))


@pytest.mark.parametrize("name", SEVERAL)
def test_weights_have_the_bits_of_one_stage(name: str) -> None:
    """Weights' gradients are added in the order of the micro-batches, as by 1F1B; breadth-first drains in
    reverse, as GPipe does.
    """
    wanted = trained_in_one_stage("gpipe" if name == "breadth-first" else "1f1b")
    for remat in ("never", "always"):
        assert_same_bits(trained_everything(named(name, 2, 4, remat=remat)), wanted)


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
    torch.testing.assert_close(pipeline(batch), other(batch), **EXACT)
