"""What a search answers with."""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_bench.pipeline.memory.stages.peaks import StageMemory
from gpipe_bench.planner.candidate import Candidate


@dataclass(frozen=True)
class Found:
    """A way with its best cut, the seconds of a step, and the bytes of each worker."""

    candidate: Candidate
    step_s: float
    bound_s: float
    memory: tuple[StageMemory, ...]

    @property
    def peak(self) -> int:
        return max(each.peak for each in self.memory)

    @property
    def is_best_cut(self) -> bool:
        """Whether it is known that no other cut of this way is faster."""
        return self.bound_s >= self.step_s
