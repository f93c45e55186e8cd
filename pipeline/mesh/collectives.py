"""What the replicas of a stage send each other in a step: sums, begun early and waited for at the end.

Every replica begins the same collectives in the same order; which ones there are follows from the schedule
and the parameters alone. They go by connections of their own, beside the messages of the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe_bench.pipeline.mesh.flat import Room
from gpipe_bench.pipeline.ranks.messages.connection import Work
from gpipe_bench.pipeline.ranks.replicas import Replicas

_PIECE_BYTES = 25 * 2**20


class Collectives(Protocol):
    """Collectives between `size` replicas, of which this process is number `rank`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def sum(self, numbers: Tensor) -> Work:
        """Begins to make `numbers`, a contiguous tensor, the sum over the replicas, the same bits on all."""

    def gather(self, numbers: Tensor) -> tuple[Work, list[Tensor]]:
        """Begins to collect the tensors of all replicas, in their order."""

    def wait(self, work: Work) -> None:
        """Until it may be used; on an accelerator by what is enqueued afterwards."""


@dataclass(frozen=True)
class OverBackend:
    """Collectives of a backend of torch's between `replicas`."""

    replicas: Replicas
    backend: Any

    @property
    def rank(self) -> int:
        return self.replicas.rank

    @property
    def size(self) -> int:
        return self.replicas.size

    def sum(self, numbers: Tensor) -> Work:
        return self.replicas.bounded(lambda: self.backend.allreduce([numbers]))  # type: ignore[no-any-return]

    def gather(self, numbers: Tensor) -> tuple[Work, list[Tensor]]:
        found = [torch.empty_like(numbers) for _ in range(self.size)]
        return self.replicas.bounded(lambda: self.backend.allgather([found], [numbers])), found

    def wait(self, work: Work) -> None:
        self.replicas.bounded(work.wait)

    def take_over(self, tensors: Sequence[Tensor]) -> None:
        """Gives all replicas the values of the first one's tensors, in place; waits for them."""
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel() and not tensor.is_meta:
                kinds.setdefault(tensor.dtype, []).append(tensor)
        for alike in kinds.values():
            for some in _pieces(alike):
                flat = Room(some).empty()
                for view, tensor in zip(flat.views, some, strict=True):
                    view.copy_(tensor)
                broadcast = partial(self.backend.broadcast, [flat.memory.view(torch.uint8)], _from_first())
                self.wait(self.replicas.bounded(broadcast))
                for view, tensor in zip(flat.views, some, strict=True):
                    tensor.copy_(view)


def _from_first() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


def _pieces(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    found: list[list[Tensor]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        if num_bytes > _PIECE_BYTES:
            found.append([])
            num_bytes = 0
        found[-1].append(tensor)
        num_bytes += tensor.nbytes
    return found
