"""Judges whether a program became slower, from samples of two versions taken side by side.

Stored times of another day, means of blocks and significance without a least effect all cry wolf on shared
machines. What is judged here is the median over rounds of the ratio *within* a round, with a bootstrap
interval over rounds, and it counts only beyond `THRESHOLD`. A second process of the old version, the control,
has to agree with the first: where identical code differs, nothing was proven.

Rounds are looked at up to three times, after fixed numbers; looking whenever one likes would raise false
alarms. Time is what is compared, so a change of +0.05 means five percent slower.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from gpipe_bench.harness.record import median_interval
from gpipe_bench.harness.rounds import level, orders

Verdict = Literal["regression", "improved", "same", "inconclusive", "contaminated"]

ARMS = ("base", "head", "control")

THRESHOLD = 0.03
"""The least change that counts; smaller ones come and go with the layout of code in memory."""

LOOKS = (12, 48, 192)
"""The rounds after which the intervals are looked at. Four times the rounds halve an interval: the first look
is enough on a quiet machine, the last one is what a busy machine needs.
"""

CONFIDENCE = 0.984
"""Confidence of one look at the results: three looks err together no more often than one at 95 %."""

MAX_RUNS = 4
"""Runs of one benchmark at most: one, its confirmation, and one more for each if it was contaminated."""

MARGIN, CPU_MARGIN = 1.5, 2.0
"""A regression counts beyond so many times what identical code differed by, in wall time and, where that
tells nothing, in processor time. They are by simulation, so that the same code fails less than once in a
hundred: with once as far in both it failed in two of a hundred on a machine whose processes differ by 4 %.
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
        """The slow-down that such a run finds four times in five.

        The lower bound must clear the threshold, and lies half an interval below the estimate, which itself
        spreads by the half interval over its normal quantile.
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

        12 rounds   look   48 rounds   look   192 rounds, or as many as there is time for   look

    A look ends the run with a verdict, or with a control that refutes it. At the first look that may be
    chance; later two processes of the same code do differ, and more of their rounds would only say so again:
    fresh processes are the remedy.

    Past `deadline_s` of the clock no round is begun, and what is there gets the look that would have come
    next: the clock knows nothing of who is faster. Before the first look's rounds the run is inconclusive,
    whatever it has seen, and two rounds are taken in any case, without which there is nothing to show.
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
    """For each round, the mean logarithm of the arm's samples minus that of the base's.

    Raises ValueError for a sample that is not positive.
    """

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
    """Verdict of an interval by itself; the threshold is equally far in both directions, in logarithms.

    An improvement must also lie beyond the noise floor: unlike a regression, no second run confirms it.
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
    if not twice([run.verdict for run in runs]):
        return False
    last = [run for run in runs if run.verdict != "contaminated"][-2:]
    return all(run.head.low > MARGIN * differs_from_itself(runs) for run in last)


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
