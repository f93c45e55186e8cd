"""One rank's ties to the others: its connections, how it learns of a failure, and how all of it ends.

A pipeline ends in one of three ways. A failure closes the connections of every rank at once. Closing it in
good order waits for the device first, because a message that was sent leaves an accelerator only when its
receiver's kernel is there, and shutting down earlier would take it back. And one that is dropped, or whose
process ends, is closed in good order too.

On a grid a failure ends the ranks of all pipelines (`failures.job`), and every rank looks out for one beside
everything else, as all do on accelerators.
"""

from __future__ import annotations

import torch

from gpipe_bench.pipeline.errors import ActionError, PeerError, StoreError
from gpipe_bench.pipeline.plan.schedule import Action
from gpipe_bench.pipeline.ranks.connecting.network import Network
from gpipe_bench.pipeline.ranks.failures.collective import let_down
from gpipe_bench.pipeline.ranks.failures.job import SILENCE_S, Job
from gpipe_bench.pipeline.ranks.shared_memory import Neighbour
from gpipe_bench.pipeline.ranks.store import Store
from gpipe_bench.pipeline.ranks.wire import NCCL_TYPES, Connection


class Ties:
    """The ties of the rank of `network`. The first connection is the one that the host reads.

    `job` are those that fail together, which have met; by default the ranks of the network.
    """

    def __init__(
        self, network: Network, device: torch.device, *, timeout_s: float, job: Job | None = None
    ) -> None:
        self.network, self.device, self.timeout_s = network, device, timeout_s
        self.is_accelerated = network.is_accelerated(device)
        self.store: Store = network.store()
        self.job = job or Job(
            self.store, network.rank, range(network.size), now=network.now, sleep=network.sleep
        )
        self._blackboard = self.job.blackboard
        self._connections: list[Connection] = []
        self._failed: ActionError | None = None
        self._closed = False
        self.noticed = False  # a failure elsewhere, by the lookout
        self.job.tells(self.notice)

    def connect(self, name: str, near: dict[int, Neighbour], *, accelerated: bool = False) -> Connection:
        """One more connection between all ranks; all must call."""
        ways = self.network.backend(self.store, name, accelerated=accelerated, timeout_s=self.timeout_s)
        types = NCCL_TYPES if accelerated else None
        self._connections.append(Connection(ways, len(self._connections), near, types))
        return self._connections[-1]

    @property
    def shared_bytes(self) -> int:
        """Of the buffers in memory shared with other processes; the first connection has all neighbours."""
        return self._connections[0].shared_bytes if self._connections else 0

    def look_out(self) -> None:
        """Watches for failures elsewhere from now on, on accelerators; on a grid that has begun before."""
        if self.is_accelerated and not self.job.is_grid:
            self.job.look_out(self.timeout_s, min(self.timeout_s, SILENCE_S), self.network.watch)

    def synchronize(self) -> None:
        """Waits until the device has done all it was given."""
        if self.is_accelerated:
            self.network.synchronize(self.device)

    def notice(self) -> None:
        """Another rank has failed: releases the device from waiting for it. What it receives from here on is
        garbage, so this step raises when it ends, or else whatever is called next.
        """
        self.noticed = True
        # The host does not wait for an accelerator's messages; for the first connection it does, and the rank
        # that it waits for closes that.
        for connection in self._connections[1 if self.is_accelerated else 0 :]:
            connection.cut(beside=True)

    def refuse_after_failure(self) -> None:
        if self._failed is not None:
            raise RuntimeError(
                f"this pipeline has failed before ({self._failed}); build a new one on every rank"
            )
        if self._closed:
            raise RuntimeError("this pipeline is closed; build a new one on every rank")

    def refuse_after_notice(self) -> None:
        if self.noticed:
            raise PeerError(None, None, "another rank has failed", timed_out=False)

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        """Ends everything because of an error here or elsewhere; what happened, as far as anybody knows.

        What is closed has ended: what is asked of it afterwards concerns nobody else.
        """
        if self._closed:
            return self.job.failure(action, error)
        if self._failed is None:
            self.job.look_no_more()
            missing = self.let_down(error)
            if missing is not None:
                self._failed = self.job.explain(missing)
            else:
                self._failed = self._blackboard.report(self.job.failure(action, error))
            for connection in self._connections:
                connection.cut()
            self.job.cut()
            self._blackboard.stay(self._failed)
        return self._failed

    def let_down(self, error: BaseException) -> PeerError | StoreError | None:
        """What an error says of other ranks: that one is missing; None if it is this rank's own."""
        if isinstance(error, PeerError | StoreError):
            return error
        return let_down(error) if self.job.is_grid else None

    def leave(self) -> None:
        """In a process that was forked: the ties stay its parent's."""
        self._closed = True
        for connection in self._connections:
            connection.leave()

    def close(self) -> None:
        """Waits until everything sent is gone, takes leave of the other ranks and shuts down; once."""
        if self._closed or self._failed is not None:
            return
        self._closed = True
        if not self.noticed:
            self.synchronize()
        self.job.leave()
        for connection in self._connections:
            if self.noticed:
                connection.cut()  # most of them once more
            else:
                connection.close()
