"""Launches for tests: one for all workers that need it, and an end to those that hang."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
from case_runner import Outcome, Outcomes, once

from tests.preloaded import end_if_it_hangs


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


def wait_for_nobody(said: Path) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    threading.Thread(target=signal.pause).start()  # no signal comes here
    end_if_it_hangs(0.01)  # instead of what it began with
    signal.pause()


def test_a_process_that_hangs_ends_and_says_where(tmp_path: Path) -> None:
    said = tmp_path / "said"
    process = forked.fork_server().Process(target=wait_for_nobody, args=(said,))
    process.start()
    process.join()
    assert process.exitcode == 1
    text = said.read_text()
    assert text.startswith("Timeout (0:00:00.01")
    assert "in wait_for_nobody" in text
    assert text.count("hread 0x") >= 2, "the stacks of all its threads"
