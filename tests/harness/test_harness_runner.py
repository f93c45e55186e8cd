"""The runner: nothing finished is lost or run twice, cases beside each other, progress."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess

import fake_experiment
import psutil
import pytest
from command_line import START, Gate, start
from fake_experiment import steps
from records import record

from gpipe_bench.harness import environment
from gpipe_bench.harness import experiment as experiments
from gpipe_bench.harness.experiment import Case, Outcome, RunOptions
from gpipe_bench.harness.record import Metric
from gpipe_bench.harness.runner import Reporter, reporter, run_experiment, sensible_jobs, words


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
        (chained(), "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
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
def test_running_out_of_memory_is_a_result(store, error, reason, monkeypatch):
    freed = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: freed.append(True))
    result, _ = go(store, raising(error), options=RunOptions(device="cpu", only={"step": ("1",)}))
    assert (result.records[0].status, result.records[0].reason) == ("out_of_memory", reason)
    assert freed, "the next case finds the memory free"
    assert result.failed == []
    assert go(store, raising(error), options=RunOptions(device="cpu", only={"step": ("1",)}))[0].reused == 1


def test_only_selects():
    cases = [Case({"K": 2, "remat": True}), Case({"K": 4, "remat": False}), Case({"M": None, "K": 2})]
    for only, chosen in (
        ({}, [0, 1, 2]),
        ({"K": ("2",)}, [0, 2]),
        ({"K": ("2", "4")}, [0, 1, 2]),
        ({"K": ("2",), "remat": ("true",)}, [0]),
        ({"M": ("none",)}, [2]),
    ):
        assert experiments.select(cases, only) == [cases[place] for place in chosen]


UNTIMED = dataclasses.replace(fake_experiment.EXPERIMENT, untimed=True)
# The fake experiment, as one that times nothing, on the command line.
COMMAND = "import dataclasses, fake_experiment\n" + (
    "fake_experiment.EXPERIMENT = dataclasses.replace(fake_experiment.EXPERIMENT, untimed=True)\n" + START
)


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


def test_two_cases_are_at_work_at_the_same_time(store, log, tmp_path, monkeypatch):
    """Steps 1 and 3 wait for each other; one after the other they would wait for ever. Step 2 ends before."""
    os.mkfifo(tmp_path / "meeting")
    monkeypatch.setenv("FAKE_MEETING", str(tmp_path / "meeting"))
    result, seen = go(store, UNTIMED, jobs=2)
    assert store.load("fake").records[0].case["step"] == 2, "stored at once"
    assert [record.case["step"] for record, _ in seen] == sorted(steps(log)) == [1, 2, 3, 4, 5]
    assert [record for record, _ in seen] == result.records
    assert {record.status for record in result.records} == {"done"}
    assert (result.ran, result.reused, result.signal) == (5, 0, None)


def test_a_process_that_is_killed_costs_its_case_alone(store, log, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_2", "killed")
    monkeypatch.setenv("FAKE_STEP_4", "crash")
    result, _ = go(store, UNTIMED, jobs=2)
    assert [record.status for record in result.records] == ["done", "failed", "done", "failed", "done"]
    reasons = {record.case["step"]: record.reason for record in result.failed}
    assert "the process that ran it was ended; if memory was short, use --jobs 1" in reasons[2]
    assert reasons[4] == "RuntimeError: the wheel came off"
    monkeypatch.delenv("FAKE_STEP_2")
    monkeypatch.delenv("FAKE_STEP_4")
    assert {record.status for record in go(store, UNTIMED, jobs=2)[0].records} == {"done"}


def test_the_processes_end_with_a_killed_run(tmp_path, gate):
    """And what these have started; else a training that nobody waits for could go on for days."""
    run = start(
        "run", "fake", "--device", "cpu", "--jobs", "2", "--results", tmp_path / "results", code=COMMAND,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        FAKE_GATE=str(gate.folder), FAKE_STEP_2="orphan",
    )  # fmt: skip
    gate.wait()
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= 3
    run.kill()
    run.wait(60)
    _, alive = psutil.wait_procs(children, timeout=300)
    assert not alive


@pytest.mark.parametrize(("cores", "share", "jobs"), [(1, None, 1), (2, None, 2), (64, None, 8), (4, 1.5, 1)])
def test_as_many_by_default_as_the_cores_and_the_container_allow(monkeypatch, cores, share, jobs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(environment, "_cgroup_cpus", lambda: share)
    assert sensible_jobs() == jobs


SHOWN = [Case({"step": step}, estimate_s=10) for step in (1, 2, 3)]


def tell(reporter):
    reporter.begin(SHOWN, 1)
    reporter.started(SHOWN[0])
    reporter.finished(SHOWN[0], record(1, duration_s=0.0), reused=True)
    reporter.finished(SHOWN[1], record(2, duration_s=20.0), reused=False)
    reporter.warn("[bold]mind the gap[/bold]")
    reporter.finished(SHOWN[2], record(3, status="failed", reason="wheel [off]", duration_s=1), reused=False)
    reporter.end()


class Terminal(io.StringIO):
    """Something that is a terminal for the program, and can be read back."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_lines_say_what_happened_and_how_long_it_takes():
    stream = io.StringIO()
    tell(Reporter(stream))
    assert stream.getvalue().splitlines() == [
        "3 cases, about 30 s",
        "[2/3] step=2: done in 20.0 s, 20 s left",
        "warning: [bold]mind the gap[/bold]",
        "[3/3] step=3: failed: wheel [off], 0 s left",
        "1 of 3 cases were on record already",
    ]
    assert [words(seconds) for seconds in (59.4, 250, 7500)] == ["59 s", "4 min 10 s", "2 h 5 min"]


def test_a_terminal_gets_a_bar(monkeypatch):
    for name in ("CI", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    tell(reporter(terminal, {"TERM": "xterm"}))
    text = terminal.getvalue()
    assert "\x1b[" in text
    for part in ("0/3", "30 s left", "3/3", "[bold]mind the gap[/bold]", "step=3: failed: wheel [off]"):
        assert part in text
