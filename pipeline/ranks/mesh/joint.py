"""What the replicas of a pipeline do together in a step, as one process takes part in it.

Each of them takes a share of the batch. What a micro-batch counts for is its share of the examples of all,
and what is given back is the mean over all: of the loss, and of the gradients of each stage, which a
`Reduction` each joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.ranks.failures.job import Job
from gpipe_bench.pipeline.ranks.gather import check_equal
from gpipe_bench.pipeline.ranks.mesh.collectives import OverBackend
from gpipe_bench.pipeline.ranks.mesh.divided.division import Divided
from gpipe_bench.pipeline.ranks.mesh.grid import Grid
from gpipe_bench.pipeline.ranks.mesh.reductions import Buckets
from gpipe_bench.pipeline.ranks.mesh.shares import GlobalShares, MeanOfAll
from gpipe_bench.pipeline.ranks.mesh.tree import Tree
from gpipe_bench.pipeline.ranks.replicas import Replicas
from gpipe_bench.pipeline.stage.layers import LossFn
from gpipe_bench.pipeline.stage.reduced import Reduction
from gpipe_bench.pipeline.stage.stage import Stage
from gpipe_bench.pipeline.stage.tensors import is_divided, local
from gpipe_bench.pipeline.times.journal import Journal

REDUCTIONS = ("buckets", "tree")


class Joint:
    """This process's part.

    Args:
        replicas: who else holds these stages; None where nobody does.
        device: of the stages.
        by_tree: whether gradients are summed by a tree over all micro-batches, or in buckets.
        bucket_bytes: gradients that leave together.
        divided: how the parameters of the stages are divided over processes; None where none are.
    """

    def __init__(
        self,
        replicas: Replicas | None,
        device: torch.device,
        *,
        by_tree: bool,
        bucket_bytes: int | None,
        divided: Divided | None = None,
    ) -> None:
        self.replicas, self._by_tree, self._bucket_bytes = replicas, by_tree, bucket_bytes
        self._divided = divided
        self._stages: list[Stage] = []
        self._reductions: dict[int, Reduction] = {}
        self._alike: list[nn.Parameter] = []  # of the stages, with the values of the first replica
        self.journal = Journal(device)
        self._collectives = self._of_hosts = None
        if replicas is not None:
            accelerated = devices.is_accelerator(device)
            self._collectives = OverBackend(replicas, replicas.connect("sums", accelerated=accelerated))
            self._of_hosts = self._collectives
            if accelerated:
                self._of_hosts = OverBackend(replicas, replicas.connect("sums of hosts", accelerated=False))
            if divided is not None:
                divided.connect(replicas, accelerated=accelerated)

    def start_alike(self, plan: object, model: nn.Module) -> None:
        """All replicas begin with the first one's parameters and buffers.

        `ValueError` where a replica has other ones, or another plan of what is done with them.
        """
        if self.replicas is None or self._collectives is None:
            return
        values = [*model.named_parameters(), *model.named_buffers()]
        forms = [(name, value.shape, value.dtype) for name, value in values]
        check_equal(self.replicas.share((plan, forms, self._by_tree, self._bucket_bytes)), "replica")
        with torch.no_grad():
            self._collectives.take_over([local(value) for _, value in values])

    def _go_on_alike(self) -> None:
        """The same for parameters that have come since, be it in a layer or with a loss that is a module.

        `ValueError` where the replicas have other ones, or where two stages would both sum one.
        """
        now = [parameter for stage in self._stages for parameter in stage.parameters]
        if len(now) == len(self._alike) and all(map(is_, now, self._alike)):
            return
        received = [parameter for stage in self._stages for parameter in stage.receiving]
        if len(set(received)) < len(received):
            raise ValueError(
                "a parameter that belongs to one stage has come to another one too, or to loss_fn, since the "
                "pipeline was built, and both would sum its gradients over replicas; tie weights before the "
                "pipeline is built, and give loss_fn parameters of its own"
            )
        if self.replicas is not None and self._collectives is not None:
            known = set(self._alike)
            new = [p for p in dict.fromkeys(now) if p not in known and not is_divided(p)]
            forms = [(parameter.shape, parameter.dtype) for parameter in now]
            if any(theirs != forms for theirs in self.replicas.share(forms)):
                raise ValueError(
                    "the replicas of a stage have been given different parameters since the pipeline was "
                    "built; change the layers, and loss_fn, alike on all ranks"
                )
            with torch.no_grad():
                self._collectives.take_over([parameter.detach() for parameter in new])
        self._alike = now

    def reduction(self, stage: Stage) -> Reduction:
        """What joins the gradients of a stage of this process."""
        found: Reduction | None
        if self._divided is not None:
            found = self._divided.reduction(stage, self._buckets)
        elif self._by_tree:
            found = Tree(stage, self._collectives, self.journal, self._bucket_bytes)
        else:
            found = self._buckets(stage)
        assert found is not None
        self._stages.append(stage)
        self._alike += stage.parameters
        self._reductions[stage.index] = found
        return found

    def _buckets(self, stage: Stage) -> Reduction | None:
        if self.replicas is None or self._collectives is None:
            return None
        return Buckets(stage, self._collectives, self.replicas, self.journal, self._bucket_bytes)

    def agree(self, num_microbatches: int, *, training: bool, is_own: bool) -> int:
        """In how many micro-batches a step goes that a replica would take in so many: where all must have
        equally many, or all refuse fewer than their schedule has, as the smallest share of the batch allows.
        All replicas of the first stage call.
        """
        alike = self._divided is not None and self._divided.by_layer
        if self.replicas is None or not (alike or (training and is_own)):
            return num_microbatches
        return min(self.replicas.share(num_microbatches))

    def begin(
        self, lengths: Sequence[int], loss_fn: LossFn | None, *, sync: bool, has_loss: bool
    ) -> Sequence[float]:
        """A training step with micro-batches of `lengths` examples begins; what each of them counts for, on
        the process that has the loss.
        """
        for stage in self._stages:
            stage.look(loss_fn)
        self._go_on_alike()
        for reduction in self._reductions.values():
            reduction.begin(len(lengths), sync=sync)
        if self._of_hosts is not None:
            return GlobalShares(lengths, self._of_hosts) if has_loss else ()
        return tuple([length / sum(lengths) for length in lengths])

    def finish(self, loss: Tensor) -> Tensor:
        """All actions of a training step are taken: waits for the gradients; the loss over all replicas."""
        mean = None if self._collectives is None else MeanOfAll(loss, self._collectives)
        for reduction in self._reductions.values():
            reduction.finish()
        return loss if mean is None else mean.wait()

    def evaluated(self) -> None:
        """A pass of forwards alone is over."""
        for reduction in self._reductions.values():
            reduction.evaluated()

    def reset(self) -> None:
        """Drops what is held of the step, after an error."""
        for reduction in self._reductions.values():
            reduction.reset()


def joint_of(
    grid: Grid | None,
    job: Job | None,
    device: torch.device,
    timeout_s: float,
    reduction: str,
    bucket_bytes: int | None,
    divided: Divided | None = None,
) -> Joint | None:
    """What is done jointly on a grid, or because of the way to sum gradients; None if nothing is. `job` are
    the processes of the grid.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; choose one of {', '.join(REDUCTIONS)}")
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; a bucket holds at least one byte")
    group = None if grid is None else grid.batch_group
    by_tree = reduction == "tree"
    if group is None and not by_tree and divided is None:
        return None
    replicas = None if group is None or job is None else Replicas(group, timeout_s, job)
    return Joint(replicas, device, by_tree=by_tree, bucket_bytes=bucket_bytes, divided=divided)
