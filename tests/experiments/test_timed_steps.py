"""Real small steps, taken in turns by the processes of a case, and what becomes of those without room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_steps import TINY, job_of
from torch import nn

from gpipe_bench.experiments.paper.timed import layers
from gpipe_bench.experiments.paper.timed import steps as timed_steps
from gpipe_bench.experiments.paper.timed.results import results
from gpipe_bench.experiments.paper.timed.steps import attempt, measure, work
from gpipe_bench.experiments.paper.timed.workloads import TABLE2, Configuration
from gpipe_bench.pipeline import Kind, launch

SMOKE = TABLE2["transformer"]["smoke"]


def test_real_steps_are_counted_and_timed():
    """All stages in this process: what ran is what the configuration says."""
    job = job_of(
        Configuration(2, 4, 8), Configuration(4, 2, 7, "except_last"), Configuration(3, 1, 4, "never")
    )._replace(rounds=1)
    answer = work(job)
    assert [each.counts for each in answer.steps] == [
        {"F": 8, "R": 8, "B": 8}, {"F": 8, "R": 4, "B": 8}, {"F": 3, "B": 3},
    ]  # fmt: skip
    for each, configuration in zip(answer.steps, job.configurations, strict=True):
        first, _ = each.turns  # there and back
        assert len(each.partition) == configuration.num_stages
        assert len(first.activation_bytes) == configuration.num_stages - 1
        assert all(s > 0 for samples in first.samples_s.values() for s in samples)
        size = configuration.microbatch_size
        assert first.activation_bytes[0] == size * 8 * 16 * 4  # examples, tokens, width, float32
        assert len(answer.layers_s[size]) == 8
    assert answer.copy_bytes_per_s > 0


def test_any_engine_runs_through_the_table_unchanged(monkeypatch):
    """Two processes, ours and an engine given as module:attribute."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "examples"))
    plan = (Configuration(2, 1, 4, runs_for_real=True), Configuration(2, 4, 4, runs_for_real=True))
    for engine in ("ours", "own_engine:FillDrain"):
        job = job_of(*plan, engine=engine)._replace(rounds=1)
        answers = launch(work, 2, job, device="cpu")
        assert answers[0].steps[0].partition == answers[1].steps[0].partition
        assert all(each.real_s and min(each.real_s) > 0 for answer in answers for each in answer.steps)
        metrics, details = results(job, answers)
        found_here = {metric.label for metric in metrics}
        assert "normalised real throughput K=2 M=4" in found_here
        assert ("replay error K=2 M=4" in found_here) == (engine == "ours")
        if engine != "ours":
            assert "keeps no timeline" in details["cells"]["K=2 M=4"]["why"]


ORDER: list[int] = []
"""The numbers of micro-batches of the steps that `Probe` took."""
FITS = [0]
NO_ROOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 41.30 GiB."


class Probe:
    """An engine that notes its steps."""

    def __init__(self, setup: Any) -> None:
        self.model, self.count = nn.Sequential(*setup.layers), setup.num_microbatches

    def step(self, batch: Any, target: Any, loss_fn: Any) -> None:
        ORDER.append(self.count)
        loss_fn(self.model(batch), target).backward()


class TooLarge(Probe):
    """An engine whose steps of one micro-batch find no memory, the first time or later."""

    def step(self, batch: Any, target: Any, loss_fn: Any) -> None:
        super().step(batch, target, loss_fn)
        if self.count == 1 and ORDER.count(1) > FITS[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 41.30 GiB.\nmore advice")


def job_with(engine: type, *counts: int, **more: Any) -> Any:
    ORDER.clear()
    plan = (Configuration(2, count, 4) for count in counts)
    return job_of(*plan, engine=f"{__name__}:{engine.__name__}")._replace(**more)


def test_the_steps_of_a_table_are_taken_there_and_back_within_each_round():
    found = work(job_with(Probe, 1, 2, 4, rounds=8))
    warm_up, rounds = ORDER[:3], [ORDER[i : i + 6] for i in range(3, len(ORDER), 6)]
    assert warm_up == [1, 2, 4]
    assert len(rounds) == 8
    assert all(sorted(each[:3]) == [1, 2, 4] and each == each[::-1] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 2
    assert [len(each.in_process_s) for each in found.steps] == [16] * 3  # two samples per round


@pytest.mark.parametrize("fits", [0, 3])
def test_a_configuration_that_runs_out_of_memory_leaves_the_others_their_numbers(fits):
    FITS[0] = fits
    job = job_with(TooLarge, 1, 2, 4)
    found = work(job)
    first, *others = found.steps
    assert first.out_of_memory == f"all stages in one process: {NO_ROOM}"
    assert not first.in_process_s
    assert ORDER.count(1) == fits + 1  # not tried again
    assert [len(each.in_process_s) for each in others] == [4, 4]
    assert not any(each.out_of_memory for each in others)
    _, details = results(job, [found])
    assert [cell["out_of_memory"] for cell in details["cells"].values()] == [first.out_of_memory, "", ""]


def test_a_case_of_which_nothing_fits_is_out_of_memory(monkeypatch):
    monkeypatch.setattr(timed_steps, "run_processes", lambda call, count, job, **_: [call(job)])
    FITS[0] = 0
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        measure(job_with(TooLarge, 1))


def test_layers_too_large_to_be_timed_leave_other_sizes_their_numbers(monkeypatch):
    real = timed_steps.layer_seconds

    def layer_seconds(layers: Any, count: int, compute_loss: Any, batch: Any, *more: Any, remat: str) -> Any:
        if len(batch) == 4 and count == 1:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return real(layers, count, compute_loss, batch, *more, remat=remat)

    monkeypatch.setattr(timed_steps, "layer_seconds", layer_seconds)
    found = work(job_of(Configuration(2, 1, 4), Configuration(2, 2, 4))._replace(rounds=1))
    assert "one layer at a time: RuntimeError: CUDA error: CUBLAS" in found.steps[0].out_of_memory
    assert len(found.steps[1].turns) == 2


def test_all_processes_give_up_together(monkeypatch):
    """One that has room would wait for the other in the next step for ever."""

    class Two:
        def is_initialized(self) -> bool:
            return True

        def get_world_size(self) -> int:
            return 2

        def all_gather_object(self, found: list[str], mine: str) -> None:
            found[:] = [mine, "OutOfMemoryError: no room"]

    monkeypatch.setattr(timed_steps, "dist", Two())
    assert attempt(lambda: None) == "process 1: OutOfMemoryError: no room"
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 / 0)


@pytest.mark.processes
def test_the_first_failure_of_a_process_is_the_message():
    with pytest.raises(RuntimeError, match="process 0: ZeroDivisionError: integer division or"):
        timed_steps.run_processes(work, 1, job_of(Configuration(2, 0, 4)))


@pytest.mark.processes
def test_a_link_between_processes_is_measured():
    one, other = timed_steps.run_processes(timed_steps.measured_link, 2, torch.device("cpu"))
    assert one == other
    assert 0 < one.latency_s < 0.1
    assert 1e7 < one.bandwidth_bytes_per_s < 1e12


def test_layers_are_timed_one_after_another() -> None:
    model, (batch, target) = list(TINY.build()), TINY.example(2)
    found = layers.alone(model, TINY.loss(), batch, target, torch.device("cpu"), repeats=2)
    assert len(found) == len(model)
    assert all(set(each) == {Kind.F, Kind.R, Kind.B} and min(each.values()) > 0 for each in found)
    assert all(p.grad is None for layer in model for p in layer.parameters())


def test_accelerators_time_layers_alone_and_leave_out_what_is_not_recomputed(monkeypatch):
    asked = []

    def alone(model: Any, loss: Any, batch: Any, target: Any, device: Any) -> list[dict[Kind, float]]:
        asked.append(len(batch))
        return [{Kind.F: 1.0, Kind.R: 2.0, Kind.B: 4.0}] * len(model)

    monkeypatch.setattr(layers, "alone", alone)
    monkeypatch.setattr(layers.devices, "is_accelerator", lambda device: True)
    model, example = list(TINY.build()), TINY.example(8)
    for remat, seconds in (("always", 7.0), ("never", 5.0)):
        found = layers.layer_seconds(model, 4, TINY.loss(), *example, remat=remat)
        assert found == (seconds,) * len(model)
    assert asked == [2, 2]  # one micro-batch of four
