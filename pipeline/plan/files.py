"""Schedules as text: tables for files, with commas between the cells, and grids for people.

The table has a row for each worker and a cell for each action, in the form that torch's
`_PipelineScheduleRuntime` reads and writes as `compute_only`, so a schedule of torch's runs here and one of
ours runs there. Two things differ. A recomputation is a cell such as `2R0`, which torch has no word for:
files that hold one are read here only. And torch takes whatever begins like an action for one, while a cell
that is none is an error here. The placement is not written down: a worker holds the stages that are in its
row.

    0F0,0F1,3F0,3I0,0F2,...        worker 0 of two, in a V
    1F0,2F0,1F1,2F1,2I0,...

A schedule is best checked by looking at it, in a terminal, a test or a review, so the grid (`draw`) needs no
plotting library; a picture for browsers is `svg`. Only the standard library is imported.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection

from .remat import Remat, named_like
from .schedule import Action, Kind, Schedule
from .timeline import Timeline

# What torch's runtime adds for itself: messages, sharded parameters, sums over replicas.
_LOWERED = re.compile(
    r"\d+((SEND|RECV|WAIT_RECV|WAIT_SEND)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD|WAIT_\w+)", re.ASCII
)
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")


def to_csv(schedule: Schedule) -> str:
    """One line per worker, its actions in order, e.g. `0F0,0F1,0B1,0B0`."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [str(action) for action in row] for row in schedule.actions
    )
    return out.getvalue()


def from_csv(text: str, name: str = "csv", remat: Remat | None = None) -> Schedule:
    """Reads what `to_csv` or torch writes. `remat` is recognised from the recomputations unless it is given.

    Empty cells, which are idle slots, and what torch's runtime adds (`0SEND_F1`, `0UNSHARD`) are left out;
    the parts of an overlapped pair such as `(0F7;7B3)OVERLAP_F_B` are taken in their order. The result is not
    yet validated: see `validate`.

    Raises:
        ValueError: the text is no table, holds no actions or something that is not an action, or leaves out
            a stage or a micro-batch.
    """
    table = csv.reader(io.StringIO(text))
    try:
        rows = [[action for cell in cells for action in _actions(cell)] for cells in table if cells]
    except csv.Error as error:
        raise ValueError(f"the text is no table ({error}); write actions with commas between them") from error
    except ValueError as error:
        raise ValueError(f"line {table.line_num}: {error}") from error
    if not any(rows):
        raise ValueError("the text holds no actions; write one line per worker, such as 0F0,0F1,0B1,0B0")
    holders: dict[int, int] = {}  # the worker of each stage
    microbatches: set[int] = set()
    for worker, row in enumerate(rows):
        for action in row:
            holders.setdefault(action.stage, worker)
            microbatches.add(action.microbatch)
    _check_numbers("stage", holders.keys())
    _check_numbers("micro-batch", microbatches)
    if remat is None:
        again: list[set[int]] = [set() for _ in holders]
        for action in (action for row in rows for action in row if action.kind is Kind.R):
            again[action.stage].add(action.microbatch)
        remat = [named_like(frozenset(each), len(microbatches)) for each in again]
    placement = tuple(holders[stage] for stage in range(len(holders)))
    return Schedule(name, len(holders), len(microbatches), remat, tuple(map(tuple, rows)), placement)


def _check_numbers(what: str, found: Collection[int]) -> None:
    """`ValueError` unless these are 0, 1, 2 ... A number that is far too large is found as quickly."""
    missing = next((number for number in range(len(found)) if number not in found), None)
    if missing is not None:
        raise ValueError(
            f"no action is of {what} {missing}, but one is of {what} {max(found)}; they count from 0 without "
            "gaps"
        )


def _actions(cell: str) -> list[Action]:
    """Returns the actions that a cell holds: none, one, or the parts of a pair."""
    cell = cell.strip()
    if not cell or _LOWERED.fullmatch(cell):
        return []
    pair = _TOGETHER.fullmatch(cell)
    return [Action.parse(part) for part in (pair[1].split(";") if pair else (cell,))]


def draw(timeline: Timeline) -> str:
    """A timeline in whole slots, such as `replay(schedule, SLOTS)`, as a grid of workers x time slots.

    A slot names kind and micro-batch, a dot is an idle slot; where a worker holds several stages, a slot
    names the stage too, as in `2F0`::

        stage 0 | F0 F1 .  .  B1 B1 B0 B0
        stage 1 | .  F0 F1 B1 B1 B0 B0
    """
    several = bool(timeline.placement)

    def short(action: Action) -> str:
        return str(action) if several else f"{action.kind.value}{action.microbatch}"

    width = max((len(short(event.action)) for event in timeline.events), default=0)
    margin = len(str(timeline.num_workers - 1))
    lines = []
    for worker in range(timeline.num_workers):
        slots: list[str] = []
        for event in timeline.of_worker(worker):
            slots += ["."] * (round(event.start_s) - len(slots))
            slots += [short(event.action)] * round(event.duration_s)
        grid = " ".join(slot.ljust(width) for slot in slots).rstrip()
        lines.append(f"{'worker' if several else 'stage'} {worker:>{margin}} | {grid}")
    return "\n".join(lines)
