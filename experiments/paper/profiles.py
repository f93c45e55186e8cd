"""Layer profiles of the two model families of Table 1 at any size, for the price of one model.

Tracing a layer takes a tenth of a second, as a compiler does a second; a search wants a family at every
size, the appendix under every number format and number of micro-batches too. So one model of each family is
profiled, at lengths that primes tell apart. The bytes of a storage are a product of lengths: if the width of
the profiled model has a prime factor that nothing else in it has, and the micro-batch another, then every
number says by its factors how it grows with the width and with the micro-batch:

    width 16 x 61, micro-batch 43:    a storage of 4 x 61 x 43 x 1024 bytes is linear in both

It holds as far as a layer runs the same operations at every size; a micro-batch of one example often does
not. The depth changes how often equal layers are there.

What is put together is checked: each layer takes exactly what the one before it returns. The result is
that of profiling every layer at its size, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.models.paper import HALVES
from gpipe_bench.pipeline.memory.profile import ModelProfile, Profiler
from gpipe_bench.pipeline.memory.trace import Boundary, LayerProfile, Trace

T = TypeVar("T")

EXAMPLES = 43
"""Examples in a micro-batch of the profiled layers; a micro-batch of one is profiled by itself: a dimension
of length 1 has no layout, and batch normalization of a single value takes another path."""
WIDTH_PRIME, WIDTH = 61, 16 * 61
DEPTH = 12
"""Layers of the profiled AmoebaNet: four cells in each of three stacks."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How layers are profiled.

    Args:
        number_format: of the activations, "float32" or "bfloat16"
        autocast: bfloat16 by autocast, as this engine has it, and not throughout
        with_shapes: so that bytes can be counted in another format
    """

    number_format: str = "float32"
    autocast: bool = True
    with_shapes: bool = False

    def profiler(self) -> Profiler:
        """A new profiler for it."""
        half = torch.bfloat16 if self.number_format == "bfloat16" else None
        return Profiler(
            autocast=half if self.autocast else None,
            number_format=None if self.autocast else half,
            with_shapes=self.with_shapes,
        )

    def boundary(self, boundary: Boundary) -> Boundary:
        """The model's input in the number format."""
        if self.autocast or self.number_format == "float32":
            return boundary
        tensors = tuple(
            replace(spec, dtype=torch.bfloat16) if spec.dtype.is_floating_point else spec
            for spec in boundary.tensors
        )
        return replace(boundary, tensors=tensors)


def meta_model(half: str, **options: Any) -> nn.Sequential:
    """The model of one half of Table 1, some options changed, without memory for its parameters."""
    with torch.device("meta"):
        return MODELS[HALVES[half].model](**{**HALVES[half].options, **options})


def profiled(reading: Reading, half: str, microbatch_size: int, **options: Any) -> ModelProfile:
    """Every distinct layer of a half's model at its own size, nothing taken from another."""
    return profiled_model(reading, HALVES[half].model, microbatch_size, **{**HALVES[half].options, **options})


@cache
def profiled_model(reading: Reading, name: str, microbatch_size: int, **options: Any) -> ModelProfile:
    """The same of any model of the zoo with these options."""
    with torch.device("meta"):
        model = MODELS[name](**options)
    inputs, target = example_batch(name, microbatch_size, device="meta", **options)
    return reading.profiler().model(
        model, loss_fn(name, **options), reading.boundary(Boundary.of(inputs)), Boundary.of(target)
    )


def transformer(
    reading: Reading,
    num_layers: int,
    microbatch_size: int,
    attention: str = "explicit",
) -> ModelProfile:
    """Transformer-L of any depth with explicit or fused attention."""
    (embedding, layer, softmax), loss = _transformer(reading, microbatch_size, attention)
    return ModelProfile((embedding, *[layer] * num_layers, softmax), loss)


@cache
def _transformer(reading: Reading, microbatch_size: int, attention: str) -> ModelProfile:
    """Embedding, one layer, softmax and the loss."""
    examples = 1 if microbatch_size == 1 else EXAMPLES
    found = profiled(reading, "transformer", examples, num_layers=1, attention=attention)
    if examples == 1:
        return found
    return resized(found, microbatch_size)


def amoebanet(
    reading: Reading,
    num_layers: int,
    num_filters: int,
    microbatch_size: int,
    num_classes: int = 1001,
    *,
    auxiliary_head: bool = True,
) -> ModelProfile:
    """AmoebaNet-D (L, D). Where L or D lie outside of the family, and only there, every layer is profiled at
    its size.
    """
    if not _is_of_the_family(num_layers, num_filters):
        options = {"num_classes": num_classes, "aux_head": auxiliary_head}
        return profiled(
            reading, "amoebanet", microbatch_size, num_layers=num_layers, num_filters=num_filters, **options
        )
    found = _amoebanet(reading, num_filters, microbatch_size, num_classes, auxiliary_head)
    return ModelProfile(of_depth(found.layers, num_layers), found.loss)


def _is_of_the_family(num_layers: int, num_filters: int) -> bool:
    """Stacks with a third cell, widths with whole numbers of channels everywhere; at a width of 128 the stem
    needs no projection.
    """
    return num_layers % 3 == 0 and num_layers >= 9 and num_filters % 16 == 0 and num_filters != 128


def of_depth(layers: Sequence[T], num_layers: int) -> tuple[T, ...]:
    """The sequence of an AmoebaNet of any depth, from that of `DEPTH`: the third of the four cells of each
    stack is there as often as the others leave room. Three layers come before the first stack and one after
    the last; the auxiliary head, where there is one, follows the second.
    """
    thirds = (5, 10, len(layers) - 3)
    times = num_layers // 3 - 3
    return tuple(layer for place, layer in enumerate(layers) for _ in range(times if place in thirds else 1))


@cache
def _amoebanet(
    reading: Reading, num_filters: int, examples: int, num_classes: int, auxiliary_head: bool
) -> ModelProfile:
    """AmoebaNet-D (DEPTH, num_filters)."""
    sampled = 1 if examples == 1 else EXAMPLES
    options = {"num_layers": DEPTH, "num_classes": num_classes, "aux_head": auxiliary_head}
    found = profiled(reading, "amoebanet", sampled, num_filters=WIDTH, **options)
    found = resized(found, examples, num_filters)
    for before, after in pairwise(found.layers):
        if before.outputs != after.inputs:
            raise RuntimeError(f"{after.name} does not take what {before.name} returns: {before.outputs}")
    return found


# Any size from one -----------------------------------------------------------------------------------------


def resized(profile: ModelProfile, examples: int, width: int = WIDTH) -> ModelProfile:
    """The profile with so many examples in a micro-batch, where it was made with `EXAMPLES`, and with that
    width, where it was made with `WIDTH`. Layers that are one stay one.
    """
    at = cache(partial(_resized, partial(_number, examples, width)))
    return ModelProfile(tuple(map(at, profile.layers)), at(profile.loss))


@cache
def _number(examples: int, width: int, number: int) -> int:
    """A length, or a product of lengths. Raises ValueError where it is not whole at the wanted size."""
    over, under, rest = number, 1, number
    for prime, sampled, wanted in ((EXAMPLES, EXAMPLES, examples), (WIDTH_PRIME, WIDTH, width)):
        while rest and rest % prime == 0:
            rest //= prime
            over, under = over * wanted, under * sampled
    value, left = divmod(over, under)
    if left:
        raise ValueError(f"{number} is no whole number at the size asked for: {over} / {under}")
    return value


def _resized(number: Callable[[int], int], profile: LayerProfile) -> LayerProfile:
    def every(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(number, numbers))

    def boundary(given: Boundary) -> Boundary:
        return replace(given, tensors=tuple(replace(t, shape=every(t.shape)) for t in given.tensors))

    def trace(given: Trace) -> Trace:
        shapes = tuple((*every(shape[:-1]), shape[-1]) for shape in given.shapes)
        return replace(given, sizes=every(given.sizes), shapes=shapes)

    return replace(
        profile,
        inputs=boundary(profile.inputs),
        outputs=boundary(profile.outputs),
        parameter_counts=every(profile.parameter_counts),
        parameter_sizes=every(profile.parameter_sizes),
        trained_sizes=every(profile.trained_sizes),
        buffer_sizes=every(profile.buffer_sizes),
        free=trace(profile.free),
        first=trace(profile.first),
        later=trace(profile.later),
        halves=None,  # knows its storages by other sizes
    )
