"""Times alternative ways to do one thing on a machine that runs other programs too.

If one is measured after the other, equal code often looks different. So all ways (arms) take turns: a round
runs them in a new random order, there and back, and only numbers of one round are set against each other:

    round 1   A B C   C B A
    round 2   C A B   B A C

Whether a program became slower is judged by the median over rounds of the ratio *within* a round, with a
bootstrap interval over rounds, and only beyond `THRESHOLD`. A second process of the old version, the control,
has to agree with the first: where identical code differs, nothing was proven. Rounds are looked at up to
three times, after fixed numbers; looking whenever one likes would raise false alarms.
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
"""Seconds that a sample takes at least: short ones measure the scheduler of the operating system."""

Arm = TypeVar("Arm")

Times = Mapping[str, Sequence[float]]
"""Seconds of one step, by arm; two samples per round."""


def orders(arms: Sequence[Arm], seed: int | str) -> Iterator[tuple[Arm, ...]]:
    """Endless rounds: every arm in a random order, there and back. Equal in all processes with one seed."""
    generator = random.Random(seed)
    while True:
        order = generator.sample(list(arms), len(arms))
        yield (*order, *reversed(order))


def turns(arms: Sequence[Arm], num_rounds: int, seed: int | str) -> Iterator[Arm]:
    """Arms in the order of their turns: two turns of every arm in each of `num_rounds` rounds."""
    return itertools.chain.from_iterable(itertools.islice(orders(arms, seed), num_rounds))


def repeats_for(step_s: Sequence[float], sample_s: float = SAMPLE_S) -> int:
    """Steps per sample so that one takes at least `sample_s` when nothing disturbs it."""
    return max(1, math.ceil(sample_s / min(step_s)))


def slowest(of_ranks: Sequence[Times]) -> dict[str, list[float]]:
    """Each sample's maximum over the processes."""
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
    """The control: an arm's first sample of each round over its second. If it is further from 1 than chance
    allows, the machine changed in a way that the rounds did not cancel.
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
    """Seconds of one process and of its machine, since it started (`now`) or over a stretch (`since`)."""

    cpu_s: float  # used by this process
    busy_s: float  # of all cores together, this process included
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
    """Share of the machine's cores that programs other than these processes took over the same stretch: the
    most that any of them saw.
    """
    own_s = sum(each.cpu_s for each in of_processes)
    return max(max(0.0, each.busy_s - own_s) / (each.wall_s * each.num_cores) for each in of_processes)


# Whether a case of variants in turns may be judged, and which variant is faster
#
# Its control is one variant against itself, its first sample of each round over its second. Where the
# interval excludes 1 the machine did not hold still, and the case is void. It is measured once more with more
# rounds; void again, it is contaminated, and nothing of it is judged. The control's reach is the noise floor:
# a ratio that is no further from 1 than identical code was is within the noise, whatever its own interval
# says, because an interval of rounds does not see what differs between variants for as long as they live.

MORE_ROUNDS = 2  # times the rounds when a case is measured again


def void_by(control: Metric | None) -> str:
    """Why a case's numbers can't be judged, or nothing: the interval of the control excludes 1."""
    if control is None or control.low is None or control.high is None or control.low <= 1 <= control.high:
        return ""
    return f"the control is {measured(control)}, not 1"


def state_of(record: Record) -> tuple[Literal["", "void", "contaminated"], str]:
    """Whether a case's numbers may be judged, in a word, and a sentence about it; both empty where all was
    well at once.
    """
    void, before = void_by(record.metric("control")), str(record.details.get("before", ""))
    if void and before:
        return "contaminated", f"contaminated: {void}, and before, in half the rounds: {before}"
    if void:
        return "void", f"void: {void}: the machine changed while it measured; measure again"
    if before:
        return "", f"measured again with {MORE_ROUNDS} times the rounds, because at first {before}"
    return "", ""


def trust_of(record: Record) -> list[str]:
    """How far a record can be trusted: `control 1.000 [0.990, 1.010]`, `used by others 0.012`."""
    found = [record.metric(name) for name in ("control", "used by others")]
    return [f"{each.name} {measured(each)}" for each in found if each is not None]


def is_faster(ratio: Metric, control: Metric | None) -> bool | None:
    """Whether the first of two variants is the faster one by the ratio of their speeds. None where that is
    within the noise: the interval holds 1, or the median lies within the noise floor, which is the further
    end of the control's interval.
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

THRESHOLD = 0.03  # the least change that counts: smaller ones come and go with the layout of code in memory
LOOKS = (12, 48, 192)  # rounds after which the intervals are looked at; four times as many halve an interval
CONFIDENCE = 0.984  # of one look: three err together no more often than one at 95 %
MAX_RUNS = 4  # of one benchmark: one, its confirmation, and one more for each if it was contaminated

MARGIN, CPU_MARGIN = 1.5, 2.0
"""A regression counts beyond so many times what identical code differed by, in wall time and, where that
tells nothing, in processor time: by simulation, so that the same code fails less than once in a hundred.
"""


class Sample(NamedTuple):
    """Seconds of one step: by the clock on the wall, and of processor time over all threads."""

    wall_s: float
    cpu_s: float


Round = Mapping[str, Sequence[Sample]]
"""The samples of each arm in one round, there and back."""


@dataclass(frozen=True)
class Change:
    """Relative change of the time per step with its interval: +0.05 is five percent slower."""

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
    cpu: Change  # the head's processor time, which can't see waiting
    control_cpu: Change
    base_s: float  # median seconds per step
    head_s: float
    out_of_time: bool = False  # inconclusive, with fewer rounds than the last look's for want of time

    @property
    def noise_floor(self) -> float:
        """How far identical code seemed to differ: the control's interval, at its further end."""
        return max(abs(self.control.low), abs(self.control.high))

    @property
    def smallest_detectable(self) -> float:
        """The slow-down that such a run finds four times in five: its lower bound, half an interval below the
        estimate, which itself spreads by that over its normal quantile, must clear the threshold.
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
    """Takes rounds up to the first look that ends the run, or the last one; `sample(arm)` takes one sample.

    A look ends the run with a verdict, or with a control that refutes it, unless that is the first look's,
    which may be chance.

    Past `deadline_s` of the clock no round is begun, and what is there gets the look that would have come
    next. Before the first look's rounds the run is inconclusive, whatever it has seen; two rounds are taken
    in any case.
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
    """The verdict on these rounds. Raises ValueError below two, and for a sample that took no time."""
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
    """Verdict of an interval by itself. An improvement must also lie beyond the noise floor: unlike a
    regression, no second run confirms it.
    """
    slower, faster = THRESHOLD, 1 / (1 + THRESHOLD) - 1
    if head.low > slower:
        return "regression"
    if head.high < min(faster, 1 / (1 + noise_floor) - 1):
        return "improved"
    if faster <= head.low and head.high <= slower:
        return "same"
    return "inconclusive"


def differs_from_itself(runs: Sequence[Judgement], *, cpu: bool = False) -> float:
    """The most that identical code differed by in any of these runs, contaminated ones included: two
    processes differ for as long as they live, by where their memory happens to lie.
    """
    return max(abs((run.control_cpu if cpu else run.control).value) for run in runs)


def confirmed(runs: Sequence[Judgement]) -> bool:
    """Whether the last two runs that prove anything found a regression, each well beyond what identical code
    differed by in any run.
    """
    last = [run for run in runs if run.verdict != "contaminated"][-2:]
    least = MARGIN * differs_from_itself(runs) if last else math.inf
    return twice([run.verdict for run in runs]) and all(run.head.low > least for run in last)


def by_processor_time(runs: Sequence[Judgement], *, is_counted: bool) -> Literal["regression", "same", ""]:
    """Verdict by processor time where the wall time of the last two runs told nothing: a regression, or
    "same" where exact counters say so, too (`is_counted`); else "".
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
    """Whether the last two runs that prove anything found a regression, however large."""
    proven = [verdict for verdict in verdicts if verdict != "contaminated"]
    return proven[-2:] == ["regression", "regression"]


def needs_another_run(verdicts: Sequence[Verdict]) -> bool:
    """A first regression asks for a second, and a contaminated run for one that proves something: once, or as
    long as a regression waits to be confirmed.
    """
    if not verdicts:
        return True
    if len(verdicts) >= MAX_RUNS or twice(verdicts):
        return False
    if verdicts[-1] == "contaminated":
        return "regression" in verdicts or verdicts.count("contaminated") < 2
    return verdicts[-1] == "regression"
