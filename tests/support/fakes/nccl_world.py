"""Ranks in one process that take turns: no clock, no luck, and a deadlock is seen at once.

Every rank is a thread, of which one runs at a time. It runs until it has to wait for another; then the next
one that can go on does. If nobody can, time passes, which is a number: those who look at something now and
then look, and whoever waits for a limited time gives up. If that changes nothing, it is a deadlock, and all
waits end with it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

# How long nothing may happen while some still look at something: more than any of them waits.
_PATIENCE_S = 200.0


class Deadlock(BaseException):
    """Nobody can go on."""


class RuleBroken(BaseException):
    """What real hardware would answer with a hang or with wrong numbers."""


class Killed(BaseException):
    """The end of a rank that is killed, raised when all others have ended."""


@dataclass
class _Waiter:
    rank: int
    condition: Callable[[], bool]
    what: str
    deadline_s: float = math.inf
    error: BaseException | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class World:
    """`size` ranks and what they share. `choose` picks who goes on, by its position among those who can."""

    def __init__(self, size: int, choose: Callable[[int], int] = lambda number: 0) -> None:
        self.size, self.now_s = size, 0.0
        self.shared: dict[Any, Any] = {}  # by whatever the fakes agree on
        self.dead: set[int] = set()
        self._choose = choose
        self._waiters: list[_Waiter] = []
        self._watches: list[tuple[int, Callable[[], bool], float, float]] = []
        self._limits: dict[int, tuple[float, Callable[[], bool]]] = {}
        self._last_s = 0.0  # when somebody went on
        self._over: BaseException | None = None
        self._ended = threading.Event()

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What `function` returns or raises on each rank. `Deadlock` and `RuleBroken` are raised."""
        found: list[Any] = [None] * self.size

        def begin(rank: int, waiter: _Waiter) -> None:
            waiter.go.acquire()
            try:
                found[rank] = function(rank)
            except BaseException as error:
                found[rank] = error
            self._hand_on()

        threads = []
        for rank in range(self.size):
            waiter = _Waiter(rank, lambda: True, "its turn")
            self._waiters.append(waiter)
            threads.append(threading.Thread(target=begin, args=(rank, waiter), daemon=True))
            threads[-1].start()
        self._hand_on()
        self._ended.wait()
        for thread in threads:
            thread.join()
        if self._over is not None:
            raise self._over
        return found

    def wait_until(self, rank: int, condition: Callable[[], bool], what: str) -> None:
        """Lets the others go on until `condition` holds; `TimeoutError` where the rank has a limit."""
        if condition():
            return
        if self._over is not None or self._ended.is_set():
            raise self._over or RuntimeError(f"rank {rank} waits for {what} after the end")
        limit_s, given_up = self._limits.get(rank, (math.inf, None))
        self._wait(_Waiter(rank, lambda: condition() or bool(given_up and given_up()), what, limit_s))
        if given_up is not None and not condition() and given_up():
            raise TimeoutError("given up")

    def break_rule(self, what: str) -> None:
        """Ends everything."""
        self._over = self._over or RuleBroken(what)
        raise self._over

    def kill(self, rank: int) -> None:
        """Ends the calling rank without a word to anybody."""
        self.dead.add(rank)
        self._wait(_Waiter(rank, lambda: False, "nothing any more"))

    @contextmanager
    def limited(self, rank: int, limit_s: float, given_up: Callable[[], bool]) -> Iterator[None]:
        """Every wait of the rank ends after `limit_s` altogether, or when it is given up."""
        self._limits[rank] = self.now_s + limit_s, given_up
        try:
            yield
        finally:
            del self._limits[rank]

    def sleep(self, rank: int, seconds: float) -> None:
        """Lets the others go on for a while."""
        waiter = _Waiter(rank, lambda: False, f"{seconds:g} s", self.now_s + seconds)
        with suppress(TimeoutError):
            self._wait(waiter)

    def watch(self, rank: int, look: Callable[[], bool], interval_s: float) -> Callable[[], None]:
        """Calls `look` every `interval_s` until it is true; gives how to end it."""
        over = threading.Event()
        entry = (rank, lambda: over.is_set() or look(), interval_s, self.now_s + interval_s)
        self._watches.append(entry)
        return over.set

    def _wait(self, waiter: _Waiter) -> None:
        self._waiters.append(waiter)
        self._hand_on()
        waiter.go.acquire()
        if waiter.error is not None:
            raise waiter.error

    def _hand_on(self) -> None:
        """The calling thread ends or waits: another one goes on."""
        while True:
            try:
                ready = [each for each in self._waiters if each.error is not None or each.condition()]
            except RuleBroken as error:
                ready = self._end_all(error)
            if ready:
                chosen = ready[self._choose(len(ready)) if len(ready) > 1 else 0]
                self._waiters.remove(chosen)
                self._last_s = self.now_s
                chosen.go.release()
                return
            if not self._waiters:
                self._ended.set()
                return
            if {each.rank for each in self._waiters} <= self.dead:
                for each in self._waiters:
                    each.error = Killed()
            elif not self._let_time_pass():
                waits = "; ".join(f"rank {each.rank} waits for {each.what}" for each in self._waiters)
                self._end_all(Deadlock(waits))

    def _end_all(self, error: BaseException) -> list[_Waiter]:
        self._over = self._over or error
        for each in self._waiters:
            each.error = self._over
        return list(self._waiters)

    def _let_time_pass(self) -> bool:
        """Until somebody looks or gives up; whether that may change anything."""
        deadlines = [each.deadline_s for each in self._waiters]
        looks = [next_s for rank, _, _, next_s in self._watches if rank not in self.dead]
        next_s = min(deadlines + looks)
        if next_s == math.inf or (next_s > self._last_s + _PATIENCE_S and min(deadlines) == math.inf):
            return False
        self.now_s = next_s
        watches, self._watches = self._watches, []
        for rank, look, interval_s, at_s in watches:
            if at_s > next_s or rank in self.dead:
                self._watches.append((rank, look, interval_s, at_s))
            elif not look():
                self._watches.append((rank, look, interval_s, at_s + interval_s))
        for each in self._waiters:
            if each.deadline_s <= next_s:
                each.error = TimeoutError(f"{each.what}: timed out")
        return True
