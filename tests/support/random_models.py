"""Layers of which random models are made: each takes and gives a tensor or a tuple of tensors, floating-point
ones and sometimes integers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline.stage.trees import Tree


def parts(value: Tree) -> tuple[Tensor, ...]:
    if isinstance(value, dict):  # what `joined_cases.Packed` makes
        return (value["x"] * value["scale"], *value["others"])
    return value if isinstance(value, tuple) else (value,)


def joined(values: tuple[Tensor, ...]) -> Tree:
    return values if len(values) > 1 else values[0]


def flat(tensor: Tensor, width: int) -> Tensor:
    """As rows of `width` numbers: of an example, or of each place of its sequence."""
    shape = tensor.shape[:-1] if tensor.shape[-1] == width else tensor.shape[:1]
    return tensor.reshape(*shape, width)


class Layer(nn.Module):
    """Works on the first tensor and passes the others on as they are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, value: Tree) -> Tree:
        first, *others = parts(value)
        return joined((self.change(first), *others))

    def change(self, x: Tensor) -> Tensor:
        return x


class Dense(Layer):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        # A low rank keeps wide layers cheap.
        self.down, self.up = nn.Linear(width, 4), nn.Linear(4, width)

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(self.down(flat(x, self.width)))) + 0.5 * flat(x, self.width)


class Shift(Layer):
    """Adds a parameter through a view: with one example a gradient of its shape."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.shift = nn.Parameter(torch.randn(width))

    def change(self, x: Tensor) -> Tensor:
        y = flat(x, self.width)
        return (y + self.shift[None]).view(y.shape)


class Skip(Dense):
    """x, ... -> f(x), x, ..."""

    def forward(self, value: Tree) -> Tree:
        first, *others = parts(value)
        return (self.change(first), first, *others)


class Twice(Layer):
    """x, ... -> x, x, ..."""

    def forward(self, value: Tree) -> Tree:
        first, *others = parts(value)
        return (first, first, *others)


class Turn(Layer):
    """x, y, ... -> y, ..., x"""

    def forward(self, value: Tree) -> Tree:
        first, *others = parts(value)
        return joined((*others, first)) if others and others[0].is_floating_point() else value


class Join(Layer):
    """x, y, ... -> x + y, ..."""

    def forward(self, value: Tree) -> Tree:
        tensors = parts(value)
        if len(tensors) < 2 or not tensors[1].is_floating_point():
            return value
        return joined((flat(tensors[0], self.width) + flat(tensors[1], self.width), *tensors[2:]))


class Counted(Layer):
    """x, ... -> x, ..., integers"""

    def forward(self, value: Tree) -> Tree:
        tensors = parts(value)
        return (*tensors, (tensors[0] > 0).flatten(1).sum(1))


class Head(nn.Module):
    """Everything that arrives, in one number per example."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, 1)

    def forward(self, value: Tree) -> Tensor:
        total = 0.0
        for i, tensor in enumerate(parts(value)):
            if tensor.is_floating_point():
                of_places = self.linear(flat(tensor, self.width)).flatten(1)
                total = total + of_places.mean(1, keepdim=True) * (1 + i)
            else:
                total = total + 0.1 * tensor.double()[:, None]
        return total
