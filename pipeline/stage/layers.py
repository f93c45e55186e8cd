"""Runs the layers of a stage so that their results depend neither on the cut nor on recomputation.

A layer draws random numbers, changes the averages of batch normalization and meets autocast's cache of casts
as a side effect of being called, and a pipeline calls it more often and in another order than the plain model
does. The setup around such calls, forward or backward, is written once, here.

There is one random stream per (seed, step, layer, micro-batch). Random layers draw from the process's default
generator, so their masks would depend on everything that drew before them. So the generator is seeded before
each layer that may draw, with a key made from the four counters. The same layer then sees the same stream for
the same micro-batch wherever and whenever it runs, nothing has to be saved for the recomputation, and the
plain model can be given the very same draws (`run_plain`). The CPU generator uses the low 32 bits of a key,
the CUDA generator all 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _hooks

from .. import devices
from ..devices import Mark, Transfers
from .buffers import Statistics
from .compiled import Compilation, compile_layers, without_graph
from .trees import Portals, Structure, Tree, flatten, unflatten

Result = TypeVar("Result")
Batch = TypeVar("Batch", bound=Tree | None)  # None: there is no target
LossFn = Callable[..., Tensor]  # (output, target) -> mean loss over the examples of a micro-batch


class LayerRunner:
    """Consecutive layers of the model, and the loss behind the last of them, on one device.

    `seed`, `first_layer` (the index of `layers[0]` in the whole model) and `first_microbatch` (the number of
    micro-batch 0 among those of all replicas) key the random streams. `statistics`: batch-norm averages. With
    a `compilation` the layers are compiled (`compiled`). `portals` are those of each layer.
    """

    def __init__(
        self,
        layers: tuple[nn.Module, ...],
        first_layer: int,
        *,
        device: torch.device,
        seed: int,
        statistics: Statistics,
        compilation: Compilation | None = None,
        portals: Sequence[Portals] = (),
        first_microbatch: int = 0,
    ) -> None:
        self.layers, self.first_layer, self._first_microbatch = layers, first_layer, first_microbatch
        self.device, self.seed, self.statistics = device, seed, statistics
        self._normalizes = bool(statistics.meters)
        self._generators = Generators(device)
        self._is_compiled = compilation is not None
        self._layers: list[Callable[..., Any]] = [*layers]  # as they are called
        if compilation is not None:
            self._layers = [*compile_layers(layers, first_layer, compilation)]
        if portals:
            self._layers = [each.around(layer) for each, layer in zip(portals, self._layers, strict=True)]
        # Which inputs will need a gradient, for compiled layers; None: there is nothing to be recomputed.
        self.entering: tuple[bool, ...] | None = None
        # Each layer, and its stream's key (None: draws nothing).
        self._calls: Sequence[tuple[Callable[..., Any], int | None]] = ()
        self._loss_key: int | None = None  # None: draws nothing
        self._targets: Sequence[Tree | None] | Arriving = ()
        self._loss_fn: LossFn | None = None
        self._autocast = False

    def begin(self, step: int, targets: Sequence[Tree | None] | Arriving, loss_fn: LossFn | None) -> None:
        """Prepares step number `step`, which keys the random streams, under the current autocast."""
        self._targets, self._loss_fn = targets, loss_fn
        place, found = self.first_layer, []
        for layer, call in zip(self.layers, self._layers, strict=True):
            # Each step, since hooks may change.
            found.append((call, layer_key(self.seed, step, place) if may_draw(layer) else None))
            place += 1
        self._calls = found
        draws = targets != () and loss_fn is not None and may_draw(loss_fn)
        self._loss_key = layer_key(self.seed, step, place) if draws else None
        self._autocast = torch.is_autocast_enabled(self.device.type) or torch.is_autocast_enabled("cpu")

    def release(self) -> None:
        """Drops the user's targets and loss function."""
        self._targets, self._loss_fn = (), None

    def run(self, m: int, value: Tree, *, recording: bool) -> Tree:
        """Runs the layers in order, each with its own random stream, and restores the user's generators
        afterwards.
        """
        if self._is_compiled:
            value = self._as_in_a_graph(value)
        generators = self._generators.all
        states: list[Tensor] = []  # of the generators, as the user left them
        forget_casts = self._autocast and not torch.is_grad_enabled()
        if forget_casts:  # autocast caches weights cast without a graph, and a graph must not meet them
            torch.clear_autocast_cache()
        if self._normalizes:
            self.statistics.redirect(recording=recording)
        try:
            for layer, key in self._calls:
                if key is not None:
                    if not states:
                        states = [generator.get_state() for generator in generators]
                    key = mix(key ^ (self._first_microbatch + m))
                    for generator in generators:
                        generator.manual_seed(key)
                value = layer(value)
        finally:
            for generator, state in zip(generators, states, strict=False):
                generator.set_state(state)
            if self._normalizes:
                self.statistics.release()
            if forget_casts:
                torch.clear_autocast_cache()
        if self._is_compiled and self.entering is None:
            value = without_graph(value)
        return value

    def _as_in_a_graph(self, value: Tree) -> Tree:
        """The inputs, marked as in the recomputation, so that both run the same compiled programs."""
        needs_grad = self.entering or ()
        if torch.is_grad_enabled() or not any(needs_grad):
            return value
        tensors, structure = flatten(value)
        pairs = zip(tensors, needs_grad, strict=True)
        return unflatten(
            tuple([t.detach().requires_grad_() if needed else t for t, needed in pairs]), structure
        )

    def loss(self, m: int, output: Tree) -> Tensor:
        """The mean loss of the micro-batch: one more layer, with a random stream of its own."""
        assert self._loss_fn is not None
        target = self._targets[m]
        if self._loss_key is None:
            loss = self._loss_fn(output, target)
        else:
            states = self._generators.save()
            try:
                self._generators.seed(mix(self._loss_key ^ (self._first_microbatch + m)))
                loss = self._loss_fn(output, target)
            finally:
                self._generators.restore(states)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, Tensor)
            got = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
            raise ValueError(
                f"loss_fn returned {got}; it must return the mean over the examples, a single number"
            )
        return loss

    def in_backward(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Returns the result of `call` run under the settings of a backward."""
        if self._normalizes:  # a layer may checkpoint parts of itself, which then run once more in here
            self.statistics.redirect(recording=False)
        try:
            if not self._autocast:
                return call(*arguments)
            # As after a plain forward: the context that chose the precisions is over when the backward
            # begins.
            with torch.autocast(self.device.type, enabled=False), torch.autocast("cpu", enabled=False):
                return call(*arguments)
        finally:
            if self._normalizes:
                self.statistics.release()


class Arriving:
    """The mini-batch or its targets on their way to `device`; taking a micro-batch makes the device wait.

    All are sent when the step begins, one after another beside what the device computes, and each is waited
    for by the device where it is first used. With `once`, a taken micro-batch is forgotten here.
    """

    def __init__(
        self, trees: Iterable[Tree], device: torch.device, transfers: Transfers, what: str, *, once: bool
    ) -> None:
        self._device, self._transfers, self._once = device, transfers, once
        self._parts: dict[int, tuple[tuple[Tensor, ...], tuple[Mark, ...], Structure]] = {}
        for microbatch, tree in enumerate(trees):
            tensors, structure = flatten(tree, what)
            self._parts[microbatch] = (*transfers.send(tensors, device), structure)

    def __getitem__(self, microbatch: int) -> Tree:
        tensors, marks, structure = self._parts[microbatch]
        if self._once:
            del self._parts[microbatch]
        self._transfers.receive(tensors, marks, self._device)
        return unflatten(tensors, structure)


def deliver(
    trees: Sequence[Batch], device: torch.device, transfers: Transfers, what: str, *, once: bool = False
) -> Sequence[Batch] | Arriving:
    """The micro-batches, which are parts of one mini-batch, on `device`: unchanged if already there."""
    if trees[0] is None or all(tensor.device == device for tensor in flatten(trees[0], what)[0]):
        return trees
    return Arriving(trees, device, transfers, what, once=once)


_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """A bijection of 64-bit integers that spreads every input bit over all output bits (the SplitMix64
    finalizer).
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def layer_key(seed: int, step: int, layer: int) -> int:
    """The part of a stream's key that all micro-batches share."""
    return mix(mix(mix(seed & _MASK) ^ step) ^ layer)


def stream_key(seed: int, step: int, layer: int, microbatch: int) -> int:
    """The 64-bit key of one stream."""
    return mix(layer_key(seed, step, layer) ^ microbatch)


# torch's own modules that can draw.
_RANDOM_KINDS = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.RNNBase,
)


def may_draw(layer: Callable[..., Any]) -> bool:
    """Whether a layer or a loss as it is now may draw random numbers. False only for the losses of
    `torch.nn.functional`, and for modules made of `torch.nn` classes that cannot draw and have no hooks.
    """
    if not isinstance(layer, nn.Module):
        name = getattr(layer, "__name__", "")
        is_loss = name.endswith(("_loss", "cross_entropy"))
        return not (is_loss and layer is getattr(nn.functional, name, None))
    if _hooks._global_forward_hooks or _hooks._global_forward_pre_hooks:
        return True
    todo: list[nn.Module] = [layer]
    while todo:
        module = todo.pop()
        kind: Any = type(module)
        if _kind_may_draw(kind) or module._forward_hooks or module._forward_pre_hooks:
            return True
        if "forward" in module.__dict__:
            return True
        todo += [child for child in module._modules.values() if child is not None]
    return False


@lru_cache(maxsize=256)
def _kind_may_draw(kind: Any) -> bool:
    return issubclass(kind, _RANDOM_KINDS) or not kind.__module__.startswith("torch.nn.modules.")


class Generators:
    """The default generators that a layer on `device` may draw from: the CPU's and an accelerator's own."""

    def __init__(self, device: torch.device) -> None:
        self.all = [torch.default_generator]
        if devices.is_accelerator(device):
            self.all.append(devices.generator(device))

    def seed(self, key: int) -> None:
        """Starts the stream `key` on every generator."""
        for generator in self.all:
            generator.manual_seed(key)

    def save(self) -> list[Tensor]:
        """The states of the generators, for `restore`."""
        return [generator.get_state() for generator in self.all]

    def restore(self, states: Iterable[Tensor]) -> None:
        """Restores the states of `save`."""
        for generator, state in zip(self.all, states, strict=True):
            generator.set_state(state)


def run_plain(
    layers: Iterable[nn.Module],
    inputs: Tree,
    *,
    seed: int,
    step: int,
    microbatch: int,
    device: torch.device | str = "cpu",
) -> Tree:
    """The plain model on one micro-batch with the draws a pipeline makes in training step number `step`, from
    0. The default generators are left as they were.
    """
    generators = Generators(torch.device(device))
    states = generators.save()
    try:
        for index, layer in enumerate(layers):
            generators.seed(stream_key(seed, step, index, microbatch))
            inputs = layer(inputs)
        return inputs
    finally:
        generators.restore(states)
