"""What the replicas of a stage tell each other, and how long they wait for it.

Each replica waits for the others no longer than its pipeline waits for anything. One that waits in vain asks
what happened where all of the job do (`failures.job`), because the replica that it waits for may only wait
for a rank of its own pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch import distributed as dist

from gpipe_bench.pipeline.errors import PeerError, StoreError
from gpipe_bench.pipeline.ranks.failures.collective import missing
from gpipe_bench.pipeline.ranks.failures.job import Job
from gpipe_bench.pipeline.ranks.messages.connection import Connection, backend
from gpipe_bench.pipeline.ranks.store import Store
from gpipe_bench.pipeline.ranks.together import Together

T = TypeVar("T")


class Replicas:
    """The processes of `group`, which run the same stage of one pipeline each; a failure of `job` cuts what
    connects them.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, job: Job) -> None:
        self.rank, self.size, self._timeout_s = dist.get_rank(group), dist.get_world_size(group), timeout_s
        self._processes = dist.get_process_group_ranks(group)
        self._store, self._job = Store(group), job
        self._store.connect(timeout_s)
        self._together: Together | None = None
        self._connections: list[Connection] = []

    def gather(self, mine: Tensor) -> list[Tensor]:
        """The tensor of every replica, in the order of their ranks; all must call. Errors as in `bounded`."""
        return [found.to(mine.device) for found in self.share(mine.cpu())]

    def share(self, mine: T) -> list[T]:
        """What every replica brings, a picklable object, in the order of their ranks; all must call. Errors
        as in `bounded`.
        """

        def exchange() -> list[T]:
            if self._together is None:
                connection = Connection(self._connect("replicas", accelerated=False), 0, {})
                self._together = Together(connection, self.rank, self.size)
            return self._together.gather(mine)

        return self.bounded(exchange)

    def connect(self, name: str, *, accelerated: bool, place: tuple[int, int] | None = None) -> Any:
        """A backend of torch's between all replicas, for collectives, which fail after the timeout; all must
        call. Or between some, who say the same name: `place` is then this one's rank among how many. Errors
        as in `bounded`.
        """
        return self.bounded(lambda: self._connect(name, accelerated=accelerated, place=place))

    def bounded(self, call: Callable[[], T]) -> T:
        """What `call` returns, which waits for other replicas as long as their connections allow.

        `PeerError` if one is missing, with its number in the job where that is known; `StoreError` as the
        store raises it.
        """
        try:
            return call()
        except PeerError as error:
            raise error.numbered(self._processes) from error
        except StoreError:
            raise
        except RuntimeError as error:
            raise missing(error) from error

    def close(self) -> None:
        """Ends the connections in good order."""
        for connection in self._connections:
            connection.close()

    def _connect(self, name: str, *, accelerated: bool, place: tuple[int, int] | None = None) -> Any:
        rank, size = place or (self.rank, self.size)
        ways = backend(self._store, rank, size, name=name, accelerated=accelerated, timeout_s=self._timeout_s)
        self._connections.append(Connection(ways, 0, {}))
        self._job.cuts(self._connections[-1])
        return ways
