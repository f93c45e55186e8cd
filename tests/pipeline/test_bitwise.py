"""At fixed M and schedule the number of stages changes no bit, with dropout, drop path and batch
normalization on; nor does going on from a checkpoint or in a copy.

Float32, real models, several optimizer steps: whatever is drawn, summed or laid out differently in one place
shows up in all weights after that.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from covering import pairwise
from tiny_models import everything, everything_batch, seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

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


# Copies


COPIES: dict[str, Callable[[Pipeline], Pipeline]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pipeline: pickle.loads(pickle.dumps(pipeline)),
}
copies = pytest.mark.parametrize("how", COPIES)


class Hooked(nn.Module):
    """Counts its calls in a buffer that its output depends on; a hook of its own doubles what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))
        self.linear.register_forward_hook(double)

    def forward(self, tree: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
        self.calls += 1
        return {"x": nn.functional.dropout(self.linear(tree["x"]), 0.1) / self.calls * factor}


def double(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output * 2


def scaled_steps(pipeline: Pipeline, scaler: torch.amp.GradScaler) -> list[Tensor]:
    """Losses and state of two steps."""
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        found.append(pipeline.step(
            {"x": torch.linspace(-1, 1, 24).view(4, 6)}, None, lambda tree, _: tree["x"].square().mean(),
            shared={"factor": 3}, scaler=scaler,
        ))  # fmt: skip
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*found, *state_of(pipeline).values()]


@copies
def test_a_copy_trains_like_the_original_and_apart_from_it(how: str) -> None:
    """With hooks, buffers, the number of steps and a scale."""
    torch.manual_seed(0)
    pipeline = Pipeline(
        [Hooked(), Hooked(), Hooked()], num_stages=3, num_microbatches=2, transport=InProcess(copy=True)
    )
    unused, scaler = COPIES[how](pipeline), pipeline.scaler(init_scale=4.0)
    scaled_steps(pipeline, scaler)
    twin = COPIES[how](pipeline)
    before, its_scaler = state_of(twin), twin.scaler()
    its_scaler.load_state_dict(scaler.state_dict())
    with pytest.raises(ValueError, match="no complete step to show; run"):
        _ = twin.timeline
    wanted = scaled_steps(pipeline, scaler)
    assert_same_bits(state_of(twin), before)
    assert all(map(torch.equal, scaled_steps(twin, its_scaler), wanted))
    its_scaler = unused.scaler(init_scale=4.0)
    scaled_steps(unused, its_scaler)
    assert all(map(torch.equal, scaled_steps(unused, its_scaler), wanted))
    assert twin.num_steps == pipeline.num_steps == unused.num_steps
    assert len(twin.timeline.events) == len(pipeline.timeline.events) > 0


@copies
def test_a_pipeline_over_processes_is_not_copied(how: str) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        for options in ({"group": torch.distributed.group.WORLD}, {"mesh": mesh}):
            pipeline = Pipeline([nn.Linear(2, 2)], num_stages=1, num_microbatches=1, **options)
            with pytest.raises(TypeError, match="a pipeline over several processes cannot"):
                COPIES[how](pipeline)
            assert pipeline.step(torch.ones(1, 2), None, lambda output, target: output.mean()).isfinite()
    finally:
        torch.distributed.destroy_process_group()
