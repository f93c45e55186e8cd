"""Cases beside each other: every one once, each in a process whose end is that case's result alone."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess

import fake_experiment
import psutil
import pytest
from command_line import START, Gate, start
from fake_experiment import processes, steps

from gpipe_bench.harness import environment
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.runner import Reporter, run_experiment
from gpipe_bench.harness.workers import sensible_jobs

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


def go(store, jobs, experiment=UNTIMED, **arguments):
    reporter = Reporter(io.StringIO())
    options = RunOptions(device="cpu")
    return run_experiment(experiment, options, store, reporter=reporter, jobs=jobs, **arguments)


def test_two_cases_are_at_work_at_the_same_time(store, log, tmp_path, monkeypatch):
    """Steps 1 and 2 wait for each other; one after the other they would wait for ever."""
    os.mkfifo(tmp_path / "meeting")
    monkeypatch.setenv("FAKE_MEETING", str(tmp_path / "meeting"))
    result = go(store, 2)
    assert sorted(steps(log)) == [1, 2, 3, 4, 5]
    assert [record.case["step"] for record in result.records] == [1, 2, 3, 4, 5]
    assert {record.status for record in result.records} == {"done"}
    assert (result.ran, result.reused, result.interrupted) == (5, 0, False)


def test_cases_of_a_group_run_in_turn_in_one_process_and_the_longest_first(store, log, tmp_path, monkeypatch):
    """Steps 1, 3 and 5 are a group, longer than 2 and 4; the records stay in the order of the cases. Step 2
    does not end before step 1 has begun, so step 4 shows whether the group was begun first.
    """
    os.mkfifo(tmp_path / "meeting")
    monkeypatch.setenv("FAKE_MEETING", str(tmp_path / "meeting"))
    result = go(store, 2, experiment=dataclasses.replace(UNTIMED, cases=fake_experiment.grouped_cases))
    ran = steps(log)
    assert [step for step in ran if step % 2] == [1, 3, 5]
    assert ran.index(1) < ran.index(4), "the group is begun before what is shorter"
    assert [record.case["step"] for record in result.records] == [1, 2, 3, 4, 5]
    process = processes(log)
    assert process[1] == process[3] == process[5]


def test_a_process_that_is_killed_costs_its_case_alone(store, log, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_2", "killed")
    monkeypatch.setenv("FAKE_STEP_4", "crash")
    result = go(store, 2)
    assert [record.status for record in result.records] == ["done", "failed", "done", "failed", "done"]
    reasons = {record.case["step"]: record.reason for record in result.failed}
    assert "the process that ran it was ended; if memory was short, use --jobs 1" in reasons[2]
    assert reasons[4] == "RuntimeError: the wheel came off"
    monkeypatch.delenv("FAKE_STEP_2")
    monkeypatch.delenv("FAKE_STEP_4")
    assert {record.status for record in go(store, 2).records} == {"done"}


def test_what_can_not_be_shown_ends_the_run_and_its_processes(store, log, gate, monkeypatch):
    """A reader that has left: step 2 would wait for ever, had its process not been ended."""
    monkeypatch.setenv("FAKE_GATE", str(gate.folder))

    def leave(record, saved):
        if record.case["step"] == 3:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        go(store, 2, on_record=leave)
    kept = {record.case["step"] for record in store.load("fake").records}
    assert kept >= {1, 3}
    assert 2 not in kept


def test_the_processes_end_with_a_killed_run(tmp_path, gate):
    """Else a training that nobody waits for could go on for days."""
    run = start(
        "run", "fake", "--device", "cpu", "--jobs", "2", "--results", tmp_path / "results", code=COMMAND,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, FAKE_GATE=str(gate.folder),
    )  # fmt: skip
    gate.wait()
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= 2
    run.kill()
    run.wait(60)
    _, alive = psutil.wait_procs(children, timeout=300)
    assert not alive


@pytest.mark.parametrize(("cores", "share", "jobs"), [(1, None, 1), (2, None, 2), (64, None, 8), (4, 1.5, 1)])
def test_as_many_by_default_as_the_cores_and_the_container_allow(monkeypatch, cores, share, jobs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(environment, "_cgroup_cpus", lambda: share)
    assert sensible_jobs() == jobs
