"""What the replicas of a pipeline do together in a step, as one process takes part in it.

Each of them takes a share of the batch. What a micro-batch counts for is its share of the examples of all,
and what is given back is the mean over all: of the loss, and of the gradients of each stage, which a
`Reduction` each joins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.journal import Journal
from gpipe_bench.pipeline.ranks.mesh.collectives import OverBackend
from gpipe_bench.pipeline.ranks.mesh.division import Divided
from gpipe_bench.pipeline.ranks.mesh.reductions import Buckets
from gpipe_bench.pipeline.ranks.mesh.shares import GlobalShares, mean_of_all
from gpipe_bench.pipeline.ranks.replicas import Replicas
from gpipe_bench.pipeline.stage.parts import local
from gpipe_bench.pipeline.stage.reduced import Reduction
from gpipe_bench.pipeline.stage.stage import Stage


class Joint:
    """This process's part.

    Args:
        replicas: who else holds these stages; None where nobody does, and only layers are divided.
        device: of the stages.
        bucket_bytes: gradients that leave together.
        divided: how the parameters of the stages are divided over processes; None where none are.
    """

    def __init__(
        self,
        replicas: Replicas | None,
        device: torch.device,
        bucket_bytes: int,
        divided: Divided | None = None,
    ) -> None:
        self._replicas, self._bucket_bytes, self._divided = replicas, bucket_bytes, divided
        self._reductions: dict[int, Reduction] = {}
        self.journal = Journal(device)
        if replicas is None:
            return
        accelerated = devices.is_accelerator(device)
        sums = OverBackend(replicas, replicas.connect("sums", accelerated=accelerated))
        self._collectives = self._of_hosts = sums
        if accelerated:
            self._of_hosts = OverBackend(replicas, replicas.connect("sums of hosts", accelerated=False))

    def share_values(self, model: nn.Module) -> None:
        """All replicas begin with the first one's parameters and buffers."""
        if self._replicas is None:
            return
        with torch.no_grad():
            self._collectives.take_over([*map(local, (*model.parameters(), *model.buffers()))])

    def reduction(self, stage: Stage) -> Reduction:
        """What joins the gradients of a stage of this process."""
        found: Reduction | None = None
        if self._divided is not None:
            found = self._divided.reduction(stage, self._sums)
        elif self._replicas is not None:
            found = self._sums(stage)
        assert found is not None
        self._reductions[stage.index] = found
        return found

    def _sums(self, stage: Stage) -> Reduction | None:
        if self._replicas is None:
            return None
        return Buckets(stage, self._collectives, self._replicas, self.journal, self._bucket_bytes)

    def begin(self, lengths: Sequence[int], *, sync: bool, has_loss: bool) -> Sequence[float]:
        """A training step with micro-batches of `lengths` examples begins; what each of them counts for, on
        the process that has the loss.
        """
        for reduction in self._reductions.values():
            reduction.begin(sync=sync)
        if self._replicas is None:
            return tuple([length / sum(lengths) for length in lengths])
        return GlobalShares(lengths, self._of_hosts) if has_loss else ()

    def finish(self, loss: Tensor) -> Tensor:
        """All actions of a training step are taken: waits for the gradients; the loss over all replicas."""
        for reduction in self._reductions.values():
            reduction.finish()
        return loss if self._replicas is None else mean_of_all(loss, self._collectives)

    def evaluated(self) -> None:
        """A pass of forwards alone is over."""
        for reduction in self._reductions.values():
            reduction.evaluated()

    def reset(self) -> None:
        """Drops what is held of the step, after an error."""
        for reduction in self._reductions.values():
            reduction.reset()
