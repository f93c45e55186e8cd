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
from records import record

from gpipe_bench.experiments.registry import load
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.experiment import select as chosen
from gpipe_bench.harness.store import Store

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


# Experiments

SUBJECTS: dict[str, list[str]] = {
    "engines": ["--only", "workload=transformer", "--only", "where=processes"],
    "table1": ["--only", "part=paper", "--only", "half=transformer"],
    "consistency": ["--only", "part=asynchronous"],
}
MODULES = {
    "engines": "gpipe_bench.experiments.beyond.engines",
    "table1": "gpipe_bench.experiments.paper.table1.experiment",
    "consistency": "gpipe_bench.experiments.paper.consistency.experiment",
}
TURNS = "gpipe_bench.experiments.beyond.engine_turns"
BEGIN = "gpipe_bench.harness.runner:Reporter.begin"
FINISHED = "gpipe_bench.harness.runner:Reporter.finished"
APPEND = "gpipe_bench.harness.store:Store.append"
COMPARE = "gpipe_bench.experiments.commands.run:_shown"


def command(name: str, folder: Path, *only: str) -> list[str]:
    profile = ["--profile", "smoke", "--device", "cpu", "--results", str(folder / "results")]
    return ["run", name, *profile, *(only or SUBJECTS[name])]


def kept(folder: Path, name: str) -> int:
    """Finished cases; nothing else may be on record."""
    path = folder / "results" / f"{name}.jsonl"
    records = lines(path.read_text()) if path.exists() else []
    assert {each["status"] for each in records} <= {"done"}
    return len(records)


def is_only_records(out: str) -> bool:
    return all(line.startswith("{") for line in out.splitlines())


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("engines", Moment(MODULES["engines"], INT)),
        ("table1", Moment(MODULES["table1"], TERM)),
        ("consistency", Moment(MODULES["consistency"], INT)),
        ("engines", Moment(BEGIN, TERM)),
        ("table1", Moment(BEGIN, INT)),
        ("consistency", Moment(BEGIN, TERM)),
    ],
)
def test_before_the_first_case(
    tmp_path: Path, ended: Callable[..., tuple[str, str]], name: str, moment: Moment
) -> None:
    """While it starts, and when it has just said what it is about to do."""
    out, _ = ended(moment, *command(name, tmp_path))
    assert out == ""
    assert kept(tmp_path, name) == 0


@pytest.mark.parametrize(
    ("name", "moment", "only"),
    [
        # In the middle of an import, where the terminal's interrupt finds them, too.
        ("engines", Moment("torch", INT, in_a_child=True), ()),
        # One waits for ever and the other one for it, inside an operation that no handler interrupts.
        ("engines", Moment(f"{TURNS}:peak_bytes", TERM, in_a_child=True), ()),
        (
            "table1",
            Moment("gpipe_bench.experiments.paper.largest:place_anyhow", INT, in_a_child=True),
            (),
        ),
        (
            "consistency",
            Moment("gpipe_bench.experiments.paper.consistency.training:train", TERM, in_a_child=True),
            ("--only", "processes=2"),
        ),
    ],
)  # fmt: skip
def test_inside_a_case_with_its_processes(
    tmp_path: Path, ended: Callable[..., tuple[str, str]], name: str, moment: Moment, only: tuple[str, ...]
) -> None:
    out, err = ended(moment, *command(name, tmp_path, *only))
    assert out == ""
    assert "0 finished cases are kept, the same command goes on from there" in err
    assert kept(tmp_path, name) == 0


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("table1", Moment(FINISHED, TERM, goes_on=True)),
        ("table1", Moment(APPEND, INT, goes_on=True)),
        ("consistency", Moment(FINISHED, TERM, goes_on=True)),
    ],
)
def test_between_cases_and_while_one_is_written(
    tmp_path: Path, ended: Callable[..., tuple[str, str]], name: str, moment: Moment
) -> None:
    """What is being written is written whole; at most what ran beside it is finished, too."""
    out, err = ended(moment, *command(name, tmp_path))
    found = kept(tmp_path, name)
    cases = chosen(load(name).cases(RunOptions(profile="smoke", device="cpu")), only_of(SUBJECTS[name]))
    assert 1 <= found <= 2
    assert found < len(cases)
    assert f"{found} finished cases are kept" in err
    assert is_only_records(out)


def only_of(texts: list[str]) -> dict[str, tuple[str, ...]]:
    return {key: (value,) for key, _, value in (text.partition("=") for text in texts[1::2])}


@pytest.mark.parametrize(("name", "number"), [("engines", TERM), ("table1", INT), ("consistency", TERM)])
def test_while_results_are_compared(
    tmp_path: Path, ended: Callable[..., tuple[str, str]], name: str, number: signal.Signals
) -> None:
    """With all cases on record."""
    experiment = load(name)
    options = RunOptions(
        profile="smoke", device="cpu", engine=experiment.engines[0] if experiment.engines else None
    )
    store = Store(tmp_path / "results")
    cases = chosen(experiment.cases(options), only_of(SUBJECTS[name]))
    for case in cases:
        store.append(
            record(
                experiment=name, profile="smoke", case=case.key, revision=experiment.revision,
                options=experiment.relevant(options),
            )
        )  # fmt: skip
    before = (tmp_path / "results" / f"{name}.jsonl").read_bytes()
    out, err = ended(Moment(COMPARE, number), *command(name, tmp_path))
    assert out == ""
    assert f"{len(cases)} of {len(cases)} cases were on record already" in err
    assert (tmp_path / "results" / f"{name}.jsonl").read_bytes() == before


# The guard, in somebody else's repository


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Two benchmarks that need no torch."""
    folder = their_repository.make(tmp_path / "theirs")
    text = (folder / "benchmarks.py").read_text()
    (folder / "benchmarks.py").write_text(f'{text}BENCHMARKS["again"] = build_rows\n')
    their_repository.commit(folder, "two benchmarks")
    return folder


@pytest.mark.parametrize(
    "moment",
    [
        Moment("gpipe_bench.experiments.commands.guard", TERM),
        Moment("gpipe_bench.experiments.guard.run:guard", INT),
        Moment("gpipe_bench.harness.guard:run_rounds", INT, times=1),
        Moment("gpipe_bench.experiments.guard.run:table", TERM),
    ],
)
def test_the_guard_leaves_no_process_and_no_checkout_behind(
    tmp_path: Path, ended: Callable[..., tuple[str, str]], theirs: Path, moment: Moment
) -> None:
    """While it starts, before the first benchmark, inside the second, before the table."""
    summary = tmp_path / "summary.md"
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


# Other verbs

TRIAL = "gpipe_bench.experiments.engines.cases:examine"


@pytest.mark.parametrize(
    "moment",
    [
        Moment("gpipe_bench.experiments.commands.check_engine", INT),
        Moment("torch", INT, in_a_child=True),
        Moment(TRIAL, TERM, in_a_child=True),
        Moment(TRIAL, INT, in_a_child=True, times=1),
    ],
)
def test_an_examination(ended: Callable[..., tuple[str, str]], moment: Moment) -> None:
    """While it starts, while its processes do, at the first check and at a later one."""
    out, err = ended(moment, "check-engine", "own_engine:FillDrain")
    assert (out, err) == ("", "interrupted\n")


@pytest.mark.parametrize(
    ("verb", "moment"),
    [
        ("plan", Moment("gpipe_bench.experiments.commands.plan", TERM)),
        ("plan", Moment("gpipe_bench.planner.answer:plan", INT)),
        ("plan", Moment("gpipe_bench.planner.measured:_probe", TERM, in_a_child=True)),
        ("plan", Moment("gpipe_bench.planner.model:Model.profile_of", INT)),
        ("plan --bytes", Moment("gpipe_bench.planner.model:model_of", INT)),
        ("plan --bytes", Moment("gpipe_bench.planner.model:Model.profile_of", TERM)),
    ],
)
def test_a_plan(ended: Callable[..., tuple[str, str]], verb: str, moment: Moment) -> None:
    """While it starts, builds, profiles and searches, and while processes time the layers for it."""
    machines = ["--accelerators", "2", "--memory-gib", "8", "--batch-size", "4"]
    out, _ = ended(moment, *verb.split(), "gpt2", *machines, "--num-layers", "1")
    assert out == ""
