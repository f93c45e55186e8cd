"""What was asked of the predictions before any was compared with a step.

On the reference's two cores; over all configurations of all models of a profile that are not void. They are
shown beside what was found, met or not.
"""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """A number of `measures.Found` that should be at most or at least `bound`."""

    what: str
    number: str
    at_least: bool
    bound: float

    def holds(self, value: float) -> bool:
        """Whether the number is as it should be."""
        return value >= self.bound if self.at_least else value <= self.bound


RULES = (
    Rule("configurations that ran, not void", "configurations", True, 30),
    Rule("models among them", "models", True, 6),
    Rule("error of the step time, median", "median_error", False, 0.05),
    Rule("error of the step time, worst", "worst_error", False, 0.12),
    Rule("rank correlation, median over models", "rank_correlation", True, 0.9),
    Rule("regret, median over models", "median_regret", False, 0.03),
    Rule("regret, worst of a model", "worst_regret", False, 0.03),
    Rule("error of the fullest worker's peak bytes, worst", "memory_error", False, 0.01),
)

CHOSEN, OTHERS = 5, 5
"""How many of a model are run: the best five of the plan, and five more from the rest of it."""
MOST_DRIFT = 2.0
"""A core that runs at less than half or more than double the speed of the probes makes a case void."""
EXACT_WITHIN = 0.02
"""Stages that wait instead of computing are known exactly; their prediction is at most so far off."""

INSIDE_SHARE, MOST_WIDTH = 0.75, 1.6
"""Of the published steps the share that is asked to lie in its predicted range, and how wide that may be at
most, its upper end over its lower end."""
