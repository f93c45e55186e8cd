"""One failure, known to every rank at once.

When a rank raises, its neighbours wait for messages that will never come; torch's engines leave them there
until the timeout of the process group, ten or thirty minutes by default. Here the ranks of a job share a
board, which is in the process group's store:

    failure     what happened. The first that any rank writes is what all ranks raise
    waiting     for whom the ranks wait in vain that have said so
    alive r     how often rank r has looked, where waits do not break when a process is killed; in the end
                that it has left, and how many steps it took
    knows       who knows of the failure

A rank that raises writes the failure and then closes its connections. A wait on a closed connection fails at
once, its rank reads the board, raises the same error and closes its own connections, and so on along the
pipeline. A rank that was killed writes nothing; then the first neighbour to notice writes that it
disappeared. A rank that is stopped closes nothing, so everybody waits until the timeout, most of them for a
rank that only waits itself. Who is waited for but does not wait is the one that stopped. If the store does
not answer either, it is the process that holds it. Of those who may be meant it is the one that gives no
sign of life, where ranks do give them. A replica that leaves in good order after fewer steps than others take
is found in its last sign.

All of them ask at the same time, and one process answers. So those who wait are one list, which is one
question however many they are, and only the first of them asks for signs of life and concludes; the others
wait for what it says, and conclude themselves if it says nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from traceback import walk_tb
from typing import Any, TypeVar
from weakref import WeakMethod

import torch
from torch import distributed as dist

from gpipe_bench.pipeline.errors import ActionError, PeerError, StoreError, summary
from gpipe_bench.pipeline.plan.schedule import Action
from gpipe_bench.pipeline.ranks.control import Together
from gpipe_bench.pipeline.ranks.store import Store, bounded
from gpipe_bench.pipeline.ranks.wire import Awaited, Connection, backend, bound_waits, cleaned

# A killed process gives no sign of life, and neither does one that holds Python's lock for so long.
SILENCE_S = 60.0
# How long a rank that waited in vain waits for what the others have to say. One that raises writes it before
# it closes anything; one that waited in vain writes for whom, but gloo has closed its connections by then,
# and it may have begun to wait a little later.
EXPLANATION_S = 2.0
_FIRST_S = 1.0  # beyond that, how long the others wait for the one that began first
_ASK_S, _LONGEST_ASK_S = 0.02, 0.32  # between two questions, which double
_LOOK_S = 0.5  # between two looks of the thread that watches
_MOST_SILENT_S = 1.0  # that count between two looks
_LAST_LOOK_S = 0.2  # how long the end waits for a look: torch must not be broken off in the middle of a call
_LEFT = b"left"  # and behind it the number of steps
# Through which every collective of torch's goes that Python calls; behind them is only the operator's call.
_COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")
_OPERATORS = "torch._ops"

T = TypeVar("T")
Watch = Callable[[Callable[[], bool], float], Callable[[], None]]
"""Takes what to call until it is true, and the seconds between two calls; gives how to end that earlier."""
_Record = dict[str, Any]  # action, rank, cause; rank None: unknown


class Job:
    """The processes that end together when one of them fails, seen from one of them.

    For a pipeline alone these are its ranks. On a grid they are those of all its pipelines, because these
    wait for each other once a step: there is one board, on which everybody has its number in the job.
    Others than the pipeline may use the groups of a mesh in the middle of an action (`fully_shard`,
    tensor-parallel layers). So these groups wait no longer than the pipeline does, and are closed with it.

    Args:
        store: the keys that they share.
        rank: this one.
        ranks: all of them.
        members: of them, those of this process's pipeline, in the order of the pipeline's ranks.
        coordinates: where a rank is on the grid; None where there is no grid.
        now: a clock that never goes back, seconds.
        sleep: lets the others go on.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        *,
        members: Sequence[int] | None = None,
        coordinates: Callable[[int], str] | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank, self.ranks = rank, tuple(ranks)
        self.is_grid = coordinates is not None
        self.board = Board(
            store,
            rank,
            self.ranks,
            alive=self.is_grid,
            coordinates=coordinates or (lambda rank: ""),
            now=now,
            sleep=sleep,
        )
        self.noticed = False  # a failure elsewhere, by the thread that watches
        self.awaited = Awaited(now)  # by the accelerator of this rank
        self._late: PeerError | None = None  # what of it has not come in time
        self._store, self._members = store, tuple(ranks if members is None else members)
        self._connections: list[tuple[Connection, bool]] = []
        self._together: Together | None = None
        self._stop: Callable[[], None] | None = None
        self._is_over = False

    def meet(self, timeout_s: float) -> None:
        """Waits for all to come; `ActionError` names one that does not within the timeout."""
        with self.building():
            self._store.connect(timeout_s)
            self._store.set(f"here {self.rank}", "1", timeout_s)
            try:
                self._store.await_all(dict(enumerate(f"here {rank}" for rank in self.ranks)), timeout_s)
            except PeerError as error:
                raise error.numbered(self.ranks) from error

    @contextmanager
    def building(self) -> Iterator[None]:
        """For what is done together before the pipeline is there: whatever is raised ends it for all.
        `ActionError` where another rank is missing.
        """
        try:
            yield
        except Exception as error:
            failure = self.end(None, error)
            if self.peer_error(error) is None:
                raise
            raise failure from error

    def bounded(self, call: Callable[[], T], timeout_s: float) -> T:
        """What `call` returns, in which torch connects processes and would wait for as long as the user's
        process group says. Errors as in `building`.
        """
        with self.building():
            try:
                return bounded(call, timeout_s)
            except TimeoutError as error:
                what = f"not all ranks connected within {timeout_s:g} s"
                raise PeerError(None, None, what, timed_out=True) from error

    def together(self, timeout_s: float) -> Together:
        """What all do at the same time, rarely; all must call. The first time it connects them."""
        if self._together is None:
            rank, size = self.ranks.index(self.rank), len(self.ranks)
            ways = backend(self._store, rank, size, name="job", accelerated=False, timeout_s=timeout_s)
            connection = Connection(ways, 0, {})
            self.cuts(connection)
            self._together = Together(connection, rank, size)
        return self._together

    def watch_over(self, groups: Iterable[dist.ProcessGroup], device_type: str, timeout_s: float) -> None:
        """Bounds every wait in these groups from now on, and closes them with the rest."""
        for group in groups:
            for kind in dict.fromkeys(("cpu", device_type)):
                with suppress(RuntimeError):  # a group need not have a backend for each
                    found: Any = group._get_backend(torch.device(kind))
                    bound_waits(found, timeout_s)
                    self.cuts(Connection(found, 0, {}))

    def cuts(self, connection: Connection, *, at_notice: bool = True) -> None:
        """Another connection that is cut when a rank fails, be it this one, or only this one."""
        self._connections.append((connection, at_notice))

    # A failure

    def peer_error(self, error: BaseException) -> PeerError | StoreError | None:
        """What an error says of other ranks: that one is missing; None if it is this rank's own."""
        if isinstance(error, PeerError | StoreError):
            return error
        return peer_error_of(error) if self.is_grid else None

    def failure(self, action: Action | None, error: BaseException) -> ActionError:
        """That of this rank."""
        return self.board.error(action, summary(error), self.rank)

    def end(self, action: Action | None, error: BaseException) -> ActionError:
        """Ends everything because of an error here or elsewhere; what happened, as far as anybody knows."""
        self.stop_watching()
        missing = self.peer_error(error)
        if missing is None:
            failure = self.board.report(self.failure(action, error))
        elif self._late is not None:  # the error is of a connection that was cut because of that
            failure = self.board.explain(self._late)
        else:
            if isinstance(missing, StoreError):
                missing = PeerError(None, None, str(missing), timed_out=False)
            failure = self.board.explain(missing.numbered(self._members))
        for connection, _ in tuple(self._connections):
            connection.cut()
        self.board.linger(failure)
        return failure

    def refuse_after_notice(self) -> None:
        """`PeerError` if there is a failure elsewhere."""
        if self.noticed:
            raise self._late or PeerError(None, None, "another rank has failed", timed_out=False)

    def notice(self) -> None:
        """There is a failure elsewhere: makes this rank's waits fail, also one that goes on just now."""
        self.noticed = True
        for connection, at_notice in tuple(self._connections):
            if at_notice:
                connection.cut(beside=True)

    # Watching

    def watch(self, limit_s: float, silence_s: float, watch: Watch | None = None) -> None:
        """Looks at the board beside everything else from now on, and gives signs of life.

        On CPUs a rank waits for its neighbours' connections, which break when they fail. A GPU waits without
        its host knowing, so on GPUs somebody has to look; and on a grid, where a rank may wait for one that
        only waits for the one that failed. A store that has not answered for `limit_s` is a failure too, so
        is a device that has waited for as long, and a rank that gave no sign of life for `silence_s`. `watch`
        is how to look again and again; a thread by default.
        """
        look = WeakMethod(self._look)  # the thread must not keep a pipeline alive
        self._stop = (watch or watch_in_thread)(
            lambda: (mine := look()) is None or mine(limit_s, silence_s), _LOOK_S
        )

    def _look(self, limit_s: float, silence_s: float) -> bool:
        """Whether there is nothing to look for any more."""
        try:
            failed = self._is_over or self._store.get("failure", limit_s) is not None
            if not failed and (silent := self.board.beat(silence_s)) is not None:
                self.board.report(silent)
                failed = True
            if not failed and (late := self.awaited.overdue(limit_s)) is not None:
                # Whose fault it is, is concluded when the step notices, of what all have said by then.
                self._late = late.numbered(self._members)
                self.board.say(self._late)
                failed = True
        except StoreError:  # and what held it
            failed = True
        if failed and not self._is_over:
            self.notice()
        return failed

    def stop_watching(self) -> None:
        """What there is to know is known."""
        self._is_over = True
        if self._stop is not None:
            self._stop()

    def leave(self) -> None:
        """This rank ends in good order: the others need not wait for its signs of life."""
        self.stop_watching()
        if self._stop is not None:
            with suppress(StoreError):  # its host may have ended already
                self.board.leave()


class Board:
    """What the ranks of a job tell each other of failures, by the keys of a store that they share. No method
    takes longer than a few seconds, but one that is told how long. `alive`: all of them give signs of life;
    the others are as for `Job`.
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
        self.num_steps = 0  # that this rank has begun, and its replicas must take too
        self._num_beats, self._has_said = 0, False
        self._fewest: tuple[int, int] | None = None  # steps of a rank that has left, and which
        self._watched = self._behind(rank)
        self._heard: bytes | None = None
        self._looked_s, self._silent_s = now(), 0.0

    def error(self, action: Action | None, cause: str, rank: int | None) -> ActionError:
        """A failure, with the place of the rank on the grid."""
        return ActionError(action, cause, rank, self._coordinates(rank) if rank in self._ranks else "")

    def report(self, error: ActionError) -> ActionError:
        """Writes a failure and returns the one that counts: the first that any rank wrote."""
        mine = {"action": str(error.action or ""), "rank": error.rank, "cause": error.cause}
        try:
            return self._read(json.loads(self._store.set_first("failure", json.dumps(mine))))
        except StoreError:
            return error

    def linger(self, failure: ActionError) -> None:
        """Lets the others know that this rank knows of a failure. The store goes with the process that holds
        it, so that one, before it raises what may end it, waits for a moment until all know, but the one that
        failed.
        """
        deadline = self._now() + EXPLANATION_S
        to_know = {str(rank).encode() for rank in self._ranks if rank not in (self._rank, failure.rank)}
        with suppress(StoreError):
            self._store.append("knows", f"{self._rank} ")
            while self._rank == self._store.host and self._now() < deadline:
                if to_know <= set((self._store.get("knows") or b"").split()):
                    break
                self._sleep(_ASK_S)

    # Signs of life

    def beat(self, limit_s: float) -> ActionError | None:
        """Gives a sign of life, and looks for that of the rank behind, of the last for the first's; what has
        happened if it has been missing for `limit_s`. `StoreError` if the store cannot be asked.

        A rank that leaves takes its leave, and who watched it watches the next. If it has taken fewer steps
        than this one has begun, it would be waited for in vain, and that is what has happened. What is
        watched is whether the count changes; no clocks are compared. Nor does time count in which this
        process itself did not run, because somebody has stopped all of them or they are short of processor
        time: the others then had no time to beat either.
        """
        self._num_beats += 1
        # A busy process, of this rank or of the store, is no reason to give up sooner.
        self._store.set(_sign(self._rank), str(self._num_beats), limit_s)
        if self._fewest is not None and self._fewest[0] < self.num_steps:
            taken, rank = self._fewest
            cause = f"rank {rank} left after {taken} training step{'s' * (taken != 1)}, and others go on; "
            return self.error(None, f"{cause}give all replicas equally many mini-batches", rank)
        if self._watched == self._rank:
            return None
        heard, now_s = self._store.get(_sign(self._watched), limit_s), self._now()
        self._silent_s += min(now_s - self._looked_s, _MOST_SILENT_S)
        self._looked_s = now_s
        if heard is not None and heard.startswith(_LEFT):
            left = int(heard.removeprefix(_LEFT)), self._watched
            self._fewest = min(left, self._fewest or left)
            self._watched = self._behind(self._watched)
            self._heard, self._silent_s = None, 0.0
        elif heard != self._heard:
            self._heard, self._silent_s = heard, 0.0
        elif self._silent_s > limit_s:
            cause = f"rank {self._watched} disappeared: no sign of life for {limit_s:g} s"
            return self.error(None, cause, self._watched)
        return None

    def leave(self) -> None:
        """Nobody needs to wait for this rank's signs of life any more, nor for further steps of it.
        `StoreError` as in `beat`.
        """
        self._store.set(_sign(self._rank), f"{_LEFT.decode()} {self.num_steps}")

    def _behind(self, rank: int) -> int:
        return self._ranks[(self._ranks.index(rank) + 1) % len(self._ranks)]

    def _signs(self, ranks: Sequence[int]) -> dict[int, bytes | None]:
        """The latest of each rank; who lives has given another one a second later, or left."""
        return dict(zip(ranks, self._store.get_all([_sign(rank) for rank in ranks]), strict=True))

    # The verdict

    def say(self, error: PeerError) -> None:
        """That this rank waits in vain, for the first time. `StoreError` if the store cannot be asked."""
        if not self._has_said:
            self._store.append("waiting", json.dumps([self._rank, _record(error)]) + "\n")
            self._has_said = True  # afterwards: who is told so finds it there, and twice does no harm

    def explain(self, error: PeerError) -> ActionError:
        """What happened, as far as anybody knows, when a peer cannot be reached."""
        found = _record(error)
        try:
            self.say(error)
            is_first = self._waiting(1).keys() == {self._rank}
            before = self._signs(self._ranks if self._alive and is_first else ())
            deadline = self._now() + EXPLANATION_S + (0 if is_first else _FIRST_S)
            certain, ask_s = False, _ASK_S
            while not certain and self._now() < deadline:
                written = self._store.get("failure")
                if written is not None:
                    return self._read(json.loads(written))
                self._sleep(ask_s)
                ask_s = min(2 * ask_s, _LONGEST_ASK_S)
                if error.timed_out:  # who is cut off by a rank that has timed out hears of it only now
                    waiting = self._waiting()
                    heard = {*waiting, _end(waiting, self._rank)["rank"]}
                    certain = heard == set(self._ranks)
            quiet = set[int]()
            if not certain:
                waiting = self._waiting()
                after = self._signs(tuple(before))
                quiet = {r for r, sign in after.items() if sign == before[r] and _LEFT not in (sign or b"")}
            found = self._blamed(waiting, quiet, timed_out=error.timed_out)
        except StoreError as gone:
            host = self._store.host
            if self._store.is_in_rank and (error.peer is None or error.peer != host):
                what = "did not answer" if gone.silent else "disappeared"
                return self.error(None, f"the process that held the store {what}", host)
            return self._read(found)
        return self.report(self._read(found))

    def _waiting(self, most: int | None = None) -> dict[int, _Record]:
        """For whom the ranks wait in vain that have said so, this one among them; or only the first ones."""
        return dict(map(json.loads, (self._store.get("waiting") or b"").splitlines()[:most]))

    def _blamed(self, waiting: dict[int, _Record], quiet: set[int], *, timed_out: bool) -> _Record:
        """Whom to blame, as far as can be told from who waits for whom and who is quiet."""
        mine, found = waiting[self._rank], _end(waiting, self._rank)
        if self._alive:
            if found["rank"] not in (None, *waiting) and (not quiet or found["rank"] in quiet):
                return found
            # A rank that waits for somebody in a collective does not know for whom; others may.
            ends = [found, *(_end(waiting, rank) for rank in waiting)]
            ends = [end for end in ends if end["rank"] is not None and end["rank"] not in waiting]
            absent = sorted(quiet - set(waiting))
            if absent and not any(end["rank"] in quiet for end in ends):
                return {
                    **mine,
                    "rank": absent[0],
                    "cause": f"rank {absent[0]} gave no answer: {mine['cause']}",
                }
            if ends:
                return min(ends, key=lambda end: end["rank"] not in quiet)
        silent = [rank for rank in self._ranks if rank not in waiting]
        if found["rank"] is None and timed_out:  # then it must be one that does not say that it waits
            if not silent:
                return mine
            return {**mine, "rank": silent[0], "cause": f"rank {silent[0]} did not answer: {mine['cause']}"}
        return found

    def _read(self, record: _Record) -> ActionError:
        action = Action.parse(record["action"]) if record["action"] else None
        return self.error(action, record["cause"], record["rank"])


def _record(error: PeerError) -> _Record:
    return {"action": str(error.action or ""), "rank": error.peer, "cause": error.cause}


def _end(waiting: dict[int, _Record], rank: int) -> _Record:
    """A rank that waits in vain is not the one to blame: the end of the waiting that begins with `rank`."""
    found = waiting[rank]
    passed = {rank}
    while found["rank"] in waiting and found["rank"] not in passed:
        passed.add(found["rank"])
        found = waiting[found["rank"]]
    return found


def _sign(rank: int) -> str:
    return f"alive {rank}"


def watch_in_thread(look: Callable[[], bool], interval_s: float) -> Callable[[], None]:
    """Calls `look` every `interval_s` from a thread, until it is true; returns how to end that earlier."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(interval_s):
            if look():
                return

    thread = threading.Thread(target=run, name="pipeline lookout", daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        if thread is not threading.current_thread():
            thread.join(_LAST_LOOK_S)

    return stop


def peer_error_of(error: BaseException) -> PeerError | None:
    """The `PeerError` for an exception of a collective of torch's; None for any other.

    Collectives that are not ours (those of `fully_shard`, of tensor-parallel layers) run in the middle of an
    action and must not pass for a failure of the action. What counts is where one was raised, not what it
    says: a layer that reads from a network of its own may say the same. (Where a layer itself waits for what
    it began with `async_op=True`, the error is raised in the layer and is the layer's.)
    """
    if isinstance(error, PeerError):
        return error
    if not isinstance(error, RuntimeError):
        return None
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    raised_in = next((name for name in reversed(modules) if name != _OPERATORS), "")
    return missing(error) if isinstance(error, dist.DistError) or raised_in in _COLLECTIVES else None


def missing(error: RuntimeError) -> PeerError:
    """What a collective's error says, of which nobody can tell from outside for whom it waited."""
    lines = (line.strip() for line in str(error).splitlines() if line.strip())
    what = cleaned(next(lines, type(error).__name__))
    timed_out = "timed out" in what.lower() or "timeout" in what.lower()
    return PeerError(None, None, f"a collective failed: {what}", timed_out=timed_out)
