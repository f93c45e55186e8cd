"""The runner: nothing finished is lost or run twice, and everything that goes wrong is a record."""

from __future__ import annotations

import dataclasses
import io

import fake_experiment
import pytest
from fake_experiment import steps

from gpipe_bench.harness.experiment import Case, Outcome, RunOptions, select
from gpipe_bench.harness.record import Metric
from gpipe_bench.harness.runner import Reporter, run_experiment
from gpipe_bench.harness.store import Store


def go(store, experiment=fake_experiment.EXPERIMENT, **arguments):
    seen = []
    options = arguments.pop("options", RunOptions(device="cpu"))
    result = run_experiment(
        experiment, options, store, reporter=Reporter(io.StringIO()),
        on_record=lambda record, saved: seen.append((record, saved)), **arguments,
    )  # fmt: skip
    return result, seen


def raising(error):
    def run(case, options):
        raise error

    return dataclasses.replace(fake_experiment.EXPERIMENT, run=run)


def test_what_is_on_record_is_not_run_again(store, log):
    first, _ = go(store)
    second, seen = go(store)
    assert steps(log) == [1, 2, 3, 4, 5]
    assert (first.ran, first.reused, second.ran, second.reused) == (5, 0, 0, 5)
    assert second.records == first.records == [record for record, saved in seen]
    go(store, options=RunOptions(device="cpu", fresh=True))
    assert steps(log) == [1, 2, 3, 4, 5] * 2


@pytest.mark.parametrize(
    "change",
    [
        {"options": RunOptions(device="cpu", profile="full")},
        {"options": RunOptions(device="cuda")},
        {"options": RunOptions(device="cpu", engine="another")},
        {"options": RunOptions(device="cpu", seed=1)},
        {"experiment": dataclasses.replace(fake_experiment.EXPERIMENT, revision=2)},
    ],
)
def test_what_would_give_another_result_is_run_again(store, log, change):
    go(store)
    go(store, **change)
    assert steps(log) == [1, 2, 3, 4, 5] * 2


def test_a_crash_is_a_record_with_its_traceback_and_the_run_goes_on(store, log, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_2", "crash")
    monkeypatch.setenv("FAKE_STEP_3", "exit")
    monkeypatch.setenv("FAKE_STEP_4", "unstorable")
    result, _ = go(store)
    assert [record.status for record in result.records] == ["done", "failed", "failed", "failed", "done"]
    crash, left, unstorable = result.failed
    assert crash.reason == "RuntimeError: the wheel came off"
    assert 'raise RuntimeError("the wheel' in crash.details["traceback"]
    assert left.reason == "SystemExit: 7"
    assert "object is not plain data" in unstorable.reason
    monkeypatch.delenv("FAKE_STEP_2")
    again, _ = go(store)
    assert steps(log) == [1, 2, 3, 4, 5, 2, 3, 4]
    assert [record.status for record in again.records] == ["done", "done", "failed", "failed", "done"]


def test_a_unit_that_nobody_knows_is_a_failed_case_and_not_a_comparison_that_fails(store):
    odd = Outcome((Metric("length", 1.0, "furlong", "modelled"),))
    experiment = dataclasses.replace(fake_experiment.EXPERIMENT, run=lambda case, options: odd)
    reasons = {record.reason for record in go(store, experiment)[0].failed}
    assert all("metric 'length': unknown unit 'furlong'; known are bytes, MB," in each for each in reasons)
    assert len(reasons) == 1


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


def chained():
    error = RuntimeError("stage 2 stopped in 2F0")
    error.__cause__ = OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError("no room"), "MemoryError: no room"),
        (MemoryError(), "MemoryError"),
        (chained(), "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
            "RuntimeError: [enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory",
        ),
        (  # of another process, and of a library's own workspace
            RuntimeError("process 1: torch.OutOfMemoryError: CUDA out of memory."),
            "RuntimeError: process 1: torch.OutOfMemoryError: CUDA out of memory.",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
    ],
)
def test_running_out_of_memory_is_a_result(store, error, reason):
    result, _ = go(store, raising(error), options=RunOptions(device="cpu", only={"step": ("1",)}))
    assert (result.records[0].status, result.records[0].reason) == ("out_of_memory", reason)
    assert result.failed == []
    assert go(store, raising(error), options=RunOptions(device="cpu", only={"step": ("1",)}))[0].reused == 1


def test_results_that_can_not_be_written_are_handed_over_and_the_run_goes_on(tmp_path):
    store = Store(tmp_path)
    store.path("fake").symlink_to("/dev/full")
    stream = io.StringIO()
    seen = []
    result = run_experiment(
        fake_experiment.EXPERIMENT, RunOptions(device="cpu"), store, reporter=Reporter(stream),
        on_record=lambda record, saved: seen.append((record.case["step"], saved)),
    )  # fmt: skip
    assert seen == [(step, False) for step in range(1, 6)]
    assert len(result.unsaved) == len(result.records) == 5
    assert stream.getvalue().count("No space left on device") == 5
    assert "not a regular file" in stream.getvalue()


def test_two_cases_with_one_key_are_a_mistake_of_the_experiment(store):
    experiment = dataclasses.replace(
        fake_experiment.EXPERIMENT, cases=lambda options: [Case({"K": 2}), Case({"K": 2})]
    )
    with pytest.raises(ValueError, match="fake has two cases K=2; keys"):
        go(store, experiment)


CASES = [Case({"K": 2, "remat": True}), Case({"K": 4, "remat": False}), Case({"M": None, "K": 2})]


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        ({}, [0, 1, 2]),
        ({"K": ("2",)}, [0, 2]),
        ({"K": ("2", "4")}, [0, 1, 2]),
        ({"K": ("2",), "remat": ("true",)}, [0]),
        ({"M": ("none",)}, [2]),
    ],
)
def test_only_selects(only, chosen):
    assert select(CASES, only) == [CASES[place] for place in chosen]
