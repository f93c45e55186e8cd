"""Lets several versions of a program take turns (`harness.timing.rounds`), and stops at the looks."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

from gpipe_bench.harness.guard.judge import LOOKS, Judgement, Look, Round, Sample, is_final, judge
from gpipe_bench.harness.timing.rounds import orders

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
    """Takes rounds up to the first look that decides, or the last one; `sample(arm)` takes one sample.

    Past `deadline_s` of the clock no round is begun but the first two, without which there is nothing to
    show, and the run is inconclusive, whatever it has seen: a look at a moment of the machine's choosing is
    none of the two.
    """
    rounds: list[Round] = []
    order_of = orders(ARMS, seed)
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
