"""Lets several versions of a program take turns (`harness.timing.rounds`), and stops at the looks."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

from gpipe_bench.harness.guard.judge import LOOKS, Judgement, Look, Round, Sample, ends_run, judge
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
    """Takes rounds up to the first look that ends the run, or the last one; `sample(arm)` takes one sample.

    Past `deadline_s` of the clock no round is begun but the first two, without which there is nothing to
    show, and the run is inconclusive, whatever it has seen: a look at a moment of the machine's choosing is
    none of those. Nor are rounds begun that would not reach the next look in time:

        12 rounds   look   48 rounds   look   192 rounds?   too long: what the second look said stands
    """
    rounds: list[Round] = []
    order_of = orders(ARMS, seed)
    begun_s = clock_s()
    for number, look in enumerate(looks):
        while len(rounds) < look.rounds and (len(rounds) < 2 or clock_s() < deadline_s):
            taken: Mapping[str, list[Sample]] = {arm: [] for arm in ARMS}
            for arm in next(order_of):
                taken[arm].append(sample(arm))
            rounds.append(Round(**{arm: tuple(samples) for arm, samples in taken.items()}))
        judgement = judge(rounds, look.confidence)
        if len(rounds) < look.rounds:
            return dataclasses.replace(judgement, verdict="inconclusive", out_of_time=True), rounds
        if look is looks[-1] or ends_run(judgement, number):
            break
        now_s = clock_s()
        round_s = (now_s - begun_s) / len(rounds)
        if now_s + round_s * (looks[number + 1].rounds - len(rounds)) > deadline_s:
            return dataclasses.replace(judgement, out_of_time=True), rounds
    return judgement, rounds
