"""Schedules as text: a grid for people and a table for files.

A schedule is best checked by looking at it, in a terminal, a test or a review, so the picture needs no
plotting library.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from gpipe_bench.pipeline.plan.replay import SLOTS, replay
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule


def draw(schedule: Schedule, slots: Mapping[Kind, int] | None = None) -> str:
    """The schedule as a grid of stages x time slots; by default F and R take one slot and B takes two.

    A cell names kind and micro-batch, a dot is an idle slot::

        stage 0 | F0 F1 .  .  B1 B1 B0 B0
        stage 1 | .  F0 F1 B1 B1 B0 B0
    """
    lengths = {kind: int(length) for kind, length in SLOTS.items()} | dict(slots or {})
    timeline = replay(schedule, {kind: float(length) for kind, length in lengths.items()})
    width = 1 + len(str(schedule.num_microbatches - 1))
    margin = len(str(schedule.num_stages - 1))
    lines = []
    for stage in range(schedule.num_stages):
        cells: list[str] = []
        for event in timeline.of_stage(stage):
            cells += ["."] * (round(event.start_s) - len(cells))
            cells += [f"{event.action.kind.value}{event.action.microbatch}"] * round(event.duration_s)
        grid = " ".join(cell.ljust(width) for cell in cells).rstrip()
        lines.append(f"stage {stage:>{margin}} | {grid}")
    return "\n".join(lines)


def to_csv(schedule: Schedule) -> str:
    """One line per stage, its actions in order, e.g. `0F0,0F1,0B1,0B0`."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [str(action) for action in row] for row in schedule.actions
    )
    return out.getvalue()


def from_csv(text: str, name: str = "csv", remat: str | None = None) -> Schedule:
    """Reads what `to_csv` writes. `remat` is recognised from the recomputations unless it is given.

    The result is not yet validated: see `schedule.validate`.
    """
    rows = tuple(
        tuple(Action.parse(cell) for cell in row if cell.strip())
        for row in csv.reader(io.StringIO(text))
        if row
    )
    if not any(rows):
        raise ValueError("the text holds no actions; write one line per stage, such as 0F0,0F1,0B1,0B0")
    num_microbatches = 1 + max(action.microbatch for row in rows for action in row)
    if remat is None:
        recomputed = {action.microbatch for row in rows for action in row if action.kind is Kind.R}
        last = num_microbatches - 1
        remat = "always" if last in recomputed else "except_last" if recomputed else "never"
    return Schedule(name, len(rows), num_microbatches, remat, rows)
