"""Tests that deliberate mistakes in the code (`mutants`) have shown to be missing elsewhere."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tiny_models import everything, everything_batch, mlp, mlp_batch, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as run_again_in_the_backward

from gpipe_bench.pipeline import Pipeline, checkpoint
from gpipe_bench.pipeline.plan.drawing import from_csv
from gpipe_bench.pipeline.plan.schedule import (
    REMAT_MODES,
    SCHEDULES,
    Action,
    Kind,
    dependencies,
    execution_order,
    gpipe,
    validate,
)
from gpipe_bench.pipeline.transport import InProcess

mse_loss, cross_entropy = nn.functional.mse_loss, nn.functional.cross_entropy


def test_a_recomputation_needs_its_forward() -> None:
    with pytest.raises(ValueError, match="deadlocks: 0R1 waits for 0F1"):
        validate(from_csv("0R1,0F0,0F1,0B1,0R0,0B0\n", remat="always"))


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


class Watcher(torch.autograd.Function):
    """The identity; its backward notes whether autocast is on."""

    @staticmethod
    def forward(ctx, x: Tensor, seen: list[bool]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(torch.is_autocast_enabled("cpu"))
        return gradient, None


class Watched(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        return Watcher.apply(super().forward(x), self.seen)


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_autocast_is_over_when_the_backward_runs(remat: str) -> None:
    """Torch's rule: the context around the forward chooses the precisions, the backward repeats them."""
    layers = [Watched(), Watched()]
    pipeline = Pipeline(layers, num_stages=2, num_microbatches=2, remat=remat)
    batch, _ = mlp_batch(4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipeline.step(batch, None, lambda output, target: output.float().square().mean())
    assert [layer.seen for layer in layers] == [[False, False]] * 2


def test_forwards_draw_from_streams_of_their_own() -> None:
    """In training mode too, a forward is another sample of the masks than the steps are trained with."""
    batch, _ = mlp_batch(4)
    outputs: list[Tensor] = []

    def loss_fn(output: Tensor, target: None) -> Tensor:
        outputs.append(output.detach().clone())
        return output.square().mean()

    pipeline = Pipeline(seeded(mlp), num_stages=2, num_microbatches=1, remat="never")
    pipeline.step(batch, None, loss_fn)
    forwards = [pipeline(batch), pipeline(batch)]
    samples = [*outputs, *forwards]
    assert len(samples) == 3
    for i in range(3):
        for j in range(i):
            assert not torch.equal(samples[i], samples[j])


def trained(pipeline: Pipeline, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    for step in steps:
        pipeline.step(*everything_batch(7, torch.float32, seed=step), cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    return pipeline.state_dict()


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
    found = trained(*after, range(2, 3))
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]


class Checkpointed(nn.Sequential):
    """A layer that recomputes itself inside the backward, as models with checkpoints of their own do."""

    def forward(self, x: Tensor) -> Tensor:
        return run_again_in_the_backward(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_averages_do_not_see_what_a_layer_recomputes_itself(remat: str) -> None:
    buffers = []
    for kind in (nn.Sequential, Checkpointed):
        torch.manual_seed(0)
        # The recomputation stops at the last tensor that is needed, so something has to follow the norm.
        layers = [kind(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()).double() for _ in range(2)]
        pipeline = Pipeline(layers, num_stages=2, num_microbatches=2, remat=remat)
        pipeline.step(*mlp_batch(7), mse_loss)
        buffers.append(dict(pipeline.named_buffers()))
    assert len(buffers[0]) == 6
    for name, buffer in buffers[0].items():
        assert torch.equal(buffers[1][name], buffer), name


def test_a_failed_step_leaves_no_statistics_for_the_next() -> None:
    batch, target = mlp_batch(8)

    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("broken loss")

    buffers = []
    for fails in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6).double(), nn.BatchNorm1d(6).double()]
        pipeline = Pipeline(layers, num_stages=2, num_microbatches=2)
        if fails:
            with pytest.raises(RuntimeError, match="broken loss"):
                pipeline.step(batch + 1, target, broken)
        pipeline.step(batch, target, mse_loss)
        buffers.append(dict(pipeline.named_buffers()))
    for name, buffer in buffers[0].items():
        assert torch.equal(buffers[1][name], buffer), name


class Strides(nn.Module):
    """A convolution that notes the strides of what comes in with a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.seen: set[tuple[int, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.seen.add(x.stride())
        return self.conv(x)


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_strides_of_single_examples_survive_a_boundary(remat: str) -> None:
    """Dimensions of length 1 have strides too, and kernels choose layouts by them."""
    seen = []
    for num_stages in (1, 2):
        torch.manual_seed(0)
        last = Strides()
        layers = [nn.Sequential(nn.Conv2d(2, 4, 1), ChannelsLast()), last]
        pipeline = Pipeline(
            layers, num_stages=num_stages, num_microbatches=2, remat=remat, transport=InProcess(copy=True)
        )
        for _ in range(2):
            pipeline.step(torch.randn(2, 2, 3, 1), None, lambda output, target: output.square().mean())
        seen.append(last.seen)
    assert len(seen[0]) == 1
    assert seen[1] == seen[0]
