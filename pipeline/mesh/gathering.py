"""How the parts of parameters and gradients travel: the collectives that FSDP2 asks for.

torch would use the process group of the mesh, which waits for half an hour if a process has failed. Here they
go by connections of the pipeline's own, which wait no longer than the pipeline does and are cut when a
replica fails, so that the others learn what happened. Only with them a sum of gradients can go on while the
backward does on a CPU, too: it is waited for when the step is over, unless somebody reads it before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter

from gpipe_bench.pipeline.mesh.collectives import Replicas
from gpipe_bench.pipeline.mesh.grid import Grid


class Holders:
    """The processes that hold the parts of a stage, and those that hold copies of this one's.

    Args:
        replicas: all of them.
        grid: this process's place in the job.
        accelerated: whether the tensors are on accelerators.
    """

    def __init__(self, replicas: Replicas, grid: Grid, *, accelerated: bool) -> None:
        self.replicas, self.accelerated = replicas, accelerated
        part, copy = grid.index("fsdp"), grid.index("dp")
        self.copies = grid.size("dp")
        self._parts = replicas.connect(
            f"parts of copy {copy}", accelerated=accelerated, place=(part, grid.size("fsdp"))
        )
        self._copies = None
        if self.copies > 1:
            self._copies = replicas.connect(
                f"copies of part {part}", accelerated=accelerated, place=(copy, self.copies)
            )

    def gather(self, whole: Tensor, mine: Tensor) -> Any:
        """Begins to make `whole` of the parts of all holders, end to end."""
        return self.replicas.bounded(lambda: self._parts._allgather_base(whole, mine))

    def scatter(self, mine: Tensor, whole: Tensor, op: Any) -> Any:
        """Begins to make `mine` of this holder's part of what `whole` is on all holders together."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        return self.replicas.bounded(lambda: self._parts._reduce_scatter_base(mine, whole, options))

    def sum_copies(self, mine: Tensor) -> None:
        """Makes `mine` the sum over its copies."""
        copies = self._copies
        assert copies is not None
        self.wait(self.replicas.bounded(lambda: copies.allreduce([mine])))

    def wait(self, work: Any) -> None:
        """Until it is done, or, on an accelerator, before what is enqueued next; errors as in `Replicas`."""
        self.replicas.bounded(work.wait)


class _Memory(Comm):
    """Where messages are put together."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Memory, AllGather):
    """Parameters from the holders of their parts."""

    def __init__(self, holders: Holders) -> None:
        self._holders = holders

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work = self._holders.gather(output_tensor, input_tensor)
        if async_op:
            return _Awaited(self._holders, work)
        self._holders.wait(work)
        return None


class _Awaited(dist.Work):
    """A collective that torch's own code will wait for."""

    def __init__(self, holders: Holders, work: Any) -> None:
        super().__init__()
        self._holders, self._work = holders, work

    def wait(self, timeout: Any = None) -> bool:
        self._holders.wait(self._work)
        return True


class Scatter(_Memory, ReduceScatter):
    """Gradients to the holders of their parts.

    `later` says that nobody reads the sums before `finish`: they are no addition to earlier ones.
    """

    def __init__(self, holders: Holders) -> None:
        self._holders = holders
        self._under_way: list[tuple[Any, Tensor]] = []
        self.later = False

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        work = self._holders.scatter(output_tensor, input_tensor, op)
        if self.later:
            self._under_way.append((work, input_tensor))
        else:
            self._holders.wait(work)
        return None

    def finish(self) -> None:
        """Waits for what is under way."""
        under_way, self._under_way = self._under_way, []
        for work, _ in under_way:
            self._holders.wait(work)

    def forget(self) -> None:
        """Nobody will wait any more."""
        self._under_way = []
