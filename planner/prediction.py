"""What a candidate takes: seconds with a range, bytes of every worker, where each number comes from.

Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from gpipe_bench.planner.candidate import Candidate


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step of a candidate, predicted.

    Args:
        candidate: what is run
        batch_size: examples of a mini-batch, over all replicas
        step_s: seconds of one step, with `low_s` and `high_s` around it
        peak_bytes: most bytes that an accelerator of each worker of the pipeline holds
        peak_when: the action of that peak, such as "2B0", or "optimizer"
        parts_s: where the step's time goes, in seconds of the step by reason; they add up to `step_s`
        provenance: by "layers", "links", "memory" and others: how it was found, and on what

    Raises:
        ValueError: seconds that are no range, or not one peak for each worker.
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
            raise ValueError(
                f"a step of {self.step_s} s, from {self.low_s} to {self.high_s}: give low <= step <= high, "
                "all finite and above 0"
            )
        if not len(self.peak_bytes) == len(self.peak_when) == self.candidate.num_workers:
            raise ValueError(
                f"{len(self.peak_bytes)} peaks at {len(self.peak_when)} actions for "
                f"{self.candidate.num_workers} workers; give one of each for every worker"
            )

    @property
    def peak(self) -> int:
        """Bytes of the fullest accelerator."""
        return max(self.peak_bytes)

    @property
    def fullest(self) -> int:
        """The worker of that accelerator, the first of equal ones."""
        return self.peak_bytes.index(self.peak)

    @property
    def examples_per_s(self) -> float:
        return self.batch_size / self.step_s

    def describe(self) -> dict[str, Any]:
        """As plain data."""
        return {
            **self.candidate.describe(),
            "batch_size": self.batch_size,
            "step_s": self.step_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "examples_per_s": self.examples_per_s,
            "peak_bytes": list(self.peak_bytes),
            "peak_when": list(self.peak_when),
            "parts_s": dict(self.parts_s),
            "provenance": dict(self.provenance),
        }
