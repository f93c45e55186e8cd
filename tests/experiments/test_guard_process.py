"""Processes that answer, die, hang, talk nonsense and are interrupted."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator

import psutil
import pytest

from gpipe_bench.experiments.guard.arms import Worker, WorkerError

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


@pytest.fixture
def start() -> Iterator[object]:
    workers: list[Worker] = []

    def worker(code: str) -> Worker:
        workers.append(Worker("arm", [sys.executable, "-c", code], os.environ))
        return workers[-1]

    yield worker
    for each in workers:
        each.kill()


def test_it_answers_line_by_line(start) -> None:
    worker = start(ECHO)
    for value in ("a", "ü\n", ["x" * 200_000]):
        worker.send({"value": value})
        assert worker.receive(10) == {"value": value}


def test_one_that_dies_shows_its_last_words(start) -> None:
    worker = start("import sys; sys.exit('no such layer')")
    with pytest.raises(WorkerError, match="the process of arm ended with"):
        worker.receive(10)


def test_one_that_was_killed_says_how(start) -> None:
    worker = start(ECHO)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="the process of arm ended with"):
        worker.receive(10)
    with pytest.raises(WorkerError, match="the process of arm ended with"):
        worker.send({})


def test_one_that_hangs_is_not_waited_for(start, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_s = []

    def nothing_yet(*arguments: object) -> tuple[list[object], ...]:
        asked_s.append(arguments[-1])
        return [], [], []

    monkeypatch.setattr(select, "select", nothing_yet)
    worker = start(ECHO)
    with pytest.raises(WorkerError, match="the process of arm has not"):
        worker.receive(7.0)
    assert [0 < each <= 7.0 for each in asked_s] == [True]


@pytest.mark.parametrize("text", ["hello", "[1]", "{"])
def test_one_that_talks_nonsense_is_quoted(start, text: str) -> None:
    with pytest.raises(WorkerError, match="the process of arm answered"):
        start(f"print({text!r}, flush=True); input()").receive(10)


def test_an_error_it_reports_is_raised(start) -> None:
    with pytest.raises(WorkerError, match="arm: out of memory"):
        start("""print('{"error": "out of memory"}', flush=True); input()""").receive(10)


def test_killing_it_ends_its_children_too(start) -> None:
    worker = start(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print('{\"child\": %d}' % child.pid, flush=True); input()"
    )
    child = psutil.Process(worker.receive(10)["child"])
    worker.kill()
    assert not psutil.pid_exists(worker.pid)
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
