"""Gradients summed by one tree over the micro-batches of all replicas: the same bits on every grid.

Floating-point sums depend on how they are grouped, so replicas that sum their own micro-batches one after the
other and then each other's get other bits than one pipeline that sums all of them. A binary tree over all
micro-batches, halved from the top, has every replica's micro-batches as a subtree, if there are 2, 4, 8 ...
replicas: each sums its own, and the rest of the tree sums these.

    0 1 2 3 4 5 6 7      ((0+1)+(2+3)) + ((4+5)+(6+7))      of two replicas: each one of the outer brackets

The gradients of each micro-batch are taken out of `.grad` when its backward is over and put into the tree.
That takes about log2(M) + 1 copies of a stage's gradients, and they cannot leave before the last backward is
over, so it is an option, for those who compare grids bit by bit. Between replicas every part is sent to all,
which sum alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline.clock import Journal
from gpipe_bench.pipeline.mesh.collectives import Collectives, FlatBucket, buckets_of
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.ranks.wire import Transit
from gpipe_bench.pipeline.stage.stage import Reduction, Stage

T = TypeVar("T")
_Gradients = list[Tensor | None]
_Span = tuple[int, int]


class TreeSums(Reduction):
    """The `Reduction` of one stage by a tree over micro-batches.

    Args:
        stage: whose gradients they are.
        collectives: between its replicas, if there are others.
        journal: where is written when what leaves has begun and ended.
        bucket_bytes: gradients that leave together.
    """

    def __init__(
        self, stage: Stage, collectives: Collectives | None, journal: Journal, bucket_bytes: int | None
    ) -> None:
        self._stage, self._collectives, self._journal = stage, collectives, journal
        self._bucket_bytes = bucket_bytes
        self._tree: Halving[_Gradients] = Halving(1, _add)
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._held: _Gradients = []
        self._early: dict[int, _Gradients] = {}  # of an I that could not be split, by micro-batch
        self._sum: _Gradients = []
        self._sent: list[
            tuple[FlatBucket, Tensor, Transit, list[Tensor]]
        ] = []  # what is sent stays until it has left

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

    def reset(self) -> None:
        for parameter, held in zip(self._parameters, self._held, strict=False):
            parameter.grad = held
        self._tree.take()
        self._early, self._held, self._sum, self._sent = {}, [], [], []

    def _take(self) -> _Gradients:
        """What is in `.grad`, which has nothing afterwards."""
        found = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return found

    @torch.no_grad()
    def _send(self, collectives: Collectives) -> None:
        for number, bucket in enumerate(buckets_of(self._parameters, bucket_bytes=self._bucket_bytes)):
            numbers = bucket.fill([self._sum[i] for i in bucket.positions])
            self._journal.begun(self._stage.index, number)
            work, found = collectives.gather(numbers)
            self._journal.watch(work, self._stage.index, number)
            self._sent.append((bucket, numbers, work, found))

    @torch.no_grad()
    def _receive(self, collectives: Collectives) -> None:
        for number, (bucket, _, work, found) in enumerate(self._sent):
            collectives.wait(work)
            self._journal.waited(self._stage.index, number)
            bucket.take(sum_of(found, torch.add))
            for position, view, mark in zip(
                bucket.positions, bucket.views, bucket.marks.tolist(), strict=True
            ):
                self._sum[position] = view if mark else None
        self._sent = []


@torch.no_grad()
def _add(left: _Gradients, right: _Gradients) -> _Gradients:
    """The sums of gradients, where there are any, in memory of their own."""
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


class Halving(Generic[T]):
    """The sum of `count` things, numbered from 0, of which `add` makes one of two.

    A sum is made as soon as both of its halves are there, whatever the order in which they come, so that of n
    things in order log2(n) + 1 are held at most.
    """

    def __init__(self, count: int, add: Callable[[T, T], T]) -> None:
        self._whole, self._add = (0, count), add
        self._other_half: dict[_Span, _Span] = {}
        self._held: dict[_Span, T] = {}
        self._halve(self._whole)

    def _halve(self, span: _Span) -> None:
        start, end = span
        if end - start > 1:
            low, high = (start, (start + end) // 2), ((start + end) // 2, end)
            self._other_half[low], self._other_half[high] = high, low
            self._halve(low)
            self._halve(high)

    def put(self, number: int, thing: T) -> None:
        """Takes in one of them."""
        span = (number, number + 1)
        while span != self._whole and (other := self._other_half[span]) in self._held:
            found = self._held.pop(other)
            thing = self._add(thing, found) if span < other else self._add(found, thing)
            span = (min(span[0], other[0]), max(span[1], other[1]))
        self._held[span] = thing

    def take(self) -> T | None:
        """The sum, once all are in, and begins anew; None if any is missing."""
        found = self._held.pop(self._whole, None)
        self._held = {}
        return found


def sum_of(things: Sequence[T], add: Callable[[T, T], T]) -> T:
    """The sum of all of them, at least one, by the same tree."""
    tree = Halving(len(things), add)
    for number, thing in enumerate(things):
        tree.put(number, thing)
    found = tree.take()
    assert found is not None
    return found
