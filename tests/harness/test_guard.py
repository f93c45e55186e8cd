"""What the guard concludes from samples: made-up ones, so that what is true is known."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy
import pytest

from gpipe_bench.harness.rounds import (
    ARMS,
    CONFIDENCE,
    LOOKS,
    Change,
    Judgement,
    Round,
    Sample,
    Verdict,
    by_processor_time,
    confirmed,
    differs_from_itself,
    judge,
    needs_another_run,
    run_rounds,
    verdict_of,
)


def sampler(
    seed: int, *, head: float = 1.0, control: float = 1.0, noise: float = 0.04
) -> Callable[[str], Sample]:
    """Steps of 10 ms with log-normal noise."""
    generator = random.Random(seed)
    factor = {"base": 1.0, "head": head, "control": control}

    def sample(arm: str) -> Sample:
        seconds = 0.01 * factor[arm] * math.exp(generator.gauss(0, noise))
        return Sample(seconds, seconds)

    return sample


def rounds_of(head: float, control: float = 1.0, count: int = 12, noise: float = 0.01) -> list[Round]:
    sample = sampler(7, head=head, control=control, noise=noise)
    return [{arm: (sample(arm), sample(arm)) for arm in ARMS} for _ in range(count)]


# Verdicts


@pytest.mark.parametrize(
    ("low", "high", "floor", "verdict"),
    [
        (0.031, 0.2, 0.0, "regression"),
        (0.029, 0.2, 0.0, "inconclusive"),
        (-0.2, -0.031, 0.0, "improved"),
        (-0.029, 0.029, 0.0, "same"),
        (0.01, 0.02, 0.0, "same"),  # real, but too little to count
        (-0.2, 0.2, 0.0, "inconclusive"),
        # No improvement within the noise floor; a regression has to be confirmed by fresh processes.
        (-0.14, -0.08, 0.173, "inconclusive"),
        (-0.30, -0.14, 0.173, "inconclusive"),
        (0.08, 0.14, 0.173, "regression"),
    ],
)
def test_an_interval_counts_only_beyond_the_threshold_and_the_noise(
    low: float, high: float, floor: float, verdict: str
) -> None:
    assert verdict_of(Change((low + high) / 2, low, high), floor) == verdict


@pytest.mark.parametrize(
    ("head", "verdict"), [(1.0, "same"), (1.10, "regression"), (1.01, "same"), (0.9, "improved")]
)
def test_what_is_true_is_found(head: float, verdict: str) -> None:
    run = judge(rounds_of(head), 0.975)
    assert run.verdict == verdict
    assert run.head.low <= head - 1 <= run.head.high
    assert run.cpu == run.head


# Rounds and looks


def test_a_clear_case_ends_at_the_first_look_and_an_unclear_one_at_the_last() -> None:
    clear, rounds = run_rounds(sampler(1, head=1.3, noise=0.02), "a")
    assert (clear.verdict, clear.rounds, len(rounds)) == ("regression", LOOKS[0], LOOKS[0])
    unclear, rounds = run_rounds(sampler(1, noise=0.9), "a")
    assert (unclear.verdict, unclear.rounds, len(rounds)) == ("inconclusive", LOOKS[-1], LOOKS[-1])
    assert not unclear.out_of_time


def run_for(rounds_in_time: float, **options: float) -> tuple[Judgement, int]:
    """A run that has time for so many rounds, of which each takes a second."""
    take, taken = sampler(1, **options), [0]

    def sample(arm: str) -> Sample:
        taken[0] += 1
        return take(arm)

    judged, rounds = run_rounds(sample, "a", deadline_s=rounds_in_time, clock_s=lambda: taken[0] / 6)
    return judged, len(rounds)


def test_where_time_ends_between_two_looks_the_next_one_is_taken_there() -> None:
    """Noise of a quarter: 48 rounds can't tell a tenth, of which there are 130 here."""
    judged, rounds = run_for(130, head=1.1, noise=0.25)
    assert (judged.verdict, rounds, judged.rounds, judged.out_of_time) == ("regression", 130, 130, False)
    judged, rounds = run_for(130, noise=0.9)
    assert (judged.verdict, rounds, judged.out_of_time) == ("inconclusive", 130, True)
    judged, rounds = run_for(1e6, noise=0.9)
    assert (judged.verdict, rounds, judged.out_of_time) == ("inconclusive", LOOKS[2], False)


# What one and several runs amount to


NONE, SLOWER = Change(0.0, -0.01, 0.01), Change(0.1, 0.08, 0.12)


def judged(verdict: Verdict, head: Change, control: Change = NONE) -> Judgement:
    """A run whose processor time says what its wall time does."""
    return Judgement(verdict, 12, CONFIDENCE, head, control, head, control, 0.01, 0.01)


def test_a_regression_within_what_identical_code_differed_by_does_not_fail() -> None:
    """Identical code on two cores beside another job, as it was measured, and called FAILED."""
    runs = [
        judged("contaminated", Change(0.0, -0.02, 0.02), Change(-0.031, -0.044, -0.026)),
        judged("regression", Change(0.042, 0.0301, 0.075), Change(-0.001, -0.013, 0.013)),
        judged("contaminated", Change(0.0, -0.02, 0.02), Change(-0.046, -0.105, -0.024)),
        judged("regression", Change(0.068, 0.038, 0.103), Change(0.0, -0.013, 0.013)),
    ]
    assert differs_from_itself(runs) == 0.046
    assert not confirmed(runs)
    assert confirmed([runs[0], *[judged("regression", SLOWER)] * 2])


def found(random: Any, sd: float, noise: float, effect: float) -> Judgement:
    """What a run finds, by the normal approximation: each of its three processes is faster or slower by `sd`
    as long as it lives, and a sample by `noise`.
    """
    processes, noises = random.normal(0, sd, 3), numpy.zeros(3)
    processes[1] += math.log1p(effect)
    for before, rounds in itertools.pairwise([0, *LOOKS]):
        noises += random.normal(0, 1.25 * noise * math.sqrt((rounds - before) / 2), 3)
        half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * 1.25 * noise / math.sqrt(rounds)
        base, *others = processes + noises / rounds
        changes = [Change(*numpy.expm1([each - base + off for off in (0, -half, half)])) for each in others]
        run = judged("contaminated", *changes)
        if run.control.low <= 0 <= run.control.high:
            run = replace(run, verdict=verdict_of(run.head, run.noise_floor))
        if run.verdict != "inconclusive" and (run.verdict, rounds) != ("contaminated", LOOKS[0]):
            break
    return run


def outcomes(trials: int, sd: float, noise: float, effect: float) -> Counter[str]:
    random, told = numpy.random.default_rng(1811), Counter[str]()
    for _ in range(trials):
        runs: list[Judgement] = []
        while needs_another_run([run.verdict for run in runs]):
            runs.append(found(random, sd, noise, effect))
        failed = confirmed(runs) or by_processor_time(runs, is_counted=False) == "regression"
        told["failed" if failed else runs[-1].verdict] += 1
    return told


@pytest.mark.parametrize("noise", [0.01, 0.03])
@pytest.mark.parametrize("sd", [0.0, 0.01, 0.02, 0.04])
def test_identical_code_fails_once_in_a_hundred_however_its_processes_differ(sd: float, noise: float) -> None:
    assert outcomes(1000, sd, noise, 0.0)["failed"] <= 10
    assert outcomes(50, sd, noise, -0.1)["failed"] == 0
    if sd <= 0.01:
        assert outcomes(50, sd, noise, 0.1)["failed"] >= 45


@pytest.mark.parametrize(
    ("verdicts", "fails"),
    [
        ("regression", False),
        ("regression same", False),
        ("regression regression", True),
        ("regression contaminated regression", True),
        ("contaminated contaminated", False),
        ("same", False),
    ],
)
def test_only_two_consecutive_regressions_fail(verdicts: str, fails: bool) -> None:
    assert confirmed([judged(each, SLOWER) for each in verdicts.split()]) == fails  # type: ignore[arg-type]
