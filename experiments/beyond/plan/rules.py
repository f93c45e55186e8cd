"""What was asked of the predictions before any was compared with a step, and what they come to.

The rules are for the reference's two cores; over all configurations of all models of a profile that are not
void. They are shown beside what was found, met or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import StatisticsError, correlation, median
from typing import NamedTuple, TypeVar


class Rule(NamedTuple):
    """A number of `found` that should be at most or at least `bound`."""

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


class Compared(NamedTuple):
    """A configuration that was predicted and ran; `chosen` if it is one of the plan's best."""

    model: str
    name: str
    predicted_s: float
    measured_s: float
    chosen: bool = False

    @property
    def error(self) -> float:
        """Of the step time, with its sign: predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1


class Peaks(NamedTuple):
    """Bytes of every worker of a configuration: of the memory model, and counted in a step."""

    model: str
    name: str
    predicted: tuple[int, ...]
    counted: tuple[int, ...]

    @property
    def error(self) -> float:
        """Of the fullest worker, which is what a plan has to say, with its sign."""
        return max(self.predicted) / max(self.counted) - 1

    @property
    def of_any(self) -> float:
        """The largest of any worker, with its sign."""
        errors = [model / real - 1 for model, real in zip(self.predicted, self.counted, strict=True)]
        return max(errors, key=abs)


Some = TypeVar("Some", Compared, Peaks)


def found(configurations: Sequence[Compared], peaks: Sequence[Peaks] = ()) -> Mapping[str, float]:
    """All that the rules are about, of all models; without `memory_error` where no bytes were counted.

    ValueError where nothing ran.
    """
    errors = [abs(each.error) for each in configurations]
    models = by_model(configurations)
    regrets = [regret(own) for own in models.values()] or [regret([])]
    memory = [abs(each.error) for each in peaks]
    return {
        "configurations": len(configurations),
        "models": len(models),
        "median_error": median(errors),
        "worst_error": max(errors),
        "rank_correlation": median([order_of(own) for own in models.values() if len(own) > 1] or [0.0]),
        "median_regret": median(regrets),
        "worst_regret": max(regrets),
        **({"memory_error": max(memory)} if memory else {}),
    }


def by_model(configurations: Sequence[Some]) -> dict[str, list[Some]]:
    """The configurations of each model, in the order in which the models first come."""
    models: dict[str, list[Some]] = {}
    for each in configurations:
        models.setdefault(each.model, []).append(each)
    return models


def order_of(configurations: Sequence[Compared]) -> float:
    """Spearman's rank correlation of what was predicted with what was measured."""
    return rank_correlation(
        [each.predicted_s for each in configurations], [each.measured_s for each in configurations]
    )


def regret(configurations: Sequence[Compared]) -> float:
    """How much longer the one predicted to be the fastest took than the fastest of those that ran.

    ValueError where none ran.
    """
    if not configurations:
        raise ValueError("no configuration ran, so none was chosen and there is nothing to compare")
    chosen = min(configurations, key=lambda each: each.predicted_s)
    best = min(configurations, key=lambda each: each.measured_s)
    return chosen.measured_s / best.measured_s - 1


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing the mean of theirs.

    0 where either has one value only. ValueError for fewer than two pairs.
    """
    if len(one) < 2:
        raise ValueError(f"{len(one)} values; give two pairs or more")
    try:
        return correlation(_ranks(one), _ranks(other))
    except StatisticsError:  # all values are equal
        return 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """How many are smaller; each of several equal ones counts a half."""
    return [sum((other < each) + (other == each) / 2 for other in values) for each in values]
