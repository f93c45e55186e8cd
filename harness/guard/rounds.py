"""Lets several versions of a program take turns (`harness.rounds`), and stops at the looks."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

from gpipe_bench.harness.guard.judge import LOOKS, Judgement, Look, Round, Sample, ends_run, judge
from gpipe_bench.harness.rounds import orders

ARMS = ("base", "head", "control")
SampleOf = Callable[[str], Sample]


def run_rounds(
    sample: SampleOf,
    seed: str,
    *,
    looks: Sequence[Look] = LOOKS,
    deadline_s: float = math.inf,
    clock_s: Callable[[], float] = time.monotonic,
) -> tuple[Judgement, list[Round]]:
    """Takes rounds up to the first look that ends the run, or the last one; `sample(arm)` takes one sample.

        12 rounds   look   48 rounds   look   192 rounds, or as many as there is time for   look

    Past `deadline_s` of the clock no round is begun, and what is there gets the look that would have come
    next: the clock knows nothing of who is faster. Before the first look's rounds the run is inconclusive,
    whatever it has seen, and two rounds are taken in any case, without which there is nothing to show.
    """
    rounds: list[Round] = []
    order_of = orders(ARMS, seed)
    for number, look in enumerate(looks):
        while len(rounds) < look.rounds and (len(rounds) < 2 or clock_s() < deadline_s):
            taken: Mapping[str, list[Sample]] = {arm: [] for arm in ARMS}
            for arm in next(order_of):
                taken[arm].append(sample(arm))
            rounds.append(Round(**{arm: tuple(samples) for arm, samples in taken.items()}))
        judgement = judge(rounds, look.confidence)
        if len(rounds) < looks[0].rounds:
            judgement = dataclasses.replace(judgement, verdict="inconclusive")
        if len(rounds) < look.rounds:
            more_would_tell = judgement.verdict == "inconclusive"
            return dataclasses.replace(judgement, out_of_time=more_would_tell), rounds
        if ends_run(judgement, number):
            break
    return judgement, rounds
