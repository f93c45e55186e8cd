"""One failure, known to every rank at once.

When a rank raises, its neighbours wait for messages that will never come; torch's engines leave them there
until the timeout of the process group, ten or thirty minutes by default. Here the failing rank first writes
what happened on a blackboard (the process group's store; the first writer wins) and then closes its
connections. A wait on a closed connection fails at once, its rank reads the blackboard, raises the same error
and closes its own connections, and so on along the pipeline. A rank that was killed writes nothing; then the
first neighbour to notice writes that it disappeared, on accelerators by its heartbeat (`heartbeats`).

A rank that is stopped closes nothing, so everybody waits until the timeout, most of them for a rank that
only waits itself. Each writes for whom it waits, and who is waited for but does not wait is the one that
stopped. If the store does not answer either, it is the process that holds it. Where ranks give signs of life
(`heartbeats`) they say more: of those who may be meant, it is the one that is silent.

All of them ask at the same time, and one process answers. So what they write is one list, which is one
question however many they are, and only the first of them asks for signs of life and concludes; the others
wait for what it says, and conclude themselves if it says nothing.

The store goes with the process that holds it. So that one, before it raises what may end it, stays for a
moment until the others know.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any

from gpipe_bench.pipeline.errors import ActionError, PeerError, StoreError
from gpipe_bench.pipeline.plan.schedule import Action
from gpipe_bench.pipeline.ranks.failures.heartbeats import Heartbeats, signs, silent
from gpipe_bench.pipeline.ranks.failures.watching import watch_in_thread
from gpipe_bench.pipeline.ranks.store import Store

# How long a rank that is let down waits for what the others have to say. One that raises writes it before it
# closes anything; one that waited in vain writes for whom, but gloo has closed its connections by then, and
# it may have begun to wait a little later.
EXPLANATION_S = 2.0
_FIRST_S = 1.0  # beyond that, how long the others wait for the one that began first
_LOOK_S, _LONGEST_LOOK_S = 0.02, 0.32  # between two looks, which double

Watch = Callable[[Callable[[], bool], float], Callable[[], None]]
"""Takes what to call again and again and the seconds between; gives how to end it."""
_Record = dict[str, Any]  # action, rank, cause; rank None: unknown


class Blackboard:
    """Where ranks leave the first failure of any of them. No method takes longer than a few seconds.

    Args:
        store: the keys that they share.
        rank: this one.
        ranks: all of them.
        alive: whether they give signs of life.
        coordinates: where a rank is on the grid.
        now: the time they wait in, seconds.
        sleep: likewise.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Collection[int],
        *,
        alive: bool = False,
        coordinates: Callable[[int], str] = lambda rank: "",
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, tuple(ranks)
        self._alive, self._coordinates = alive, coordinates
        self._now, self._sleep = now, sleep

    def report(self, error: ActionError) -> ActionError:
        """Writes a failure and returns the one that counts: the first that any rank wrote."""
        mine = {"action": str(error.action or ""), "rank": error.rank, "cause": error.cause}
        try:
            return self._read(self._store.set_first("failure", json.dumps(mine)))
        except StoreError:
            return error

    def has_failure(self, limit_s: float) -> bool:
        """Whether any rank has written a failure, or the store has not answered for `limit_s`."""
        try:
            return self._store.get("failure", limit_s) is not None
        except StoreError:  # and what held it
            return True

    def explain(self, error: PeerError) -> ActionError:
        """What happened, as far as anybody knows, when a peer cannot be reached."""
        found: _Record = {"action": str(error.action or ""), "rank": error.peer, "cause": error.cause}
        try:
            self._store.append("waiting", json.dumps([self._rank, found]) + "\n")
            is_first = self._testimonies(1).keys() == {self._rank}
            before = signs(self._store, self._ranks) if self._alive and is_first else {}
            deadline = self._now() + EXPLANATION_S + (0 if is_first else _FIRST_S)
            certain, look_s = False, _LOOK_S
            while not certain and self._now() < deadline:
                written = self._store.get("failure")
                if written is not None:
                    return self._read(written)
                self._sleep(look_s)
                look_s = min(2 * look_s, _LONGEST_LOOK_S)
                if error.timed_out:  # who is cut off by a rank that has timed out hears of it only now
                    testimonies = self._testimonies()
                    heard = {*testimonies, self._last(testimonies, self._rank)["rank"]}
                    certain = heard == set(self._ranks)
            quiet = set[int]()
            if not certain:
                testimonies = self._testimonies()
                quiet = silent(before, signs(self._store, before))
            found = self._blamed(testimonies, quiet, timed_out=error.timed_out)
        except StoreError as gone:
            host = self._store.host
            if self._store.is_in_rank and (error.peer is None or error.peer != host):
                what = "did not answer" if gone.silent else "disappeared"
                return self._of(None, f"the process that held the store {what}", host)
            return self._read(json.dumps(found))
        return self.report(self._read(json.dumps(found)))

    def stay(self, failure: ActionError) -> None:
        """Lets the others know that this rank knows of a failure. The one that holds the store waits for a
        moment until all know, but the one that failed.
        """
        deadline = self._now() + EXPLANATION_S
        to_know = {str(rank).encode() for rank in self._ranks if rank not in (self._rank, failure.rank)}
        try:
            self._store.append("knows", f"{self._rank} ")
            while self._rank == self._store.host and self._now() < deadline:
                if to_know <= set((self._store.get("knows") or b"").split()):
                    break
                self._sleep(_LOOK_S)
        except StoreError:
            pass

    def _testimonies(self, most: int | None = None) -> dict[int, _Record]:
        """For whom the ranks wait in vain that have said so, this one among them; or only the first ones."""
        return dict(map(json.loads, (self._store.get("waiting") or b"").splitlines()[:most]))

    def _blamed(self, testimonies: dict[int, _Record], quiet: set[int], *, timed_out: bool) -> _Record:
        """Whom to blame, as far as can be told from who waits for whom and who is quiet."""
        found = self._last(testimonies, self._rank)
        if not self._alive:
            return self._missing(testimonies) if found["rank"] is None and timed_out else found
        if found["rank"] not in (None, *testimonies) and (not quiet or found["rank"] in quiet):
            return found
        # A rank that waits for somebody in a collective does not know for whom; others may.
        ends = [found, *(self._last(testimonies, rank) for rank in testimonies)]
        ends = [end for end in ends if end["rank"] is not None and end["rank"] not in testimonies]
        for end in ends:
            if end["rank"] in quiet:
                return end
        absent = sorted(quiet - set(testimonies))
        if absent:
            mine = testimonies[self._rank]
            return {**mine, "rank": absent[0], "cause": f"rank {absent[0]} gave no answer: {mine['cause']}"}
        if ends:
            return ends[0]
        return self._missing(testimonies) if found["rank"] is None and timed_out else found

    def _last(self, testimonies: dict[int, _Record], rank: int) -> _Record:
        """A rank that waits in vain is not the one to blame: the end of the waiting that begins with one."""
        found = testimonies[rank]
        blamed = {rank}
        while found["rank"] in testimonies and found["rank"] not in blamed:
            blamed.add(found["rank"])
            found = testimonies[found["rank"]]
        return found

    def _missing(self, testimonies: dict[int, _Record]) -> _Record:
        """Who it must be where nobody knows for whom all wait: the first rank that does not say that it
        waits.
        """
        mine = testimonies[self._rank]
        for rank in self._ranks:
            if rank not in testimonies:
                return {**mine, "rank": rank, "cause": f"rank {rank} did not answer: {mine['cause']}"}
        return mine

    def _read(self, text: bytes | str) -> ActionError:
        record = json.loads(text)
        action = Action.parse(record["action"]) if record["action"] else None
        return self._of(action, record["cause"], record["rank"])

    def _of(self, action: Action | None, cause: str, rank: int | None) -> ActionError:
        return ActionError(action, cause, rank, self._coordinates(rank) if rank in self._ranks else "")


class Lookout:
    """Looks at the blackboard beside everything else and calls `on_failure` once, when there is something.

    On CPUs a rank waits for its neighbours' connections, which break when they fail. A GPU waits without its
    host knowing, so on GPUs somebody has to look; and on a grid, where a rank may wait for one that only
    waits for the one that failed. A store that has not answered for `limit_s` is a failure too, and so is a
    rank without a `heartbeat`, of which the blackboard then learns. `watch` is how to look again and again.
    """

    def __init__(
        self,
        blackboard: Blackboard,
        on_failure: Callable[[], None],
        *,
        limit_s: float,
        interval_s: float = 0.5,
        heartbeats: Heartbeats | None = None,
        watch: Watch = watch_in_thread,
    ) -> None:
        self._blackboard, self._limit_s, self._heartbeats = blackboard, limit_s, heartbeats
        self._on_failure = weakref.WeakMethod(on_failure)  # the thread must not keep a pipeline alive
        self._over = False
        self._stop = watch(self._look, interval_s)

    def stop(self) -> None:
        self._over = True
        self._stop()

    def _look(self) -> bool:
        on_failure = self._on_failure()
        if on_failure is None or self._over:
            return True
        failed = self._blackboard.has_failure(self._limit_s)
        if not failed and self._heartbeats is not None:
            try:
                silent = self._heartbeats.beat()
            except StoreError:
                failed = True
            else:
                failed = silent is not None
                if silent is not None:
                    self._blackboard.report(silent)
        if failed and not self._over:
            on_failure()
        return failed
