"""What the data-parallel replicas of a stage tell each other: few numbers, once a step.

Each replica waits for the others no longer than its pipeline waits for anything. One that waits in vain asks
what happened there, because the replica that it waits for may only wait for a rank of its own pipeline.
"""

from __future__ import annotations

from torch import Tensor
from torch import distributed as dist

from gpipe_bench.pipeline.errors import ActionError, PeerError, StoreError, summary
from gpipe_bench.pipeline.ranks.failures.failure import Blackboard
from gpipe_bench.pipeline.ranks.messages.connection import Connection, backend
from gpipe_bench.pipeline.ranks.store import Store
from gpipe_bench.pipeline.ranks.together import Together


class Replicas:
    """The processes of `group`, which run the same stage of one pipeline each."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._rank, self._size, self._timeout_s = dist.get_rank(group), dist.get_world_size(group), timeout_s
        self._processes = dist.get_process_group_ranks(group)
        self._store = Store(group)
        self._store.connect(timeout_s)
        self._blackboard = Blackboard(self._store, self._rank, range(self._size), alone=False)
        self._together: Together | None = None

    def gather(self, mine: Tensor) -> list[Tensor]:
        """The tensor of every replica, in the order of their ranks; all must call. `RuntimeError` says which
        process is missing and why.
        """
        try:
            if self._together is None:
                self._together = self._connect()
            return [found.to(mine.device) for found in self._together.gather(mine.cpu())]
        except StoreError as error:
            failure = self._blackboard.explain(PeerError(None, None, str(error), timed_out=False))
        except PeerError as error:
            failure = self._blackboard.explain(error)
        who = f"process {self._processes[failure.rank]}" if failure.rank is not None else "another process"
        raise RuntimeError(f"{who}, which runs the same stage of another replica, failed: {failure.cause}")

    def tell(self, error: BaseException) -> None:
        """Lets the other replicas know why this process will not come any more."""
        self._blackboard.report(ActionError(None, summary(error), self._rank))

    def _connect(self) -> Together:
        ways = backend(
            self._store, self._rank, self._size, name="replicas", accelerated=False, timeout_s=self._timeout_s
        )
        return Together(Connection(ways, 0, {}), self._rank, self._size)
