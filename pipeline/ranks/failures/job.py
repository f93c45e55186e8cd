"""The processes that end together when one of them fails: who they are, and what each of them can cut.

For a pipeline alone these are its ranks. On a grid they are those of all its pipelines, because these wait
for each other once a step: there is one blackboard, on which everybody has the number that it has in the job.
Others than the pipeline may use the groups of a mesh in the middle of an action (`fully_shard`,
tensor-parallel layers). So these groups wait no longer than the pipeline does, and are closed with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakMethod

import torch
from torch import distributed as dist

from gpipe_bench.pipeline.errors import ActionError, PeerError, StoreError, summary
from gpipe_bench.pipeline.ranks.failures.collective import let_down
from gpipe_bench.pipeline.ranks.failures.failure import Blackboard, Lookout, Watch
from gpipe_bench.pipeline.ranks.failures.heartbeats import Heartbeats
from gpipe_bench.pipeline.ranks.failures.watching import watch_in_thread
from gpipe_bench.pipeline.ranks.store import Store, bounded
from gpipe_bench.pipeline.ranks.together import Together
from gpipe_bench.pipeline.ranks.wire import Connection, backend

# A killed process gives no sign of life, and neither does one that holds Python's lock for so long.
SILENCE_S = 60.0
T = TypeVar("T")


class Job:
    """The processes of one job, seen from one of them.

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
        self.store, self.rank, self.ranks = store, rank, tuple(ranks)
        self.members = tuple(ranks if members is None else members)
        self.is_grid = coordinates is not None
        self._coordinates = coordinates or (lambda rank: "")
        self.blackboard = Blackboard(
            store,
            rank,
            self.ranks,
            alive=self.is_grid,
            coordinates=self._coordinates,
            now=now,
            sleep=sleep,
        )
        self._now = now
        self._heartbeats: Heartbeats | None = None
        self._lookout: Lookout | None = None
        self._told: WeakMethod[Callable[[], None]] | None = None
        self._noticed = False
        self._connections: list[Connection] = []
        self._together: Together | None = None

    def meet(self, timeout_s: float) -> None:
        """Waits for all to come; `ActionError` names one that does not within the timeout."""
        with self.building():
            self.store.connect(timeout_s)
            self.store.set(f"here {self.rank}", "1", timeout_s)
            try:
                self.store.await_all([f"here {rank}" for rank in self.ranks], timeout_s)
            except PeerError as error:
                raise error.numbered(self.ranks) from error

    def look_out(self, limit_s: float, silence_s: float, watch: Watch = watch_in_thread) -> None:
        """Gives signs of life and looks for those of the others, and for failures, from now on: of a store
        that is silent for `limit_s` and of a rank that is so for `silence_s`.
        """
        self._heartbeats = Heartbeats(self.store, self.rank, self.ranks, limit_s=silence_s, now=self._now)
        self._lookout = Lookout(
            self.blackboard, self.notice, limit_s=limit_s, heartbeats=self._heartbeats, watch=watch
        )

    def tells(self, on_failure: Callable[[], None]) -> None:
        """Calls the method, which is not kept alive, when there is a failure."""
        self._told = WeakMethod(on_failure)
        if self._noticed:
            on_failure()

    def notice(self) -> None:
        """There is a failure elsewhere."""
        self._noticed = True
        self.cut()
        if self._told is not None and (told := self._told()) is not None:
            told()

    def look_no_more(self) -> None:
        """What there is to know is known."""
        if self._lookout is not None:
            self._lookout.stop()

    def leave(self) -> None:
        """This rank ends in good order: the others need not wait for its signs of life."""
        self.look_no_more()
        if self._heartbeats is not None:
            with suppress(StoreError):  # its host may have ended already
                self._heartbeats.leave()

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

    @contextmanager
    def building(self) -> Iterator[None]:
        """For what is done together before the pipeline is there: whatever is raised ends it for all.
        `ActionError` where another rank is missing.
        """
        try:
            yield
        except Exception as error:
            missing = error if isinstance(error, StoreError) else let_down(error)
            if missing is None:
                self.blackboard.report(self.failure(None, error))
                self.cut()
                raise
            self.look_no_more()
            failure = self.explain(missing)
            self.cut()
            self.blackboard.stay(failure)
            raise failure from error

    def explain(self, error: PeerError | StoreError) -> ActionError:
        """What has happened, as far as anybody knows, where a rank of the pipeline cannot be reached."""
        if isinstance(error, StoreError):
            error = PeerError(None, None, str(error), timed_out=False)
        return self.blackboard.explain(error.numbered(self.members))

    def failure(self, action: Any, error: BaseException) -> ActionError:
        """That of this rank."""
        return ActionError(action, summary(error), self.rank, self._coordinates(self.rank))

    def watch_over(self, groups: Iterable[dist.ProcessGroup], device_type: str, timeout_s: float) -> None:
        """Bounds every wait in these groups from now on, and closes them with the rest."""
        for group in groups:
            group.set_timeout(timedelta(seconds=timeout_s))
            for kind in dict.fromkeys(("cpu", device_type)):
                with suppress(RuntimeError):  # a group need not have a backend for each
                    self._connections.append(Connection(group._get_backend(torch.device(kind)), 0, {}))

    def together(self, timeout_s: float) -> Together:
        """What all do at the same time, rarely; all must call. The first time it connects them."""
        if self._together is None:
            ways = backend(
                self.store,
                self.ranks.index(self.rank),
                len(self.ranks),
                name="job",
                accelerated=False,
                timeout_s=timeout_s,
            )
            connection = Connection(ways, 0, {})
            self.cuts(connection)
            self._together = Together(connection, self.ranks.index(self.rank), len(self.ranks))
        return self._together

    def cuts(self, connection: Connection) -> None:
        """Another connection that ends with the rest when a rank fails."""
        self._connections.append(connection)

    def cut(self) -> None:
        """Makes every wait of this rank and for it fail, beside the pipeline's own."""
        for connection in self._connections:
            connection.cut(beside=True)
