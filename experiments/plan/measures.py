"""How good predictions were: errors, ranks, regret. Only the standard library is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median


@dataclass(frozen=True, slots=True)
class Compared:
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


@dataclass(frozen=True, slots=True)
class Peaks:
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


@dataclass(frozen=True, slots=True)
class Found:
    """All that the rules are about."""

    configurations: int
    models: int
    median_error: float
    worst_error: float
    rank_correlation: float
    median_regret: float
    worst_regret: float
    memory_error: float | None


def found(configurations: Sequence[Compared], peaks: Sequence[Peaks] = ()) -> Found:
    """Of all configurations of all models. ValueError where there is none."""
    if not configurations:
        raise ValueError("no configuration ran, so there is nothing to compare")
    errors = [abs(each.error) for each in configurations]
    models = by_model(configurations)
    return Found(
        configurations=len(configurations),
        models=len(models),
        median_error=median(errors),
        worst_error=max(errors),
        rank_correlation=median(
            [
                rank_correlation([each.predicted_s for each in own], [each.measured_s for each in own])
                for own in models.values()
                if len(own) > 1
            ]
            or [0.0]
        ),
        median_regret=median(map(regret, models.values())),
        worst_regret=max(map(regret, models.values())),
        memory_error=max((abs(each.error) for each in peaks), default=None),
    )


def by_model(configurations: Sequence[Compared]) -> Mapping[str, list[Compared]]:
    """The configurations of each model, in the order in which the models first come."""
    models: dict[str, list[Compared]] = {}
    for each in configurations:
        models.setdefault(each.model, []).append(each)
    return models


def regret(configurations: Sequence[Compared]) -> float:
    """How much longer the one predicted to be the fastest took than the fastest of those that ran.

    ValueError where none ran.
    """
    if not configurations:
        raise ValueError("no configuration ran, so none was chosen")
    chosen = min(configurations, key=lambda each: each.predicted_s)
    best = min(configurations, key=lambda each: each.measured_s)
    return chosen.measured_s / best.measured_s - 1


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing the mean of theirs.

    0 where either has one value only. ValueError for fewer than two pairs.
    """
    if len(one) != len(other) or len(one) < 2:
        raise ValueError(f"{len(one)} and {len(other)} values; give two pairs or more")
    a, b = ranks(one), ranks(other)
    mean_a, mean_b = fmean(a), fmean(b)
    spread_a = sum((x - mean_a) ** 2 for x in a)
    spread_b = sum((y - mean_b) ** 2 for y in b)
    if not spread_a or not spread_b:
        return 0.0
    together = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return float(together / (spread_a * spread_b) ** 0.5)


def ranks(values: Sequence[float]) -> list[float]:
    """From 1 for the smallest; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found_ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for place in order[start:stop]:
            found_ranks[place] = (start + 1 + stop) / 2
        start = stop
    return found_ranks
