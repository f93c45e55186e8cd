"""Judges trainings from records alone: who learned, who lies within two standard deviations, whose weights
are equal.

Nothing is called consistent with a baseline that did not learn: weights that never moved are always equal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.records.record import Quantity, Record, of_case

METRICS = {"images": "held-out accuracy", "text": "held-out perplexity"}
NUM_DEVIATIONS = 2.0
TABLE = "consistency"
ROW = "distance to the sequential mean"
SCALED = (
    "AmoebaNet-D scaled down, on digits unless other images were given; the paper trains (2, 128) on ImageNet"
)


def select(records: Sequence[Record], part: str, model: str) -> list[Record]:
    return of_case(records, part=part, model=model)


def score_of(record: Record) -> float | None:
    """The final score of a finished training; None if it diverged or did not finish."""
    quantity = record.quantity(METRICS[str(record.case["model"])])
    value = quantity.value if quantity is not None and record.status == "done" else None
    return None if value is None else float(value)


def learned(record: Record) -> bool:
    """Whether the training met its own stated requirement."""
    score = score_of(record)
    return score is not None and _suffices(score, record)


def _suffices(score: float, record: Record) -> bool:
    required = float(record.details["required"])
    return score >= required if record.details["higher_is_better"] else score <= required


@dataclass(frozen=True)
class Distance:
    """In standard deviations of one run, with the 95 % interval of the true one."""

    value: float
    low: float
    high: float


def interval(distance: float, runs: int, baseline_runs: int) -> tuple[float, float]:
    """The true distances at which one as observed, or a farther one, is no rarer than 2.5 % on either side.

    The exact interval of a standardized difference of means: the observed one follows a noncentral t, since
    the standard deviation is itself estimated, from the baseline's few runs.
    """
    from scipy.special import nctdtrinc

    scale, freedom = math.sqrt(1 / runs + 1 / baseline_runs), baseline_runs - 1
    # Centres of the distributions of which this many percent lie below what was observed.
    low, high = (float(nctdtrinc(freedom, share, distance / scale)) for share in (0.975, 0.025))
    return scale * max(0.0, low), scale * high


def outside_by_chance(runs: int, baseline_runs: int) -> float:
    """How often the mean of runs that are just like the baseline's lies outside their band."""
    from scipy.special import stdtr

    return float(2 * stdtr(baseline_runs - 1, -NUM_DEVIATIONS / math.sqrt(1 / runs + 1 / baseline_runs)))


@dataclass(frozen=True)
class Baseline:
    """The sequential runs of one model. `problem` says why nothing can be held against them, or is empty."""

    scores: tuple[float, ...]
    mean: float
    deviation: float
    problem: str

    def distance(self, scores: Sequence[float]) -> Distance:
        """Of the mean of these scores from ours, in standard deviations of one run."""
        away = abs(statistics.fmean(scores) - self.mean)
        value = away / self.deviation if away else 0.0
        return Distance(value, *interval(value, len(scores), len(self.scores)))


def baseline(records: Sequence[Record], model: str) -> Baseline | None:
    """None without records of it."""
    runs = select(records, "baseline", model)
    scores = tuple(score for run in runs if (score := score_of(run)) is not None)
    if not runs:
        return None
    problem = ""
    if len(scores) < len(runs):
        problem = f"{len(runs) - len(scores)} of {len(runs)} sequential runs did not finish"
    elif not all(map(learned, runs)):
        count = sum(not learned(run) for run in runs)
        problem = (
            f"{count} of {len(runs)} sequential runs did not learn ({runs[0].details['requirement']}), "
            "so nothing is called consistent"
        )
    elif len(scores) < 3:
        problem = f"{len(scores)} sequential runs make no standard deviation worth the name"
    deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
    if not problem and deviation == 0:
        problem = "all sequential runs end with the same score, so there is no standard deviation"
    mean = statistics.fmean(scores) if scores else 0.0
    return Baseline(scores, mean, deviation, problem)


def statistical(
    records: Sequence[Record], model: str, num_stages: int
) -> tuple[tuple[float, ...], Distance | None, str]:
    """The scores of the runs with own seeds, their mean's distance in standard deviations, and the verdict:
    "consistent" within the band, "undecided" outside it by no more than chance explains, or "deviates".
    """
    runs = [r for r in select(records, "own seeds", model) if r.case["num_stages"] == num_stages]
    scores = tuple(score for run in runs if (score := score_of(run)) is not None)
    found = baseline(records, model)
    if not runs or found is None:
        return scores, None, "not run"
    if found.problem:
        return scores, None, f"not judged: {found.problem}"
    if any(run.status != "done" for run in runs):
        return scores, None, "not run: a run did not finish"
    if len(scores) < len(runs):
        return scores, None, "deviates: a run diverged"
    distance = found.distance(scores)
    if not _suffices(statistics.fmean(scores), runs[0]):
        return scores, distance, "deviates: did not learn"
    if distance.value <= NUM_DEVIATIONS:
        return scores, distance, "consistent"
    return scores, distance, "undecided" if distance.low <= NUM_DEVIATIONS else "deviates"


def exact(record: Record) -> str:
    """The verdict on a training that began like its reference and should have ended like it."""
    largest = record.quantity("largest weight difference")
    reference = record.quantity("reference " + METRICS[str(record.case["model"])])
    if record.status != "done" or largest is None or largest.value is None:
        return f"not run: {record.reason}" if record.reason else "not run"
    if not learned(record) or reference is None or reference.value is None:
        return "not judged: the training did not learn"
    different = record.quantity("numbers that differ")
    same = largest.value == 0 and different is not None and different.value == 0
    return "identical" if same else "deviates"


def cells(records: Sequence[Record]) -> list[Entry]:
    """The paper's four cells: the trainings on images with their own seeds."""
    found = []
    for num_stages in (1, 2, 4, 8):
        scores, distance, verdict = statistical(records, "images", num_stages)
        quantity = None
        if distance is not None and ":" not in verdict:
            quantity = Quantity(
                name=ROW, value=distance.value, unit="standard deviations", low=distance.low,
                high=distance.high, provenance="measured", higher_is_better=False,
                note=f"{len(scores)} run(s) of its own",
            )  # fmt: skip
        found.append(
            Entry(
                table=TABLE,
                row=ROW,
                column=f"pipeline-{num_stages}",
                quantity=quantity,
                note=SCALED,
                reason=verdict if ":" in verdict else "",
            )
        )
    return found
