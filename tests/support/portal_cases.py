"""Portals between processes: cases that `test_distributed` runs on four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from odd_layers import Add
from ranks import Ranks, halves
from tiny_models import EXACT, assert_own_gradients, seeded
from torch import Tensor, nn

from gpipe_bench.models import MODELS
from gpipe_bench.pipeline import Pipeline, Pop, PortalSequential, Stash

mse_loss = nn.functional.mse_loss


def unet(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    options = {"num_convs": 1, "num_filters": 4, "depth": 2, "dropout": dropout, "image_size": 8}
    return seeded(lambda: MODELS["unet"](portals=True, **options), dtype)


def images(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (7, 3, 9, 9), (7, 1, 9, 9)
    return tuple(torch.rand(shape, generator=generator, dtype=dtype) for shape in shapes)  # type: ignore[return-value]


def decoder() -> nn.Sequential:
    """A stash that layers of several stages pop, also of the next one."""
    return seeded(
        lambda: PortalSequential(
            nn.Linear(3, 3),
            Stash("a", nn.Tanh()),
            *(layer for _ in range(3) for layer in (nn.Linear(3, 3), Pop("a", Add()))),
        )
    )


def _check(ranks: Ranks, build: Callable[[], nn.Sequential], batch: Any, **options: Any) -> None:
    """Twice, so that receives are posted ahead in the second step; then an evaluation."""
    inputs, target = batch
    plain = build()
    mse_loss(plain(inputs), target).backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    with ranks.pipeline(build(), **options) as pipeline:
        for _ in range(2):
            pipeline.zero_grad()
            pipeline.step(*ranks.own(inputs, target), mse_loss)
            assert_own_gradients(pipeline, wanted, rtol=1e-10, atol=1e-14)
        output = pipeline(inputs if ranks.is_first else None)
        if ranks.is_last:
            torch.testing.assert_close(output, plain(inputs).detach(), **EXACT)


def portals_between_processes() -> None:
    batch = images()
    numbers = torch.Generator().manual_seed(2)
    rows = tuple(torch.randn(6, 3, generator=numbers, dtype=torch.float64) for _ in range(2))
    world, pair = Ranks(), halves()
    _check(world, unet, batch, schedule="1f1b", remat="always")
    _check(world, unet, batch, schedule="zb-h1", remat="never", share_memory=False)
    _check(world, decoder, rows, schedule="gpipe", remat="except_last")
    _check(pair, unet, batch, schedule="1f1b", remat="never")
    inputs, target = rows
    plain = decoder()
    mse_loss(plain(inputs), target).backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    with Pipeline(
        decoder(), num_stages=4, num_workers=2, num_microbatches=2, schedule="interleaved", cost=[1.0] * 8,
        group=pair.group,
    ) as pipeline:  # fmt: skip
        for _ in range(2):
            pipeline.zero_grad()
            pipeline.step(inputs, target, mse_loss)
            assert_own_gradients(pipeline, wanted, rtol=1e-10, atol=1e-14)


def portals_and_bits() -> None:
    """Weights after five steps, with dropout, on one, two and four ranks."""
    inputs, target = images(torch.float32)

    def train(pipeline: Pipeline) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            pipeline.step(inputs, target, mse_loss)
            optimizer.step()
            optimizer.zero_grad()
        return pipeline.state_dict()

    wanted = train(Pipeline(unet(0.2, torch.float32), num_stages=1, num_microbatches=4, schedule="1f1b"))
    for ranks in (Ranks(), halves()):
        with ranks.pipeline(unet(0.2, torch.float32), schedule="1f1b") as pipeline:
            found = train(pipeline)
        assert found
        for name, value in found.items():
            assert torch.equal(value, wanted[name]), name


CASES: tuple[Callable[[], None], ...] = (
    portals_between_processes,
    portals_and_bits,
)
