"""Lets several versions of a program take turns, and stops at the looks.

Every round runs all arms there and back, in an order drawn anew, so that a machine that slows down or
speeds up during the round does so for all of them alike.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpipe_bench.harness.guard.judge import LOOKS, Judgement, Look, Round, Sample, is_final, judge

ARMS = ("base", "head", "control")
SAMPLE_S = 0.05
"""Seconds that a sample takes at least: short ones measure the scheduler of the operating system."""

SampleOf = Callable[[str], Sample]


def orders(seed: str) -> Iterator[tuple[str, ...]]:
    """Endless rounds: every arm in a random order, there and back."""
    generator = random.Random(seed)
    while True:
        order = generator.sample(ARMS, len(ARMS))
        yield (*order, *reversed(order))


def run_rounds(
    sample: SampleOf,
    seed: str,
    *,
    looks: Sequence[Look] = LOOKS,
    deadline_s: float = math.inf,
    clock_s: Callable[[], float] = time.monotonic,
) -> tuple[Judgement, list[Round]]:
    """Takes rounds up to the first look that decides, or the last one; `sample(arm)` takes one sample.

    Past `deadline_s` of the clock no round is begun but the first two, without which there is nothing to
    show, and the run is inconclusive, whatever it has seen: a look at a moment of the machine's choosing is
    none of the two.
    """
    rounds: list[Round] = []
    order_of = orders(seed)
    for look in looks:
        while len(rounds) < look.rounds and (len(rounds) < 2 or clock_s() < deadline_s):
            taken: Mapping[str, list[Sample]] = {arm: [] for arm in ARMS}
            for arm in next(order_of):
                taken[arm].append(sample(arm))
            rounds.append(Round(**{arm: tuple(samples) for arm, samples in taken.items()}))
        judgement = judge(rounds, look.confidence)
        if len(rounds) < look.rounds:
            return dataclasses.replace(judgement, verdict="inconclusive", out_of_time=True), rounds
        if is_final(judgement):
            break
    return judgement, rounds


def repeats_for(step_s: Sequence[float], sample_s: float = SAMPLE_S) -> int:
    """Steps per sample so that one takes at least `sample_s` when nothing disturbs it."""
    return max(1, math.ceil(sample_s / min(step_s)))
