"""One way to train a model: the grid of accelerators, the schedule, the cut and the recomputation; and the
prediction of its step.

A `Way` is all of it but the cut. A `Candidate` has that, too: all that is needed to run it. What follows from
it is its `Prediction`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from math import isfinite
from typing import Any

from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.pipeline.plan.schedule import Kind, Remat, Schedule

LEVELS = (2, 3)
"""ZeRO levels of `fsdp`: 2 shards gradients and optimizer state, 3 parameters too; 0 stands for none."""
WRAPPED = ("selective", "blocks")
"""Recomputation by torch's checkpoint around every block: all but the products, or everything."""
REMATS = ("never", "selective", "except_last", "always", "blocks")
"""Kinds of recomputation, usually the fastest first. The schedule applies those that are not in WRAPPED to
a whole stage; they begin while the stage waits for the gradient."""


@dataclass(frozen=True, slots=True, order=True)
class Grid:
    """Accelerators by what they do.

    Args:
        pp: workers of the pipeline
        dp: replicas that hold everything
        fsdp: replicas that share out what `fsdp_level` says; they count as replicas too
        fsdp_level: one of LEVELS, or 0 exactly where `fsdp` is 1
        tp: accelerators that compute one stage together
    """

    pp: int
    dp: int = 1
    fsdp: int = 1
    fsdp_level: int = 0
    tp: int = 1

    def __post_init__(self) -> None:
        if self.fsdp_level not in (0, *LEVELS) or (self.fsdp == 1) != (self.fsdp_level == 0):
            raise ValueError(
                f"fsdp {self.fsdp} with fsdp_level {self.fsdp_level}; give level 0 for one rank, else 2 or 3"
            )

    @property
    def replicas(self) -> int:
        return self.dp * self.fsdp

    @property
    def accelerators(self) -> int:
        return self.pp * self.replicas * self.tp

    def __str__(self) -> str:
        sharded = f"fsdp {self.fsdp} (ZeRO-{self.fsdp_level})" if self.fsdp > 1 else ""
        parts = [f"pp {self.pp}", f"dp {self.dp}" * (self.dp > 1), sharded, f"tp {self.tp}" * (self.tp > 1)]
        return " x ".join(part for part in parts if part)


def by_schedule(remat: Sequence[str]) -> tuple[str, ...]:
    """What the schedule recomputes on each stage; "never" where checkpoints in layers do it."""
    return tuple("never" if each in WRAPPED else each for each in remat)


@cache
def splits(name: str) -> bool:
    """Whether a schedule has I and W."""
    return any(action.kind is Kind.W for action in named(name, 2, 4))


@dataclass(frozen=True, slots=True)
class Way:
    """All of a candidate but its cut.

    Args:
        grid: of the accelerators
        schedule: a name of `pipeline.plan.named.NAMED`
        stages_per_worker: v
        num_microbatches: M, of each replica
        microbatch_size: examples
    """

    grid: Grid
    schedule: str
    stages_per_worker: int
    num_microbatches: int
    microbatch_size: int

    @property
    def num_stages(self) -> int:
        """K, the number of stages."""
        return self.grid.pp * self.stages_per_worker

    @property
    def splits(self) -> bool:
        """Whether the schedule splits backwards into I and W."""
        return splits(self.schedule)

    def candidate(self, cut: Partition, remat: tuple[str, ...]) -> Candidate:
        """Completes the way with a cut and its recomputation."""
        return Candidate(**{name: getattr(self, name) for name in Way.__slots__}, cut=cut, remat=remat)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate(Way):
    """A way to train with its cut; ValueError for a cut that is none or has another number of stages.

    Args:
        cut: the layers of each stage, all of them in their order
        remat: one of REMATS for each stage
    """

    cut: Partition
    remat: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.cut) != self.num_stages or len(self.remat) != self.num_stages:
            raise ValueError(
                f"{self.num_stages} stages need as many: the cut has {len(self.cut)}, remat {len(self.remat)}"
            )
        ends = [0, *(stage.stop for stage in self.cut)]
        if any(a >= b for a, b in pairwise(ends)) or [stage.start for stage in self.cut] != ends[:-1]:
            raise ValueError(f"the cut is {self.cut}; stages hold a layer or more each, in order, no gaps")

    def rows(self, num_microbatches: int | None = None, *, recomputes: bool = True) -> Schedule:
        """Returns the schedule, also for another number of micro-batches. ValueError if it does not exist."""
        again: Remat = by_schedule(self.remat) if recomputes else "never"
        number, each = num_microbatches or self.num_microbatches, self.stages_per_worker
        return named(self.schedule, self.grid.pp, number, remat=again, stages_per_worker=each)

    def describe(self) -> dict[str, Any]:
        """Returns the candidate as plain data; the cut is given as numbers of layers."""
        facts = asdict(self)
        grid = facts.pop("grid")
        facts |= {"cut": [len(stage) for stage in self.cut], "remat": list(self.remat)}
        return facts | {"num_workers": grid.pop("pp"), **grid}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step of a candidate, predicted; ValueError for seconds that are no range, or not one peak per worker.

    Args:
        candidate: what is run
        batch_size: examples of a mini-batch, over all replicas
        step_s: seconds of one step, with `low_s` and `high_s` around it
        peak_bytes: most bytes that an accelerator of each worker of the pipeline holds
        peak_when: the action of that peak, such as "2B0", or "optimizer"
        parts_s: where the step's time goes, in seconds of the step by reason; they add up to `step_s`
        provenance: by "layers", "links", "memory" and others: how it was found, and on what
    """

    candidate: Candidate
    batch_size: int
    step_s: float
    low_s: float
    high_s: float
    peak_bytes: tuple[int, ...]
    peak_when: tuple[str, ...]
    parts_s: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (0 < self.low_s <= self.step_s <= self.high_s and isfinite(self.high_s)):
            raise ValueError(f"a step of {self.step_s} s, from {self.low_s} to {self.high_s}, is no range")
        if not len(self.peak_bytes) == len(self.peak_when) == self.candidate.grid.pp:
            numbers = f"{len(self.peak_bytes)} peaks at {len(self.peak_when)} actions"
            raise ValueError(
                f"{numbers} for {self.candidate.grid.pp} workers; give one of each for every worker"
            )

    @property
    def peak(self) -> int:
        """Bytes of the fullest accelerator."""
        return max(self.peak_bytes)

    @property
    def fullest(self) -> int:
        """The worker with the highest peak, the first of equal ones."""
        return self.peak_bytes.index(self.peak)

    @property
    def examples_per_s(self) -> float:
        return self.batch_size / self.step_s

    def describe(self) -> dict[str, Any]:
        """Returns the prediction as plain data."""
        facts = asdict(self)
        del facts["candidate"]
        return self.candidate.describe() | facts | {"examples_per_s": self.examples_per_s}
