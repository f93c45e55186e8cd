"""Random layers for what was made apart from each other: pytrees whose constants change, arguments that
layers share, weights with several places, layers that change their input in place, that drop and that choose
their way by the data; and what a user may do to such layers between two steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from random_models import Counted, Dense, Head, Join, Layer, Shift, Skip, Turn, Twice, flat, joined, parts
from torch import Tensor, nn

from gpipe_bench.pipeline.stage.trees import Tree


class Packed(Layer):
    """x, ... -> a dict, whose numbers and keys depend on x."""

    def forward(self, value: Tree) -> Tree:
        first, *others = parts(value)
        positive = bool(first.detach().sum() > 0)
        extra = {"nothing": None} if positive else {}
        return {"x": first, "scale": 2 if positive else 0.5, "others": others, "name": "packed", **extra}


class Same(Dense):
    """Has the weight of another layer."""

    def __init__(self, width: int, other: Dense) -> None:
        super().__init__(width)
        self.up.weight = other.up.weight


class InPlace(nn.Module):
    """Changes in place what the layer before has just made."""

    def __init__(self, clamps: bool) -> None:
        super().__init__()
        self.clamps, self.active = clamps, True

    def forward(self, value: Tree) -> Tree:
        if not self.active:
            return value
        first, *others = value if isinstance(value, tuple) else (value,)
        return joined((first.relu_() if self.clamps else first.mul_(0.9).add_(0.01), *others))


class Normed(Dense):
    """Ends with a norm, whose gradients I computes."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width)

    def change(self, x: Tensor) -> Tensor:
        return self.norm(super().change(x) + flat(x, self.width))


class Choosing(Dense):
    """Goes one of two ways, by the data."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.other = Dense(width)

    def change(self, x: Tensor) -> Tensor:
        return self.other.change(x) if float(x.detach().sum()) > 0 else super().change(x)


class Dropping(Dense):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.drop = nn.Dropout(0.3)

    def change(self, x: Tensor) -> Tensor:
        return self.drop(super().change(x))


def of_torch(generator: random.Random, width: int) -> nn.Module:
    """A layer of torch's alone, which may begin to draw."""
    drop = nn.Dropout(generator.choice([0.0, 0.3]))
    return generator.choice([drop, nn.Sequential(nn.Linear(width, width), drop)])


KINDS = (
    Dense, Dense, Choosing, Dropping, Normed, Shift, Skip, Twice, Turn, Join, Counted, Packed, Packed, Same,
    Same,
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
        of_one_tensor = count == 1 and not any(isinstance(layer, Packed) for layer in layers)
        if of_one_tensor and generator.random() < 0.2:
            layers.append(of_torch(generator, width))
        elif kind is Same:
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


Change = Callable[[Sequence[nn.Module]], None]


def change_of(generator: random.Random, layers: Sequence[nn.Module]) -> tuple[Change, bool]:
    """Something that is done to the layers, or to equal ones, between two steps; and whether a pipeline over
    processes has to be told, by `refresh`.
    """
    index = generator.randrange(len(layers) - 1)  # the last one is trained in any case
    switch, number = generator.random() < 0.5, generator.choice([0.0, 0.1, 0.6])

    def probability(found: Sequence[nn.Module]) -> None:
        for module in found[index].modules():
            if isinstance(module, nn.Dropout):
                module.p = number

    def trained(found: Sequence[nn.Module]) -> None:
        found[index].requires_grad_(switch)

    def mode(found: Sequence[nn.Module]) -> None:
        found[index].train(switch)

    def in_place(found: Sequence[nn.Module]) -> None:
        for each in found:
            if isinstance(each, InPlace):
                each.active = switch

    def values(found: Sequence[nn.Module]) -> None:
        with torch.no_grad():
            for parameter in found[index].parameters():
                parameter.mul_(0.9)

    def hook(found: Sequence[nn.Module]) -> None:
        for module in _linear(found[index]):
            handle = module.__dict__.pop("hooked", None)
            if handle is None:
                module.__dict__["hooked"] = module.register_forward_hook(_noise if switch else _less)
            else:
                handle.remove()

    def hook_of_a_gradient(found: Sequence[nn.Module]) -> None:
        for parameter in found[index].parameters():
            if parameter.requires_grad:
                parameter.register_hook(_halved)

    def replaced(found: Sequence[nn.Module]) -> None:
        for module in _linear(found[index]):
            module.bias = nn.Parameter(module.bias.detach() + 0.1, module.bias.requires_grad)

    ways: list[tuple[Change, bool]] = [
        (mode, False), (values, False), (in_place, True), (trained, True), (hook, False),
        (hook_of_a_gradient, False), (replaced, False), (probability, False), (probability, False),
    ]  # fmt: skip
    return generator.choice(ways)


def _linear(layer: nn.Module) -> list[nn.Linear]:
    return [module for module in layer.modules() if isinstance(module, nn.Linear)][:1]


def _less(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output * 0.8


def _noise(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output + torch.rand_like(output) if module.training else output


def _halved(gradient: Tensor) -> Tensor:
    return gradient * 0.5
