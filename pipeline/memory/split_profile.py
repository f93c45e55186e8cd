"""A layer's I and W on fake tensors: the engine's own split, watched.

The layer is run as for the other stories (`profile`), its graph is split as a stage does it, and W's
operations are taken one by one, each alone, so that their costs can be added up in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_bench.pipeline.memory.ends import SOURCE
from gpipe_bench.pipeline.memory.story import Deferred
from gpipe_bench.pipeline.memory.tracker import EventLog
from gpipe_bench.pipeline.stage.split_backward import Split, Waiting, Weights


class Halved:
    """I of a layer whose graph ends in ``root``, whose gradient is ``seed``, while an `EventLog` runs.

    ``whole`` says that the graph cannot be split; then nothing has been done.
    """

    def __init__(self, root: Tensor, seed: Tensor, num_inputs: int) -> None:
        edges = (get_gradient_edge(root),)
        split = Split(edges, SOURCE)
        self.whole = split.whole
        self.exits: list[Tensor | None] = [None] * num_inputs
        self._weights: Weights | None = None
        self._seed = seed
        self._edges: tuple[GradientEdge, ...] = edges
        self._split: Split | None = split

    def inputs(self) -> None:
        """I."""
        assert self._split is not None
        split, edges = self._split, self._edges
        self._split, self._edges = None, ()
        self._weights = split.inputs(edges, (self._seed,), self.exits)

    @torch.no_grad()
    def weights(self, log: EventLog) -> tuple[tuple[Deferred, ...], Deferred | None]:
        """W, operation by operation; by then nobody else holds what waits."""
        weights = self._weights
        assert weights is not None
        self._weights = None
        single, shared, done = weights.single, weights.shared, weights.done
        del weights
        found = []
        while single:
            waiting = [single.pop()]
            found.append(_deferred(log, waiting, [], is_single=True))
            log.events.clear()
            waiting.clear()
            found[-1] = _releasing(found[-1], log)
        if not shared and not done:
            return tuple(found), None
        last = _deferred(log, shared, done, is_single=False)
        log.events.clear()
        shared.clear()
        done.clear()
        return tuple(found), _releasing(last, log)


def _releasing(deferred: Deferred, log: EventLog) -> Deferred:
    return replace(deferred, releases=tuple(-event - 1 for event in log.events if event < 0))


def _deferred(
    log: EventLog, waiting: list[Waiting], done: list[tuple[GradientEdge, Tensor]], *, is_single: bool
) -> Deferred:
    before = log.alive
    log.events.clear()
    gradients = [gradient for each in waiting for gradient in each.gradients()]
    num_formula, (formula_peak, result) = len(log.events), _rise(log, log.events)
    edges = [edge for each in waiting for edge in each.edges] + [edge for edge, _ in done]
    given = [*gradients, *(gradient for _, gradient in done)]
    entering = sum(_entering(edge, gradient) for edge, gradient in zip(edges, given, strict=True))
    keeps = {serial for each in given if (serial := log.serial_of(each)) in before}
    counted = sum(gradient.nbytes for gradient in given)
    del gradients, given
    passes = []
    for _ in range(2):  # the parameters have no gradients, then they do
        log.events.clear()
        accumulating = Weights([*waiting], [], []) if is_single else Weights([], [*waiting], [*done])
        accumulating.accumulate()
        del accumulating
        peak, _ = _rise(log, log.events[num_formula:])
        passes.append((peak, _rise(log, log.events)[1]))
    (first_peak, made), (later_peak, _) = passes
    return Deferred(
        releases=(),
        keeps=tuple(sorted(serial for serial in keeps if serial is not None)),
        formula_peak=formula_peak,
        result=result,
        counted=counted,
        entering=entering,
        first_peak=first_peak,
        later_peak=later_peak,
        made=made,
    )


def _rise(log: EventLog, events: Sequence[int]) -> tuple[int, int]:
    """Most bytes above those at the begin, and bytes above them at the end."""
    live = peak = 0
    for event in events:
        live += log.sizes[event - 1] if event > 0 else -log.sizes[-event - 1]
        peak = max(peak, live)
    return peak, live


def _entering(edge: GradientEdge, gradient: Tensor) -> int:
    """Bytes of what the engine makes of a gradient whose tensor was expanded."""
    metadata: Any = edge.node._input_metadata[edge.output_nr]
    shape = torch.Size(metadata.shape)
    return 0 if shape == gradient.shape else shape.numel() * gradient.itemsize
