"""One way to train: the grid of accelerators, the pipeline's stages and schedule, what is recomputed.

A candidate is complete: everything that is needed to run it, or to say what it takes, and nothing that
follows from it. Only the standard library and `pipeline.plan` are imported.

    dp 2 x fsdp 1 x tp 1 x 4 workers, 2 stages each, M = 8, interleaved      8 accelerators, 8 stages
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.pipeline.plan.schedules.known import NAMED

FSDP_LEVELS = (0, 2, 3)
"""What the ranks of `fsdp` share out: nothing; gradients and optimizer state (ZeRO-2); parameters too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A way to train.

    Args:
        cut: the layers of each stage, all of them in their order
        schedule: a name of `pipeline.plan.schedules.known.NAMED`
        num_microbatches: M, of each replica
        remat: one of REMAT_MODES for each stage
        num_workers: of the pipeline, K where each holds one stage
        stages_per_worker: v
        dp: replicas that hold everything
        fsdp: replicas that share out what `fsdp_level` says; they count as replicas too
        fsdp_level: one of FSDP_LEVELS, 0 exactly where `fsdp` is 1
        tp: accelerators that compute one stage together

    Raises:
        ValueError: a number below 1, a cut that is none or has another number of stages, an unknown schedule
            or one with another number of stages per worker, an unknown `remat` or level.
    """

    cut: Partition
    schedule: str
    num_microbatches: int
    remat: tuple[str, ...]
    num_workers: int
    stages_per_worker: int = 1
    dp: int = 1
    fsdp: int = 1
    fsdp_level: int = 0
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("num_microbatches", "num_workers", "stages_per_worker", "dp", "fsdp", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.schedule not in NAMED:
            raise ValueError(f"schedule is {self.schedule!r}; choose one of {', '.join(NAMED)}")
        fixed = NAMED[self.schedule].stages_per_worker
        if fixed not in (None, self.stages_per_worker):
            raise ValueError(
                f"schedule {self.schedule!r} has {fixed} stages per worker, not {self.stages_per_worker}"
            )
        if len(self.cut) != self.num_stages or len(self.remat) != self.num_stages:
            raise ValueError(
                f"{self.num_workers} workers with {self.stages_per_worker} stages each need as many "
                f"stages: the cut has {len(self.cut)}, remat {len(self.remat)}"
            )
        ends = [0, *(stage.stop for stage in self.cut)]
        if any(a >= b for a, b in pairwise(ends)) or [stage.start for stage in self.cut] != ends[:-1]:
            raise ValueError(f"the cut is {self.cut}; stages hold a layer or more each, in order, no gaps")
        for each in self.remat:
            if each not in REMAT_MODES:
                raise ValueError(f"remat is {each!r}; choose one of {', '.join(REMAT_MODES)}")
        if self.fsdp_level not in FSDP_LEVELS or (self.fsdp == 1) != (self.fsdp_level == 0):
            raise ValueError(
                f"fsdp {self.fsdp} with fsdp_level {self.fsdp_level}; give level 0 for one rank, 2 or 3 for "
                "more"
            )

    @property
    def num_stages(self) -> int:
        """K."""
        return self.num_workers * self.stages_per_worker

    @property
    def replicas(self) -> int:
        """Shares of a mini-batch."""
        return self.dp * self.fsdp

    @property
    def accelerators(self) -> int:
        """All that it needs."""
        return self.replicas * self.tp * self.num_workers

    def microbatch_size(self, batch_size: int) -> int:
        """Examples of a micro-batch. `ValueError` for a mini-batch that does not divide into equal ones."""
        size, rest = divmod(batch_size, self.replicas * self.num_microbatches)
        if rest:
            raise ValueError(
                f"a mini-batch of {batch_size} does not divide into {self.replicas} replicas of "
                f"{self.num_microbatches} micro-batches; give a multiple of "
                f"{self.replicas * self.num_microbatches}"
            )
        return size

    def describe(self) -> dict[str, Any]:
        """As plain data, the cut by the numbers of its layers."""
        facts = asdict(self) | {"remat": list(self.remat)}
        facts["cut"] = [len(stage) for stage in self.cut]
        return facts
