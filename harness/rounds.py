"""Times alternative ways to do one thing on a machine that runs other programs too.

Timings taken at different times differ: if one is measured after the other, equal code often looks different.
So all ways (arms) take turns: a round runs them in a new random order, there and back:

    round 1   A B C   C B A
    round 2   C A B   B A C

A drift within the round then weighs on all of them alike, and only numbers of one round are set against each
other. Everything here that is timed beside something else takes its turns in this order: steps of the tables,
engines, rates of a link, revisions under the guard. Each process notes what the machine's cores did meanwhile
(`Usage`), so that disturbed timings show. psutil is imported only for that.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

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
    """Share of the machine's cores that programs other than these processes took over the same stretch.

    The processes measure the machine a moment apart, so the busiest that any saw counts.
    """
    own_s = sum(each.cpu_s for each in of_processes)
    return max(max(0.0, each.busy_s - own_s) / (each.wall_s * each.num_cores) for each in of_processes)
