"""What a profile of a layer says: the tensors at its two ends, and one run of it as a sequence of storages
that appear and die. What a layer frees depends on what its neighbours hold, so sequences can be added up over
layers and numbers cannot.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..stage.trees import Nested, Tree, take_apart

# What crosses from one layer to the next: a tensor that stands twice in a tuple travels once, and integer
# tensors travel forward but no gradient comes back for them.


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by what its cost depends on. The first dimension is the micro-batch.

    ``layout`` names the dimensions from the outermost in memory to the innermost, None where that is their
    order: whether a layer copies its input (a `reshape` of a transposed one) depends on it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    layout: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The description of a (real, fake or meta) tensor."""
        layout = None
        if not tensor.is_contiguous():
            strides = tensor.stride()
            order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
            layout = order if order != tuple(range(tensor.dim())) else None
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, layout)

    def empty(self) -> Tensor:
        """A dense tensor like that, without a gradient."""
        layout = self.layout or tuple(range(len(self.shape)))
        return torch.empty_permuted(self.shape, layout, dtype=self.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Boundary:
    """The value that passes between two layers: a tensor, a tuple of tensors, or another pytree, of which
    ``nested`` is the structure with its constants. ``same_as[i]`` is the first position that holds the same
    tensor as position i (AmoebaNet's stem passes one twice); it travels and is kept once.
    """

    tensors: tuple[TensorSpec, ...]
    same_as: tuple[int, ...]
    is_tuple: bool
    nested: Nested | None = None

    @classmethod
    def of(cls, value: Tree) -> Boundary:
        """The boundary that a (real, fake or meta) value would cross."""
        tensors, nested = _apart(value)
        first: dict[int, int] = {}
        same_as = tuple(first.setdefault(id(tensor), index) for index, tensor in enumerate(tensors))
        is_tuple = nested is None and not isinstance(value, Tensor)
        return cls(tuple(map(TensorSpec.of, tensors)), same_as, is_tuple, nested)

    def build(self, tensors: Sequence[Tensor]) -> Tree:
        """Builds the value that crosses the boundary from these tensors, one for each position."""
        if self.nested is not None:
            return self.nested.build(tensors)
        return tuple(tensors) if self.is_tuple else tensors[0]

    @cached_property
    def distinct(self) -> tuple[int, ...]:
        """Positions of the tensors that really travel."""
        return tuple(index for index, first in enumerate(self.same_as) if index == first)

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.tensors[index].num_bytes for index in self.distinct)

    def join(self, other: Boundary) -> Boundary:
        """Both side by side, as a loss takes outputs and target."""
        same_as = tuple(len(self.tensors) + i for i in other.same_as)
        return Boundary(self.tensors + other.tensors, self.same_as + same_as, True)


def as_tuple(value: Tree) -> tuple[Tensor, ...]:
    """The tensors of a layer's value, by position. `ValueError` for what cannot pass between layers."""
    return _apart(value)[0]


def _apart(value: Tree) -> tuple[tuple[Tensor, ...], Nested | None]:
    if isinstance(value, Tensor):
        return (value,), None
    if type(value) is tuple and all(isinstance(each, Tensor) for each in value):
        return value, None
    try:
        return take_apart(value, "what a layer passed")
    except TypeError as error:
        raise ValueError(str(error)) from error


def resized(boundary: Boundary, microbatch_size: int) -> Boundary:
    """The same boundary for another micro-batch size."""
    tensors = tuple(replace(spec, shape=(microbatch_size, *spec.shape[1:])) for spec in boundary.tensors)
    return replace(boundary, tensors=tensors)


# Runs of a layer


@dataclass(frozen=True, eq=False)
class Trace:
    """Storages of one run of a layer and the order in which they appear and die.

    Events are ``+(s + 1)`` where storage s appears and ``-(s + 1)`` where it dies. The forward ends when the
    caller lets go of inputs and outputs; the backward begins with the gradients of the outputs and ends with
    those of the inputs alive.
    """

    sizes: tuple[int, ...]  # bytes of each storage
    inputs: tuple[int, ...]  # storage of each input position
    outputs: tuple[int, ...]  # storage of each output position: an input's where it is passed on
    kept: frozenset[int]  # what the graph still holds after the forward pass
    gradients: frozenset[int]  # storages that became parameter gradients
    output_gradients: tuple[int | None, ...]  # storage of each output's gradient; None: there is none
    input_gradients: tuple[int | None, ...]  # storage of each input's gradient: an output's if passed on
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    without_gradient: frozenset[int]  # input positions that no gradient reached though they take one
    _known: dict[tuple[Received | None, ...], tuple[Segment, ...]] = field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def forward_peak(self) -> int:
        """Most bytes that the forward pass adds to its inputs."""
        return rise(self.sizes, self.forward)[0]

    @cached_property
    def kept_inside(self) -> int:
        """Bytes the graph holds beyond the storages at the layer's two ends."""
        return sum(self.sizes[storage] for storage in self.kept.difference(self.inputs, self.outputs))

    @cached_property
    def kept_ends(self) -> tuple[int, ...]:
        """The storages at the layer's two ends that the graph holds, in the order of the ends."""
        return tuple(dict.fromkeys(s for s in self.inputs + self.outputs if s in self.kept))

    def segments(self, received: tuple[Received | None, ...]) -> tuple[Segment, ...]:
        """The backward pass, cut where storages are let go that the neighbours may hold too.

        ``received`` says which storages the gradients of the outputs really are; they are alive when it
        begins. Computed once for each.
        """
        if received in self._known:
            return self._known[received]
        ends = {*self.inputs, *self.outputs}
        given = {s: r for s, r in zip(self.output_gradients, received, strict=True) if s is not None}
        users = Counter(each.storage for each in given.values() if each is not None)
        segments: list[Segment] = []
        now, top = [0, 0, 0], [0, 0, 0]  # saved, gradients, other
        for event in self.backward:
            storage, sign = abs(event) - 1, 1 if event > 0 else -1
            if storage in ends:
                segments.append(Segment(tuple(top), tuple(now), storage))
                now, top = [0, 0, 0], [0, 0, 0]
                continue
            if storage in given:
                real = given[storage]
                if real is None or sign > 0:
                    continue
                users[real.storage] -= 1
                if users[real.storage] == 0 and not real.is_held:
                    now[2] -= real.num_bytes
                continue
            kind = 0 if storage in self.kept else 1 if storage in self.gradients else 2
            now[kind] += sign * self.sizes[storage]
            if sum(now) > sum(top):
                top = now.copy()
        segments.append(Segment(tuple(top), tuple(now), None))
        self._known[received] = tuple(segments)
        return self._known[received]


def rise(sizes: Sequence[int], events: Iterable[int]) -> tuple[int, int]:
    """Most bytes above those at the begin of some events, and bytes above them at the end."""
    live = peak = 0
    for event in events:
        live += sizes[event - 1] if event > 0 else -sizes[-event - 1]
        peak = max(peak, live)
    return peak, live


class Received(NamedTuple):
    """The gradient of an output as the layers after made it, maybe one storage for several outputs."""

    storage: int  # equal for outputs that got the same
    num_bytes: int
    is_held: bool  # the caller of autograd holds it until the end


class Segment(NamedTuple):
    """A part of a backward pass: changes in bytes from its begin on, of what the graph holds, of gradients of
    parameters, and of everything else.
    """

    peak: tuple[int, ...]  # to its fullest moment
    end: tuple[int, ...]  # to its end
    released: int | None  # the storage let go at its end


@dataclass(frozen=True, eq=False)
class SplitTrace:
    """The two halves of a layer's backward; where it is ``whole`` I does all of it.

    In I some of what the graph holds, and some gradients, do not die: they wait for W. Peaks of W are beyond
    what waits, and end with the gradients that it makes.
    """

    whole: bool
    inputs: Trace  # its `backward` is I
    waiting: frozenset[int] = frozenset()  # storages of that trace that live on until W
    first_peak: int = 0  # W that makes the gradients of parameters
    later_peak: int = 0  # W that adds to them
    made: int = 0  # bytes of the gradients that the first W makes


class BufferRole(Enum):
    """How a recomputation treats a buffer (stage.buffers)."""

    STATISTICS = "left to batch normalization"
    CHANGING = "changes in a forward, in place"
    REPLACED = "is replaced by another tensor in a forward"
    STILL = "does not change"


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """The bytes of one layer at one micro-batch size."""

    name: str
    inputs: Boundary
    outputs: Boundary
    unused: frozenset[int]  # positions of outputs for which no gradient comes back
    parameter_counts: tuple[int, ...]  # elements of each trainable parameter tensor
    parameter_sizes: tuple[int, ...]  # bytes of each parameter tensor, trained or not
    trained_sizes: tuple[int, ...]  # bytes of each parameter tensor that gets a gradient
    buffer_sizes: tuple[int, ...]  # with what a stage adds for batch normalization (stage.buffers)
    free: Trace
    first: Trace
    later: Trace
    halves: SplitTrace | None = None  # I and W, where they were asked for
    overwritten: frozenset[int] = frozenset()  # positions of inputs that the layer changes in place
    buffer_roles: tuple[BufferRole, ...] = ()  # of the buffers, which come first in `buffer_sizes`

    @cached_property
    def num_parameters(self) -> int:
        """Trainable elements."""
        return sum(self.parameter_counts)

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, trained or not."""
        return sum(self.parameter_sizes)

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers. One that a forward replaces by another tensor counts twice: the engine looks
        at the old one when all layers are through.
        """
        pairs = zip(self.buffer_roles, self.buffer_sizes, strict=False)
        return sum(self.buffer_sizes) + sum(size for role, size in pairs if role is BufferRole.REPLACED)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of parameters, once they are there."""
        return sum(self.first.sizes[storage] for storage in self.first.gradients)

    @cached_property
    def output_gradient_bytes(self) -> int:
        """Bytes of the gradients that come back for the outputs."""
        ends = self.outputs
        positions = [i for i in ends.distinct if ends.tensors[i].requires_grad and i not in self.unused]
        return sum(ends.tensors[i].num_bytes for i in positions)
