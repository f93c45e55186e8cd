"""Halves of a backward that follow each other at once, joined again where that makes a step no longer.

I and W cost a little more together than B does, on small layers a good deal. Where nobody waits for the
gradient that I sends, as on the first stage, or where it comes early enough anyway, a W right behind its I
gains nothing. What it gains the replay of measured times decides. Only the standard library is imported.

    0I2 0W2 0I3 0W3        becomes        0B2 0B3
"""

from __future__ import annotations

from dataclasses import replace

from gpipe_bench.pipeline.plan.links import FREE, Link
from gpipe_bench.pipeline.plan.replay import ActionTimes, replay
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule


def fused(schedule: Schedule, action_s: ActionTimes, link: Link = FREE) -> Schedule:
    """`schedule` with B for I and W of a stage wherever these are neighbours and the step gets no longer.

    `action_s` are the seconds of all kinds that occur and of B, as for `replay`. Stages are looked at one by
    one, from the first: it has nobody to send a gradient to. What a worker keeps at a time stays the same.
    """
    makespan_s = replay(schedule, action_s, link).makespan_s
    for stage in range(schedule.num_stages):
        candidate = _joined(schedule, stage)
        if candidate.actions == schedule.actions:
            continue
        candidate_s = replay(candidate, action_s, link).makespan_s
        if candidate_s <= makespan_s:
            schedule, makespan_s = candidate, candidate_s
    return schedule


def _joined(schedule: Schedule, stage: int) -> Schedule:
    """All I and W of the stage that are neighbours in the row of its worker, joined."""
    worker = schedule.worker(stage)
    row: list[Action] = []
    for action in schedule.actions[worker]:
        before = row[-1] if row else None
        if (
            action.kind is Kind.W
            and action.stage == stage
            and before == Action(stage, Kind.I, action.microbatch)
        ):
            row[-1] = Action(stage, Kind.B, action.microbatch)
        else:
            row.append(action)
    return replace(
        schedule, actions=(*schedule.actions[:worker], tuple(row), *schedule.actions[worker + 1 :])
    )
