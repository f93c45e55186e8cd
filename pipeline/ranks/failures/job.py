"""The processes that end together when one of them fails: who they are, and what each of them can cut.

For a pipeline alone these are its ranks. On a grid they are those of all its pipelines, because these wait
for each other once a step: there is one blackboard, on which everybody has the number that it has in the job.
Others than the pipeline may use the groups of a mesh in the middle of an action (`fully_shard`,
tensor-parallel layers). So these groups wait no longer than the pipeline does, and are closed with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from gpipe_bench.pipeline.errors import ActionError, PeerError, StoreError, summary
from gpipe_bench.pipeline.ranks.failures.collective import let_down
from gpipe_bench.pipeline.ranks.failures.failure import Blackboard
from gpipe_bench.pipeline.ranks.messages.connection import Connection, backend
from gpipe_bench.pipeline.ranks.store import Store, bounded
from gpipe_bench.pipeline.ranks.together import Together

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
        self._groups: list[Connection] = []
        self._together: Together | None = None

    def meet(self, timeout_s: float) -> None:
        """Waits for all to come; `ActionError` names one that does not within the timeout."""
        try:
            self.store.connect(timeout_s)
            self.store.set(f"here {self.rank}", "1", timeout_s)
            self.store.await_all([f"here {rank}" for rank in self.ranks], timeout_s)
        except PeerError as error:
            raise self.explain(error.numbered(self.ranks)) from error
        except StoreError as error:
            raise self.explain(error) from error

    def bounded(self, call: Callable[[], T], timeout_s: float) -> T:
        """What `call` returns, in which torch connects processes and would wait for as long as the user's
        process group says; `ActionError` if it does not return within the timeout.
        """
        try:
            return bounded(call, timeout_s)
        except TimeoutError as error:
            what = f"not all ranks connected within {timeout_s:g} s"
            raise self.explain(PeerError(None, None, what, timed_out=True)) from error
        except RuntimeError as error:
            missing = let_down(error)
            if missing is None:
                raise
            raise self.explain(missing) from error

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
                    self._groups.append(Connection(group._get_backend(torch.device(kind)), 0, {}))

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
            self._groups.append(connection)
            self._together = Together(connection, self.ranks.index(self.rank), len(self.ranks))
        return self._together

    def cut(self) -> None:
        """Makes every wait of this rank and for it fail, beside the pipeline's own."""
        for connection in self._groups:
            connection.cut(beside=True)
