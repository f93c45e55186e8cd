"""One test for each mistake that was once found in one process, its symptom as its name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from odd_layers import OverwritesOne
from tiny_models import EXACT, assert_own_gradients, mlp_batch, plain_step, seeded
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gpipe_bench.pipeline import Action, ActionError, InProcess, Pipeline, Schedule
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES

mse_loss = nn.functional.mse_loss


def square(output: Tensor, target: Any) -> Tensor:
    return output.float().square().mean()


# Memory that two tensors share


class Position(nn.Module):
    """Adds a parameter, seen through a view: torch then takes its gradient for `.grad` without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.position[None]).view(1, 6)


def late_weights(num_stages: int) -> Schedule:
    """All weight gradients after all input gradients."""
    rows = [
        [Action.parse(f"{stage}{kind}{m}") for kind in "FIW" for m in range(4)] for stage in range(num_stages)
    ]
    return Schedule("late weights", num_stages, 4, "never", tuple(map(tuple, rows)))


@pytest.mark.parametrize("num_stages", [1, 2, 6])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "late weights"])
def test_a_parameters_gradient_is_another_tensors_memory(num_stages: int, schedule: str) -> None:
    """Micro-batches of one example, whose gradients have the shapes of the parameters; over two steps."""
    layers = seeded(lambda: nn.Sequential(*(nn.Linear(6, 6) if i == 1 else Position() for i in range(6))))
    batch, target = mlp_batch(4)
    pipeline = Pipeline(
        layers, num_stages=num_stages, num_microbatches=4, remat="never", cost=[1] * 6,
        schedule=late_weights(num_stages) if schedule == "late weights" else schedule,
    )  # fmt: skip
    parameters = dict(layers.named_parameters())
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for x, y in zip(batch.split(1), target.split(1), strict=True):  # summed outside of autograd
        found = torch.autograd.grad(mse_loss(layers(x), y) / 4, [*parameters.values()])
        for name, gradient in zip(sums, found, strict=True):
            sums[name] += 2 * gradient
    for _ in range(2):
        pipeline.step(batch, target, mse_loss)
    assert_own_gradients(pipeline, sums, **EXACT)


def test_the_gradient_of_a_loss_that_is_a_view_grows_with_a_parameters() -> None:
    """It is made once for all micro-batches of one size."""

    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(()).view(1, 1) + self.offset.view(1, 1)

    pipeline = Pipeline([Offset()], num_stages=1, num_microbatches=4, remat="never")
    pipeline.step(torch.ones(4, 1, dtype=torch.float64), None, lambda output, target: output.view(()))
    (offset,) = pipeline.parameters()
    assert float(offset.grad) == 1


def test_a_target_in_the_memory_of_a_batch_that_is_overwritten() -> None:
    batch, _ = mlp_batch(4)
    layers = [nn.ReLU(inplace=True), nn.Linear(6, 6).double()]
    pipeline = Pipeline(layers, num_stages=1, num_microbatches=2)
    with pytest.raises(ActionError, match=r"pass target.clone\(\)"):
        pipeline.step(batch, batch, mse_loss)


def test_tensors_of_the_mini_batch_that_share_memory_part() -> None:
    """Under re-materialization the one that is overwritten is copied, and the other one would not see it."""
    build = lambda: nn.Sequential(OverwritesOne(), nn.Linear(6, 6))  # noqa: E731
    x, target = mlp_batch(4)
    views = lambda: (kept := x.clone(), kept.view(-1, 2, 3))  # noqa: E731
    plain = plain_step(seeded(build), views(), target, mse_loss, 2)
    pipeline = Pipeline(seeded(build), num_stages=2, num_microbatches=2, remat="never")
    pipeline.step(views(), target, mse_loss)
    assert_own_gradients(pipeline, plain.gradients, **EXACT)
    pipeline = Pipeline(seeded(build), num_stages=2, num_microbatches=2, remat="always")
    with pytest.raises(RuntimeError, match=r"out-of-place form of the operation \(inplace=False\),"):
        pipeline.step(views(), target, mse_loss)


# Layouts and precisions


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
def test_strides_of_single_examples_change_at_a_boundary(remat: str) -> None:
    """Dimensions of length 1 have strides too, and kernels choose layouts by them."""
    seen = []
    for num_stages in (1, 2):
        layers = [nn.Sequential(nn.Conv2d(2, 4, 1), ChannelsLast()), last := Strides()]
        pipeline = Pipeline(
            layers, num_stages=num_stages, num_microbatches=2, remat=remat, transport=InProcess(copy=True)
        )
        for _ in range(2):
            pipeline.step(torch.randn(2, 2, 3, 1), None, square)
        seen.append(last.seen)
    assert len(seen[0]) == 1
    assert seen[1] == seen[0]


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
def test_autocast_is_on_in_the_backward(remat: str) -> None:
    """Torch's rule: the context around the forward chooses the precisions, the backward repeats them."""
    layers = [Watched(), Watched()]
    pipeline = Pipeline(layers, num_stages=2, num_microbatches=2, remat=remat)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipeline.step(torch.randn(4, 6), None, square)
    assert [layer.seen for layer in layers] == [[False, False]] * 2


def test_the_scale_of_a_loss_of_few_digits_stays_for_the_next_step() -> None:
    pipeline = Pipeline(
        seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())), num_stages=2, num_microbatches=2
    )
    gradients = []
    for given in (None, pipeline.scaler(init_scale=4.0), None):
        pipeline.zero_grad()
        pipeline.step(*mlp_batch(4), lambda y, t: mse_loss(y, t).to(torch.bfloat16), scaler=given)
        gradients.append([p.grad for p in pipeline.parameters()])
    for first, second, third in zip(*gradients, strict=True):
        assert torch.equal(first * 4, second)
        assert torch.equal(first, third)


# What is built, asked or found out


def test_one_batch_normalization_twice_in_a_stage() -> None:
    norm = nn.BatchNorm1d(6)
    pipeline = Pipeline([nn.Linear(6, 6), norm, nn.Linear(6, 6), norm], num_stages=1, num_microbatches=2)
    assert sum(parameter is norm.weight for parameter in pipeline.parameters()) == 1


def test_verify_forgets_what_the_steps_before_have_found_out() -> None:
    """That the first layer overwrites its input shows in the second micro-batch alone, from then on."""

    class Second(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5) if x[0, 0] > 0 else x)

    pipeline = Pipeline([Second(4, 4), nn.Linear(4, 3)], num_stages=2, num_microbatches=2)
    batch, target = torch.ones(4, 4), torch.randn(4, 3)
    pipeline.step(batch, target, mse_loss)
    batch[:2] = -1
    pipeline.verify(batch, target, mse_loss)
    assert pipeline.step(batch, target, mse_loss).isfinite()


def test_verify_with_a_long_chain_in_a_layer_and_gradients_disabled() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for _ in range(2000):
        model[0].chain = {"next": getattr(model[0], "chain", None)}
    pipeline = Pipeline(model, num_stages=2, num_microbatches=2)
    with torch.no_grad():
        assert pipeline.verify(torch.randn(4, 4), torch.randn(4, 3), mse_loss) < 1e-3
        assert pipeline.verify(torch.full((4, 4), torch.nan), torch.randn(4, 3), mse_loss) == 0  # in both


class Table(nn.Linear):
    """A table that does not change, and a mean that does."""

    def __init__(self, change: Callable[[Table, Tensor], None]) -> None:
        super().__init__(6, 6)
        self.change = change
        self.register_buffer("table", torch.ones(6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x.detach().mean(0))
        return super().forward(x) * self.table * (1 + self.mean)


@pytest.mark.parametrize("remat", ["always", "never"])
def test_a_step_of_fake_tensors_asks_for_their_addresses(remat: str, request: pytest.FixtureRequest) -> None:
    """A step of which only shapes are asked: nothing can be compared, and nothing needs to be. Torch warns of
    who asks for an address, once, and says that it will be an error.
    """
    request.addfinalizer(partial(torch.set_warn_always, torch.is_warn_always_enabled()))
    torch.set_warn_always(True)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        layers = [
            Table(lambda layer, mean: layer.mean.lerp_(mean, 0.3)),
            Table(lambda layer, mean: setattr(layer, "mean", 0.7 * layer.mean + mean)),
        ]
        table = layers[0].table
        pipeline = Pipeline(layers, num_stages=2, num_microbatches=2, remat=remat)
        for _ in range(3):
            loss = pipeline.step(torch.empty(4, 6), torch.empty(4, 6), mse_loss)
    assert isinstance(loss, FakeTensor)
    assert all(isinstance(p.grad, FakeTensor) for p in pipeline.parameters())
    assert layers[0].table is table
