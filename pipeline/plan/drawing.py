"""Schedules as text: a grid for people and a table for files.

A schedule is best checked by looking at it, in a terminal, a test or a review, so the picture needs no
plotting library.
"""

from __future__ import annotations

import csv
import io

from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.timeline import Timeline


def draw(timeline: Timeline) -> str:
    """A timeline in whole slots, such as `replay(schedule, SLOTS)`, as a grid of stages x time slots.

    A slot names kind and micro-batch, a dot is an idle slot::

        stage 0 | F0 F1 .  .  B1 B1 B0 B0
        stage 1 | .  F0 F1 B1 B1 B0 B0
    """
    width = max((len(_short(event.action)) for event in timeline.events), default=0)
    margin = len(str(timeline.num_stages - 1))
    lines = []
    for stage in range(timeline.num_stages):
        slots: list[str] = []
        for event in timeline.of_stage(stage):
            slots += ["."] * (round(event.start_s) - len(slots))
            slots += [_short(event.action)] * round(event.duration_s)
        grid = " ".join(slot.ljust(width) for slot in slots).rstrip()
        lines.append(f"stage {stage:>{margin}} | {grid}")
    return "\n".join(lines)


def _short(action: Action) -> str:
    return f"{action.kind.value}{action.microbatch}"


def to_csv(schedule: Schedule) -> str:
    """One line per stage, its actions in order, e.g. `0F0,0F1,0B1,0B0`."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [str(action) for action in row] for row in schedule.actions
    )
    return out.getvalue()


def from_csv(text: str, name: str = "csv", remat: str | None = None) -> Schedule:
    """Reads what `to_csv` writes. `remat` is recognised from the recomputations unless it is given.

    The result is not yet validated: see `plan.validate`.

    Raises:
        ValueError: the text is no table, holds no actions or something that is not an action.
    """
    try:
        lines = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise ValueError(f"the text is no table ({error}); write actions with commas between them") from error
    rows = tuple(tuple(Action.parse(cell) for cell in row if cell.strip()) for row in lines)
    if not any(rows):
        raise ValueError("the text holds no actions; write one line per stage, such as 0F0,0F1,0B1,0B0")
    num_microbatches = 1 + max(action.microbatch for row in rows for action in row)
    if remat is None:
        recomputed = {action.microbatch for row in rows for action in row if action.kind is Kind.R}
        last = num_microbatches - 1
        remat = "always" if last in recomputed else "except_last" if recomputed else "never"
    return Schedule(name, len(rows), num_microbatches, remat, rows)
