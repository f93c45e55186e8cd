"""Rows of workers as the memory of a way asks for them: with recomputation, and how many graphs they keep."""

from __future__ import annotations

from collections.abc import Sequence
from operator import le

from gpipe_bench.pipeline.plan.remat import Choice, recomputes
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule


def with_recomputation(schedule: Schedule, worker: int, remat: Sequence[Choice]) -> tuple[Action, ...]:
    """The worker's row with R before each backward of what its stages recompute."""
    count = schedule.num_microbatches
    again = dict(zip(schedule.stages_of(worker), remat, strict=True))
    row: list[Action] = []
    for action in schedule.actions[worker]:
        if action.kind in (Kind.B, Kind.I) and recomputes(again[action.stage], action.microbatch, count):
            row.append(Action(action.stage, Kind.R, action.microbatch))
        row.append(action)
    return tuple(row)


def most_graphs(row: Sequence[Action], stages: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """How many graphs of each of its stages a worker keeps at a time that recomputes nothing, without what
    another moment has at least as many of.
    """
    counts, found = dict.fromkeys(stages, 0), set[tuple[int, ...]]()
    for action in row:
        if action.kind is Kind.F:
            counts[action.stage] += 1
        elif action.kind is not Kind.W:
            found.add(tuple(counts.values()))  # before anything is let go there are most
            counts[action.stage] -= 1
    return tuple(
        one for one in found if not any(other != one and all(map(le, one, other)) for other in found)
    )
