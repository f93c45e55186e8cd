"""At fixed M and schedule the number of stages changes no bit, with dropout, drop path and batch
normalization on; nor does going on from a checkpoint.

Float32, real models, several optimizer steps: whatever is drawn, summed or laid out differently in one place
shows up in all weights after that.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from covering import pairwise
from tiny_models import everything, everything_batch, seeded
from torch import Tensor, nn

from gpipe_bench import models
from gpipe_bench.models import set_drop_path
from gpipe_bench.pipeline import NAMED, InProcess, Pipeline, checkpoint

OPTIONS: dict[str, dict[str, object]] = {
    "amoebanet-d": {
        "num_layers": 3, "num_filters": 16, "num_classes": 10, "image_size": 67, "aux_head": True,
        "dropout": 0.2,
    },
    "transformer-lm": {
        "num_layers": 6, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "vocab_size": 50, "seq_len": 6,
        "dropout": 0.2,
    },
}  # fmt: skip
cross_entropy = nn.functional.cross_entropy


def assert_same_bits(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []


def state_of(pipeline: Pipeline) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in pipeline.state_dict().items()}


def train(
    name: str, num_stages: int, schedule: str, remat: str, device: str = "cpu", bfloat16: bool = False
) -> dict[str, Tensor]:
    """The state of a model of the zoo after three RMSProp steps of uneven micro-batches."""
    torch.manual_seed(0)
    options = OPTIONS[name]
    model = models.MODELS[name](**options)
    set_drop_path(model, 0.7)
    pipeline = Pipeline(
        model, num_stages=num_stages, num_microbatches=3, schedule=schedule, remat=remat,
        cost=[1] * len(model), devices=device,
    )  # fmt: skip
    optimizer = torch.optim.RMSprop(pipeline.parameters(), lr=1e-3, momentum=0.9)
    loss_fn = models.loss_fn(name, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch, target = models.example_batch(name, 7, generator=generator, **options)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bfloat16):
            pipeline.step(batch, target, loss_fn)
        optimizer.step()
        optimizer.zero_grad()
    return state_of(pipeline)


one_stage = functools.cache(lambda name, schedule: train(name, 1, schedule, "always"))


@pytest.mark.parametrize(
    ("name", "schedule", "remat", "num_stages"),
    pairwise(tuple(OPTIONS), ("gpipe", "1f1b"), ("except_last", "never"), (2, 4, 8)),
)
def test_weights_do_not_depend_on_the_number_of_stages(
    name: str, schedule: str, remat: str, num_stages: int
) -> None:
    """Nor, on the way, on re-materialization: the reference recomputes everything."""
    assert_same_bits(train(name, num_stages, schedule, remat), one_stage(name, schedule))


@pytest.mark.gpu
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_nor_do_they_on_a_gpu(name: str, bfloat16: bool, request: pytest.FixtureRequest) -> None:
    """Operations whose result depends on the order in which threads arrive have their deterministic forms,
    where torch has one.
    """
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True, warn_only=True)
    for remat in ("always", "never"):
        wanted = train(name, 1, "gpipe", remat, "cuda", bfloat16)
        for num_stages in (2, 4):
            assert_same_bits(train(name, num_stages, "gpipe", remat, "cuda", bfloat16), wanted)


@pytest.mark.parametrize("cut", range(1, 12))
def test_no_cut_changes_a_bit(cut: int) -> None:
    """Nor the norm by which gradients are clipped. Also behind a layer that gives the same tensor twice,
    and across memory layouts, with copied boundaries.
    """
    batch, target = everything_batch(9, torch.float32)
    found = []
    for partition in ([12], [cut, 12 - cut]):
        pipeline = Pipeline(
            seeded(everything, torch.float32), num_microbatches=4, partition=partition,
            transport=InProcess(copy=True),
        )  # fmt: skip
        pipeline.step(batch, target, cross_entropy)
        norm = pipeline.clip_grad_norm_(0.01)
        found.append({"norm": norm} | {name: p.grad for name, p in pipeline.named_parameters()})
    assert_same_bits(found[1], found[0])
    del found[0]["norm"]
    clipped = torch.linalg.vector_norm(torch.cat([g.flatten() for g in found[0].values()]))
    torch.testing.assert_close(clipped, torch.tensor(0.01), rtol=1e-3, atol=0.0)


def made(num_stages: int, seed: int = 0, **options: object) -> tuple[Pipeline, torch.optim.Optimizer]:
    pipeline = Pipeline(
        seeded(everything, torch.float32, seed), num_stages=num_stages, num_microbatches=4, cost=[1] * 12,
        seed=5, **options,
    )  # fmt: skip
    return pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.05, momentum=0.9)


def trained(pipeline: Pipeline, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    """What the pipeline holds after these steps, and what it answers."""
    for step in steps:
        pipeline.step(*everything_batch(7, torch.float32, seed=step), cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    output = pipeline.eval()(everything_batch(5, torch.float32)[0])
    pipeline.train()
    return state_of(pipeline) | {"output": output}


one_for_all = functools.cache(lambda name: trained(*made(1, schedule=name), range(5)))


@pytest.mark.parametrize("name", [name for name in NAMED if name not in ("naive", "gpipe", "1f1b")])
@pytest.mark.parametrize("remat", ["never", "always"])
def test_every_named_schedule_gives_the_bits_of_one_stage(name: str, remat: str) -> None:
    """Weights' gradients are added in the order of the micro-batches, as by 1F1B; breadth-first drains in
    reverse, as GPipe does.
    """
    pipeline, optimizer = made(2 * (NAMED[name].stages_per_worker or 2), schedule=name, remat=remat)
    found = trained(pipeline, optimizer, range(5))
    assert_same_bits(found, one_for_all("gpipe" if name == "breadth-first" else "1f1b"))
    timeline, num_workers = pipeline.timeline, pipeline.schedule.num_workers
    assert num_workers == 2
    assert sum(len(timeline.of_worker(w)) for w in range(num_workers)) == len(list(pipeline.schedule))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it should be: one process
def test_a_saved_run_continues_with_another_number_of_stages(tmp_path: Path) -> None:
    """With dropout and batch normalization, bit for bit as if it had never stopped; here in a V."""
    wanted = trained(*made(1, schedule="1f1b"), range(3))
    before, after = made(4, schedule="zb-v", remat="never"), made(2, seed=9, schedule="1f1b")
    trained(*before, range(2))
    checkpoint.save(tmp_path, *before)
    checkpoint.load(tmp_path, *after)
    assert_same_bits(trained(*after, range(2, 3)), wanted)
