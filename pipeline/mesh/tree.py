"""Gradients summed by one tree over the micro-batches of all replicas: the same bits on every grid.

The gradients of each micro-batch are taken out of `.grad` when its backward is over and put into the tree
(`halving`). That takes about log2(M) + 1 copies of a stage's gradients, and they cannot leave before the
last backward is over, so it is an option, for those who compare grids bit by bit. Between replicas every part
is sent to all, which sum alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline.mesh.buckets import buckets
from gpipe_bench.pipeline.mesh.collectives import Collectives
from gpipe_bench.pipeline.mesh.flat import Flat, Room
from gpipe_bench.pipeline.mesh.halving import Halving, sum_of
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.ranks.messages.connection import Work
from gpipe_bench.pipeline.stage.stage import Stage
from gpipe_bench.pipeline.times.journal import Journal

_Gradients = list[Tensor | None]


class _Sent(NamedTuple):
    """Gradients on their way to the other replicas, and those that come from them."""

    positions: tuple[int, ...]
    room: Room
    mine: Flat  # alive until it has left
    work: Work
    found: list[Tensor]


class Tree:
    """The `Reduction` of one stage by a tree over micro-batches.

    Args:
        stage: whose gradients they are.
        collectives: between its replicas, if there are others.
        journal: where is written when what leaves has begun and ended.
        bucket_bytes: gradients that leave together.
    """

    def __init__(
        self,
        stage: Stage,
        collectives: Collectives | None,
        journal: Journal,
        bucket_bytes: int | None,
    ) -> None:
        self._stage, self._collectives, self._journal = stage, collectives, journal
        self._bucket_bytes = bucket_bytes
        self._tree: Halving[_Gradients] = Halving(1, _add)
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._held: _Gradients = []
        self._early: dict[int, _Gradients] = {}  # of an I that could not be split, by micro-batch
        self._sum: _Gradients = []
        self._sent: list[_Sent] = []

    def begin(self, num_microbatches: int, *, sync: bool) -> None:
        assert sync
        self._tree = Halving(num_microbatches, _add)
        self._parameters = self._stage.trainable
        self._held = self._take()

    def before(self, kind: Kind, m: int, *, last: bool) -> None:
        self._stage.look_for_first_gradients()

    def after(self, kind: Kind, m: int, *, last: bool) -> None:
        gradients = self._take()
        if kind is Kind.I:
            self._early[m] = gradients
            return
        if (early := self._early.pop(m, None)) is not None:
            gradients = _add(early, gradients)
        self._tree.put(m, gradients)
        if last:
            self._sum = self._tree.take() or []
            if self._collectives is not None:
                self._send(self._collectives)

    def finish(self) -> None:
        if self._collectives is not None:
            self._receive(self._collectives)
        for parameter, held, gradient in zip(self._parameters, self._held, self._sum, strict=True):
            if held is None:
                parameter.grad = gradient
            else:
                parameter.grad = held if gradient is None else held.add_(gradient)
        self._held, self._sum = [], []

    def evaluated(self) -> None:
        pass

    def reset(self) -> None:
        for parameter, held in zip(self._parameters, self._held, strict=False):
            parameter.grad = held
        self._tree.take()
        self._early, self._held, self._sum, self._sent = {}, [], [], []

    def refresh(self) -> None:
        pass

    def _take(self) -> _Gradients:
        """What is in `.grad`, which has nothing afterwards."""
        found = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return found

    @torch.no_grad()
    def _send(self, collectives: Collectives) -> None:
        sizes, kinds = [p.nbytes for p in self._parameters], [p.dtype for p in self._parameters]
        for number, positions in enumerate(buckets(sizes, kinds, bucket_bytes=self._bucket_bytes)):
            room = Room([self._parameters[i] for i in positions], len(positions))
            flat = room.empty()
            for place, (position, view) in enumerate(zip(positions, flat.views, strict=True)):
                gradient = self._sum[position]
                flat.rest[place] = gradient is not None
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient)
            self._journal.begun(self._stage.index, number)
            work, found = collectives.gather(flat.numbers)
            self._journal.watch(work, self._stage.index, number)
            self._sent.append(_Sent(positions, room, flat, work, found))

    @torch.no_grad()
    def _receive(self, collectives: Collectives) -> None:
        for number, sent in enumerate(self._sent):
            collectives.wait(sent.work)
            self._journal.waited(self._stage.index, number)
            flat = sent.room.of(sum_of(sent.found, torch.add))
            for position, view, mark in zip(sent.positions, flat.views, flat.rest.tolist(), strict=True):
                self._sum[position] = view if mark else None
        self._sent = []


@torch.no_grad()
def _add(left: _Gradients, right: _Gradients) -> _Gradients:
    """The sums of gradients, where there are any, in memory of their own."""
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]
