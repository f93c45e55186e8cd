"""Random layers for what was made apart from each other: pytrees whose constants change, arguments that
layers share, weights with several places, and layers that change their input in place.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from random_models import Counted, Dense, Head, Join, Layer, Shift, Skip, Turn, Twice, flat, joined, parts
from torch import Tensor, nn

from gpipe_bench.pipeline.stage.microbatch import Tree


class Packed(Layer):
    """x, ... -> a dict, whose numbers and keys depend on x."""

    def forward(self, value: Tree) -> Tree:
        first, *others = parts(value)
        positive = bool(first.detach().sum() > 0)
        extra = {"nothing": None} if positive else {}
        return {"x": first, "scale": 2 if positive else 0.5, "others": others, "name": "packed", **extra}


class Asking(Dense):
    """Takes what all layers share."""

    def forward(self, value: Tree, shift: Tensor | None = None, *, times: int = 1) -> Tree:
        first, *others = parts(value)
        y = self.change(first) * times
        return joined((y if shift is None else y + shift, *others))


class Same(Dense):
    """Has the weight of another layer."""

    def __init__(self, width: int, other: Dense) -> None:
        super().__init__(width)
        self.up.weight = other.up.weight


class InPlace(nn.Module):
    """Changes in place what the layer before has just made."""

    def __init__(self, clamps: bool) -> None:
        super().__init__()
        self.clamps = clamps

    def forward(self, value: Tree) -> Tree:
        first, *others = value if isinstance(value, tuple) else (value,)
        return joined((first.relu_() if self.clamps else first.mul_(0.9).add_(0.01), *others))


class Normed(Dense):
    """Ends with a norm, whose gradients I computes."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width)

    def change(self, x: Tensor) -> Tensor:
        return self.norm(super().change(x) + flat(x, self.width))


KINDS = (
    Dense, Dense, Dense, Normed, Shift, Skip, Twice, Turn, Join, Counted, Packed, Packed, Asking, Asking,
    Same, Same,
)  # fmt: skip


def joined_layers(generator: random.Random, num_layers: int, width: int) -> list[nn.Module]:
    """Layers with parameters that depend on the generator alone."""
    torch.manual_seed(generator.randrange(2**32))
    layers: list[nn.Module] = []
    count = 1
    while len(layers) < num_layers - 1:
        kind = generator.choice(KINDS)
        if kind in (Skip, Twice, Counted):
            if count == 4:
                continue
            count += 1
        others = [layer for layer in layers if isinstance(layer, Dense)]
        if kind is Same:
            layers.append(Same(width, generator.choice(others)) if others else Dense(width))
        else:
            layers.append(kind(width))
        # A fresh result that no other tensor shares memory with.
        if (
            isinstance(layers[-1], Dense | Shift)
            and generator.random() < 0.35
            and len(layers) < num_layers - 1
        ):
            layers.append(InPlace(generator.random() < 0.5))
    for layer in layers[: generator.choice([0, 0, 0, num_layers // 2])]:
        layer.requires_grad_(False)
    return [layer.double() for layer in (*layers, Head(width))]


def shared_of(generator: random.Random, width: int) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    if generator.random() < 0.6:
        found["shift"] = torch.full((width,), generator.random(), dtype=torch.float64)
    if generator.random() < 0.6:
        found["times"] = generator.choice([1, 2])
    return found or None


def run(layers: list[nn.Module], value: Tree, shared: Mapping[str, Any] | None) -> Tree:
    """The layers one after the other."""
    for layer in layers:
        value = layer(value, **(shared or {})) if isinstance(layer, Asking) else layer(value)
    return value
