"""A layer taken forward on its own, with references as scarce as in a stage, and the story that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline.memory.boundary import Boundary, as_tuple
from gpipe_bench.pipeline.memory.changes import Moved
from gpipe_bench.pipeline.memory.ends import enter, follow
from gpipe_bench.pipeline.memory.story import BufferRole, Story
from gpipe_bench.pipeline.memory.tracker import EventLog


class OneRun:
    """A layer taken forward, its inputs and outputs let go of as in a stage, and its story from then on."""

    def __init__(self, inputs: Boundary) -> None:
        self._inputs = inputs
        self._leaves = [spec.empty() for spec in inputs.tensors]
        self.seed = torch.empty(())
        self.delivered: dict[int, Tensor] = {}  # gradients of the inputs
        self._sent_back: list[int | None] = []
        self._kept: frozenset[int] = frozenset()
        self._hidden: int | None = None
        self.overwritten: frozenset[int] = frozenset()  # positions of the inputs
        self.moved: dict[str, BufferRole] = {}  # buffers by their names

    def forward(
        self,
        log: EventLog,
        precision: Callable[[], AbstractContextManager[object]],
        layer: nn.Module,
        unused: frozenset[int],
    ) -> Tensor | None:
        """Returns where the backward begins; None without a graph."""
        self._log, inputs = log, self._inputs
        values = [
            enter(leaf, spec, position, self.delivered)
            for position, (leaf, spec) in enumerate(zip(self._leaves, inputs.tensors, strict=True))
        ]
        values = [values[first] for first in inputs.same_as]
        self._input_storages = _serials(log, values)
        log.events.clear()
        versions = [value._version for value in values]
        buffers = Moved(layer)
        with precision():
            result = layer(inputs.build(values))
        self.overwritten = frozenset(
            [
                position
                for position, (value, version) in enumerate(zip(values, versions, strict=True))
                if value._version != version and inputs.same_as[position] == position
            ]
        )
        self.moved = buffers.look()
        del buffers
        self._forward = tuple(log.events)
        self.ends = Boundary.of(result)
        self._output_storages = _serials(log, as_tuple(result))
        root = follow(result, unused, log, self._sent_back) if torch.is_grad_enabled() else None
        self._hidden = log.serial_of(root) if root is not None else None
        del result, values
        if root is not None:
            self._kept = frozenset(log.alive - {self._hidden})
        log.events.clear()
        return root

    def events(self) -> tuple[int, ...]:
        """What has happened since the forward."""
        hidden = self._hidden
        return tuple([event for event in self._log.events if hidden is None or abs(event) != hidden + 1])

    def story(self, backward: tuple[int, ...], gradients: set[int | None], *, with_shapes: bool) -> Story:
        """The story with such a backward, which made ``gradients`` of parameters."""
        log, inputs, delivered = self._log, self._inputs, self.delivered
        has_graph = torch.is_grad_enabled()
        return Story(
            sizes=tuple(log.sizes),
            inputs=self._input_storages,
            outputs=self._output_storages,
            kept=self._kept,
            gradients=frozenset(serial for serial in gradients if serial is not None),
            output_gradients=tuple(self._sent_back) or (None,) * len(self._output_storages),
            input_gradients=tuple(
                log.serial_of(delivered[first]) if first == position and first in delivered else None
                for position, first in enumerate(inputs.same_as)
            ),
            forward=self._forward,
            backward=backward if has_graph else (),
            without_gradient=frozenset(
                position
                for position, first in enumerate(inputs.same_as)
                if inputs.tensors[position].requires_grad and first not in delivered
            ),
            shapes=tuple(log.shapes) if with_shapes else (),
        )


def _serials(log: EventLog, tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Numbers of the tensors' storages; one that the run did not make (a parameter) is new but costs nothing
    here: it is counted where it belongs.
    """
    tensors, made = tuple(tensors), len(log.sizes)
    log.watch(tensors)
    log.sizes[made:] = [0] * (len(log.sizes) - made)
    return tuple(serial for serial in map(log.serial_of, tensors) if serial is not None)
