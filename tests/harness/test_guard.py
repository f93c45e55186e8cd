"""What the guard concludes from samples: made-up ones, so that what is true is known."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from scipy.stats import wilcoxon

from gpipe_bench.harness.rounds import (
    ARMS,
    CONFIDENCE,
    LOOKS,
    UNTOLD,
    Change,
    Sample,
    Trial,
    change,
    judge,
    verdict_of,
)

NONE = Change(0.0, -0.01, 0.01)
Effect = dict[str, float]


def trials_of(
    count: int, head: float = 0.0, *, control: float = 0.0, processes: float = 0.01, noise: float = 0.01,
    cpu_noise: float | None = None, seed: int = 7,
) -> list[Trial]:  # fmt: skip
    """Steps of 10 ms: processes differ as long as they live, samples and processor time also within them."""
    random, logs = numpy.random.default_rng(seed), {"base": 0.0, "head": head, "control": control}

    def trial() -> Trial:
        of = {arm: random.normal(logs[arm], processes) for arm in ARMS}

        def sample(arm: str) -> Sample:
            wall, cpu = random.normal(of[arm], noise), random.normal(of[arm], cpu_noise or noise)
            return Sample(0.01 * math.exp(wall), 0.01 * math.exp(cpu))

        return [{arm: (sample(arm), sample(arm)) for arm in ARMS} for _ in range(4)]

    return [trial() for _ in range(count)]


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.031, 0.2, "regression"),
        (0.029, 0.2, "inconclusive"),
        (-0.2, -0.031, "improved"),
        (-0.029, 0.029, "same"),
        (0.01, 0.02, "same"),  # real, but too little to count
        (-0.2, 0.2, "inconclusive"),
    ],
)
def test_an_interval_counts_only_beyond_the_threshold(low: float, high: float, verdict: str) -> None:
    assert verdict_of(Change((low + high) / 2, low, high), NONE) == verdict
    assert verdict_of(Change((low + high) / 2, low, high), Change(0.02, 0.01, 0.03)) == "contaminated"


@pytest.mark.parametrize(
    ("head", "verdict"), [(1.0, "same"), (1.10, "regression"), (1.01, "same"), (0.9, "improved")]
)
def test_what_is_true_is_found(head: float, verdict: str) -> None:
    found = judge(trials_of(32, math.log(head)))
    assert (found.verdict, found.trials, found.by_cpu) == (verdict, 32, False)
    assert found.head.low <= head - 1 <= found.head.high
    assert found.base_s == pytest.approx(0.01, rel=0.02)
    assert found.head_s == pytest.approx(0.01 * head, rel=0.02)


def test_before_the_first_look_nothing_is_told() -> None:
    early = judge(trials_of(LOOKS[0] - 1, 0.5), is_last=True)
    assert (early.verdict, early.by_cpu, early.smallest_detectable) == ("inconclusive", False, None)
    assert judge(trials_of(LOOKS[0], 0.5)).verdict == "regression"


@pytest.mark.parametrize("count", [7, 8, 11, 32])
def test_the_interval_is_that_of_wilcoxons_test(count: int) -> None:
    """It holds the shifts that scipy's exact test does not reject."""
    ratios = numpy.random.default_rng(count).normal(0.05, 0.02, count)
    found = change([*ratios])
    for inside, each in ((1, found.low), (-1, found.high)):
        for off, kept in ((1e-9, True), (-1e-9, False)):
            shifted = ratios - (math.log1p(each) + inside * off)
            assert (wilcoxon(shifted, method="exact").pvalue > 1 - CONFIDENCE) == kept


# Processor time


@pytest.mark.parametrize(
    ("head", "is_counted", "verdict"),
    [(0.1, False, "regression"), (0.0, True, "same"), (0.0, False, "inconclusive")],  # it can't see waiting
)
def test_processor_time_decides_at_the_last_look_where_wall_time_tells_nothing(
    head: float, is_counted: bool, verdict: str
) -> None:
    trials = trials_of(LOOKS[1], head, noise=0.6, cpu_noise=0.01)
    assert judge(trials, is_counted=is_counted).verdict == "inconclusive"
    found = judge(trials, is_last=True, is_counted=is_counted)
    assert (found.verdict, found.by_cpu) == (verdict, verdict != "inconclusive")


def test_what_differs_from_itself_in_processor_time_too_stays_contaminated() -> None:
    found = judge(trials_of(LOOKS[1], 0.2, control=0.2), is_last=True, is_counted=True)
    assert (found.verdict, found.by_cpu) == ("contaminated", False)


# How often it errs

HOW: dict[str, Callable[[Any, float, tuple[int, int]], Any]] = {
    "normal": lambda random, sd, size: random.normal(0, sd, size),
    "two kinds": lambda random, sd, size: 2 * sd * random.integers(0, 2, size),
    "a slow one in ten": lambda random, sd, size: sd / 0.3 * (random.random(size) < 0.1),
    "heavy tails": lambda random, sd, size: sd / 3**0.5 * random.standard_t(3, size),
}


def outcomes(how: str, runs: int, sd: float, noise: float, effect: float) -> Counter[str]:
    """Of runs of two looks at wall time: every process is faster or slower by `sd` as long as it lives, what
    is measured of it in a trial by `noise`.
    """
    random, told = numpy.random.default_rng(1811), Counter[str]()
    for _ in range(runs):
        logs = HOW[how](random, sd, (LOOKS[1], 3)) + numpy.array([0.0, math.log1p(effect), 0.0])
        seconds = numpy.exp(logs + random.normal(0, noise, logs.shape)).tolist()
        trials = [[{arm: [Sample(each)] for arm, each in zip(ARMS, trial, strict=True)}] for trial in seconds]
        found = judge(trials[: LOOKS[0]])
        told[(judge(trials) if found.verdict in UNTOLD else found).verdict] += 1
    return told


@pytest.mark.parametrize("noise", [0.005, 0.015, 0.1])
@pytest.mark.parametrize("sd", [0.0, 0.02, 0.04])
@pytest.mark.parametrize("how", HOW)
def test_identical_code_fails_once_in_a_hundred_however_its_processes_differ(
    how: str, sd: float, noise: float
) -> None:
    assert outcomes(how, 200, sd, noise, 0.0)["regression"] <= 2
    assert outcomes(how, 50, sd, noise, -0.1)["regression"] == 0
    if noise < 0.1:
        assert outcomes(how, 50, sd, noise, 0.1)["regression"] >= 45
