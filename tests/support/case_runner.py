"""Runs cases in several processes, launched once per file of tests; each case is reported as a test.

A file of tests has a fixture that calls `outcomes_of`, and a test per case that calls `assert_passed`.
Processes find a case by module and name, so it is a top-level function.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessException

from gpipe_bench.harness.store import locked
from gpipe_bench.pipeline import launch

if TYPE_CHECKING:  # forked processes have no pytest
    import pytest

Case = Callable[[], None]
Cases = Mapping[str, Case]

HANGING_S = 45.0  # longer than any case's own waits
IDLE = 0.02  # share of a core that ranks use together while they wait


class Outcome(NamedTuple):
    """The result of a case on one rank: its traceback, or None if it passed."""

    trace: str | None
    taken_s: float


Outcomes = list[dict[str, Outcome]]  # of each rank, by the names of the cases


def named(*cases: Case) -> dict[str, Case]:
    """The cases by name, as in tests; names must differ."""
    found = {case.__name__: case for case in cases}
    assert len(found) == len(cases)
    return found


def run_all(cases: Cases) -> dict[str, Outcome]:
    """Runs cases one after another, on each rank."""
    outcomes = {}
    for name, case in cases.items():
        start_s = time.monotonic()
        try:
            case()
            trace = None
        except Exception:
            trace = traceback.format_exc()
            print(f"{name}, rank {dist.get_rank()}: {trace}", file=sys.stderr, flush=True)  # others may wait
        outcomes[name] = Outcome(trace, time.monotonic() - start_s)
        dist.barrier()
    return outcomes


def selected(request: pytest.FixtureRequest, cases: Cases) -> Cases:
    """The `cases` whose `test_case` in the fixture's file is selected to run."""
    items = [item for item in request.session.items if item.path == request.path]
    chosen = {item.callspec.params["case"] for item in items if item.name.startswith("test_case[")}
    return {name: case for name, case in cases.items() if name in chosen}


def outcomes_of(cases: Cases, num_ranks: int = 4) -> Outcomes:
    """Each rank's outcomes of the cases, from one launch."""
    return watched(run_all, num_ranks, dict(cases))


def watched(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, hanging_s: float = HANGING_S
) -> list[Any]:
    """Launches the function on CPUs; returns its results. If all ranks wait for each other, `AssertionError`
    with all stacks after `hanging_s`, or later on a busy machine.
    """
    with tempfile.TemporaryDirectory(prefix="watched-") as folder:
        try:
            return launch(_watched, num_ranks, Path(folder), hanging_s, function, *arguments, device="cpu")
        except ProcessException as error:
            if stacks := [path.read_text() for path in sorted(Path(folder).glob("stacks-*"))]:
                raise AssertionError("\n".join(["all ranks wait", *stacks])) from error
            raise


CORES = os.cpu_count() or 1


def _watched(folder: Path, hanging_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs on each rank."""
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(folder, hanging_s, over), daemon=True, name="watch")
    watch.start()
    try:
        return function(*arguments)
    finally:
        over.set()


def _watch(folder: Path, hanging_s: float, over: threading.Event) -> None:
    """A thread: shares this rank's CPU time with the others, and detects when no rank uses any."""
    own, size = dist.get_rank(), dist.get_world_size()
    since_s, before_s, clocks = time.monotonic(), 0.0, [folder / f"clock-{rank}" for rank in range(size)]
    while not over.wait(max(hanging_s / 50, 0.25)):  # seldom: it takes time, too
        clocks[own].write_text(f"{time.process_time():20.6f}")  # of fixed length, so never read in part
        spent_s = sum(float(clock.read_text() or 0) for clock in clocks if clock.exists())
        waited_s = time.monotonic() - since_s
        if spent_s - before_s > IDLE * max(hanging_s, waited_s):
            since_s, before_s = time.monotonic(), spent_s
        elif any(folder.glob("stacks-*")) or waited_s > hanging_s * max(1.0, os.getloadavg()[0] / CORES):
            with (folder / f"stacks-{own}").open("w") as file:
                print(f"rank {own} of {size}:", file=file, flush=True)
                faulthandler.dump_traceback(file)
            over.wait(max(hanging_s / 10, 5.0))  # for the others to write their stacks
            os._exit(1)


def once(path: Path, make: Callable[[], Outcomes]) -> Outcomes:
    """The outcomes of `make` in the first of several processes; others wait and read them from `path`."""
    with path.open("a+b") as file, locked(file.fileno()):
        file.seek(0)
        if not (found := file.read()):
            found = pickle.dumps(make())
            file.write(found)
            file.flush()
    return pickle.loads(found)


def assert_passed(outcomes: Outcomes, case: str) -> None:
    """Shows the traceback of every rank on which the case failed."""
    traces = [f"rank {rank}: {found.trace}" for rank, of in enumerate(outcomes) if (found := of[case]).trace]
    assert not traces, "\n".join(traces)
