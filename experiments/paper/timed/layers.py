"""Seconds of single layers, by which a timed model is cut into stages.

A pipeline with one layer per stage would keep each layer's input for all micro-batches: 71 GiB for
ResNet-101's 370 layers; training needs six. So layers run in order, and each input is dropped after use. A
layer is called as a stage calls it: its inputs enter the graph as those of a stage do, and the gradients that
come in are made before.

A GPU runs many layers faster than Python launches them. So it is kept busy before each repeat for as long as
the host needs to ask (`devices.hold`), and what is timed is the device's time. If the GPU's clock has risen
since, this hold is too short. If it starts before the host has launched a whole repeat, the repeat runs again
with a longer hold; a warning names the layers for which that did not help.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.clock import Clock
from gpipe_bench.pipeline.plan.schedule import Action, Kind
from gpipe_bench.pipeline.stage.split_backward import run_engine
from gpipe_bench.pipeline.stage.tensors import MicrobatchState
from gpipe_bench.pipeline.stage.trees import Message, flatten, split, tensors_of

REPEATS = 4  # the first warms up
AHEAD, MOST_AHEAD_S = 1.5, 0.5  # x the host's launch time; longest hold
LONGER, MOST_TIMES = 2.0, 16.0  # factor by which a hold that was too short grows, and its maximum
KINDS = (Kind.F, Kind.R, Kind.B)

Seconds = dict[Kind, float]
"""Seconds of a forward without a graph, of one with it (a recomputation), and of a backward."""


def layer_seconds(
    layers: Sequence[nn.Module],
    num_microbatches: int,
    compute_loss: Callable[..., Tensor],
    batch: Any,
    target: Any,
    remat: str,
) -> tuple[float, ...]:
    """Seconds of every layer: forward, backward and, as `remat` says, recomputation of one micro-batch.

    Each process finds its own, but all must cut at the same places, since a stage's neighbour is in another
    process; so the mean over processes counts, and all must call.
    """
    device = flatten(batch)[0][0].device
    first, wanted = (split(each, num_microbatches)[0] for each in (batch, target))
    found = [
        sum(s for kind, s in seconds.items() if kind is not Kind.R or remat != "never")
        for seconds in alone(layers, compute_loss, first, wanted, device)
    ]
    seconds_of_all = torch.tensor(found, dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(seconds_of_all)
        seconds_of_all /= dist.get_world_size()
    return tuple(seconds_of_all.tolist())


def alone(
    layers: Sequence[nn.Module],
    compute_loss: Callable[..., Tensor],
    batch: Any,
    target: Any,
    device: torch.device,
    repeats: int = REPEATS,
) -> list[Seconds]:
    """Median seconds of each layer on one micro-batch; the last one's include the loss, and the first repeat
    does not count.
    """
    found, value, ahead, late = list[Seconds](), batch, _Ahead(device), list[str]()

    def last(output: Any) -> Any:
        return compute_loss(output, target)

    for index, layer in enumerate(layers):
        is_last = index == len(layers) - 1
        taken = _Taken(layer, last if is_last else lambda output: output, value, index)
        found.append(_timed(taken, ahead, repeats))
        if ahead.failed:
            late.append(str(index))
        layer.zero_grad(set_to_none=True)
        if not is_last:
            with torch.no_grad():
                value = layer(value)
    if late:
        warnings.warn(
            f"{device} had begun with layers {', '.join(late)} before the host had asked for all of them, so "
            "their seconds may be the host's; time them on a host that does nothing else",
            stacklevel=2,
        )
    return found


class _Ahead:
    """How long a device is kept busy, in `LONGER` steps where it turns out to have been too short."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times, self.failed = device, 1.0, False

    def hold(self, asked_s: float) -> None:
        devices.hold(self.device, self.times * min(AHEAD * asked_s, MOST_AHEAD_S))

    def was_enough(self, started: int | torch.Event) -> bool:
        """Whether the device is still held; `started` is the mark recorded after the hold."""
        if isinstance(started, int) or not started.query():
            return True
        if self.times < MOST_TIMES:
            self.times *= LONGER
            return False
        self.failed = True
        return True


def _timed(taken: _Taken, ahead: _Ahead, repeats: int) -> Seconds:
    actions = [Action(0, kind, number) for number in range(repeats) for kind in KINDS]
    clock, ahead.failed = Clock(actions, [ahead.device]), False
    clock.begin()
    asked_s = 0.0
    for first in range(0, len(actions), len(KINDS)):
        while True:
            ahead.hold(asked_s)
            begun_s = perf_counter()
            for position in range(first, first + len(KINDS)):
                clock.note(2 * position)
                taken.take(actions[position].kind)
                clock.note(2 * position + 1)
            asked_s = perf_counter() - begun_s
            if not first or ahead.was_enough(clock.times[2 * first]):
                break
    clock.complete = True
    samples: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    for event in clock.events():
        if event.action.microbatch > 0 or repeats == 1:
            samples[event.action.kind].append(event.duration_s)
    return {kind: median(of_kind) for kind, of_kind in samples.items()}


class _Taken:
    """A layer as a stage of its own takes it: forward, recomputation, backward."""

    def __init__(self, layer: nn.Module, end: Callable[[Any], Any], value: Any, index: int) -> None:
        tensors, structure = flatten(value, "a layer's input")
        tensors = tuple([tensor.detach() for tensor in tensors])
        needed = tuple([tensor.is_floating_point() and index > 0 for tensor in tensors])
        self._layer, self._end, self._message = layer, end, Message(tensors, structure, needed)
        self._kept: Any = None
        self._seeds: tuple[Tensor, ...] = ()  # made once, as the gradients of a pipeline come from elsewhere

    def take(self, kind: Kind) -> None:
        if kind is Kind.B:
            if self._seeds:
                run_engine(self._kept.edges, self._seeds)
            self._kept = None
            return
        kept = MicrobatchState(self._message)
        with torch.set_grad_enabled(kind is Kind.R):
            outputs = tuple(tensors_of(self._end(self._layer(kept.enter()))))
        if kind is Kind.R:
            kept.keep_graph(outputs, (True,) * len(outputs))
            self._kept = kept
            if not self._seeds:
                self._seeds = tuple([torch.ones_like(t) for t in outputs if t.requires_grad])
