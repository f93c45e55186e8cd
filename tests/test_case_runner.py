"""Launches for tests: one for all workers that need it, and an end to those that hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import forked
import pytest
from case_runner import Outcome, Outcomes, once, watched
from torch import distributed as dist


def test_of_several_that_need_the_same_outcomes_one_launches(tmp_path: Path) -> None:
    both, made = threading.Barrier(2), []

    def make() -> Outcomes:
        made.append(1)
        return [{"case": Outcome(None, 0.5)}]

    def ask(_: int) -> Outcomes:
        both.wait()
        return once(tmp_path / "outcomes", make)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, range(2))) == [[{"case": Outcome(None, 0.5)}]] * 2
    assert len(made) == 1


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


def compute(missing: int) -> int:
    """Its others wait for long, which is no deadlock."""
    if dist.get_rank() == missing:
        start_s = time.process_time()
        while time.process_time() - start_s < 1.5:
            pass
    dist.barrier()
    return dist.get_rank()


@pytest.mark.processes
def test_who_waits_for_a_rank_that_computes_does_not_hang() -> None:
    assert watched(compute, 2, 0, hanging_s=1.0) == [0, 1]


def wait_for_nobody(said: Connection) -> None:
    os.dup2(said.fileno(), 2)
    threading.Thread(target=signal.pause).start()
    os.write(2, b"has an end\n" if signal.getitimer(signal.ITIMER_REAL)[0] > 0 else b"has no end\n")
    forked.end_if_it_hangs(0.01)  # instead of what it began with
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
    os.kill(process.pid, signal.SIGALRM)  # as it would itself
    process.join()
    assert process.exitcode == -signal.SIGALRM
