"""The frozen protocol of consistent training: what its file must be, and what its test can find."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy
import pytest

from gpipe_bench.experiments.paper.consistency.judging import (
    PATH,
    Plan,
    interval,
    load_protocol,
    welch,
    word_of,
)

PROTOCOL = load_protocol()
REPETITIONS = 200_000


def altered(folder: Path, old: str, new: str) -> Path:
    """The file with one text replaced."""
    text = PATH.read_text()
    assert text.count(old) == 1, old
    path = folder / "protocol.toml"
    path.write_text(text.replace(old, new))
    return path


def distances(plan: Plan, true: float, shared: float, seed: int = 0) -> numpy.ndarray:
    """Of repeated experiments, (repetitions, K): the distances seen where the true one is `true`.

    `shared` is the share of a score's variance that comes from its initial weights.
    """
    random = numpy.random.default_rng(seed)
    count = len(plan.sequential)
    initial = random.normal(0, math.sqrt(shared), (REPETITIONS, count))
    sequential = initial + random.normal(0, math.sqrt(1 - shared), (REPETITIONS, count))
    mean, deviation = sequential.mean(axis=1), sequential.std(axis=1, ddof=1)
    noise = random.normal(0, math.sqrt((1 - shared) / plan.runs), (REPETITIONS, len(plan.stages)))
    means = true + initial[:, : plan.runs].mean(axis=1)[:, None] + noise
    return abs(means - mean[:, None]) / deviation[:, None]


# The file


def test_the_seeds_follow_from_the_papers_number_alone() -> None:
    seeds: list[int] = []
    for model, plan in PROTOCOL.plans.items():
        roles = {"initial": plan.initial, "sequential": plan.sequential}
        roles |= {f"K={count}": seeds for count, seeds in plan.stages.items()}
        for role, own in roles.items():
            for number, seed in enumerate(own, start=1):
                words = f"1811.06965 {model} {role} {number}"
                assert seed == int(hashlib.sha256(words.encode()).hexdigest()[:8], 16) // 2
            seeds += own
    assert len(seeds) == len(set(seeds)) == 10 + 10 + 4 * 6 + 8 + 8 + 4 * 4
    assert min(seeds) > 1999, "earlier trainings took theirs from 0 to 1999"
    assert all({*map(len, plan.stages.values())} == {plan.runs} for plan in PROTOCOL.plans.values())


def test_every_byte_counts(tmp_path: Path) -> None:
    assert hashlib.sha256(PATH.read_bytes()).hexdigest() == PROTOCOL.sha256
    assert load_protocol(altered(tmp_path, "\n# Ranges", "\n#  Ranges")).digest != PROTOCOL.digest


# The test that it describes


def farthest(plan: Plan) -> float:
    """The observed distance up to which the whole interval lies within the margin."""
    low, high = 0.0, PROTOCOL.margin
    for _ in range(40):
        middle = (low + high) / 2
        inside = interval(middle, plan.runs, len(plan.sequential), PROTOCOL.alpha)[1] <= PROTOCOL.margin
        low, high = (middle, high) if inside else (low, middle)
    return low


@pytest.mark.parametrize(("model", "one", "all_together"), [("images", 0.93, 0.80), ("text", 0.83, 0.56)])
def test_the_numbers_of_runs_suffice_for_the_stated_power(
    model: str, one: float, all_together: float
) -> None:
    """By repeated experiments; common initial weights only add to it."""
    plan = PROTOCOL.plans[model]
    most = farthest(plan)
    found = distances(plan, 0.0, 0.0) <= most
    assert found[:, 0].mean() == pytest.approx(one, abs=0.006)
    assert found.all(axis=1).mean() == pytest.approx(all_together, abs=0.006)
    stated = found.all(axis=1) if plan.power_of == "all K together" else found[:, 0]
    assert round(stated.mean(), 2) >= PROTOCOL.power
    paired = distances(plan, 0.0, 0.5) <= most
    assert paired.all(axis=1).mean() > found.all(axis=1).mean()


@pytest.mark.parametrize("model", ["images", "text"])
@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9])
def test_a_difference_as_large_as_the_margin_is_found_equal_no_oftener_than_alpha(
    model: str, shared: float
) -> None:
    plan = PROTOCOL.plans[model]
    share = (distances(plan, PROTOCOL.margin, shared)[:, 0] <= farthest(plan)).mean()
    assert 0.005 < share < PROTOCOL.alpha + 0.002


def test_the_whole_interval_lies_within_the_margin_up_to_the_farthest_distance() -> None:
    plan = PROTOCOL.plans["images"]
    numbers = plan.runs, len(plan.sequential)
    most = farthest(plan)
    words = [
        word_of(*interval(value, *numbers, PROTOCOL.alpha), PROTOCOL.margin)
        for value in (0.0, most - 1e-6, most + 1e-6, 3.0, 9.0)
    ]
    assert words == ["reproduced", "reproduced", "undecided", "undecided", "above"]


@pytest.mark.parametrize(("runs", "baseline_runs"), [(1, 5), (4, 8), (6, 10)])
@pytest.mark.parametrize("distance", [0.5, 3.0, 6.0])
def test_the_interval_is_that_of_repeated_experiments(distance: float, runs: int, baseline_runs: int) -> None:
    """At either end, as many of 200,000 simulated experiments as should lie beyond the distance seen."""
    random = numpy.random.default_rng(0)

    def share_beyond(true: float) -> float:
        first = random.normal(size=(REPETITIONS, baseline_runs))
        gap = random.normal(true, 1 / runs**0.5, size=REPETITIONS) - first.mean(axis=1)
        return float((gap / first.std(axis=1, ddof=1) > distance).mean())

    low, high = interval(distance, runs, baseline_runs, 0.05)
    assert share_beyond(high) == pytest.approx(0.95, abs=0.003)
    if low > 0:
        assert share_beyond(low) == pytest.approx(0.05, abs=0.003)
    else:
        assert share_beyond(0.0) > 0.05


def test_welchs_interval_is_scipys() -> None:
    from scipy.stats import ttest_ind

    for seed in range(5):
        random = numpy.random.default_rng(seed)
        one, other = random.normal(1, 3, 6).tolist(), random.normal(0, 1, 10).tolist()
        low, high = ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
        assert welch(one, other)[1:] == (pytest.approx(low), pytest.approx(high))
