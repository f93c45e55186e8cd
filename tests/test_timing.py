"""The one way to time things side by side: whose turn it is, what samples say, who else was busy."""

from __future__ import annotations

import gc
import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_bench.experiments.measuring import configuration, step_results, step_timing
from gpipe_bench.experiments.measuring.configuration import Configuration, attempt
from gpipe_bench.experiments.measuring.step_results import results
from gpipe_bench.experiments.measuring.step_timing import StepJob, work
from gpipe_bench.experiments.measuring.turns import measure
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


ORDER: list[int] = []
"""The numbers of micro-batches of the steps that `Probe` took."""


class Probe:
    """An engine that notes its steps."""

    def __init__(self, setup: Any) -> None:
        self.model, self.count = nn.Sequential(*setup.layers), setup.num_microbatches

    def step(self, batch: Any, target: Any, loss_fn: Any) -> None:
        ORDER.append(self.count)
        loss_fn(self.model(batch), target).backward()


def test_the_steps_of_a_table_are_taken_there_and_back_within_each_round() -> None:
    options = {
        "num_layers": 2, "d_model": 8, "ffn_dim": 8, "num_heads": 1, "seq_len": 4, "vocab_size": 10,
        "cut": "sublayer",
    }  # fmt: skip
    ORDER.clear()
    plan = tuple(Configuration(2, count, 4) for count in (1, 2, 4))
    found = work(StepJob("transformer-lm", options, plan, rounds=8, engine=f"{__name__}:Probe"))
    warm_up, rounds = ORDER[:3], [ORDER[i : i + 6] for i in range(3, len(ORDER), 6)]
    assert warm_up == [1, 2, 4]
    assert len(rounds) == 8
    assert all(sorted(each[:3]) == [1, 2, 4] and each == each[::-1] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 2
    assert [len(each.in_process_s) for each in found.steps] == [16] * 3  # two samples per round


class TooLarge(Probe):
    """An engine whose steps of one micro-batch find no memory, the first time or later."""

    def step(self, batch: Any, target: Any, loss_fn: Any) -> None:
        super().step(batch, target, loss_fn)
        if self.count == 1 and ORDER.count(1) > FITS[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 41.30 GiB.\nmore advice")


FITS = [0]
TINY = {
    "num_layers": 2, "d_model": 8, "ffn_dim": 8, "num_heads": 1, "seq_len": 4, "vocab_size": 10,
    "cut": "sublayer",
}  # fmt: skip
NO_ROOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 41.30 GiB."


@pytest.mark.parametrize("fits", [0, 3])
def test_a_configuration_that_runs_out_of_memory_leaves_the_others_their_numbers(fits: int) -> None:
    ORDER.clear()
    FITS[0] = fits
    plan = tuple(Configuration(2, count, 4) for count in (1, 2, 4))
    found = work(StepJob("transformer-lm", TINY, plan, rounds=2, engine=f"{__name__}:TooLarge"))
    first, *others = found.steps
    assert first.out_of_memory == f"all stages in one process: {NO_ROOM}"
    assert first.without_numbers
    assert ORDER.count(1) == fits + 1  # not tried again
    assert [len(each.in_process_s) for each in others] == [4, 4]
    assert not any(each.out_of_memory for each in others)
    _, details = results([(each, (each.num_microbatches,)) for each in plan], [found], "cpu")
    assert [cell["out_of_memory"] for cell in details["cells"].values()] == [first.out_of_memory, "", ""]


def test_a_case_of_which_nothing_fits_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_results, "run_processes", lambda call, count, job, **_: [call(job)])
    FITS[0] = 0
    ORDER.clear()
    job = StepJob("transformer-lm", TINY, (Configuration(2, 1, 4),), rounds=2, engine=f"{__name__}:TooLarge")
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        step_results.measure(job)


def test_layers_too_large_to_be_timed_leave_other_sizes_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = step_timing.layer_seconds

    def layer_seconds(layers: Any, count: int, compute_loss: Any, batch: Any, *more: Any, remat: str) -> Any:
        if len(batch) == 4 and count == 1:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return real(layers, count, compute_loss, batch, *more, remat=remat)

    monkeypatch.setattr(step_timing, "layer_seconds", layer_seconds)
    plan = tuple(Configuration(2, count, 4) for count in (1, 2))
    found = work(StepJob("transformer-lm", TINY, plan, rounds=1))
    assert "one layer at a time: RuntimeError: CUDA error: CUBLAS" in found.steps[0].out_of_memory
    assert len(found.steps[1].turns) == 2


def test_all_processes_give_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has room would wait for the other in the next step for ever."""

    class Two:
        def is_initialized(self) -> bool:
            return True

        def get_world_size(self) -> int:
            return 2

        def all_gather_object(self, found: list[str], mine: str) -> None:
            found[:] = [mine, "OutOfMemoryError: no room"]

    monkeypatch.setattr(configuration, "dist", Two())
    assert attempt(lambda: None) == "process 1: OutOfMemoryError: no room"
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 / 0)


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
        found = measure(
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
    with pytest.raises(ValueError, match="3 samples are no whole number of rounds"):
        against_itself({"a": [1.0, 2.0, 3.0]}, "a")


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_sample_that_took_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"a step of ours is \[1.0, .*\]; a sample must take time"):
        ratios({"ours": [1.0, seconds], "theirs": [1.0, 1.0]}, "ours", "theirs")
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
