"""The one way to time things side by side: whose turn it is, what samples say, who else was busy."""

from __future__ import annotations

import gc
import itertools
import math

import pytest
import torch
from torch import nn

from gpipe_bench.experiments.beyond.side_by_side import take_turns
from gpipe_bench.harness.rounds import (
    Usage,
    against_itself,
    differences,
    level,
    orders,
    ratios,
    repeats_for,
    slowest,
    turns,
    used_by_others,
)
from gpipe_bench.planner import timing
from gpipe_bench.planner.timing import time_step

# Whose turn it is


@pytest.mark.parametrize("seed", [3, "seed"])
def test_every_round_runs_all_arms_there_and_back_in_changing_order(seed: int | str) -> None:
    rounds = list(itertools.islice(orders(["a", "b", "c"], seed), 60))
    assert all(sorted(order[:3]) == ["a", "b", "c"] and order == order[::-1] for order in rounds)
    assert {order[:3] for order in rounds} == set(itertools.permutations("abc"))
    assert rounds == list(itertools.islice(orders(["a", "b", "c"], seed), 60))  # the same in every process
    assert rounds != list(itertools.islice(orders(["a", "b", "c"], "another"), 60))
    assert list(turns(["a", "b", "c"], 60, seed)) == list(itertools.chain.from_iterable(rounds))


def test_all_arms_take_as_many_steps_as_their_samples_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the steps move, by 2 s or by 20 ms; a sample takes 50 ms at least."""
    now, taken = [0.0], {"slow": 0, "fast": 0}
    layer = nn.Linear(1, 1)
    gradients: list[float] = []

    def step(arm: str, seconds: float) -> None:
        taken[arm] += 1
        now[0] += seconds
        layer(torch.ones(1, 1)).sum().backward()
        assert layer.weight.grad is not None
        gradients.append(float(layer.weight.grad))

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    try:
        found = take_turns(
            {"slow": lambda: step("slow", 2.0), "fast": lambda: step("fast", 0.02)}, [layer], 3, seed=0
        )
    finally:
        gc.unfreeze()
    assert found.times == {"slow": pytest.approx([2.0] * 6), "fast": pytest.approx([0.02] * 6)}
    assert taken == {"slow": 2 + 6, "fast": 2 + 6 * 3}  # two steps tell how many a sample needs
    assert max(gradients) == 3  # those of a sample's own steps, and none from before it


def test_a_process_without_a_part_in_an_arm_only_waits() -> None:
    assert time_step(None, [], repeats=5) == 0.0


def test_a_sample_takes_as_many_steps_as_fill_it() -> None:
    assert repeats_for([0.012, 0.010, 0.5], 0.06) == 6
    assert repeats_for([0.0101, 0.02], 0.06) == 6
    assert repeats_for([1.0], 0.06) == 1


# What is made of the samples


def test_a_step_takes_as_long_as_its_slowest_process() -> None:
    assert slowest([{"a": [1.0, 5.0]}, {"a": [2.0, 3.0]}]) == {"a": [2.0, 5.0]}


def test_a_drift_within_the_rounds_cancels() -> None:
    """The machine slows down by a tenth from sample to sample; theirs takes 1.5 times as long as ours."""
    now = 1.0
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for arm in turns(["ours", "theirs"], 9, seed=1):
        times[arm].append(now * (1.5 if arm == "theirs" else 1.0))
        now *= 1.1
    assert ratios(times, "theirs", "ours") == pytest.approx([1.5] * 9)
    assert ratios(times, "theirs", "ours", 0.5) == pytest.approx([0.75] * 9)
    assert all(ratio < 1 for ratio in against_itself(times, "ours"))  # the control shows it


def test_differences_are_paired_by_round() -> None:
    times = {"more": [3.0, 3.0, 20.0, 45.0], "less": [1.0, 1.0, 10.0, 10.0]}
    assert differences(times, "more", "less", 10.0) == pytest.approx([20.0, 200.0])


def test_a_level_is_the_median_of_logarithms() -> None:
    assert level([1.0, math.e**2], "a step") == pytest.approx(1.0)


# Who else was busy


def test_what_no_process_of_ours_used_was_used_by_others() -> None:
    """Two cores over 10 s: 14 of 20 s busy as one sees it, of which ours took 4 and 6."""
    one, other = Usage(4.0, 14.0, 10.0, 2), Usage(6.0, 12.0, 10.0, 2)
    assert used_by_others([one, other]) == pytest.approx(4 / 20)
    assert used_by_others([Usage(6.0, 5.9, 10.0, 2)]) == 0.0  # clocks that tick coarsely owe nobody anything


def test_usage_is_what_came_after_its_start() -> None:
    assert Usage(5.0, 20.0, 110.0, 2).since(Usage(1.0, 15.0, 100.0, 2)) == Usage(4.0, 5.0, 10.0, 2)
    assert all(value >= 0 for value in Usage.now())
