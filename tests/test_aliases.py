"""Gradients that share memory inside one process; `alias_cases` has what only several processes can do."""

from __future__ import annotations

import warnings

import pytest
import torch
from tiny_models import mlp_batch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.schedule import Action, Schedule

WIDTH, NUM_MICROBATCHES = 6, 4


class Position(nn.Module):
    """Adds a parameter, seen through a view: torch then takes its gradient for `.grad` without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.position[None]).view(1, WIDTH)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH).double() if i == 1 else Position() for i in range(6)))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def late_weights(num_stages: int) -> Schedule:
    """All weight gradients after all input gradients."""
    m = range(NUM_MICROBATCHES)
    rows = tuple(
        tuple(Action.parse(f"{stage}{kind}{i}") for kind in "FIW" for i in m) for stage in range(num_stages)
    )
    return Schedule("late weights", num_stages, NUM_MICROBATCHES, "never", rows)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "late weights"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
def test_no_parameters_gradient_is_another_tensors_memory(num_stages: int, schedule: str) -> None:
    """Micro-batches of one example, whose gradients have the shapes of the parameters; over two steps."""
    layers = model()
    batch, target = mlp_batch(NUM_MICROBATCHES)
    wanted = [torch.zeros_like(p) for p in layers.parameters()]
    for x, y in zip(batch.split(1), target.split(1), strict=True):
        found = torch.autograd.grad(mean_square(layers(x), y) / NUM_MICROBATCHES, list(layers.parameters()))
        wanted = [a + 2 * b for a, b in zip(wanted, found, strict=True)]
    pipeline = Pipeline(
        layers,
        num_stages=num_stages,
        num_microbatches=NUM_MICROBATCHES,
        schedule=late_weights(num_stages) if schedule == "late weights" else schedule,
        remat="never",
        cost=[1] * len(layers),
    )
    for _ in range(2):
        pipeline.step(batch, target, mean_square)
    for (name, parameter), gradient in zip(pipeline.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=1e-12, atol=1e-14, msg=lambda t, n=name: f"{n}: {t}"
        )


def test_a_loss_that_is_a_view_does_not_share_its_gradient_with_a_parameter() -> None:
    """The gradient of the loss is made once for all micro-batches of one size."""

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


def test_nobody_asks_for_the_address_of_a_fake_tensor() -> None:
    """Which torch warns of, once, and says that it will be an error."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
            pipeline = Pipeline(layers, num_stages=2, num_microbatches=2, remat="never")
            batch = torch.empty(2, WIDTH)
            pipeline.step(batch, torch.empty_like(batch), mean_square)
    finally:
        torch.set_warn_always(always)
