"""What the replicas of a stage tell each other, and how long they wait for it.

Each replica waits for the others no longer than its pipeline waits for anything. One that waits in vain asks
what happened there, because the replica that it waits for may only wait for a rank of its own pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch import distributed as dist

from gpipe_bench.pipeline.errors import ActionError, PeerError, StoreError, summary
from gpipe_bench.pipeline.ranks.failures.failure import Blackboard
from gpipe_bench.pipeline.ranks.messages.connection import Connection, backend
from gpipe_bench.pipeline.ranks.store import Store
from gpipe_bench.pipeline.ranks.together import Together

T = TypeVar("T")


class Replicas:
    """The processes of `group`, which run the same stage of one pipeline each."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.rank, self.size, self._timeout_s = dist.get_rank(group), dist.get_world_size(group), timeout_s
        self._processes = dist.get_process_group_ranks(group)
        self._store = Store(group)
        self._store.connect(timeout_s)
        self._blackboard = Blackboard(self._store, self.rank, range(self.size), alone=False)
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

        `RuntimeError` says which process is missing and why.
        """
        try:
            return call()
        except StoreError as error:
            failure = self._blackboard.explain(PeerError(None, None, str(error), timed_out=False))
        except PeerError as error:
            failure = self._blackboard.explain(error)
        except RuntimeError as error:  # a collective's, which does not say for whom it waited
            text = str(error).strip().splitlines()[0].partition("] ")[2] or str(error)
            timed_out = "timed out" in text.lower()
            failure = self._blackboard.explain(PeerError(None, None, text, timed_out=timed_out))
        who = f"process {self._processes[failure.rank]}" if failure.rank is not None else "another process"
        raise RuntimeError(f"{who}, which runs the same stage of another replica, failed: {failure.cause}")

    def tell(self, error: BaseException) -> None:
        """Lets the other replicas know why this process will not come any more, and lets none wait for it."""
        self._blackboard.report(ActionError(None, summary(error), self.rank))
        for connection in self._connections:
            connection.cut()

    def close(self) -> None:
        """Ends the connections in good order."""
        for connection in self._connections:
            connection.close()

    def _connect(self, name: str, *, accelerated: bool, place: tuple[int, int] | None = None) -> Any:
        rank, size = place or (self.rank, self.size)
        ways = backend(self._store, rank, size, name=name, accelerated=accelerated, timeout_s=self._timeout_s)
        self._connections.append(Connection(ways, 0, {}))
        return ways
