"""Schedules as text: a grid for people.

A schedule is best checked by looking at it, in a terminal, a test or a review, so the picture needs no
plotting library.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.portals import described
from gpipe_bench.pipeline.plan.schedule import Action
from gpipe_bench.pipeline.plan.timeline import Timeline


def draw(timeline: Timeline, portals: Sequence[Edge] = ()) -> str:
    """A timeline in whole slots, such as `replay(schedule, SLOTS)`, as a grid of workers x time slots.

    A slot names kind and micro-batch, a dot is an idle slot; where a worker holds several stages, a slot
    names the stage too, as in `2F0`::

        stage 0 | F0 F1 .  .  B1 B1 B0 B0
        stage 1 | .  F0 F1 B1 B1 B0 B0

    Below stand the `portals`, each line of them from the stage that stashes to the one that pops::

        portals | stage 0 -> stage 3: skip
    """
    several = bool(timeline.placement)
    width = max((len(_short(event.action, several)) for event in timeline.events), default=0)
    margin = len(str(timeline.num_workers - 1))
    lines = []
    for worker in range(timeline.num_workers):
        slots: list[str] = []
        for event in timeline.of_worker(worker):
            slots += ["."] * (round(event.start_s) - len(slots))
            slots += [_short(event.action, several)] * round(event.duration_s)
        grid = " ".join(slot.ljust(width) for slot in slots).rstrip()
        lines.append(f"{'worker' if several else 'stage'} {worker:>{margin}} | {grid}")
    lines += [f"portals | {described(line)}" for line in portals]
    return "\n".join(lines)


def _short(action: Action, several: bool) -> str:
    return str(action) if several else f"{action.kind.value}{action.microbatch}"
