"""Signs of life, for ranks whose connections do not break when a process is killed.

A killed process writes nothing on the blackboard, and a GPU that waits for it over NVLink or shared memory
waits for ever. So every rank counts on in the store, and each watches the one behind it, the last the first:
one that leaves takes its leave, and who watched it watches the next. What is watched is whether the count
changes within `limit_s` of the own clock; no clocks are compared. Nor does time count in which this process
itself did not run, because somebody has stopped all of them or they are short of processor time: the others
then had no time to beat either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gpipe_bench.pipeline.errors import ActionError
from gpipe_bench.pipeline.ranks.store import Store

_LEFT = "left"
# The most that counts between two looks.
_LOOK_S = 1.0


class Heartbeats:
    """The part of one rank; `now` gives seconds."""

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], *, limit_s: float, now: Callable[[], float]
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, tuple(ranks)
        self._limit_s, self._now = limit_s, now
        self._count = 0
        self._watched = self._behind(rank)
        self._heard: bytes | None = None
        self._looked_s = now()
        self._silent_s = 0.0

    def beat(self) -> ActionError | None:
        """Gives a sign of life and looks for the other's; what has happened if it is missing for too long.

        `StoreError` if the store cannot be asked.
        """
        self._count += 1
        # A busy process, of this rank or of the store, is no reason to give up sooner.
        self._store.set(_key(self._rank), str(self._count), self._limit_s)
        if self._watched == self._rank:
            return None
        heard, now_s = self._store.get(_key(self._watched), self._limit_s), self._now()
        self._silent_s += min(now_s - self._looked_s, _LOOK_S)
        self._looked_s = now_s
        if heard == _LEFT.encode():
            self._watched = self._behind(self._watched)
            self._heard, self._silent_s = None, 0.0
        elif heard != self._heard:
            self._heard, self._silent_s = heard, 0.0
        elif self._silent_s > self._limit_s:
            cause = f"rank {self._watched} disappeared: no sign of life for {self._limit_s:g} s"
            return ActionError(None, cause, self._watched)
        return None

    def leave(self) -> None:
        """This rank ends in good order: nobody needs to wait for its signs. `StoreError` as in `beat`."""
        self._store.set(_key(self._rank), _LEFT)

    def _behind(self, rank: int) -> int:
        return self._ranks[(self._ranks.index(rank) + 1) % len(self._ranks)]


def signs(store: Store, ranks: Iterable[int]) -> dict[int, bytes | None]:
    """The latest sign of life of each rank; who lives has given another one a second later, or left."""
    known = tuple(ranks)
    return dict(zip(known, store.get_all([_key(rank) for rank in known]), strict=True))


def silent(before: Mapping[int, bytes | None], after: Mapping[int, bytes | None]) -> set[int]:
    """Who has given no sign of life between two `signs`."""
    return {rank for rank, sign in after.items() if sign == before[rank] and sign != _LEFT.encode()}


def _key(rank: int) -> str:
    return f"alive {rank}"
