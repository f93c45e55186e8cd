"""What the engine adds to the layers' own time, per action.

Layers that do next to nothing leave the engine: schedule, stages, transport, clock. M > 1, recomputation on.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline

NUM_STAGES, NUM_MICROBATCHES = 4, 8


class Shift(nn.Module):
    """One addition: (N, 1) -> (N, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.weight


def pipeline_of(remat: str, schedule: str = "gpipe") -> Pipeline:
    return Pipeline(
        [Shift() for _ in range(NUM_STAGES)], num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES,
        schedule=schedule, remat=remat,
    )  # fmt: skip


@pytest.mark.parametrize("remat", ["always", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_step_per_action(benchmark: Any, schedule: str, remat: str) -> None:
    pipeline = pipeline_of(remat, schedule)
    batch, target = torch.randn(2, NUM_MICROBATCHES, 1)
    loss = benchmark(pipeline.step, batch, target, nn.functional.mse_loss)
    assert float(loss) == pytest.approx(float(nn.functional.mse_loss(batch, target)))
    num_actions = sum(1 for _ in pipeline.schedule)
    assert len(pipeline.timeline.events) == num_actions > 2 * NUM_STAGES * NUM_MICROBATCHES
    benchmark.extra_info["actions"] = num_actions  # divide the time by this


def test_plain_layers(benchmark: Any) -> None:
    """What the same layers take without an engine, recomputation included: subtract it."""
    layers = nn.Sequential(*(Shift() for _ in range(NUM_STAGES)))
    batch, target = torch.randn(2, NUM_MICROBATCHES, 1)
    parts = list(zip(batch.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True))

    def step() -> None:
        for inputs, _ in parts:
            with torch.no_grad():
                layers(inputs)
        for inputs, wanted in parts:
            nn.functional.mse_loss(layers(inputs), wanted).backward()

    benchmark(step)
    assert all(parameter.grad is not None for parameter in layers.parameters())
