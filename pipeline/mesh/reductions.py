"""Gradients of a stage, summed over its replicas while the last backward of a step still runs.

    0B3 . . . . .[0B0                 ]                      the last backward of stage 0 in this step
                     .[bucket][bucket] [bucket]              each leaves as soon as all of it is there
                                                ^            the end of the step waits

Every gradient that comes in within the last backward is announced by a hook of its parameter, which hangs
there for that time alone. When those of a bucket are there they are copied end to end, what was copied is
from then on `.grad`, and the sum of it begins. What never comes (a parameter that the loss does not depend
on) leaves with the end of the backward: as zeros, with a mark, so that a parameter that no replica has a
gradient for has none afterwards either.

Which gradients come in which order, and how often (a layer that is checkpointed in the reentrant way gives
a weight several in one backward), is found in the first step, in which all leave with the end of the last
backward.

A sum over replicas must count what was in `.grad` before the step once. So replica 0 keeps it and adds to it,
and the others begin without: what they all have afterwards holds it. Where the earlier step was without
`sync`, it is each replica's own, and all keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline.mesh.buckets import buckets
from gpipe_bench.pipeline.mesh.collectives import Collectives
from gpipe_bench.pipeline.mesh.flat import Flat, Room
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.ranks.messages.connection import Work
from gpipe_bench.pipeline.stage.stage import Stage
from gpipe_bench.pipeline.times.journal import Journal


class Order(Protocol):
    """Agrees on what replica 0 says."""

    def share(self, mine: list[int]) -> list[list[int]]:
        """What every replica brings, in their order; all must call."""


class _Sent(NamedTuple):
    """A bucket that has left."""

    positions: tuple[int, ...]
    flat: Flat
    work: Work
    missing: tuple[int, ...]  # of the positions, those without a gradient on this replica


class Buckets:
    """The `Reduction` of one stage whose replicas have all of its parameters.

    Args:
        stage: whose gradients they are.
        collectives: between its replicas.
        agreement: likewise, for what the host has to know.
        journal: where is written when each sum began and ended.
        bucket_bytes: gradients that leave together; as `buckets` has it if not given.
    """

    def __init__(
        self,
        stage: Stage,
        collectives: Collectives,
        agreement: Order,
        journal: Journal,
        bucket_bytes: int | None = None,
    ) -> None:
        self._stage, self._collectives, self._agreement = stage, collectives, agreement
        self._journal, self._bucket_bytes = journal, bucket_bytes
        self._trainable: tuple[nn.Parameter, ...] = ()
        self._parameters: tuple[nn.Parameter, ...] = ()  # what their gradients come in on
        self._times: list[int] | None = None  # each gets a gradient in the last backward; None: not known yet
        self._buckets: tuple[tuple[int, ...], ...] = ()
        self._bucket_of: dict[int, int] = {}
        self._rooms: list[Room] = []
        self._seen: list[int] = []  # positions, as gradients came in
        self._to_come: list[int] = []  # gradients of each parameter in this backward
        self._open: list[int] = []  # parameters of each bucket that are not there yet
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._sent: list[_Sent] = []
        self._sync = True
        self._own = False  # what is in .grad is of this replica alone

    # One step

    def begin(self, num_microbatches: int, *, sync: bool) -> None:
        self._sync = sync
        trainable, before = self._stage.trainable, len(self._parameters)
        self._parameters = self._stage.receiving  # of tied weights other ones in every step
        if (
            len(self._parameters) != before
            or len(trainable) != len(self._trainable)
            or any(a is not b for a, b in zip(trainable, self._trainable, strict=True))
        ):
            self._trainable = trainable
            self.refresh()
        if self._collectives.rank and not self._own:
            for parameter in self._parameters:
                parameter.grad = None

    def before(self, kind: Kind, m: int, *, last: bool) -> None:
        if not (last and self._sync):
            return
        self._seen = []
        if self._times is not None:
            self._to_come = list(self._times)
            self._open = [sum(self._times[i] > 0 for i in bucket) for bucket in self._buckets]
            # What nobody expects is not waited for here, but at the end of the backward.
            for number, bucket in enumerate(self._buckets):
                self._open[number] += any(self._times[i] == 0 for i in bucket)
        for position, parameter in enumerate(self._parameters):
            hook = self._came_in(position)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def after(self, kind: Kind, m: int, *, last: bool) -> None:
        if not (last and self._sync):
            return
        self._unhook()
        while len(self._sent) < len(self._buckets):
            self._send()

    def finish(self) -> None:
        if not self._sync:
            self._own = True
            return
        self._own = False
        for number, sent in enumerate(self._sent):
            self._collectives.wait(sent.work)
            self._journal.waited(self._stage.index, number)
            if sent.missing:
                marks = sent.flat.rest.tolist()
                for place, position in enumerate(sent.positions):
                    if not marks[place]:
                        self._parameters[position].grad = None
        self._sent = []
        if self._times is None:
            self._learn()

    def evaluated(self) -> None:
        pass

    def reset(self) -> None:
        self._unhook()
        self._sent = []

    def refresh(self) -> None:
        self._times = None
        self._plan([])

    # Parts of it

    def _plan(self, order: list[int]) -> None:
        self._buckets = buckets(
            [p.nbytes for p in self._parameters],
            [p.dtype for p in self._parameters],
            order,
            self._bucket_bytes,
        )
        self._bucket_of = {i: number for number, bucket in enumerate(self._buckets) for i in bucket}
        self._rooms = [Room([self._parameters[i] for i in bucket], len(bucket)) for bucket in self._buckets]

    def _learn(self) -> None:
        """From the next step on buckets leave when they are full, in the order that replica 0 has seen."""
        self._times = [0] * len(self._parameters)
        for position in self._seen:
            self._times[position] += 1
        last_first = dict.fromkeys(reversed(self._seen))  # when the last gradient of each was there
        order = self._agreement.share(list(reversed(last_first)))[0]
        self._plan(order)

    def _came_in(self, position: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self._seen.append(position)
            if self._times is None:
                return
            self._to_come[position] -= 1
            number = self._bucket_of[position]
            if self._to_come[position] == 0:
                self._open[number] -= 1
                while len(self._sent) < len(self._buckets) and not self._open[len(self._sent)]:
                    self._send()
            elif self._to_come[position] < 0 and number < len(self._sent):
                raise RuntimeError(
                    f"a parameter of stage {self._stage.index} got more gradients in a backward than in an "
                    "earlier step, when the sum over replicas had begun; call Pipeline.refresh() on every "
                    "rank before the first step in which it does"
                )

        return hook

    def _unhook(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks = []

    @torch.no_grad()
    def _send(self) -> None:
        """Begins the sum of the next bucket."""
        number = len(self._sent)
        positions = self._buckets[number]
        flat = self._rooms[number].empty()
        flat.rest.fill_(1)
        missing = []
        for place, (position, view) in enumerate(zip(positions, flat.views, strict=True)):
            parameter = self._parameters[position]
            gradient = parameter.grad
            if gradient is None:
                missing.append(position)
                flat.rest[place].zero_()
                view.zero_()
            elif gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"a gradient of stage {self._stage.index} is sparse and cannot be summed over replicas; "
                    "use sparse=False"
                )
            else:
                view.copy_(gradient)
            parameter.grad = view
        self._journal.begun(self._stage.index, number)
        work = self._collectives.sum(flat.numbers)
        self._journal.watch(work, self._stage.index, number)
        self._sent.append(_Sent(positions, flat, work, tuple(missing)))
