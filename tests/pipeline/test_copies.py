"""Copies of a pipeline train like it and apart from it; over processes there are none."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from tiny_models import everything, everything_batch, seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.pipeline import InProcess, Pipeline

COPIES: dict[str, Callable[[Pipeline], Pipeline]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pipeline: pickle.loads(pickle.dumps(pipeline)),
}


def train(pipeline: Pipeline, steps: range) -> dict[str, Tensor]:
    """Steps with dropout and batch normalization; what the pipeline holds and answers after them."""
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for step in steps:
        pipeline.step(*everything_batch(9, seed=step), nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    return {**found, "output": pipeline(everything_batch(5)[0])}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("how", "options"),
    [("deepcopy", {"transport": InProcess(copy=True), "schedule": "1f1b"}), ("pickle", {})],
)
def test_a_copy_trains_like_the_original_and_apart_from_it(how: str, options: dict[str, object]) -> None:
    pipeline = Pipeline(seeded(everything), num_stages=3, num_microbatches=4, seed=5, **options)
    unused = COPIES[how](pipeline)
    train(pipeline, range(2))
    twin = COPIES[how](pipeline)
    before = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    wanted = train(pipeline, range(2, 4))
    assert_equal(twin.state_dict(), before)
    assert_equal(train(twin, range(2, 4)), wanted)
    train(unused, range(2))
    assert_equal(train(unused, range(2, 4)), wanted)
    assert twin.num_steps == pipeline.num_steps == unused.num_steps
    assert twin.timeline.num_stages == 3


class Hooked(nn.Module):
    """Counts its calls in a buffer that its output depends on; a hook of its own doubles what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))
        self.linear.register_forward_hook(double)

    def forward(self, tree: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
        self.calls += 1
        return {"x": self.linear(tree["x"]) / self.calls * factor}


def double(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output * 2


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_hooks_buffers_and_scale(how: str) -> None:
    torch.manual_seed(0)
    pipeline = Pipeline([Hooked(), Hooked(), Hooked()], num_stages=3, num_microbatches=2)
    x = torch.randn(4, 6)

    def train(pipeline: Pipeline, scaler: torch.amp.GradScaler) -> list[Tensor]:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            loss = pipeline.step(
                {"x": x}, None, lambda tree, _: tree["x"].square().mean(), shared={"factor": 3}, scaler=scaler
            )
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss)
        return [*losses, *pipeline.state_dict().values()]

    scaler = pipeline.scaler(init_scale=4.0)
    train(pipeline, scaler)
    twin = COPIES[how](pipeline)
    its_scaler = twin.scaler()
    its_scaler.load_state_dict(scaler.state_dict())
    with pytest.raises(ValueError, match="no complete step to show; run"):
        _ = twin.timeline
    found, wanted = train(twin, its_scaler), train(pipeline, scaler)
    assert len(twin.timeline.events) == len(pipeline.timeline.events) > 0
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("how", COPIES)
def test_tied_layers_stay_tied(how: str) -> None:
    tied = nn.Linear(6, 6)
    twin = COPIES[how](Pipeline([tied, nn.Tanh(), tied], num_stages=3, num_microbatches=2))
    assert len(list(twin.parameters())) == 2
    twin.step(torch.randn(4, 6), None, lambda output, target: output.square().mean())
    assert twin.get_submodule("0") is twin.get_submodule("2") is not tied


@pytest.mark.parametrize("how", COPIES)
def test_a_pipeline_over_processes_is_not_copied(how: str) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        for options in ({"group": torch.distributed.group.WORLD}, {"mesh": mesh}):
            pipeline = Pipeline([nn.Linear(2, 2)], num_stages=1, num_microbatches=1, **options)
            with pytest.raises(TypeError, match="a pipeline over several processes cannot"):
                COPIES[how](pipeline)
            pipeline.step(torch.ones(1, 2), None, lambda output, target: output.mean())
    finally:
        torch.distributed.destroy_process_group()
