"""Sums of many things in an order that does not depend on who holds which of them.

Floating-point sums depend on how they are grouped, so replicas that sum their own micro-batches one after the
other and then each other's get other bits than one pipeline that sums all of them. A binary tree over all
micro-batches, halved from the top, has every replica's micro-batches as a subtree, if there are 2, 4, 8 ...
replicas: each sums its own, and the rest of the tree sums these.

    0 1 2 3 4 5 6 7      ((0+1)+(2+3)) + ((4+5)+(6+7))      of two replicas: each one of the outer brackets

A sum is made as soon as both of its halves are there, whatever the order in which they come, so that of n
things in order log2(n) + 1 are held at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
_Span = tuple[int, int]


class Halving(Generic[T]):
    """The sum of `count` things, numbered from 0, of which `add` makes one of two."""

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
            low_first = span < other
            thing = self._add(thing, found) if low_first else self._add(found, thing)
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
