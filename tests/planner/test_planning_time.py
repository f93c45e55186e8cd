"""Where the seconds for timing go, and what is kept of them: made-up probes and clocks, nothing is timed."""

from __future__ import annotations

import gc
import io
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from gpipe_bench.planner import Request, link_named
from gpipe_bench.planner.measured import measured, sizes_worth
from gpipe_bench.planner.model import Subject
from gpipe_bench.planner.probes import Bench, Probed, ProbeJob, print_progress, probe

LOOPBACK = link_named("loopback")
REQUEST = Request(accelerators=2, memory_bytes=2**40, batch_size=16, link=LOOPBACK)


def test_sizes_of_one_micro_batch_alone_are_not_timed() -> None:
    assert sizes_worth([1, 2, 4, 8, 16], REQUEST) == [1, 2, 4, 8]
    assert sizes_worth([16], REQUEST) == [16]
    assert sizes_worth([1, 16], replace(REQUEST, accelerators=1)) == [1, 16]


def probed(*sizes: int, **more: Any) -> Probed:
    """Of six layers in this process."""
    job = ProbeJob(Subject("planning_models:plain"), sizes, **more)
    try:
        return probe(Bench(job))
    finally:
        gc.unfreeze()


def test_each_size_is_timed_in_every_way_as_often_as_there_are_rounds() -> None:
    found = probed(2, 1, rounds=2)
    counts = Counter((run.size, run.way) for run in found.runs)
    assert counts == {(size, way): 4 for size in (1, 2) for way in ("fine", "coarse")}
    assert found.activation_bytes == found.gradient_bytes == {size: (64.0 * size,) * 5 for size in (1, 2)}
    assert found.parameter_bytes == ((4 * 16 * 16, 4 * 16),) * 6
    fine = next(run for run in found.runs if run.way == "fine")
    assert {action.stage for action in fine.actions} == {layer for layer, _ in fine.update_s} == set(range(6))
    assert measured([found]).at(2).seconds("G", range(6)) > 0


def test_no_round_begins_after_the_budget() -> None:
    spent = probed(1, 2, rounds=3, budget_s=1e-3)
    assert Counter(run.size for run in spent.runs) == {1: 4, 2: 4}, "one, of all sizes"


def test_how_far_it_is_is_said_in_lines_or_over_one_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    print_progress("round 2", 24.0, 60.0)
    assert out.getvalue() == "timing layers: round 2, 24 s, at most 36 s to go\n"
    out.isatty = lambda: True  # type: ignore[method-assign]
    print_progress("round 3", 61.0, 60.0)
    assert out.getvalue().endswith(f"\r{'timing layers: round 3, 61 s, at most 0 s to go':<70}")
