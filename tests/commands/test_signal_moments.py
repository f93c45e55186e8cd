"""SIGINT and SIGTERM at any moment of the verbs that take long: each ends with 130 or 143, says so without a
traceback, begins nothing more, prints no result that it was told not to wait for, and keeps what it had.

A keyboard's interrupt goes to the whole process group, a kill to the command alone; `moments.py` lets a
command, or a process that it has started, stop at a place of one's choice, so that nothing here waits for a
clock.
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
from command_line import ROOT, lines, surroundings
from forked import Script

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
EXAMINE = f"{EXPERIMENTS}.engines.cases:examine"


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


def test_while_a_record_is_written(tmp_path: Path, ended: Callable[..., tuple[str, str]]) -> None:
    """It is written whole; at most what ran beside it is finished, too."""
    moment = Moment("gpipe_bench.harness.store:Store.append", INT, goes_on=True)
    out, err = ended(moment, *run(*TABLE1))
    found = kept(tmp_path, "table1")
    assert 1 <= found <= 2
    assert f"{found} finished cases are kept" in err
    assert all(line.startswith("{") for line in out.splitlines())


@pytest.mark.parametrize(
    "moment",
    [
        Moment(f"{EXPERIMENTS}.guard.run:guard", INT),
        Moment("gpipe_bench.harness.guard:run_rounds", TERM),
    ],
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
