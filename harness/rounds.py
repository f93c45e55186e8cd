"""Times alternative ways (arms) to do one thing on a machine that runs other programs, too.

Measured one after another, equal code often seems to differ. So all arms take turns: a round runs them in a
new random order, there and back, and only numbers of the same round are compared:

    round 1   A B C   C B A
    round 2   C A B   B A C

A program became slower if the median over rounds of the ratio *within* a round, with a bootstrap interval
over rounds, is beyond `THRESHOLD`. A second process of the old version, the control, must agree with the
first: if identical code differs, nothing is proven. The intervals are computed up to three times, after fixed
numbers of rounds; looking at any time would raise false alarms.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from .paper import show
from .record import Metric, Record, median_interval

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

ARMS = ("base", "head", "control")

THRESHOLD = 0.03  # least change that counts; smaller ones follow the layout of code in memory
LOOKS = (12, 48, 192)  # rounds after which intervals are computed; four times as many halve an interval
CONFIDENCE = 0.984  # of one look: three together err no more often than one at 95 %
MAX_RUNS = 4  # of one benchmark: a run, its confirmation, and one more for each if contaminated

MARGIN, CPU_MARGIN = 1.5, 2.0
"""A regression must exceed so many times the difference of identical code, in wall time or, if that is
inconclusive, in CPU time. In simulations the same code then fails less than once in a hundred."""


class Sample(NamedTuple):
    """Seconds of one step: wall time, and CPU time over all threads."""

    wall_s: float
    cpu_s: float


Round = Mapping[str, Sequence[Sample]]
"""The samples of each arm in one round, there and back."""


@dataclass(frozen=True)
class Change:
    """Relative change of the time per step with its interval: +0.05 is five per cent slower."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Judgement:
    """Result of one run of a benchmark. Changes are against the base."""

    verdict: Verdict
    rounds: int
    confidence: float
    head: Change
    control: Change
    cpu: Change  # the head's CPU time, which does not include waiting
    control_cpu: Change
    base_s: float  # median seconds per step
    head_s: float
    out_of_time: bool = False  # inconclusive because time ran out before the last look

    @property
    def noise_floor(self) -> float:
        """How far identical code seemed to differ: the further end of the control's interval."""
        return max(abs(self.control.low), abs(self.control.high))

    @property
    def smallest_detectable(self) -> float:
        """The slow-down that such a run detects four times in five: its lower bound, half an interval below
        an estimate that itself varies, must exceed the threshold.
        """
        half = (math.log1p(self.head.high) - math.log1p(self.head.low)) / 2
        quantile = statistics.NormalDist().inv_cdf((1 + self.confidence) / 2)
        power = statistics.NormalDist().inv_cdf(0.8)
        return math.expm1(math.log1p(THRESHOLD) + half * (1 + power / quantile))


def run_rounds(
    sample: Callable[[str], Sample],
    seed: str,
    *,
    looks: Sequence[int] = LOOKS,
    deadline_s: float = math.inf,
    clock_s: Callable[[], float] = time.monotonic,
) -> tuple[Judgement, list[Round]]:
    """Runs rounds until a look ends the run, or the last look; `sample(arm)` takes one sample.

    A look ends the run with a verdict, or with a contaminated control, except at the first look, where that
    may be chance.

    After `deadline_s` no round begins, and the rounds so far are judged. With fewer rounds than the first
    look needs the run is inconclusive; two rounds are run in any case.
    """
    rounds: list[Round] = []
    order_of = orders(ARMS, seed)
    for look in looks:
        while len(rounds) < look and (len(rounds) < 2 or clock_s() < deadline_s):
            taken: dict[str, list[Sample]] = {arm: [] for arm in ARMS}
            for arm in next(order_of):
                taken[arm].append(sample(arm))
            rounds.append(taken)
        judgement = judge(rounds)
        if len(rounds) < looks[0]:
            judgement = replace(judgement, verdict="inconclusive")
        if len(rounds) < look:
            return replace(judgement, out_of_time=judgement.verdict == "inconclusive"), rounds
        by_chance = judgement.verdict == "contaminated" and look == looks[0]
        if judgement.verdict != "inconclusive" and not by_chance:
            break
    return judgement, rounds


def judge(rounds: Sequence[Round], confidence: float = CONFIDENCE) -> Judgement:
    """The verdict on these rounds. Raises ValueError below two rounds, and for a sample that took no time."""
    head, control, cpu, control_cpu = (
        change(log_ratios(rounds, arm, metric), confidence)
        for metric in ("wall_s", "cpu_s")
        for arm in ("head", "control")
    )
    seconds = {arm: statistics.median(each.wall_s for pair in rounds for each in pair[arm]) for arm in ARMS}
    judged = Judgement(
        "contaminated", len(rounds), confidence, head, control, cpu, control_cpu, seconds["base"],
        seconds["head"],
    )  # fmt: skip
    if not control.low <= 0 <= control.high:
        return judged
    return replace(judged, verdict=verdict_of(head, judged.noise_floor))


def log_ratios(rounds: Sequence[Round], arm: str, metric: str = "wall_s") -> list[float]:
    """For each round, the mean logarithm of the arm's samples minus that of the base's."""

    def level_of(each: Round, arm: str) -> float:
        return level([getattr(sample, metric) for sample in each[arm]], f"{metric} of {arm}")

    return [level_of(each, arm) - level_of(each, "base") for each in rounds]


def change(ratios: Sequence[float], confidence: float) -> Change:
    """Median of log-ratios with its bootstrap interval, as a relative change."""
    interval = median_interval(ratios, confidence)
    if interval is None:
        raise ValueError(f"{len(ratios)} rounds have no interval; measure at least 2")
    return Change(*map(math.expm1, (statistics.median(ratios), *interval)))


def verdict_of(head: Change, noise_floor: float = 0.0) -> Verdict:
    """The verdict of an interval. An improvement must exceed the noise floor: no second run confirms it."""
    slower, faster = THRESHOLD, 1 / (1 + THRESHOLD) - 1
    if head.low > slower:
        return "regression"
    if head.high < min(faster, 1 / (1 + noise_floor) - 1):
        return "improved"
    if faster <= head.low and head.high <= slower:
        return "same"
    return "inconclusive"


def differs_from_itself(runs: Sequence[Judgement], *, cpu: bool = False) -> float:
    """The largest difference of identical code in these runs, contaminated ones too: two processes differ for
    as long as they live, by where their memory lies.
    """
    return max(abs((run.control_cpu if cpu else run.control).value) for run in runs)


def confirmed(runs: Sequence[Judgement]) -> bool:
    """Whether the last two valid runs found a regression, each well above the differences of identical code
    in all runs.
    """
    last = [run for run in runs if run.verdict != "contaminated"][-2:]
    least = MARGIN * differs_from_itself(runs) if last else math.inf
    return twice([run.verdict for run in runs]) and all(run.head.low > least for run in last)


def by_processor_time(runs: Sequence[Judgement], *, is_counted: bool) -> Literal["regression", "same", ""]:
    """The verdict by CPU time if wall time in the last two runs was inconclusive: a regression, or "same" if
    exact counters agree (`is_counted`); else "".
    """
    last, verdicts = runs[-2:], [run.verdict for run in runs[-2:]]
    if len(last) < 2 or "contaminated" not in verdicts or {*verdicts} - {"contaminated", "inconclusive"}:
        return ""
    noise = differs_from_itself(runs, cpu=True)
    if all(run.cpu.low > max(THRESHOLD, CPU_MARGIN * noise) for run in last):
        return "regression"
    is_same = noise <= THRESHOLD and all(verdict_of(run.cpu) == "same" for run in last)
    return "same" if is_same and is_counted else ""


def twice(verdicts: Sequence[Verdict]) -> bool:
    """Whether the last two valid runs found a regression of any size."""
    proven = [verdict for verdict in verdicts if verdict != "contaminated"]
    return proven[-2:] == ["regression", "regression"]


def needs_another_run(verdicts: Sequence[Verdict]) -> bool:
    """Whether to run again: a first regression needs a second, a contaminated run a valid one, once, or until
    a regression is confirmed.
    """
    if not verdicts:
        return True
    if len(verdicts) >= MAX_RUNS or twice(verdicts):
        return False
    if verdicts[-1] == "contaminated":
        return "regression" in verdicts or verdicts.count("contaminated") < 2
    return verdicts[-1] == "regression"
