"""SIGINT and SIGTERM at any moment of the verbs that take long: each ends with 130 or 143, says so without a
traceback, begins nothing more, prints no result that it was told not to wait for, and keeps what it had.

`moments.py` lets a command, or a process that it has started, stop at a place of one's choice: no clock.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import their_repository
from command_line import ROOT, START, Gate, lines, start, surroundings
from forked import Script

from gpipe_bench.harness import processes
from gpipe_bench.harness.processes import number_of, stopping

pytestmark = pytest.mark.processes
LONG_S = 900.0  # for a hang, which would be a failure; nothing is asserted about time
ENDINGS = {signal.SIGINT: 130, signal.SIGTERM: 143}
INT, TERM = ENDINGS


class Moment(NamedTuple):
    """Where a command is when the signal comes, see `moments.py`."""

    place: str
    number: signal.Signals
    in_a_child: bool = False
    times: int = 0  # passed before
    goes_on: bool = False  # after the signal has come, rather than waiting inside for it


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[Callable[..., tuple[str, str]]]:
    """Runs a command up to a moment, sends the signal, and gives what it said when it and all that it had
    started are gone.
    """
    arrived, leave = tmp_path / "arrived", tmp_path / "leave"
    os.mkfifo(arrived)
    os.mkfifo(leave)
    pipe = os.open(arrived, os.O_RDWR)
    families: list[psutil.Process] = []

    def run(moment: Moment, *arguments: Any) -> tuple[str, str]:
        variables = {"MOMENT": moment.place, "MOMENT_ARRIVED": str(arrived), "TMPDIR": str(folder)}
        variables["MOMENT_TIMES"] = str(moment.times)
        if moment.in_a_child:
            variables["MOMENT_IN_A_CHILD"] = "1"
        if moment.goes_on:
            variables["MOMENT_LEAVE"] = str(leave)
        environment = surroundings(**variables)
        environment["PYTHONPATH"] += os.pathsep + str(ROOT / "examples")
        script, words = ROOT / "tests" / "support" / "moments.py", [str(argument) for argument in arguments]
        process: Any
        if moment.in_a_child or ":" in moment.place:
            process = Script(script, words, tmp_path, tmp_path / "said", environment)
        else:  # while it starts
            process = subprocess.Popen(
                [sys.executable, str(script), *words],
                cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
        families.append(psutil.Process(process.pid))
        while not select.select([pipe], [], [], 1.0)[0]:
            assert process.poll() is None, ("it ended before", process.communicate(timeout=LONG_S))
        assert (str(process.pid) not in os.read(pipe, 1000).decode().split()) == moment.in_a_child
        family = psutil.Process(process.pid).children(recursive=True)
        families.extend(family)
        if moment.number == INT:
            os.killpg(process.pid, INT)
        else:
            os.kill(process.pid, TERM)
        if moment.goes_on:
            leave.write_text("go")
        out, err = process.communicate(timeout=LONG_S)
        assert process.returncode == ENDINGS[moment.number], err
        assert "Traceback" not in err
        assert "interrupted" in err
        _, alive = psutil.wait_procs(family, timeout=LONG_S)
        assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
        return out, err

    folder = tmp_path / "temporary"
    folder.mkdir()
    yield run
    os.close(pipe)
    for process in families:
        with contextlib.suppress(psutil.Error):
            process.kill()


# Every verb that takes long

ENGINES = ("engines", "workload=transformer", "where=processes")
TABLE1 = ("table1", "part=paper", "half=transformer")
EXPERIMENTS = "gpipe_bench.experiments"
EXAMINE = f"{EXPERIMENTS}.engines.trials:examine"


def run(name: str, *only: str) -> list[str]:
    chosen = [word for each in only for word in ("--only", each)]
    return ["run", name, "--profile", "smoke", "--device", "cpu", "--results", "results", *chosen]


EXAMINATION = ["check-engine", "own_engine:FillDrain"]
PLAN = ["plan", "gpt2", "--accelerators", "2", "--memory-gib", "8", "--batch-size", "4", "--num-layers", "1"]
MOMENTS: dict[str, tuple[list[str], Moment]] = {
    "a run that starts": (run(*ENGINES), Moment(f"{EXPERIMENTS}.beyond.engines", INT)),
    "processes that import torch": (run(*ENGINES), Moment("torch", INT, in_a_child=True)),
    # One waits for ever and the other one for it, inside an operation that no handler interrupts.
    "processes that wait for each other": (
        run(*ENGINES), Moment(f"{EXPERIMENTS}.beyond.engine_turns:peak_bytes", TERM, in_a_child=True),
    ),
    "cases beside each other": (
        run(*TABLE1), Moment(f"{EXPERIMENTS}.paper.largest:place_anyhow", INT, in_a_child=True),
    ),
    "a later check": (EXAMINATION, Moment(EXAMINE, INT, in_a_child=True, times=1)),
    "a plan whose layers are timed": (
        PLAN, Moment("gpipe_bench.planner.measured:_probe", TERM, in_a_child=True),
    ),
}  # fmt: skip


def kept(folder: Path, name: str) -> int:
    """Finished cases; nothing else may be on record."""
    path = folder / "results" / f"{name}.jsonl"
    records = lines(path.read_text()) if path.exists() else []
    assert {each["status"] for each in records} <= {"done"}
    return len(records)


@pytest.mark.parametrize("what", MOMENTS)
def test_nothing_is_printed_kept_or_left_running(
    tmp_path: Path, ended: Callable[..., tuple[str, str]], what: str
) -> None:
    words, moment = MOMENTS[what]
    out, err = ended(moment, *words)
    assert out == ""
    if moment.in_a_child and words[0] == "run":
        assert "0 finished cases are kept, the same command goes on from there" in err
    if words[0] == "run":
        assert kept(tmp_path, words[1]) == 0


@pytest.mark.parametrize("jobs", [1, 2])
def test_while_a_record_is_written(tmp_path: Path, ended: Callable[..., tuple[str, str]], jobs: int) -> None:
    """It is written whole; at most what ran beside it is finished, too."""
    moment = Moment("gpipe_bench.harness.store:Store.append", INT, goes_on=True)
    out, err = ended(moment, *run(*TABLE1), "--jobs", jobs)
    found = kept(tmp_path, "table1")
    assert 1 <= found <= jobs
    assert f"{found} finished cases are kept" in err
    assert all(line.startswith("{") for line in out.splitlines())


@pytest.mark.parametrize(
    "moment",
    [Moment(f"{EXPERIMENTS}.guard.run:guard", INT), Moment(f"{EXPERIMENTS}.guard.run:measure", TERM)],
)
def test_the_guard_leaves_no_process_and_no_checkout_behind(
    tmp_path: Path, ended: Callable[..., tuple[str, str]], moment: Moment
) -> None:
    """In somebody else's repository, before its benchmark and inside of it."""
    theirs, summary = their_repository.make(tmp_path / "theirs"), tmp_path / "summary.md"
    out, _ = ended(
        moment, "guard", "--repo", theirs, "--benchmarks", theirs / "benchmarks.py", "--base", "HEAD",
        "--budget-s", "0.5", "--markdown", summary,
    )  # fmt: skip
    assert "guard: " not in out
    assert not summary.exists()
    assert list((tmp_path / "temporary").iterdir()) == []
    listed = subprocess.run(
        ["git", "-C", theirs, "worktree", "list"], capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == 1


# In good order, at once, and once

RANKS = START.replace('"fake_experiment"', '"fake_ranks"')


@pytest.fixture
def arrived(tmp_path):
    """Reads what a process says once, whenever that is."""
    path = tmp_path / "arrived"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)

    def read():
        ready, _, _ = select.select([pipe], [], [], 120)
        assert ready, "the process did not begin within two minutes"
        return os.read(pipe, 100).decode()

    read.path = path
    yield read
    os.close(pipe)


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


def command(*arguments, code, **variables):
    """A command that leads a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env=surroundings(**variables),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


@pytest.fixture
def descendants():
    """All that a process has started so far; gone when the test is done, whatever it finds."""
    found = []

    def of(process):
        found.extend(psutil.Process(process.pid).children(recursive=True))
        return found

    yield of
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()


def nobody_is_left(processes):
    _, alive = psutil.wait_procs(processes, timeout=300)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def ending_of(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out.decode(), err.decode()


def steps_kept(results):
    return [(each["case"]["step"], each["status"]) for each in lines((results / "fake.jsonl").read_text())]


@pytest.mark.parametrize(
    ("to", "number", "status"), [("the run", signal.SIGTERM, 143), ("the whole group", signal.SIGINT, 130)]
)
def test_a_run_ends_with_all_that_it_launched(tmp_path, arrived, descendants, to, number, status):
    """A keyboard's interrupt reaches every process of the group at once; a kill only the run itself, for
    which both signals are one: test_the_way_out_is_taken_in_good_order.
    """
    results = tmp_path / "results"
    process = command(
        "run", "fake", "--device", "cpu", "--results", results, code=RANKS, FAKE_ARRIVED=str(arrived.path)
    )
    arrived()
    family = descendants(process)
    assert len(family) >= 2
    if to == "the run":
        process.send_signal(number)
    else:
        os.killpg(process.pid, number)
    found, out, err = ending_of(process)
    assert found == status, err
    assert "1 finished cases are kept, the same command goes on from there" in err
    assert "the comparison" not in out
    assert steps_kept(results) == [(1, "done")]
    assert nobody_is_left(family)


def test_it_waits_less_than_two_seconds_for_ranks_that_do_not_end(tmp_path, arrived, descendants):
    """As docs/commands.md promises; by the clock a busy machine may take longer."""
    process = command(
        "run", "fake", "--device", "cpu", "--results", tmp_path, code=RANKS, FAKE_ARRIVED=str(arrived.path)
    )
    arrived()
    family = descendants(process)
    os.killpg(process.pid, signal.SIGINT)
    ending_of(process)
    assert nobody_is_left(family)
    assert processes.GRACE_S + processes.SETTLE_S < 2


def test_what_was_started_twice_to_end_ends_once(tmp_path, gate):
    """Tools send a second signal, or send it to process and group."""
    results = tmp_path / "results"
    process = start("run", "fake", "--device", "cpu", "--results", results, FAKE_GATE=str(gate.folder))
    gate.wait()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    found, out, err = ending_of(process)
    assert found == 130, err
    assert "reproduced" not in out
    assert err.count("1 finished cases are kept") == 1
    assert "Traceback" not in err
    assert steps_kept(results) == [(1, "done")]


STUBBORN = """
import fake_experiment
import signal
take = fake_experiment.run
def run(case, options):
    while True:
        try:
            return take(case, options)
        except KeyboardInterrupt:
            pass
import dataclasses
fake_experiment.EXPERIMENT = dataclasses.replace(fake_experiment.EXPERIMENT, run=run)
""" + START.replace("GRACE_S = 600.0", "GRACE_S = 1.5")


def test_a_library_that_swallows_the_interrupt_does_not_hold_it_up(tmp_path, gate):
    results = tmp_path / "results"
    process = start(
        "run", "fake", "--device", "cpu", "--results", results, code=STUBBORN, FAKE_GATE=str(gate.folder)
    )
    gate.wait()
    process.send_signal(signal.SIGTERM)
    found, out, err = ending_of(process)
    assert found == 143, err
    assert "reproduced" not in out
    assert "ended by SIGTERM" in err
    assert steps_kept(results) == [(1, "done")]


@pytest.fixture
def default_handlers():
    """Also in a background job, which was told to ignore interrupts: it would wait for one for ever."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "status"), ENDINGS.items())
def test_the_way_out_is_taken_in_good_order(number, status, default_handlers, monkeypatch):
    # The server that other tests fork from is a child of this process, and would be ended with the run.
    monkeypatch.setattr(processes, "_descendants", list)
    cleaned, before = [], signal.getsignal(number)

    def work():
        with stopping():
            try:
                os.kill(os.getpid(), number)
                signal.pause()
            finally:
                cleaned.append(True)

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert cleaned
    assert 128 + number_of(caught.value) == status
    assert signal.getsignal(number) is before
