"""Profiles of a whole family from one, whose lengths are told apart by prime numbers.

The bytes of a storage are a product of lengths. If the width of the profiled model has a prime factor that
nothing else in it has, and the micro-batch another, then every number says by its factors how it grows with
the width and with the micro-batch, and the profile of any other size follows, to the byte:

    width 16 x 61, micro-batch 17:    a storage of 4 x 61 x 17 x 1024 bytes is linear in both

It works on shapes, so the padding of a tiled memory can be added afterwards. It holds as far as a layer runs
the same operations at every size; a micro-batch of one example often does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import permutations
from math import prod

from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.trace import LayerProfile, Trace


@dataclass(frozen=True)
class Label:
    """A length of a profiled model and what it is to become.

    Args:
        prime: a factor that the length has once and no other number of the model has
        sampled: the length in the profile, or a part of it
        wanted: what takes its place
    """

    prime: int
    sampled: int
    wanted: int


@dataclass(frozen=True)
class Relabel:
    """Turns the numbers of a profile into those of another size of the same model."""

    labels: tuple[Label, ...]
    _known: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    def number(self, number: int) -> int:
        """A length, or a product of lengths. Raises ValueError where it is not whole at the wanted size."""
        if number not in self._known:
            over, under, rest = number, 1, number
            for label in self.labels:
                while rest and rest % label.prime == 0:
                    rest //= label.prime
                    over, under = over * label.wanted, under * label.sampled
            value, left = divmod(over, under)
            if left:
                raise ValueError(f"{number} is no whole number at the size asked for: {over} / {under}")
            self._known[number] = value
        return self._known[number]

    def boundary(self, boundary: Boundary) -> Boundary:
        """The boundary at the wanted size."""
        return _with_shapes(boundary, [tuple(map(self.number, spec.shape)) for spec in boundary.tensors])

    def profile(self, profile: LayerProfile) -> LayerProfile:
        """The profile at the wanted size."""
        return replace(
            profile,
            inputs=self.boundary(profile.inputs),
            outputs=self.boundary(profile.outputs),
            parameter_counts=self._all(profile.parameter_counts),
            parameter_sizes=self._all(profile.parameter_sizes),
            trained_sizes=self._all(profile.trained_sizes),
            buffer_sizes=self._all(profile.buffer_sizes),
            free=self._trace(profile.free),
            first=self._trace(profile.first),
            later=self._trace(profile.later),
            halves=None,  # knows its storages by other sizes
        )

    def _all(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self.number, numbers))

    def _trace(self, trace: Trace) -> Trace:
        shapes = tuple((*map(self.number, shape[:-1]), shape[-1]) for shape in trace.shapes)
        return replace(trace, sizes=self._all(trace.sizes), shapes=shapes)


def tiled(profile: LayerProfile) -> LayerProfile:
    """The profile where memory holds arrays in tiles of 8 x 128 elements: storages and boundaries are padded.

    Parameters and buffers are not. Needs a profile with shapes.
    """
    return replace(
        profile,
        inputs=_padded_ends(profile.inputs),
        outputs=_padded_ends(profile.outputs),
        free=_padded_trace(profile.free),
        first=_padded_trace(profile.first),
        later=_padded_trace(profile.later),
        halves=None,
    )


def _padded_ends(boundary: Boundary) -> Boundary:
    return _with_shapes(boundary, [padded(spec.shape) for spec in boundary.tensors])


def _padded_trace(trace: Trace) -> Trace:
    sizes = []
    for size, (*shape, itemsize) in zip(trace.sizes, trace.shapes, strict=True):
        dense = prod(shape) * itemsize
        # A storage of another size than the tensor for which it was made is taken as a row.
        lengths = tuple(shape) if size == dense else (size // itemsize,)
        sizes.append(prod(padded(lengths)) * itemsize if size else 0)
    return replace(trace, sizes=tuple(sizes))


@cache
def padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in tiles of 8 x 128: one dimension becomes a multiple of 8 and another of 128, whichever two
    cost least; a row becomes a multiple of 128, a number stays.
    """
    if len(shape) < 2:
        return tuple(_up(length, 128) for length in shape)
    choices = []
    for low, high in permutations(range(len(shape)), 2):
        lengths = list(shape)
        lengths[low], lengths[high] = _up(shape[low], 8), _up(shape[high], 128)
        choices.append(tuple(lengths))
    return min(choices, key=prod)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _with_shapes(boundary: Boundary, shapes: Sequence[tuple[int, ...]]) -> Boundary:
    tensors = tuple(replace(spec, shape=shape) for spec, shape in zip(boundary.tensors, shapes, strict=True))
    return replace(boundary, tensors=tensors)
