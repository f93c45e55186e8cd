"""Processes that answer, die, hang, talk nonsense and are ended."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator

import psutil
import pytest

from gpipe_bench.experiments.guard.arms import Worker, WorkerError


@pytest.fixture
def start() -> Iterator[object]:
    workers: list[Worker] = []

    def worker(code: str) -> Worker:
        workers.append(Worker("arm", [sys.executable, "-c", code], os.environ))
        return workers[-1]

    yield worker
    for each in workers:
        each.kill()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('no such layer')", "process of arm ended with exit status 1:\nno such layer"),
        ("import os; os.kill(os.getpid(), 9)", "process of arm ended with exit status -9"),
        ("print('hello', flush=True); input()", "process of arm answered b'hello', which is no JSON"),
        ("print('[1]', flush=True); input()", "process of arm answered .*, which is no object"),
        ("""print('{"error": "out of memory"}', flush=True); input()""", "^arm: out of memory"),
    ],
)
def test_one_that_does_not_answer_says_why(start, code: str, said: str) -> None:
    with pytest.raises(WorkerError, match=said):
        start(code).receive(10)


def test_one_that_hangs_is_not_waited_for(start, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start("input()")
    monkeypatch.setattr(select, "select", lambda *arguments: ([], [], []))
    with pytest.raises(WorkerError, match="the process of arm has not answered for 7 s"):
        worker.receive(7.0)


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
