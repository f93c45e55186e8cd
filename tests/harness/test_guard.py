"""What the guard concludes from samples: made-up ones, so that what is true is known."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy
import pytest

from gpipe_bench.harness.guard import (
    ARMS,
    CONFIDENCE,
    LOOKS,
    MAX_RUNS,
    THRESHOLD,
    Change,
    Judgement,
    Round,
    Sample,
    Verdict,
    by_processor_time,
    change,
    confirmed,
    differs_from_itself,
    judge,
    log_ratios,
    needs_another_run,
    run_rounds,
    twice,
    verdict_of,
)


def sampler(
    seed: int, *, head: float = 1.0, control: float = 1.0, noise: float = 0.04, drift: float = 0.0
) -> Callable[[str], Sample]:
    """Steps of 10 ms with log-normal noise and a machine that becomes slower from sample to sample."""
    generator = random.Random(seed)
    factor = {"base": 1.0, "head": head, "control": control}
    count = itertools.count()

    def sample(arm: str) -> Sample:
        seconds = 0.01 * factor[arm] * math.exp(generator.gauss(0, noise) + drift * next(count))
        return Sample(seconds, seconds)

    return sample


def rounds_of(head: float, control: float = 1.0, count: int = 12, noise: float = 0.01) -> list[Round]:
    sample = sampler(7, head=head, control=control, noise=noise)
    return [{arm: (sample(arm), sample(arm)) for arm in ARMS} for _ in range(count)]


def pairs(*seconds: float) -> Round:
    """Both samples of each arm took as long."""
    return {arm: (Sample(each, each),) * 2 for arm, each in zip(ARMS, seconds, strict=True)}


# Verdicts


@pytest.mark.parametrize(
    ("low", "high", "floor", "verdict"),
    [
        (0.031, 0.2, 0.0, "regression"),
        (0.029, 0.2, 0.0, "inconclusive"),
        (-0.2, -0.031, 0.0, "improved"),
        (-0.2, -0.02, 0.0, "inconclusive"),
        (-0.029, 0.029, 0.0, "same"),
        (0.01, 0.02, 0.0, "same"),  # real, but too little to count
        (-0.031, 0.0, 0.0, "inconclusive"),
        (-0.2, 0.2, 0.0, "inconclusive"),
        # No improvement within the noise floor; a regression has to be confirmed by fresh processes.
        (-0.14, -0.08, 0.173, "inconclusive"),
        (-0.14, -0.08, 0.08, "improved"),
        (-0.30, -0.20, 0.173, "improved"),
        (-0.30, -0.14, 0.173, "inconclusive"),
        (0.08, 0.14, 0.173, "regression"),
        (-0.01, 0.01, 0.02, "same"),
    ],
)
def test_an_interval_counts_only_beyond_the_threshold_and_the_noise(
    low: float, high: float, floor: float, verdict: str
) -> None:
    assert verdict_of(Change((low + high) / 2, low, high), floor) == verdict


def test_identical_code_on_a_restless_machine_has_not_improved() -> None:
    """The head happens to be a tenth faster in every round, while the base differs as much from itself."""
    swings = [0.85, 1.17, 0.9, 1.15, 1.0, 0.86]
    run = judge([pairs(1.0, 0.88, swing) for swing in swings * 2], 0.975)
    assert run.noise_floor == max(-run.control.low, run.control.high) > 0.12
    assert run.control.low < 0 < run.control.high
    assert run.verdict == "inconclusive"


@pytest.mark.parametrize(
    ("head", "verdict"), [(1.0, "same"), (1.10, "regression"), (1.01, "same"), (0.9, "improved")]
)
def test_what_is_true_is_found(head: float, verdict: str) -> None:
    run = judge(rounds_of(head), 0.975)
    assert run.verdict == verdict
    assert run.head.low <= head - 1 <= run.head.high
    assert run.cpu == run.head


def test_a_base_that_differs_from_itself_proves_nothing() -> None:
    """Though the head is slower by a tenth."""
    run = judge(rounds_of(1.1, control=1.05), 0.975)
    assert run.verdict == "contaminated"
    assert run.noise_floor >= 0.05


def test_a_ratio_is_that_of_one_round() -> None:
    """The machine becomes three times slower; within a round everything is in proportion."""
    rounds = [pairs(level, 1.2 * level, level) for level in (1.0, 2.0, 3.0)]
    assert log_ratios(rounds, "head") == pytest.approx([math.log(1.2)] * 3)
    assert change(log_ratios(rounds, "head"), 0.95).value == pytest.approx(0.2)


def test_processor_time_is_another_column_and_no_verdict() -> None:
    run = judge([{**pairs(1.0, 1.0, 1.0), "head": (Sample(1.2, 1.0),) * 2}] * 12, 0.975)
    assert run.verdict == "regression"
    assert run.cpu.value == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_sample_that_took_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"1\.0\]; a sample must take time"):
        judge([{**pairs(1.0, 1.0, 1.0), "head": (Sample(seconds, 1.0), Sample(1.0, 1.0))}] * 3, 0.975)


def test_one_round_has_no_interval() -> None:
    with pytest.raises(ValueError, match="1 rounds have no interval; measure"):
        judge(rounds_of(1.0, count=1), 0.975)


# Rounds and looks


def test_a_clear_case_ends_at_the_first_look_and_an_unclear_one_at_the_last() -> None:
    clear, rounds = run_rounds(sampler(1, head=1.3, noise=0.02), "a")
    assert (clear.verdict, clear.rounds, len(rounds)) == ("regression", LOOKS[0], LOOKS[0])
    unclear, rounds = run_rounds(sampler(1, noise=0.9), "a")
    assert (unclear.verdict, unclear.rounds, len(rounds)) == ("inconclusive", LOOKS[-1], LOOKS[-1])
    assert not unclear.out_of_time


def test_all_looks_together_err_as_one_at_95_percent() -> None:
    assert len(LOOKS) * (1 - CONFIDENCE) <= 0.05
    assert list(LOOKS) == sorted(set(LOOKS))


def test_the_last_look_tells_what_the_second_could_not() -> None:
    """A tenth slower on a machine whose samples differ by a fifth."""
    assert simulated(20, LOOKS[:2], noise=0.2, head=1.1).count("regression") <= 10
    assert simulated(20, noise=0.2, head=1.1).count("regression") >= 15


def test_a_contaminated_first_look_goes_on_and_a_second_ends_the_run() -> None:
    """Two processes of the same code that differ by then go on differing."""
    judged, _ = run_rounds(sampler(1, control=1.2, noise=0.01), "a")
    assert (judged.verdict, judged.rounds) == ("contaminated", LOOKS[1])


def test_a_steady_drift_cancels_within_the_round() -> None:
    judged, rounds = run_rounds(sampler(3, noise=0.0, drift=0.01), "a")
    assert judged.verdict == "same"
    assert log_ratios(rounds, "head") == pytest.approx([0.0] * len(rounds), abs=1e-9)


def run_for(rounds_in_time: float, **options: float) -> tuple[Judgement, int]:
    """A run that has time for so many rounds, of which each takes a second."""
    take, taken = sampler(1, **options), [0]

    def sample(arm: str) -> Sample:
        taken[0] += 1
        return take(arm)

    judged, rounds = run_rounds(sample, "a", deadline_s=rounds_in_time, clock_s=lambda: taken[0] / 6)
    return judged, len(rounds)


def test_before_the_first_look_it_is_inconclusive_however_clear_it_seems() -> None:
    judged, rounds = run_for(7, head=2.0)
    assert rounds == 7
    assert judged.head.low > THRESHOLD
    assert (judged.verdict, judged.out_of_time) == ("inconclusive", True)


def test_where_time_ends_between_two_looks_the_next_one_is_taken_there() -> None:
    """Noise of a quarter: 48 rounds can't tell a tenth, of which there are 130 here."""
    judged, rounds = run_for(130, head=1.1, noise=0.25)
    assert (judged.verdict, rounds, judged.rounds, judged.out_of_time) == ("regression", 130, 130, False)
    judged, rounds = run_for(130, noise=0.9)
    assert (judged.verdict, rounds, judged.out_of_time) == ("inconclusive", 130, True)
    judged, rounds = run_for(1e6, noise=0.9)
    assert (judged.verdict, rounds, judged.out_of_time) == ("inconclusive", LOOKS[2], False)


def test_no_time_at_all_still_shows_two_rounds() -> None:
    judged, rounds = run_rounds(sampler(1, head=2.0), "a", deadline_s=0.0, clock_s=lambda: 1.0)
    assert (judged.verdict, judged.rounds, len(rounds)) == ("inconclusive", 2, 2)


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
        ("regression inconclusive", False),
        ("regression regression", True),
        ("regression contaminated regression", True),
        ("contaminated regression regression", True),
        ("contaminated contaminated", False),
        ("same", False),
        ("improved", False),
    ],
)
def test_only_two_consecutive_regressions_fail(verdicts: str, fails: bool) -> None:
    assert confirmed([judged(each, SLOWER) for each in verdicts.split()]) == fails  # type: ignore[arg-type]


def test_what_is_unproven_is_measured_again_but_not_for_ever() -> None:
    """Whatever the verdicts, it ends; and it ends early exactly where nothing is left to find out."""
    kinds: tuple[Verdict, ...] = ("regression", "improved", "same", "inconclusive", "contaminated")

    def sequences(verdicts: tuple[Verdict, ...]) -> Iterator[tuple[Verdict, ...]]:
        if not needs_another_run(verdicts):
            yield verdicts
            return
        for kind in kinds:
            yield from sequences((*verdicts, kind))

    found = list(sequences(()))
    assert max(map(len, found)) == MAX_RUNS
    for verdicts in found:
        if len(verdicts) < MAX_RUNS:
            given_up = verdicts == ("contaminated", "contaminated")
            assert twice(verdicts) or given_up or verdicts[-1] in ("improved", "same", "inconclusive")


def simulated(trials: int, looks: Sequence[int] = LOOKS, **options: float) -> list[str]:
    return [run_rounds(sampler(seed, **options), str(seed), looks=looks)[0].verdict for seed in range(trials)]


def test_identical_code_rarely_looks_slower_and_a_tenth_is_seen() -> None:
    """Noise as on a busy machine: 8 % from sample to sample."""
    same = simulated(60, noise=0.08)
    assert same.count("regression") + same.count("improved") <= 1
    assert same.count("contaminated") <= 7  # what the looks allow, and chance
    assert simulated(30, noise=0.08, head=1.1).count("regression") >= 26


def test_the_smallest_detectable_slow_down_is_detected_four_times_in_five() -> None:
    looks = (48,)
    quiet = [run_rounds(sampler(seed, noise=0.06), str(seed), looks=looks)[0] for seed in range(20)]
    effect = sorted(judged.smallest_detectable for judged in quiet)[10]
    found = simulated(60, looks, noise=0.06, head=1 + effect)
    proven = [verdict for verdict in found if verdict != "contaminated"]
    assert 0.65 <= proven.count("regression") / len(proven) <= 0.95
