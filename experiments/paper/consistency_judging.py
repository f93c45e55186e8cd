"""How consistent training is judged: by a protocol that was frozen before the runs, from records alone.

A number of runs, a seed or a margin that may change after a look at the results makes any verdict possible.
So all of them stand in results/consistency-protocol.toml; the runs take them from there and from nowhere
else, every record names the file's digest, and records made under another file are not judged. Nothing is
called equal to a baseline that did not learn: weights that never moved are always equal.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from gpipe_bench.harness import PUBLISHED
from gpipe_bench.harness.record import Metric, Record, of_case
from gpipe_bench.harness.verdict import Result

PATH = PUBLISHED / "consistency-protocol.toml"
METRICS = {"images": "held-out accuracy", "text": "held-out perplexity"}
ANSWERS = {"reproduced": "agrees", "undecided": "no test", "above": "differs"}
"""Answers, by the protocol's word."""


def cells(records: Sequence[Record]) -> list[Result]:
    """The paper's one sentence, of every K: trainings on images with their own seeds, by Welch's interval,
    which takes no spreads to be alike. It holds where it holds for each K: its number and both ends are the
    largest of any.
    """
    protocol, row, metric = load_protocol(), "distance to the sequential mean", None
    findings = {k: statistical(records, "images", k) for k in protocol.plans["images"].stages}
    open_ = next((each for each in findings.values() if each.reason or each.distance is None), None)
    if open_ is None:
        intervals = {k: apart(records, "images", k) for k in findings}
        value, low, high = map(max, zip(*intervals.values(), strict=True))
        over = ", ".join(
            f"K={k}: {ANSWERS[word_of(a, b, protocol.margin)]}" for k, (_, a, b) in intervals.items()
        )
        metric = Metric(
            row, value, "standard deviations", "measured", low=low, high=high, key={"over": over},
            note="the means of the runs of each K, with Welch's 95 % interval",
        )  # fmt: skip
    reason = "" if open_ is None else open_.reason
    compared = open_ is not None and open_.word == "not comparable"
    return [
        Result(
            table="consistency", row=row, column="largest over K", metric=metric,
            note="AmoebaNet-D scaled down, on digits unless other images were given; the paper trains "
            "(2, 128) on ImageNet",
            not_comparable=reason if compared else "", reason="" if compared else reason,
        )
    ]  # fmt: skip


# The protocol


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one model.

    Args:
        sequential: seeds of the sequential runs
        initial: seeds of the initial weights: run number i of the sequential ones and of every K begins with
            the weights of number i
        stages: number of stages K -> seeds of its runs
        power_of: "all K together", or "each K"
    """

    sequential: tuple[int, ...]
    initial: tuple[int, ...]
    stages: dict[int, tuple[int, ...]]
    power_of: str

    @property
    def runs(self) -> int:
        """Number of runs for each number of stages."""
        return len(next(iter(self.stages.values())))


class Protocol(msgspec.Struct, frozen=True):
    """The whole file.

    Args:
        margin: distance in standard deviations of the sequential runs up to which accuracies are the same
        alpha: of each of the two one-sided tests; the interval that must lie inside the margin has the
            confidence 1 - 2 alpha
        power: the least probability of finding equal what is equal
        split_seed: of the choice of held-out examples
        plans: by model
        sha256: of the file's bytes
    """

    margin: float
    alpha: float
    power: float
    split_seed: int
    plans: dict[str, Plan]
    sha256: str

    @property
    def digest(self) -> str:
        """The beginning of `sha256`, as records' keys and the pages have it."""
        return self.sha256[:12]


@cache
def load_protocol(path: Path = PATH) -> Protocol:
    """The file. That its seeds are those of its rule, new and all different, is tested."""
    content = path.read_bytes()
    found = tomllib.loads(content.decode())
    known = found["judged"] | {"split_seed": found["draw"]["split_seed"]}
    known |= {"plans": {model: found[model] for model in METRICS}}
    known |= {"sha256": hashlib.sha256(content).hexdigest()}
    return msgspec.convert(known, Protocol, str_keys=True)


# The test. The margin is in standard deviations of the sequential runs, which are estimated from the same
# few runs that make their mean. So the distance follows a noncentral t, and its interval is exact, if scores
# spread as much at every K. Welch's interval, which the protocol does not have, stands beside it: it assumes
# nothing of the spreads.


def word_of(low: float, high: float, margin: float) -> str:
    """Whether an interval lies within the margin, on both sides of its end, or outside."""
    if high <= margin:
        return "reproduced"
    return "undecided" if low <= margin else "above"


def interval(distance: float, runs: int, baseline_runs: int, alpha: float) -> tuple[float, float]:
    """The true distances that neither of two one-sided tests at `alpha` rejects; 0 stands for less than
    none.
    """
    from scipy.special import nctdtrinc

    # The standard deviation of the difference of the two means, in those of one run.
    scale, freedom = math.sqrt(1 / runs + 1 / baseline_runs), baseline_runs - 1
    # Centres of the distributions of which this much lies below what was observed.
    low, high = (float(nctdtrinc(freedom, share, distance / scale)) for share in (1 - alpha, alpha))
    return scale * max(0.0, low), scale * high


def welch(scores: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """How far the mean of the scores lies above that of others, with its 95 % interval; at least two each."""
    from scipy.special import stdtrit

    parts = [statistics.variance(each) / len(each) for each in (scores, others)]
    gap = statistics.fmean(scores) - statistics.fmean(others)
    if not sum(parts):
        return gap, gap, gap
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(each) - 1) for part, each in zip(parts, (scores, others), strict=True)
    )
    reach = float(stdtrit(freedom, 0.975)) * math.sqrt(sum(parts))
    return gap, gap - reach, gap + reach


def apart(records: Sequence[Record], model: str, num_stages: int) -> tuple[float, float, float]:
    """How far the mean of a K's runs lies from that of the sequential ones, in standard deviations of these,
    with both ends of Welch's interval. Raises ValueError without a baseline.
    """
    found = baseline(records, model)
    if found is None or not found.deviation:
        raise ValueError(f"{model}: no sequential runs with a standard deviation are on record")
    gap, low, high = (
        each / found.deviation for each in welch(statistical(records, model, num_stages).scores, found.scores)
    )
    nearest = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return abs(gap), nearest, max(abs(low), abs(high))


# The records


def select(records: Sequence[Record], part: str, model: str) -> list[Record]:
    """Records of the trainings under the present protocol."""
    return of_case(records, part=part, model=model, protocol=load_protocol().digest)


def score_of(record: Record) -> float | None:
    """The final score of a finished training; None if it diverged or did not finish."""
    metric = record.metric(METRICS[str(record.case["model"])])
    value = metric.value if metric is not None and record.status == "done" else None
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
    """Finding of the protocol's test for one number of stages.

    `distance` is that of the means, in standard deviations of one run, with the interval of the true one;
    `word` the judge's: "reproduced", "undecided", "above", or with a `reason` "not comparable", "not run".
    """

    scores: tuple[float, ...] = ()
    distance: tuple[float, float, float] | None = None
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
        if found is not None or not of_case(records, part="baseline", model=model):
            return Finding(scores)
        return Finding(
            scores, word="not comparable",
            reason="the records were made under another protocol than results/consistency-protocol.toml is "
            "now; run again",
        )  # fmt: skip
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
    mean = statistics.fmean(scores)
    away = abs(mean - found.mean)
    value = away / found.deviation if away else 0.0
    low, high = interval(value, len(scores), len(found.scores), protocol.alpha)
    word = word_of(low, high, protocol.margin)
    if word != "above" and not _suffices(mean, runs[0], "required"):
        return Finding(scores, (value, low, high), "not comparable", "the runs did not learn")
    return Finding(scores, (value, low, high), word)


def exact(record: Record) -> str:
    """The verdict on a training that began like its reference and should have ended like it."""
    largest = record.metric("largest weight difference")
    reference = record.metric("reference " + METRICS[str(record.case["model"])])
    if record.status != "done" or largest is None or largest.value is None:
        return f"not run: {record.reason}" if record.reason else "not run"
    if not learned(record) or reference is None or reference.value is None:
        return "not judged: the training did not learn"
    different = record.metric("numbers that differ")
    same = largest.value == 0 and different is not None and different.value == 0
    return "identical" if same else "deviates"
