"""How two ways of doing the same are timed on a machine that does other things too.

What is measured apart differs by the time of day: where one was measured after the other, equal code often
looks different. So every round runs all arms there and back (A B B A, in an order drawn anew), which cancels
a drift within the round, and only numbers of one round are set against each other. Only the standard library
is imported.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

Times = Mapping[str, Sequence[float]]
"""Seconds of one step, by arm; two samples per round."""


def palindromes(arms: Sequence[str], num_rounds: int, seed: int) -> list[tuple[str, ...]]:
    """The order of each round: every arm, in a random order, there and back."""
    generator = random.Random(seed)
    rounds = []
    for _ in range(num_rounds):
        order = generator.sample(list(arms), len(arms))
        rounds.append((*order, *reversed(order)))
    return rounds


def measure(
    steps: Mapping[str, Callable[[], object] | None],
    repeats: Mapping[str, int],
    num_rounds: int,
    seed: int,
    prepare: Callable[[], object],
    clock_s: Callable[[], float],
) -> dict[str, list[float]]:
    """Seconds per step of every arm in this process, two samples per round.

    `prepare` is called before each sample, by all processes: it clears what the last one left and waits for
    the others. A sample is the mean of `repeats` steps. Where an arm's step is None, this process only waits,
    and its samples are 0.
    """
    times: dict[str, list[float]] = {arm: [] for arm in steps}
    for order in palindromes(list(steps), num_rounds, seed):
        for arm in order:
            step, count = steps[arm], repeats[arm]
            prepare()
            start_s = clock_s()
            if step is not None:
                for _ in range(count):
                    step()
            times[arm].append((clock_s() - start_s) / count if step is not None else 0.0)
    return times


def slowest(of_ranks: Sequence[Times]) -> dict[str, list[float]]:
    """A step takes as long as its slowest process."""
    return {
        arm: [max(samples) for samples in zip(*(times[arm] for times in of_ranks), strict=True)]
        for arm in of_ranks[0]
    }


def per_round(samples: Sequence[float]) -> list[float]:
    """The geometric mean of each round's two samples. `ValueError` for half a round."""
    if len(samples) % 2:
        raise ValueError(f"{len(samples)} samples are no whole number of rounds, which have two each")
    return [math.sqrt(a * b) for a, b in zip(samples[::2], samples[1::2], strict=True)]


def ratios(times: Times, numerator: str, denominator: str, factor: float = 1.0) -> list[float]:
    """`factor` * numerator / denominator in each round: the mean difference of logarithms, as a factor."""
    pairs = zip(per_round(times[numerator]), per_round(times[denominator]), strict=True)
    return [factor * a / b for a, b in pairs]


def differences(times: Times, more: str, less: str, factor: float = 1.0) -> list[float]:
    """`factor` * (more - less) in each round."""
    pairs = zip(per_round(times[more]), per_round(times[less]), strict=True)
    return [factor * (a - b) for a, b in pairs]


def against_itself(times: Times, arm: str) -> list[float]:
    """The control: an arm's first sample of each round over its second. If it is further from 1 than chance
    allows, the machine changed in a way that the rounds did not cancel.
    """
    samples = times[arm]
    return [a / b for a, b in zip(samples[::2], samples[1::2], strict=True)]
