"""Judges trainings from records alone: who learned, which means are the same within the protocol's margin,
whose weights are equal.

Nothing is called equal to a baseline that did not learn: weights that never moved are always equal.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_bench.experiments.consistency.equivalence import Distance, interval
from gpipe_bench.experiments.consistency.protocol import Plan, Protocol, load_protocol
from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.records.record import Quantity, Record, of_case

METRICS = {"images": "held-out accuracy", "text": "held-out perplexity"}
TABLE = "consistency"
ROW = "distance to the sequential mean"
SCALED = (
    "AmoebaNet-D scaled down, on digits unless other images were given; the paper trains (2, 128) on ImageNet"
)
INTERVAL = "90 % interval: two one-sided tests at 5 %, all of it within the margin"


def select(records: Sequence[Record], part: str, model: str) -> list[Record]:
    """Of the trainings under the present protocol."""
    return of_case(records, part=part, model=model, protocol=load_protocol().digest)


def score_of(record: Record) -> float | None:
    """The final score of a finished training; None if it diverged or did not finish."""
    quantity = record.quantity(METRICS[str(record.case["model"])])
    value = quantity.value if quantity is not None and record.status == "done" else None
    return None if value is None else float(value)


def learned(record: Record) -> bool:
    """Whether the training met its own stated requirement."""
    score = score_of(record)
    return score is not None and _suffices(score, record, "required")


def _suffices(score: float, record: Record, what: str) -> bool:
    """Whether the score reaches the record's "required" or "floor"."""
    wanted = float(record.details[what])
    return score >= wanted if record.details["higher_is_better"] else score <= wanted


@dataclass(frozen=True)
class Finding:
    """What the protocol's test says of one number of stages.

    `word` is the judge's: "reproduced", "undecided", "above", or with a `reason` "not comparable", "not run".
    """

    scores: tuple[float, ...] = ()
    distance: Distance | None = None
    word: str = "not run"
    reason: str = ""


@dataclass(frozen=True)
class Baseline:
    """The sequential runs of one model.

    `missing` says what has to be run before anything can be held against them, `problem` why nothing can; at
    least one of them is empty.
    """

    scores: tuple[float, ...]
    mean: float
    deviation: float
    missing: str
    problem: str

    def distance(self, scores: Sequence[float], alpha: float) -> Distance:
        """Of the mean of these scores from ours, in standard deviations of one run."""
        away = abs(statistics.fmean(scores) - self.mean)
        value = away / self.deviation if away else 0.0
        return Distance(value, *interval(value, len(scores), len(self.scores), alpha))


def baseline(records: Sequence[Record], model: str) -> Baseline | None:
    """None without records of it under the present protocol."""
    runs = select(records, "baseline", model)
    if not runs:
        return None
    protocol = load_protocol()
    scores = tuple(score for run in runs if (score := score_of(run)) is not None)
    mean = statistics.fmean(scores) if scores else 0.0
    deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
    missing = _missing(runs, protocol.plans[model].sequential, "sequential runs")
    problem = "" if missing else _problem(runs, scores, mean, deviation, protocol)
    return Baseline(scores, mean, deviation, missing, problem)


def _missing(runs: Sequence[Record], seeds: Sequence[int], what: str) -> str:
    """Which of the protocol's runs have not been finished."""
    done = {run.case["seed"] for run in runs if run.status == "done"}
    count = sum(seed in done for seed in seeds)
    return "" if count == len(seeds) else f"{count} of the protocol's {len(seeds)} {what} are finished"


def _problem(
    runs: Sequence[Record], scores: Sequence[float], mean: float, deviation: float, protocol: Protocol
) -> str:
    """Why nothing can be held against these sequential runs."""
    sources = {tuple(sorted(run.options.items())) for run in runs}
    if len(sources) > 1:
        return "the sequential runs are of several data sets or devices; keep each in a folder of its own"
    if runs[0].options.get("seed", protocol.split_seed) != protocol.split_seed:
        return f"the held-out examples are chosen by another seed than the protocol's {protocol.split_seed}"
    if len(scores) < len(runs):
        return f"{len(runs) - len(scores)} of {len(runs)} sequential runs diverged"
    failed = sum(not _suffices(score, runs[0], "floor") for score in scores)
    if failed:
        return f"{failed} of {len(runs)} sequential runs failed, so nothing is called equal to them"
    if not _suffices(mean, runs[0], "required"):
        return f"the sequential runs did not learn ({runs[0].details['requirement']})"
    if deviation == 0:
        return "all sequential runs end with the same score, so there is no standard deviation"
    return ""


def statistical(records: Sequence[Record], model: str, num_stages: int) -> Finding:
    """The test of the runs with seeds of their own, by their mean."""
    protocol = load_protocol()
    plan: Plan = protocol.plans[model]
    runs = [r for r in select(records, "own seeds", model) if r.case["num_stages"] == num_stages]
    scores = tuple(score for run in runs if (score := score_of(run)) is not None)
    found = baseline(records, model)
    if not runs or found is None:
        others = of_case(records, part="baseline", model=model)
        old = found is None and bool(others)
        return Finding(scores, word="not comparable" if old else "not run", reason=_OTHER if old else "")
    missing = _missing(runs, plan.stages[num_stages], f"runs with K = {num_stages}") or found.missing
    if missing:
        return Finding(scores, reason=missing)
    problem = found.problem
    if not problem and any(run.options != select(records, "baseline", model)[0].options for run in runs):
        problem = "the runs are of other data than the sequential ones; keep each in a folder of its own"
    if not problem and len(scores) < len(runs):
        problem = f"{len(runs) - len(scores)} of {len(runs)} runs diverged, so they have no mean"
    if problem:
        return Finding(scores, word="not comparable", reason=problem)
    distance = found.distance(scores, protocol.alpha)
    word = distance.word(protocol.margin)
    if word != "above" and not _suffices(statistics.fmean(scores), runs[0], "required"):
        return Finding(scores, distance, "not comparable", "the runs did not learn")
    return Finding(scores, distance, word)


_OTHER = (
    "the records were made under another protocol than results/consistency-protocol.toml is now; run again"
)


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
    for num_stages in load_protocol().plans["images"].stages:
        finding = statistical(records, "images", num_stages)
        quantity, distance = None, finding.distance
        if distance is not None and not finding.reason:
            quantity = Quantity(
                name=ROW, value=distance.value, unit="standard deviations", low=distance.low,
                high=distance.high, provenance="measured", higher_is_better=False,
                note=f"the mean of {len(finding.scores)} runs; {INTERVAL}",
            )  # fmt: skip
        compared = finding.word == "not comparable"
        found.append(
            Entry(
                table=TABLE,
                row=ROW,
                column=f"pipeline-{num_stages}",
                quantity=quantity,
                note=SCALED,
                not_comparable=finding.reason if compared else "",
                reason="" if compared else finding.reason,
            )
        )
    return found
