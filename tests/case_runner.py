"""Cases that several processes run together: launched once for all of a file, and each reported as a test.

A file of tests has a fixture that calls `outcomes_of`, and a test of each case that calls `assert_passed`.
What the processes run is found by its module and name, so a case is a function at the top of a module.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import distributed as dist

from gpipe_bench.harness.store import file_lock
from gpipe_bench.pipeline.ranks.launch import launch

if TYPE_CHECKING:  # forked processes have no pytest
    import pytest

Case = Callable[[], None]
Cases = Mapping[str, Case]


class Outcome(NamedTuple):
    """What became of a case on one rank: the traceback, or None where it passed."""

    trace: str | None
    taken_s: float


Outcomes = list[dict[str, Outcome]]  # of each rank, by the names of the cases


def named(*cases: Case) -> dict[str, Case]:
    """By their names, which are those of the tests; no two may have the same."""
    found = {case.__name__: case for case in cases}
    assert len(found) == len(cases)
    return found


def run_all(cases: Cases) -> dict[str, Outcome]:
    """On each rank: runs cases one after the other."""
    outcomes = {}
    for name, case in cases.items():
        start_s = time.monotonic()
        try:
            case()
            trace = None
        except Exception:
            trace = traceback.format_exc()
        outcomes[name] = Outcome(trace, time.monotonic() - start_s)
        dist.barrier()
    return outcomes


def selected(request: pytest.FixtureRequest, cases: Cases) -> Cases:
    """Those of `cases` whose `test_case` of the fixture's file is among the tests to run."""
    items = [item for item in request.session.items if item.path == request.path]
    chosen = {item.callspec.params["case"] for item in items if item.name.startswith("test_case[")}
    return {name: case for name, case in cases.items() if name in chosen}


def outcomes_of(cases: Cases, num_ranks: int = 4) -> Outcomes:
    """What each rank of one launch says of the cases."""
    return launch(run_all, num_ranks, dict(cases), device="cpu")


def once(path: Path, make: Callable[[], Outcomes]) -> Outcomes:
    """What `make` gives to the first of several processes; the others wait for it and read it from `path`."""
    with path.open("a+b") as file, file_lock(file.fileno()):
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
