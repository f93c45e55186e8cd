"""One random stream per (seed, step, layer, micro-batch).

Random layers draw from the process's default generator, so their masks depend on everything that drew before
them: on K, on the order of the micro-batches, and on whether a forward is the first or a recomputation. The
usual remedy saves and restores generator states. Here the generator is instead seeded before each layer that
may draw, with a key made from the four counters. The same layer then sees the same stream for the same
micro-batch wherever and whenever it runs, nothing has to be saved for the recomputation, and the plain model
can be given the very same draws (`run_plain`).

The CPU generator uses the low 32 bits of a key, the CUDA generator all 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _hooks

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.stage.trees import Keywords, Tree

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
    return mix(_step_key(seed, step) ^ layer)


@lru_cache(maxsize=16)
def _step_key(seed: int, step: int) -> int:
    return mix(mix(seed & _MASK) ^ step)


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
    """Whether a layer or a loss as it is now may draw random numbers, in any mode and with any probability.

    False only for the losses of `torch.nn.functional`, and if it is built of modules of `torch.nn` alone,
    none of which can draw, and there are no hooks; the forward of any other class could call anything.
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
    """The default generators that a layer on `device` may draw from: the CPU's and, of an accelerator,
    its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.all = [torch.default_generator]
        if devices.is_accelerator(device):
            self.all.append(devices.generator(device))

    def seed(self, key: int) -> None:
        """Starts the stream `key` on every generator."""
        for generator in self.all:
            generator.manual_seed(key)

    def save(self) -> list[Tensor]:
        """The states of the generators, to be restored after the engine has used them."""
        return [generator.get_state() for generator in self.all]

    def restore(self, states: Iterable[Tensor]) -> None:
        """Gives the generators back as they were at `save`."""
        for generator, state in zip(self.all, states, strict=True):
            generator.set_state(state)

    def have_moved(self, states: Iterable[Tensor]) -> bool:
        """Whether something was drawn since `save`."""
        return any(not torch.equal(a, b) for a, b in zip(states, self.save(), strict=True))


def run_plain(
    layers: Iterable[nn.Module],
    inputs: Tree,
    *,
    seed: int,
    step: int,
    microbatch: int,
    device: torch.device | str = "cpu",
    shared: Mapping[str, Any] | None = None,
) -> Tree:
    """The plain model on one micro-batch with the draws a pipeline makes in its step number `step`.

    `step` counts the pipeline's training steps from 0; `shared` is what its steps take. The
    default generators are left as they were.
    """
    generators = Generators(torch.device(device))
    states = generators.save()
    try:
        value = inputs
        for index, layer in enumerate(layers):
            generators.seed(stream_key(seed, step, index, microbatch))
            value = layer(value, **Keywords.of(layer).select(shared or {}))
        return value
    finally:
        generators.restore(states)
