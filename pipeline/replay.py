"""A schedule laid out in time from the durations of its actions, without running it.

Answers what a step would take on K devices where there are fewer, or where only the order of the work is in
question. Every stage takes its row in order and starts an action as soon as the row and the action's
dependencies allow; messages are free. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipeline.schedule import Action, Kind, Schedule, dependencies, execution_order
from pipeline.timeline import Event, Timeline

# A backward computes two products where a forward computes one; a recomputation is a forward.
SLOTS: dict[Kind, float] = {Kind.F: 1, Kind.R: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}


def replay(schedule: Schedule, action_s: Mapping[Kind, float] | Callable[[Action], float]) -> Timeline:
    """The timeline of `schedule` when an action takes `action_s` seconds, by kind or by action."""
    duration_s = action_s if callable(action_s) else lambda action: action_s[action.kind]
    needs = dependencies(schedule)
    end_s: dict[Action, float] = {}
    free_s = [0.0] * schedule.num_stages
    events = []
    for action in execution_order(schedule):
        start_s = max([free_s[action.stage], *(end_s[need] for need in needs[action])])
        end_s[action] = free_s[action.stage] = start_s + duration_s(action)
        events.append(Event(action, start_s, end_s[action]))
    return Timeline.of(events, schedule.num_stages, provenance="replayed")


def makespan_slots(schedule: Schedule) -> float:
    """Length of a step in forwards, with equal stages, free messages and F : R : B = 1 : 1 : 2."""
    return replay(schedule, SLOTS).makespan_s
