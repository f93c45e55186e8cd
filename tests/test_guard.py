"""What the guard concludes from samples: made-up ones, so that what is true is known."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator

import pytest

from gpipe_bench.harness.guard.judge import (
    LOOKS,
    MAX_RUNS,
    THRESHOLD,
    Change,
    Judgement,
    Look,
    Round,
    Sample,
    Verdict,
    change,
    confirmed,
    ends_run,
    judge,
    log_ratios,
    needs_another_run,
    verdict_of,
)
from gpipe_bench.harness.guard.rounds import ARMS, run_rounds


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
    pair = {arm: lambda arm=arm: (sample(arm), sample(arm)) for arm in ARMS}
    return [Round(**{arm: pair[arm]() for arm in ARMS}) for _ in range(count)]


# Verdicts


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.031, 0.2, "regression"),
        (0.029, 0.2, "inconclusive"),
        (-0.2, -0.031, "improved"),
        (-0.2, -0.02, "inconclusive"),
        (-0.029, 0.029, "same"),
        (0.01, 0.02, "same"),  # real, but too little to count
        (-0.031, 0.0, "inconclusive"),
        (-0.2, 0.2, "inconclusive"),
    ],
)
def test_an_interval_counts_only_beyond_the_threshold(low: float, high: float, verdict: str) -> None:
    assert verdict_of(Change((low + high) / 2, low, high)) == verdict


@pytest.mark.parametrize(
    ("head", "verdict"), [(1.0, "same"), (1.10, "regression"), (1.01, "same"), (0.9, "improved")]
)
def test_what_is_true_is_found(head: float, verdict: str) -> None:
    judged = judge(rounds_of(head), 0.975)
    assert judged.verdict == verdict
    assert judged.head.low <= head - 1 <= judged.head.high
    assert judged.cpu == judged.head


def test_a_base_that_differs_from_itself_proves_nothing() -> None:
    """Though the head is slower by a tenth."""
    judged = judge(rounds_of(1.1, control=1.05), 0.975)
    assert judged.verdict == "contaminated"
    assert judged.noise_floor >= 0.05
    assert not ends_run(judged, 0)
    assert ends_run(judged, 1)


def test_a_ratio_is_that_of_one_round() -> None:
    """The machine becomes three times slower; within a round everything is in proportion."""
    rounds = [
        Round(*(tuple(Sample(level * f, level * f) for _ in range(2)) for f in (1.0, 1.2, 1.0)))
        for level in (1.0, 2.0, 3.0)
    ]
    assert log_ratios(rounds, "head") == pytest.approx([math.log(1.2)] * 3)
    assert change(log_ratios(rounds, "head"), 0.95).value == pytest.approx(0.2)


def test_processor_time_is_another_column_and_no_verdict() -> None:
    pair = (Sample(1.0, 1.0), Sample(1.0, 1.0))
    waiting = (Sample(1.2, 1.0), Sample(1.2, 1.0))
    judged = judge([Round(pair, waiting, pair)] * 12, 0.975)
    assert judged.verdict == "regression"
    assert judged.cpu.value == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_sample_that_took_no_time_is_refused(seconds: float) -> None:
    fine = (Sample(1.0, 1.0),) * 2
    broken = (Sample(seconds, 1.0), Sample(1.0, 1.0))
    with pytest.raises(ValueError, match="wall_s of head is .*; a sample must take time"):
        judge([Round(fine, broken, fine)] * 3, 0.975)


def test_one_round_has_no_interval() -> None:
    with pytest.raises(ValueError, match="1 rounds have no interval; measure at least 2"):
        judge(rounds_of(1.0, count=1), 0.975)


# Rounds and looks


def test_a_clear_case_ends_at_the_first_look_and_an_unclear_one_at_the_last() -> None:
    clear, rounds = run_rounds(sampler(1, head=1.3, noise=0.02), "a")
    assert (clear.verdict, clear.rounds, len(rounds)) == ("regression", LOOKS[0].rounds, LOOKS[0].rounds)
    unclear, rounds = run_rounds(sampler(1, noise=0.9), "a")
    assert (unclear.verdict, unclear.rounds, len(rounds)) == (
        "inconclusive",
        LOOKS[-1].rounds,
        LOOKS[-1].rounds,
    )
    assert unclear.confidence == LOOKS[-1].confidence


def test_all_looks_together_err_as_one_at_95_percent() -> None:
    assert sum(1 - look.confidence for look in LOOKS) <= 0.05
    assert [look.rounds for look in LOOKS] == sorted({look.rounds for look in LOOKS})


def test_the_last_look_tells_what_the_second_could_not() -> None:
    """A tenth slower on a machine whose samples differ by a fifth."""
    assert simulated(20, LOOKS[:2], noise=0.2, head=1.1).count("regression") <= 10
    assert simulated(20, noise=0.2, head=1.1).count("regression") >= 15


def test_a_contaminated_first_look_goes_on_and_a_second_ends_the_run() -> None:
    """Two processes of the same code that differ by then go on differing."""
    judged, _ = run_rounds(sampler(1, control=1.2, noise=0.01), "a")
    assert (judged.verdict, judged.rounds) == ("contaminated", LOOKS[1].rounds)


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
    assert judged.confidence == LOOKS[2].confidence
    judged, rounds = run_for(130, noise=0.9)
    assert (judged.verdict, rounds, judged.out_of_time) == ("inconclusive", 130, True)
    judged, rounds = run_for(1e6, noise=0.9)
    assert (judged.verdict, rounds, judged.out_of_time) == ("inconclusive", LOOKS[2].rounds, False)


def test_no_time_at_all_still_shows_two_rounds() -> None:
    judged, rounds = run_rounds(sampler(1, head=2.0), "a", deadline_s=0.0, clock_s=lambda: 1.0)
    assert (judged.verdict, judged.rounds, len(rounds)) == ("inconclusive", 2, 2)


# What one and several runs amount to


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
    assert confirmed(tuple(verdicts.split())) == fails  # type: ignore[arg-type]


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
            assert confirmed(verdicts) or given_up or verdicts[-1] in ("improved", "same", "inconclusive")


def simulated(trials: int, looks: tuple[Look, ...] = LOOKS, **options: float) -> list[str]:
    return [run_rounds(sampler(seed, **options), str(seed), looks=looks)[0].verdict for seed in range(trials)]


def test_identical_code_rarely_looks_slower_and_a_tenth_is_seen() -> None:
    """Noise as on a busy machine: 8 % from sample to sample."""
    same = simulated(60, noise=0.08)
    assert same.count("regression") + same.count("improved") <= 1
    assert same.count("contaminated") <= 7  # what the looks allow, and chance
    assert simulated(30, noise=0.08, head=1.1).count("regression") >= 26


def test_the_smallest_detectable_slow_down_is_detected_four_times_in_five() -> None:
    looks = (Look(48, 0.975),)
    quiet = [run_rounds(sampler(seed, noise=0.06), str(seed), looks=looks)[0] for seed in range(20)]
    effect = sorted(judged.smallest_detectable for judged in quiet)[10]
    found = simulated(60, looks, noise=0.06, head=1 + effect)
    proven = [verdict for verdict in found if verdict != "contaminated"]
    assert 0.65 <= proven.count("regression") / len(proven) <= 0.95


def test_the_noise_floor_is_the_far_end_of_the_control() -> None:
    judged = judge(rounds_of(1.0), 0.975)
    judged = dataclasses.replace(judged, control=Change(0.0, -0.04, 0.02))
    assert judged.noise_floor == 0.04
