"""A layer's profile: its inputs and outputs, and each run as a sequence of storages that appear and die. A
stage's memory is found by replaying its layers' sequences: a layer's peak depends on what its neighbours
hold.
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

# Boundaries: what passes from one layer to the next. A tensor that stands twice in a tuple travels once. No
# gradient comes back for integer tensors.


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and layout of a tensor. The first dimension is the micro-batch.

    ``layout`` lists the dimensions from the outermost in memory to the innermost; None: as in ``shape``. A
    layer may copy an input because of its layout (`reshape` of a transposed tensor).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    layout: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a real, fake or meta tensor."""
        layout = None
        if not tensor.is_contiguous():
            strides = tensor.stride()
            order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
            layout = order if order != tuple(range(tensor.dim())) else None
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, layout)

    def empty(self) -> Tensor:
        """An uninitialized dense tensor of this spec that requires no gradient."""
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
        """The boundary of a real, fake or meta value."""
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
        """First position of each distinct tensor: the tensors that travel."""
        return tuple(index for index, first in enumerate(self.same_as) if index == first)

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.tensors[index].num_bytes for index in self.distinct)

    def join(self, other: Boundary) -> Boundary:
        """The tensors of both, as a loss takes outputs and target."""
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
    outputs: tuple[int, ...]  # storage of each output position; an input's storage where a layer passes it on
    kept: frozenset[int]  # storages that the graph holds after the forward
    gradients: frozenset[int]  # storages that became parameter gradients
    output_gradients: tuple[int | None, ...]  # storage of each output's gradient; None: there is none
    input_gradients: tuple[int | None, ...]  # storage of each input's gradient; may be an output's
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    without_gradient: frozenset[int]  # input positions that require a gradient and got none
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
        """The backward pass, divided where it frees a storage that a neighbour may hold, too.

        ``received`` gives the storages of the output gradients, alive when the backward begins. Results are
        cached.
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
    """Returns the peak of a sequence of events, and its end, in bytes above its start."""
    live = peak = 0
    for event in events:
        live += sizes[event - 1] if event > 0 else -sizes[-event - 1]
        peak = max(peak, live)
    return peak, live


class Received(NamedTuple):
    """The gradient of an output as the next layers sent it; several outputs may share a storage."""

    storage: int  # number of the storage, equal for outputs that share it
    num_bytes: int
    is_held: bool  # the caller of autograd holds it until the end


class Segment(NamedTuple):
    """A part of a backward pass. Bytes are changes since its start, of three kinds: held by the graph,
    parameter gradients, all else.
    """

    peak: tuple[int, ...]  # at its peak
    end: tuple[int, ...]  # at its end
    released: int | None  # the storage at an end of the layer that is freed when this part ends


@dataclass(frozen=True, eq=False)
class SplitTrace:
    """The two halves of a layer's backward; if ``whole``, I does all of it.

    Some storages of the graph and some gradients outlive I: they wait for W. Peaks of W are beyond what
    waits, and include the gradients that it makes.
    """

    whole: bool
    inputs: Trace  # the trace whose `backward` is I
    waiting: frozenset[int] = frozenset()  # storages of `inputs` that live until W
    first_peak: int = 0  # of a W that creates the parameter gradients
    later_peak: int = 0  # of a W that accumulates into them
    made: int = 0  # bytes of the parameter gradients that the first W creates


class BufferRole(Enum):
    """What a forward does to a buffer, which decides whether recomputation needs a copy (stage.buffers)."""

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
    buffer_sizes: tuple[int, ...]  # bytes of each, then those that a stage adds for batch normalization
    free: Trace
    first: Trace
    later: Trace
    halves: SplitTrace | None = None  # with Profiler(split_backward=True)
    overwritten: frozenset[int] = frozenset()  # positions of inputs that the layer changes in place
    buffer_roles: tuple[BufferRole, ...] = ()  # role of each buffer; the buffers come first in `buffer_sizes`

    @cached_property
    def num_parameters(self) -> int:
        """Number of trainable elements."""
        return sum(self.parameter_counts)

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, trained or not."""
        return sum(self.parameter_sizes)

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers. A buffer that a forward replaces by another tensor counts twice: the engine
        keeps the old tensor until the stage's forward ends.
        """
        pairs = zip(self.buffer_roles, self.buffer_sizes, strict=False)
        return sum(self.buffer_sizes) + sum(size for role, size in pairs if role is BufferRole.REPLACED)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of all parameter gradients."""
        return sum(self.first.sizes[storage] for storage in self.first.gradients)

    @cached_property
    def output_gradient_bytes(self) -> int:
        """Bytes of the gradients that come back for the outputs."""
        ends = self.outputs
        positions = [i for i in ends.distinct if ends.tensors[i].requires_grad and i not in self.unused]
        return sum(ends.tensors[i].num_bytes for i in positions)
