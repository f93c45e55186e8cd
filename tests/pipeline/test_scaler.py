"""Gradient scaling: the gradients are scaled and the loss is not; over several processes see `tree_cases`."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import mlp_batch, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline

mse_loss = nn.functional.mse_loss


def half_model() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())))


def train_plain(model: nn.Module, scaler: torch.amp.GradScaler, dtype: torch.dtype, big: int) -> list[float]:
    """As torch's documentation does; the target of step number `big` makes infinite gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scales = []
    for step in range(4):
        batch, target = mlp_batch(4, dtype=torch.float32, seed=step)
        target = target * 1e38 if step == big else target
        for x, y in zip(batch.split(2), target.split(2), strict=True):
            with torch.autocast("cpu", dtype=dtype):
                loss = mse_loss(model(x).float(), y) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("own", [True, False])
def test_a_scaler_works_as_with_the_plain_model(dtype: torch.dtype, own: bool) -> None:
    options = {"init_scale": 2.0**10, "growth_interval": 2}
    plain, layers = (seeded(half_model, torch.float32) for _ in range(2))
    wanted = train_plain(plain, torch.amp.GradScaler("cpu", **options), dtype, big=1)
    assert wanted == [1024, 512, 512, 1024]
    pipeline = Pipeline(layers, num_stages=3, num_microbatches=2)
    scaler = pipeline.scaler(**options) if own else torch.amp.GradScaler("cpu", **options)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        batch, target = mlp_batch(4, dtype=torch.float32, seed=step)
        target = target * 1e38 if step == 1 else target
        twin = Pipeline(copy.deepcopy(layers), num_stages=3, num_microbatches=2)
        with torch.autocast("cpu", dtype=dtype):
            loss = pipeline.step(batch, target, lambda y, t: mse_loss(y.float(), t), scaler=scaler)
            unscaled = twin.step(batch, target, lambda y, t: mse_loss(y.float(), t))
        assert torch.equal(loss, unscaled)
        if step == 0:
            for one, other in zip(pipeline.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad * 2.0**10, rtol=1e-2, atol=1e-2)
                assert not torch.equal(one.grad, other.grad)
        scaler.unscale_(optimizer)
        pipeline.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == wanted[step]
    for one, other in zip(pipeline.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def test_a_scaler_that_is_switched_off_changes_nothing() -> None:
    pipeline, twin = (Pipeline(seeded(half_model), num_stages=2, num_microbatches=2) for _ in range(2))
    scaler = pipeline.scaler(enabled=False)
    assert torch.equal(
        pipeline.step(*mlp_batch(4), mse_loss, scaler=scaler), twin.step(*mlp_batch(4), mse_loss)
    )
    for one, other in zip(pipeline.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    scaler.step(torch.optim.SGD(pipeline.parameters(), lr=0.1))
    scaler.step(None)
    scaler.update()


def test_a_loss_of_few_digits_is_scaled_in_them() -> None:
    """Nothing of the scale is left in what is kept for the next step."""
    pipeline = Pipeline(seeded(half_model), num_stages=2, num_microbatches=2)
    scaler = pipeline.scaler(init_scale=4.0)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target).to(torch.bfloat16)

    gradients = []
    for given in (None, scaler, None):
        pipeline.zero_grad()
        pipeline.num_steps = 0
        pipeline.step(*mlp_batch(4), loss_fn, scaler=given)
        gradients.append([p.grad for p in pipeline.parameters()])
    for first, second, third in zip(*gradients, strict=True):
        assert torch.equal(first * 4, second)
        assert torch.equal(first, third)
