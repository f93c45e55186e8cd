"""One run of a layer as a sequence of storages that appear and die, and a layer as a few such runs.

Numbers alone (peak, saved) cannot be added up over layers, because what a layer frees depends on what its
neighbours hold. The sequence can, and it is the same for every micro-batch size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from .boundary import Boundary


@dataclass(frozen=True, eq=False)
class Trace:
    """Storages of one run of a layer and the order in which they appear and die.

    Events are ``+(s + 1)`` where storage s appears and ``-(s + 1)`` where it dies. The forward pass ends when
    inputs and outputs are let go by the caller; the backward pass begins with the gradients of the outputs
    and ends with those of the inputs alive.
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
    # What each storage was made for: a tensor's shape, and the bytes of an element last.
    shapes: tuple[tuple[int, ...], ...] = ()
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
        live = peak = 0  # their sums
        for event in self.backward:
            storage, sign = abs(event) - 1, 1 if event > 0 else -1
            if storage in ends:
                segments.append(Segment(top[0], top[1], top[2], now[0], now[1], now[2], storage, peak))
                now, top = [0, 0, 0], [0, 0, 0]
                live = peak = 0
                continue
            if storage in given:
                real = given[storage]
                if real is None or sign > 0:
                    continue
                users[real.storage] -= 1
                if users[real.storage] == 0 and not real.is_held:
                    now[2] -= real.num_bytes
                    live -= real.num_bytes
                continue
            kind = 0 if storage in self.kept else 1 if storage in self.gradients else 2
            change = sign * self.sizes[storage]
            now[kind] += change
            live += change
            if live > peak:
                peak, top = live, now.copy()
        segments.append(Segment(top[0], top[1], top[2], now[0], now[1], now[2], None, peak))
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


@dataclass(frozen=True)
class Segment:
    """A part of a backward pass: changes in bytes from its begin to its fullest moment and to its end."""

    peak_saved: int
    peak_gradients: int
    peak_other: int
    saved: int
    gradients: int
    other: int
    released: int | None  # the storage let go at its end
    peak: int  # the sum of the first three


@dataclass(frozen=True, eq=False)
class SplitTrace:
    """The two halves of a layer's backward; where it is ``whole`` I does all of it.

    I is a trace like any other, but that some of what the graph holds, and some gradients, do not die in it:
    they wait for W. Peaks of W are beyond what waits, and end with the gradients that it makes.
    """

    whole: bool
    inputs: Trace  # its `backward` is I
    waiting: frozenset[int] = frozenset()  # storages of that trace that live on until W
    first_peak: int = 0  # W that makes the gradients of parameters
    later_peak: int = 0  # W that adds to them
    made: int = 0  # bytes of the gradients that the first W makes


class BufferRole(Enum):
    """How a recomputation treats a buffer (gpipe_bench.pipeline.stage.buffers)."""

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
    buffer_sizes: tuple[
        int, ...
    ]  # with what a stage adds for batch normalization (gpipe_bench.pipeline.stage.buffers)
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
        """Bytes of the buffers, with what a stage adds for batch normalization."""
        return sum(self.buffer_sizes)

    @cached_property
    def replaced_bytes(self) -> int:
        """Bytes of the buffers that a forward replaces by other tensors."""
        pairs = zip(self.buffer_roles, self.buffer_sizes, strict=False)
        return sum(size for role, size in pairs if role is BufferRole.REPLACED)

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
