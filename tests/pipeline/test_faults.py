"""Some of the faults of `faults.py`, and what there is of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fault_table import ACTIONS, KINDS, TRANSPORTS, every, faults, on_grids

ROOT = Path(__file__).parents[2]
# The process that holds the store stops, in a step, while all wait to save, before it has met the others, and
# when nobody needs it any more; a chain of ranks that wait; a rank that is not there at all; one of each
# other kind; and of a grid one that others await in a sum, one that is told there, and the store's.
CHOSEN = (
    "stop rank 0 of 2, gloo, 0F",
    "stop rank 2 of 3, shared memory, 2B",
    "stop rank 0 of 3, shared memory, before saving",
    "kill rank 1 of 3, gloo, before construction",
    "raise rank 0 of 2, shared memory, 0I",
    "memory rank 1 of 2, gloo, 1W",
    "stop rank 0 of 2, gloo, 3",
    "raise rank 2 of 3, shared memory, 5",
    "stop rank 0 of 3, shared memory, while meeting",
    "stop rank 0 of 3, shared memory, before closing",
    "stop rank 3 of 4, shared memory, before reducing",
    "raise rank 2 of 4, gloo, 0B1",
    "stop rank 0 of 4, gloo, 0B1 of step 1",
    "kill rank 3 of 4, shared memory, in construction",
)


def test_a_broken_rank_ends_all_others_which_say_who_it_was(tmp_path: Path) -> None:
    """How soon is the script's to judge; here only that they end, after the fault, and what they say."""
    report = tmp_path / "faults.jsonl"
    lines = [str(fault) for fault in every(0)]
    chosen = [next(line for line in lines if line.startswith(start)) for start in CHOSEN]
    only = [argument for line in chosen for argument in ("--only", line)]
    process = subprocess.run(
        [sys.executable, "tests/support/faults.py", *only, "--timeout", "4", "--jobs", "3",
         "--json", str(report)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    outcomes = [json.loads(line) for line in report.read_text().splitlines()]
    assert len(outcomes) == len(CHOSEN), process.stdout + process.stderr
    assert [outcome["wrong"] for outcome in outcomes if outcome["wrong"]] == [], process.stdout
    assert all(outcome["longest_s"] > 0 for outcome in outcomes)


def test_every_kind_of_fault_in_every_rank_and_action_is_planted() -> None:
    found = faults(0)
    assert len(set(found)) == len(found)
    in_actions = {(f.kind, f.num_ranks, f.rank, f.place[1], f.transport) for f in found if f.is_action}
    assert in_actions == {
        (kind, size, rank, action, transport)
        for kind in KINDS
        for size in (2, 3)
        for rank in range(size)
        for action in ACTIONS
        for transport in TRANSPORTS
    }
    assert len(in_actions) == 200
    assert faults(0) == found != faults(1)


def test_every_rank_of_a_grid_is_killed_stopped_and_raises_in_the_first_step_and_later() -> None:
    found = on_grids(0)
    assert len(set(found)) == len(found)
    in_actions = {(f.kind, f.rank, f.step) for f in found if f.is_action and f.dp == 2}
    assert in_actions == {(k, r, s) for k in ("kill", "stop", "raise") for r in range(4) for s in range(2)}
