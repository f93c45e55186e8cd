"""Layers that do more than map their input to their output."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Dense(nn.Module):
    """A linear layer whose subclasses do something beside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Does(Dense):
    """Calls `what(layer, x, y)`, which gives what comes out, or nothing where that is y; `set` are attributes
    that the layer begins with.
    """

    def __init__(self, what: Callable[[Does, Tensor, Tensor], Tensor | None], **attributes: object) -> None:
        super().__init__()
        self.what = what
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        found = self.what(self, x, y)
        return y if found is None else found


# State of their own


def counts(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    layer.n += 1
    return y * (1 + 0.1 * layer.n)


def counts_unread(layer: Does, x: Tensor, y: Tensor) -> None:
    layer.n += 1


def logs(layer: Does, x: Tensor, y: Tensor) -> None:
    layer.log.append(1.0)


def reads_its_log(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    layer.log.append(y.detach().mean())
    return y + layer.log[-min(2, len(layer.log))]


def remembers(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    before = layer.state.get("mean", 0.0)
    layer.state["mean"] = 0.5 * before + 0.5 * x.detach().mean(0)
    return y * (1 + before)


def remembers_in_place(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    before = layer.state["mean"].clone()
    layer.state["mean"].lerp_(x.detach().mean(0), 0.5)
    return y * (1 + before)


def goes_by_the_first(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    """By the first input that it ever saw."""
    if layer.scale is None:
        layer.scale = 1 + x.detach().mean(0)
    return y * layer.scale


def makes_a_table(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    """In its first call: harmless."""
    if layer.table is None:
        layer.table = torch.linspace(0.5, 1.5, WIDTH, dtype=x.dtype)
    return y * layer.table


class Holder:
    n = 0


def counts_in_an_object(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    layer.holder.n += 1
    return y * (1 + 0.1 * layer.holder.n)


class Recurrent(nn.Module):
    """Backpropagation through time, cut off at the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.h = nn.RNN(WIDTH, WIDTH), None

    def forward(self, x: Tensor) -> Tensor:
        output, h = self.rnn(x[None], self.h)
        self.h = h.detach()
        return output[0]


# Buffers


def moves_its_buffer(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    layer.mean = 0.7 * layer.mean + 0.3 * x.detach().mean(0)
    return y * (1 + layer.mean)


def moves_it_by_data(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    layer.mean.data.lerp_(x.detach().mean(0), 0.3)
    return y * (1 + layer.mean)


def counts_in_integers(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    layer.calls += 1
    return y * layer.calls


# Parameters, hooks and gradients


class ChangesItsWeight(Dense):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.data.mul_(0.9)
        return super().forward(x)


class Clamps(Dense):
    """Changes nothing after the first time."""

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-0.3, 0.3)
        return super().forward(x)


def probes(layer: Does, x: Tensor, y: Tensor) -> None:
    """Trains on something else inside of its forward."""
    with torch.enable_grad():
        layer.linear(torch.ones(1, WIDTH, dtype=x.dtype)).sum().backward()


def adds_a_slope(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    """A gradient penalty's way: asks autograd for something, and changes nothing."""
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(layer.linear(z).square().sum(), z)
    return y + 0.1 * slope.detach()


def hooks_its_output(layer: Does, x: Tensor, y: Tensor) -> None:
    y.register_hook(lambda gradient: 2 * gradient)


def hooks_where_it_can(layer: Does, x: Tensor, y: Tensor) -> None:
    if y.requires_grad:
        hooks_its_output(layer, x, y)


def asks_for_gradients(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    return y * (1.1 if torch.is_grad_enabled() else 1.0)


def hooked() -> nn.Module:
    """A hook counts in a closure, and scales by that."""
    calls = [0]

    def scale(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        calls[0] += 1
        return output * (1 + 0.1 * calls[0])

    layer = Dense()
    layer.register_forward_hook(scale)
    return layer


def hook_in_backward() -> nn.Module:
    layer = Dense()
    layer.linear.weight.register_hook(lambda gradient: 0.5 * gradient)
    return layer


class Checkpointed(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


# Random numbers


def noise_of_python(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    return y * (1 + 0.5 * random.random())


def noise_of_numpy(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    return y * (1 + 0.5 * np.random.rand())


def noise_of_its_own(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    return y * (1 + torch.rand((), generator=layer.generator, dtype=x.dtype))


# Ways past the layers


class LeavesAux(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.aux: Tensor = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = y.square().mean()
        return y


class ReadsAux(Dense):
    """What another layer left; in a list, so that it is no module of this one."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.other[0].aux


class HiddenTie(nn.Module):
    """Uses the weight of another layer without having it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = [other]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.other[0].linear.weight)


class Special(Tensor):
    pass


class MakesSpecial(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).as_subclass(Special)


class AsksForSpecial(Dense):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.as_subclass(Tensor))
        return 2 * y if isinstance(x, Special) else y


def sets_scale(layer: Does, x: Tensor, y: Tensor) -> None:
    y.scale = 2.0


# Paths that data decide


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Dense(), Dense()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if float(x.detach()[0, 0]) > 0 else self.b(x)


def needs_none_for_some(layer: Does, x: Tensor, y: Tensor) -> Tensor:
    """A gradient for some micro-batches, and not for the first one."""
    return y if float(x.detach()[0, 0]) > 0 else y.detach()


class OverwritesIfLarge(Dense):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach()[0, 0]) > 0:
            x = x.mul_(0.5) if not (x.is_leaf and x.requires_grad) else x * 0.5
        return super().forward(x)


class OtherKeys(Dense):
    """A dict whose keys data decide."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = super().forward(x)
        return {"y": y} if float(x.detach()[0, 0]) > 0 else {"y": y, "z": 2 * y}
