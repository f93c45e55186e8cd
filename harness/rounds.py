"""Times alternative ways (arms) to do one thing on a machine that runs other programs, too.

Measured one after another, equal code often seems to differ. So all arms take turns: a round runs them in a
new random order, there and back, and only numbers of the same round are compared:

    round 1   A B C   C B A
    round 2   C A B   B A C

A program became slower if the ratio of its time to the old version's is beyond `THRESHOLD` with its whole
interval, over trials in fresh processes. A second process of the old version, the control, must agree with
the first: if identical code differs, nothing is proven. The intervals are computed up to three times, after
fixed numbers of trials or when time ends; looking at any time would raise false alarms.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from .paper import show
from .record import Metric, Record

SAMPLE_S = 0.05
"""Least seconds of a sample: shorter ones measure the operating system's scheduler."""

Arm = TypeVar("Arm")

Times = Mapping[str, Sequence[float]]
"""Seconds of one step, by arm; two samples per round."""


def orders(arms: Sequence[Arm], seed: int | str) -> Iterator[tuple[Arm, ...]]:
    """Endless rounds, each with all arms in a random order, there and back; the same for the same seed."""
    generator = random.Random(seed)
    while True:
        order = generator.sample(list(arms), len(arms))
        yield (*order, *reversed(order))


def turns(arms: Sequence[Arm], num_rounds: int, seed: int | str) -> Iterator[Arm]:
    """Arms in the order of their turns: two turns each in each of `num_rounds` rounds."""
    return itertools.chain.from_iterable(itertools.islice(orders(arms, seed), num_rounds))


def repeats_for(step_s: Sequence[float], sample_s: float = SAMPLE_S) -> int:
    """Steps per sample so that an undisturbed sample takes at least `sample_s`."""
    return max(1, math.ceil(sample_s / min(step_s)))


def slowest(of_ranks: Sequence[Times]) -> dict[str, list[float]]:
    """The maximum of each sample over the processes."""
    return {
        arm: [max(samples) for samples in zip(*(times[arm] for times in of_ranks), strict=True)]
        for arm in of_ranks[0]
    }


def level(samples: Sequence[float], what: str) -> float:
    """The mean logarithm of an arm's samples in one round.

    Raises ValueError for a sample that is not positive; the message names `what`.
    """
    if not all(0 < each < math.inf for each in samples):
        raise ValueError(f"{what} is {list(samples)}; a sample must take time")
    return math.fsum(map(math.log, samples)) / len(samples)


def ratios(times: Times, numerator: str, denominator: str, factor: float = 1.0) -> list[float]:
    """`factor` * numerator / denominator in each round: the ratio of their geometric means."""
    pairs = zip(_levels(times, numerator), _levels(times, denominator), strict=True)
    return [factor * math.exp(a - b) for a, b in pairs]


def differences(times: Times, more: str, less: str, factor: float = 1.0) -> list[float]:
    """`factor` * (more - less) in each round."""
    pairs = zip(_levels(times, more), _levels(times, less), strict=True)
    return [factor * (math.exp(a) - math.exp(b)) for a, b in pairs]


def against_itself(times: Times, arm: str) -> list[float]:
    """The control: an arm's first sample of each round over its second. An interval without 1 means that the
    machine changed in a way that rounds did not cancel.
    """
    return [first / second for first, second in _by_round(times[arm])]


def _levels(times: Times, arm: str) -> list[float]:
    return [level(pair, f"a step of {arm}") for pair in _by_round(times[arm])]


def _by_round(samples: Sequence[float]) -> list[tuple[float, float]]:
    """Both samples of each round. ValueError for half a round."""
    if len(samples) % 2:
        raise ValueError(f"{len(samples)} samples are no whole number of rounds, which have two each")
    return list(zip(samples[::2], samples[1::2], strict=True))


class Usage(NamedTuple):
    """Seconds of one process and of its machine, since their start (`now`) or over a period (`since`)."""

    cpu_s: float  # CPU time of this process
    busy_s: float  # CPU time of all processes on all cores
    wall_s: float  # by the clock
    num_cores: int

    @classmethod
    def now(cls) -> Usage:
        import psutil

        cores = psutil.cpu_times()
        busy_s = sum(cores) - cores.idle - getattr(cores, "iowait", 0.0) - getattr(cores, "guest", 0.0)
        return cls(time.process_time(), busy_s, time.perf_counter(), psutil.cpu_count() or 1)

    def since(self, start: Usage) -> Usage:
        """The usage from `start` to this moment."""
        return Usage(
            self.cpu_s - start.cpu_s, self.busy_s - start.busy_s, self.wall_s - start.wall_s, self.num_cores
        )


def used_by_others(of_processes: Sequence[Usage]) -> float:
    """The share of the machine's CPU time that other programs used over the same period: the most that any of
    these processes saw.
    """
    own_s = sum(each.cpu_s for each in of_processes)
    return max(max(0.0, each.busy_s - own_s) / (each.wall_s * each.num_cores) for each in of_processes)


# Whether a case of variants in turns is valid, and which variant is faster
#
# The control compares a variant's first sample of each round with its second. If the interval excludes 1 the
# machine changed, and the case is void; it is measured once more with more rounds. Void again, it is
# contaminated, and nothing of it is judged. The control's interval is the noise floor: a ratio no further
# from 1 than identical code's is noise, whatever its own interval, because rounds do not show what differs
# between variants for their whole lifetime.

MORE_ROUNDS = 2  # times as many rounds when a case is measured again


def void_by(control: Metric | None) -> str:
    """Why a case is void (the control's interval excludes 1), or an empty text."""
    if control is None or control.low is None or control.high is None or control.low <= 1 <= control.high:
        return ""
    return f"the control is {measured(control)}, not 1"


def state_of(record: Record) -> tuple[Literal["", "void", "contaminated"], str]:
    """A case's state in a word and in a sentence; both are empty if it was valid at once."""
    void, before = void_by(record.metric("control")), str(record.details.get("before", ""))
    if void and before:
        return "contaminated", f"contaminated: {void}, and before, in half the rounds: {before}"
    if void:
        return "void", f"void: {void}: the machine changed while it measured; measure again"
    if before:
        return "", f"measured again with {MORE_ROUNDS} times the rounds, because at first {before}"
    return "", ""


def trust_of(record: Record) -> list[str]:
    """Signs of a record's validity: `control 1.000 [0.990, 1.010]`, `used by others 0.012`."""
    found = [record.metric(name) for name in ("control", "used by others")]
    return [f"{each.name} {measured(each)}" for each in found if each is not None]


def is_faster(ratio: Metric, control: Metric | None) -> bool | None:
    """Whether the first of two variants is faster, by the ratio of their speeds. None within the noise: the
    interval holds 1, or the median lies within the noise floor, the further end of the control's interval.
    """
    low, high = ratio.low, ratio.high
    if not ratio.value or low is None or high is None or low <= 1 <= high:
        return None
    ends = (control.low, control.high) if control is not None else ()
    floor = max((abs(math.log(end)) for end in ends if end), default=0.0)
    return None if abs(math.log(ratio.value)) < floor else ratio.value > 1


def measured(metric: Metric) -> str:
    """`0.951 [0.947, 0.956]`."""

    def text(value: float) -> str:
        return f"{value:.3f}" if metric.unit == "ratio" else show(value, metric.unit, 3)

    assert metric.value is not None, "measured metrics have a value"
    if metric.low is None or metric.high is None:
        return text(metric.value)
    return f"{text(metric.value)} [{text(metric.low)}, {text(metric.high)}]"


# Whether a program became slower

Verdict = Literal["regression", "improved", "same", "inconclusive", "contaminated"]

UNTOLD = ("inconclusive", "contaminated")

ARMS = ("base", "head", "control")

THRESHOLD = 0.03  # least change that counts; smaller ones follow the layout of code in memory
LOOKS = (8, 32, 128)  # trials after which intervals are computed; four times as many halve an interval
CONFIDENCE = 0.984  # of one look: three at wall time together err no more often than one at 95 %


class Sample(NamedTuple):
    """Seconds of one step: wall time, and CPU time over all threads, if that is known."""

    wall_s: float
    cpu_s: float | None = None


Round = Mapping[str, Sequence[Sample]]
"""The samples of each arm in one round, there and back."""

Trial = Sequence[Round]
"""The rounds of one trial. Every trial has fresh processes: two of the same code differ for as long as they
live, by where their memory lies, and no number of rounds shows that."""


@dataclass(frozen=True)
class Change:
    """Relative change of the time per step with its interval: +0.05 is five per cent slower."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Judgement:
    """Result of the trials of a benchmark."""

    verdict: Verdict
    trials: int
    head: Change  # against both arms of the base
    control: Change  # the base against itself
    cpu: Change | None  # the head's CPU time, which does not include waiting
    base_s: float  # median seconds per step
    head_s: float
    by_cpu: bool = False  # wall time tells nothing, and CPU time decided
    out_of_time: bool = False  # time ran out before the last look

    @property
    def smallest_detectable(self) -> float | None:
        """The slow-down that such trials detect four times in five: its lower bound, half an interval below
        an estimate that itself varies, must exceed the threshold. None before the first look.
        """
        if self.trials < LOOKS[0]:
            return None
        half = (math.log1p(self.head.high) - math.log1p(self.head.low)) / 2
        quantile = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
        power = statistics.NormalDist().inv_cdf(0.8)
        return math.expm1(math.log1p(THRESHOLD) + half * (1 + power / quantile))


def judge(trials: Sequence[Trial], *, is_last: bool = False, is_counted: bool = False) -> Judgement:
    """The verdict on these trials; below the first look they tell nothing.

    Args:
        is_last: no more trials follow, so CPU time decides if wall time tells nothing
        is_counted: exact counters are equal, so equal CPU time is enough for "same"; it can't see waiting

    Raises ValueError for a sample that took no time.
    """
    head, control = (change([log_ratio(trial, arm) for trial in trials]) for arm in ("head", "control"))
    rounds = [pair for trial in trials for pair in trial]
    base_s, head_s = (
        statistics.median(sample.wall_s for pair in rounds for arm in arms for sample in pair[arm])
        for arms in (("base", "control"), ("head",))
    )
    judged = Judgement("inconclusive", len(trials), head, control, None, base_s, head_s)
    verdict: Verdict = verdict_of(head, control)
    if trials[0][0]["base"][0].cpu_s is not None:
        cpu, again = (
            change([log_ratio(trial, arm, "cpu_s") for trial in trials]) for arm in ("head", "control")
        )
        judged = replace(judged, cpu=cpu)
        by_cpu = verdict_of(cpu, again)
        tells = by_cpu == "regression" or (by_cpu == "same" and is_counted)
        if is_last and tells and verdict in UNTOLD and len(trials) >= LOOKS[0]:
            judged, verdict = replace(judged, by_cpu=True), by_cpu
    return judged if len(trials) < LOOKS[0] else replace(judged, verdict=verdict)


def log_ratio(trial: Trial, arm: str, metric: str = "wall_s") -> float:
    """The median over the rounds of a trial of the head's logarithm of time minus the mean of both arms of
    the base, or of the control's minus the base's.
    """

    def of(pair: Round, arm: str) -> float:
        return level([getattr(sample, metric) for sample in pair[arm]], f"{metric} of {arm}")

    others = ("base",) if arm == "control" else ("base", "control")
    return statistics.median(
        of(pair, arm) - statistics.fmean(of(pair, other) for other in others) for pair in trial
    )


def change(ratios: Sequence[float]) -> Change:
    """Hodges and Lehmann's estimate of log-ratios, the median of the means of all pairs, and the interval of
    Wilcoxon's signed-rank test at `CONFIDENCE`, as relative changes. Processes need not differ normally.
    Below 7 ratios the interval is their range.
    """
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(ratios, 2))
    skipped = _outside(len(ratios))
    return Change(*map(math.expm1, (statistics.median(means), means[skipped], means[-1 - skipped])))


@functools.cache
def _outside(count: int) -> int:
    """How many of the means of pairs lie below the interval: by the distribution of the sum of the ranks of
    positive numbers, where each of `count` numbers is as likely to be negative.
    """
    ways = [1]  # by their sum, the choices of ranks
    for rank in range(1, count + 1):
        ways = [a + b for a, b in zip([*ways, *[0] * rank], [*[0] * rank, *ways], strict=True)]
    error = (1 - CONFIDENCE) / 2 * 2**count
    return max(0, bisect.bisect_right(list(itertools.accumulate(ways)), error) - 1)


def verdict_of(head: Change, control: Change) -> Verdict:
    """The verdict of an interval; nothing is proven if identical code differs."""
    if not control.low <= 0 <= control.high:
        return "contaminated"
    slower, faster = THRESHOLD, 1 / (1 + THRESHOLD) - 1
    if head.low > slower:
        return "regression"
    if head.high < faster:
        return "improved"
    return "same" if faster <= head.low and head.high <= slower else "inconclusive"
