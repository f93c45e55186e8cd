"""Tests the test tools: multi-process cases, hangs, tiers."""

from __future__ import annotations

import ast
import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import forked
import pytest
from case_runner import watched
from tiers import patterns
from torch import distributed as dist


def meet(missing: int) -> None:
    if dist.get_rank() == missing:
        wait_for_ever()
    dist.barrier()


def wait_for_ever() -> None:
    threading.Event().wait()


@pytest.mark.processes
def test_a_deadlock_ends_with_the_stacks_of_all_ranks() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0 of 3:.*rank 1 of 3:.*rank 2 of 3:") as caught:
        watched(meet, 3, 1, hanging_s=2.0)
    said = str(caught.value)
    assert said.count("in wait_for_ever") == 1
    assert said.count("in barrier") == 2


def wait_for_nobody(said: Connection) -> None:
    os.dup2(said.fileno(), 2)
    threading.Thread(target=signal.pause).start()
    os.write(2, b"has an end\n" if signal.getitimer(signal.ITIMER_REAL)[0] > 0 else b"has no end\n")
    forked.end_if_it_hangs(0.01)  # replaces its first limit
    signal.pause()


def test_a_process_that_hangs_says_where_and_ends() -> None:
    context = forked.fork_server()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=wait_for_nobody, args=(there,))
    process.start()
    there.close()
    said = ""
    while "in wait_for_nobody" not in said and (more := os.read(here.fileno(), 4096)):
        said += more.decode()
    assert said.startswith("has an end\nTimeout (0:00:00.01")
    assert said.count("hread 0x") == 2, "the stacks of all its threads"
    os.kill(process.pid, signal.SIGALRM)  # as its timer would
    process.join()
    assert process.exitcode == -signal.SIGALRM


# The second tier names existing tests


FOLDER = Path(__file__).parents[1]


def names_in(path: Path) -> list[str]:
    """The test functions of a file, by pytest's names."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return [f"{path.relative_to(FOLDER)}::{name}" for name in functions if name.startswith("test_")]


def test_every_line_names_a_test_that_is_there() -> None:
    """Else a renamed or moved test would silently be in the first tier."""
    named = {line.removeprefix("!").partition("[")[0] for line in patterns()}
    there = {str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/test_*.py")}
    there |= {name for path in FOLDER.glob("*/test_*.py") for name in names_in(path)}
    assert named <= there, named - there
