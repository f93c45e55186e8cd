"""The one way to time things side by side: whose turn it is, what samples say, who else was busy."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_bench.experiments.beyond.side_by_side import take_turns
from gpipe_bench.harness.rounds import (
    Usage,
    against_itself,
    differences,
    orders,
    ratios,
    turns,
    used_by_others,
)
from gpipe_bench.planner import Request, link_named, timing
from gpipe_bench.planner.measured import measured, sizes_worth
from gpipe_bench.planner.model import Subject
from gpipe_bench.planner.probes import Bench, Probed, ProbeJob, probe

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


# What is made of the samples


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


# Who else was busy


def test_what_no_process_of_ours_used_was_used_by_others() -> None:
    """Two cores over 10 s: 14 of 20 s busy as one sees it, of which ours took 4 and 6."""
    one, other = Usage(4.0, 14.0, 10.0, 2), Usage(6.0, 12.0, 10.0, 2)
    assert used_by_others([one, other]) == pytest.approx(4 / 20)
    assert used_by_others([Usage(6.0, 5.9, 10.0, 2)]) == 0.0  # clocks that tick coarsely owe nobody anything


# Probes of layers: how often each is timed, and what is said of it

LOOPBACK = link_named("loopback")
REQUEST = Request(accelerators=2, memory_bytes=2**40, batch_size=16, link=LOOPBACK)


def test_sizes_of_one_micro_batch_alone_are_not_timed() -> None:
    assert sizes_worth([1, 2, 4, 8, 16], REQUEST) == [1, 2, 4, 8]
    assert sizes_worth([16], REQUEST) == [16]
    assert sizes_worth([1, 16], replace(REQUEST, accelerators=1)) == [1, 16]


def probed(*sizes: int, **more: Any) -> Probed:
    """Of six layers in this process."""
    job = ProbeJob(Subject("planning_models:plain"), sizes, **more)
    try:
        return probe(Bench(job))
    finally:
        gc.unfreeze()


def test_each_size_is_timed_in_every_way_as_often_as_there_are_rounds() -> None:
    found = probed(2, 1, rounds=2)
    counts = Counter((run.size, run.way) for run in found.runs)
    assert counts == {(size, way): 4 for size in (1, 2) for way in ("fine", "coarse")}
    assert found.activation_bytes == found.gradient_bytes == {size: (64.0 * size,) * 5 for size in (1, 2)}
    assert found.parameter_bytes == ((4 * 16 * 16, 4 * 16),) * 6
    fine = next(run for run in found.runs if run.way == "fine")
    assert {action.stage for action in fine.actions} == {layer for layer, _ in fine.update_s} == set(range(6))
    assert measured([found]).at(2).seconds("G", range(6)) > 0
