"""One run of a layer as a sequence of storages that appear and die.

Numbers alone (peak, saved) cannot be added up over layers, because what a layer frees depends on what its
neighbours hold. The sequence can, and it is the same for every micro-batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, eq=False)
class Story:
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
    output_gradients: tuple[int, ...]  # storages of the gradients that the backward pass begins with
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    without_gradient: frozenset[int]  # input positions that no gradient reached though they take one

    @property
    def plot(self) -> tuple[object, ...]:
        """The story without its sizes: equal for two micro-batch sizes that can be interpolated."""
        return (
            self.inputs, self.outputs, self.kept, self.gradients, self.output_gradients,
            self.forward, self.backward, self.without_gradient,
        )  # fmt: skip

    @cached_property
    def forward_peak(self) -> int:
        """Most bytes that the forward pass adds to its inputs."""
        live = peak = 0
        for event in self.forward:
            live += self.sizes[event - 1] if event > 0 else -self.sizes[-event - 1]
            peak = max(peak, live)
        return peak

    @cached_property
    def kept_inside(self) -> int:
        """Bytes the graph holds beyond the storages at the layer's two ends."""
        return sum(self.sizes[storage] for storage in self.kept.difference(self.inputs, self.outputs))

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The backward pass, cut where storages are let go that the neighbours may hold too."""
        return self._stretches(frozenset())

    @cached_property
    def stretches_of_last(self) -> tuple[Stretch, ...]:
        """The same for the last layer of a stage: whoever starts autograd holds the gradients of the outputs
        until it returns.
        """
        return self._stretches(frozenset(-storage - 1 for storage in self.output_gradients))

    def _stretches(self, ignored: frozenset[int]) -> tuple[Stretch, ...]:
        ends = {*self.inputs, *self.outputs}
        stretches: list[Stretch] = []
        now, top = [0, 0, 0], [0, 0, 0]  # saved, gradients, other
        for event in self.backward:
            if event in ignored:
                continue
            storage, sign = abs(event) - 1, 1 if event > 0 else -1
            if storage in ends:
                stretches.append(Stretch(top[0], top[1], top[2], now[0], now[1], now[2], storage))
                now, top = [0, 0, 0], [0, 0, 0]
                continue
            kind = 0 if storage in self.kept else 1 if storage in self.gradients else 2
            now[kind] += sign * self.sizes[storage]
            if sum(now) > sum(top):
                top = now.copy()
        stretches.append(Stretch(top[0], top[1], top[2], now[0], now[1], now[2], None))
        return tuple(stretches)


@dataclass(frozen=True)
class Stretch:
    """A part of a backward pass: changes in bytes from its begin to its fullest moment and to its end."""

    peak_saved: int
    peak_gradients: int
    peak_other: int
    saved: int
    gradients: int
    other: int
    released: int | None  # the storage let go at its end

    @property
    def peak(self) -> int:
        return self.peak_saved + self.peak_gradients + self.peak_other
