"""torch's schedules of workers with several stages, and ours that run the very same rows.

They work on the same layers, cut at the same places. torch.distributed.pipelining wants a module per stage
and is told nothing more than which stages this process has.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.engines.setup import LossFn
from gpipe_bench.pipeline.plan.drawn.table import from_csv
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.pipeline.plan.schedule import Schedule

SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved zero bubble": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
}
"""Our name -> torch's class. The third has no name here: its rows are read from torch."""


class TorchSchedule:
    """One of torch's schedules in this process; layers are tensors in, tensors out."""

    def __init__(
        self, name: str, layers: Sequence[nn.Module], cut: Partition, place: Sequence[int], number: int
    ) -> None:
        from torch.distributed import pipelining

        rank, last = dist.get_rank(), len(cut) - 1
        mine = [stage for stage, worker in enumerate(place) if worker == rank]
        stages = [
            pipelining.PipelineStage(
                nn.Sequential(*(layers[index] for index in cut[stage])),
                stage,
                len(cut),
                torch.device("cpu"),
                group=dist.group.WORLD,
            )
            for stage in mine
        ]
        self.is_first, self.is_last = 0 in mine, last in mine
        self.loss_fn: LossFn | None = None
        make = getattr(pipelining, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            single = name == "Schedule1F1B"
            self.running: Any = make(stages[0] if single else stages, number, loss_fn=self._loss)

    def _loss(self, output: Any, target: Any) -> Tensor:
        assert self.loss_fn is not None, "step() has set it"
        return self.loss_fn(output, target)

    def step(self, batch: Tensor, target: Tensor, loss_fn: LossFn) -> None:
        """One mini-batch; gradients of its mean loss are added to `.grad`."""
        self.loss_fn = loss_fn
        inputs = (batch,) if self.is_first else ()
        if self.is_last:
            self.running.step(*inputs, target=target, losses=[], return_outputs=False)
        else:
            self.running.step(*inputs, return_outputs=False)

    def rows(self, name: str) -> Schedule:
        """Its rows as a schedule of ours."""
        order = self.running.pipeline_order
        return from_csv(
            "\n".join(
                ",".join("" if action is None else str(action) for action in order[rank])
                for rank in sorted(order)
            ),
            name,
        )
