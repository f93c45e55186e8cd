"""Bubble rates of 1F1B that the zero-bubble paper published, with the profiled times that they follow from.

Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), print the seconds of a forward, of both halves
of a backward and of a message for each of their models on A100s, and the share of a worker's time that 1F1B
then leaves idle. Nothing is unknown, so the replay must come to the same rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.replay import replay
from gpipe_bench.pipeline.plan.schedule import SCHEDULES, Kind

TABLE = "zero-bubble"
ROW = "bubble rate of 1F1B"


@dataclass(frozen=True, slots=True)
class Profiled:
    """One of their settings; times in milliseconds of one micro-batch on one worker."""

    model: str
    num_stages: int
    num_microbatches: int
    forward_ms: float
    input_backward_ms: float
    weight_backward_ms: float
    message_ms: float

    @property
    def column(self) -> str:
        """As in results/paper.csv."""
        return f"{self.model}, p={self.num_stages}, m={self.num_microbatches}"

    def bubble_rate(self) -> float:
        """Share of the step that a worker does not compute."""
        backward_ms = self.input_backward_ms + self.weight_backward_ms
        step_ms = replay(
            SCHEDULES["1f1b"](self.num_stages, self.num_microbatches, "never"),
            {Kind.F: self.forward_ms, Kind.B: backward_ms},
            Link("their messages", self.message_ms),
        ).makespan_s
        return 1 - self.num_microbatches * (self.forward_ms + backward_ms) / step_ms


PROFILED = (
    Profiled("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601),
    Profiled("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626),
    Profiled("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762),
    Profiled("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527),
    Profiled("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377),
    Profiled("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378),
    Profiled("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408),
    Profiled("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.460),
)
