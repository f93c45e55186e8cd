"""Layers that take keyword arguments, and what they share in a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Masked(nn.Linear):
    """Takes a mask without a batch dimension."""

    def forward(self, x: Tensor, mask: Tensor, *, factor: float = 1.0) -> Tensor:
        return super().forward(x * mask) * factor


class Anything(nn.Linear):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return super().forward(x) * options["factor"] + options["mask"].sum() * options["table"]["row"]


def shared_model() -> nn.Sequential:
    return nn.Sequential(
        Masked(6, 6), nn.Tanh(), nn.Dropout(0.3), Masked(6, 6), Anything(6, 6), nn.Linear(6, 6)
    )


def what_is_shared(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    table = {"row": torch.randn(6, generator=generator, dtype=torch.float64), "unused": None}
    return {"mask": torch.rand(6, generator=generator) > 0.4, "factor": 1 + step, "table": table}
