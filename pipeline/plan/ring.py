"""When each receive is posted, and into which buffer: derived from the schedule.

A receive that is posted only when its tensor is needed puts the whole transfer on the critical path: gloo
moves no byte before, and NCCL's stream first waits for the computation. Posting everything at once would need
a buffer for every micro-batch in both directions. A ring posts the first receives at the beginning of the
step and each further one when a buffer becomes free. Where messages are small, memory is not what counts:
every receive that is posted while the stage computes interrupts the sender, so all are posted at once. Only
the standard library is imported.

1F1B, stage 1 of 3, M = 5, activations, with as many buffers as the stage before has micro-batches in flight
(3):

    begin: post 0, 1, 2      after B0: post 3 (buffer of 0)      after B1: post 4 (buffer of 1)

A message may wait for its buffer and, as few sends may be on their way, its sender with it. So a schedule
that can be executed could still stop for good where buffers are scarce. The numbers given here are those that
suffice for most schedules; where the waits of a schedule would close a circle, a ring on it grows until none
does. With a buffer for every micro-batch nothing waits for one, so every valid schedule gets through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, dependencies

# Sends on the way, per direction, before the sender waits for the oldest. With one, a late receiver would
# hold up the sender at once; more would only keep more outputs alive, since the receiver has posted its
# receives already.
SENDS_ON_THE_WAY = 2


@dataclass(frozen=True)
class Ring:
    """The receives of one stage in one direction.

    `order` lists the micro-batches as they are needed, `slot[m]` is the buffer of micro-batch m, `initial`
    are posted when the step begins and `following[m]` when the buffer of m is free again (None: nothing is
    left to post).
    """

    num_slots: int
    order: tuple[int, ...]
    slot: tuple[int, ...]
    initial: tuple[int, ...]
    following: tuple[int | None, ...]


def activation_ring(schedule: Schedule, stage: int) -> Ring:
    """Receives of a stage's inputs. A buffer is the kept input of its micro-batch until the end of the
    backward.

    As many buffers as the stage before has micro-batches in flight, so that it never computes an output that
    has no place to go, or as this stage has, if it keeps them longer.
    """
    order = _order(schedule, stage, gradients=False)
    ends = [end.microbatch for end in _ends(schedule, stage)]
    return _ring(order, ends, _num_slots(schedule)[stage, False])


def gradient_ring(schedule: Schedule, stage: int, *, small: bool = False) -> Ring:
    """Receives of the gradients of a stage's outputs. A buffer is free when its backward is done.

    One buffer where a recomputation separates two backwards, which hides the transfer; two where nothing
    does; one for every micro-batch in flight where messages are small.
    """
    order = _order(schedule, stage, gradients=True)
    num_slots = _num_slots(schedule)[stage, True]
    if small:
        num_slots = max(num_slots, schedule.in_flight(stage))
    return _ring(order, [end.microbatch for end in _ends(schedule, stage)], num_slots)


def _order(schedule: Schedule, stage: int, *, gradients: bool) -> list[int]:
    """Micro-batches in the order in which the stage needs what it receives for them."""
    kinds = (Kind.B, Kind.I) if gradients else (Kind.F,)
    return [action.microbatch for action in schedule.actions[stage] if action.kind in kinds]


def _ends(schedule: Schedule, stage: int) -> list[Action]:
    """The actions with which the stage is done with a micro-batch, in their order."""
    row = schedule.actions[stage]
    halved = {action.microbatch for action in row if action.kind is Kind.W}
    return [action for action in row if action.kind is (Kind.W if action.microbatch in halved else Kind.B)]


_Rings = dict[tuple[int, bool], int]  # number of slots by receiving stage and whether of gradients


@lru_cache(maxsize=16)
def _num_slots(schedule: Schedule) -> _Rings:
    """The slots of every ring: what suffices as a rule, and more where the schedule would stop for good."""
    slots: _Rings = {}
    ahead = 2 if schedule.remat == "never" else 1
    for stage, row in enumerate(schedule.actions):
        in_flight = schedule.in_flight(stage)
        if stage > 0:
            slots[stage, False] = max(schedule.in_flight(stage - 1), in_flight)
        if stage + 1 < schedule.num_stages:
            halved = any(action.kind is Kind.W for action in row)
            slots[stage, True] = in_flight if halved else min(ahead, in_flight)
    needs = dependencies(schedule)
    for row in schedule.actions:
        for earlier, later in pairwise(row):
            needs[later] += (earlier,)
    while circle := _circle(schedule, needs, slots):
        for ring in circle:
            slots[ring] += 1
    return slots


def _circle(
    schedule: Schedule, needs: dict[Action, tuple[Action, ...]], slots: _Rings
) -> set[tuple[int, bool]]:
    """The rings on a circle of waits, if there is one; `needs` holds the waits for other reasons."""
    waits: dict[Action, list[tuple[Action, tuple[int, bool] | None]]] = {
        action: [(source, None) for source in sources] for action, sources in needs.items()
    }
    for slotted, num_slots in slots.items():
        for waiting, end in _waits_for_slots(schedule, *slotted, num_slots):
            waits[waiting].append((end, slotted))
    followers: dict[Action, list[Action]] = {action: [] for action in waits}
    missing = {action: len(sources) for action, sources in waits.items()}
    for action, sources in waits.items():
        for source, _ in sources:
            followers[source].append(action)
    free = [action for action, number in missing.items() if not number]
    while free:
        for follower in followers[free.pop()]:
            missing[follower] -= 1
            if not missing[follower]:
                free.append(follower)
    stuck = [action for action, number in missing.items() if number]
    if not stuck:
        return set()
    # Whoever is left waits for another that is left, so going back from one to the next closes a circle.
    path: list[Action] = []
    reasons: list[tuple[int, bool] | None] = []
    action = stuck[0]
    while action not in path:
        path.append(action)
        action, reason = next((source, ring) for source, ring in waits[action] if missing[source])
        reasons.append(reason)
    return {ring for ring in reasons[path.index(action) :] if ring is not None}


def _waits_for_slots(
    schedule: Schedule, stage: int, gradients: bool, num_slots: int
) -> Iterator[tuple[Action, Action]]:
    """Which action waits for which end of a micro-batch, because a message waits for its slot.

    The action that needs the message, and on the sender whatever follows the send that is one too many on the
    way.
    """
    sender = stage + 1 if gradients else stage - 1
    kinds = (Kind.B, Kind.I) if gradients else (Kind.F,)
    ends = _ends(schedule, stage)
    needing = [action for action in schedule.actions[stage] if action.kind in kinds]
    row = schedule.actions[sender]
    after_send = [row[i + 1] if i + 1 < len(row) else None for i in range(len(row)) if row[i].kind in kinds]
    for position in range(num_slots, len(needing)):
        end = ends[position - num_slots]
        yield needing[position], end
        held_up = position + SENDS_ON_THE_WAY
        if held_up < len(after_send) and (following := after_send[held_up]) is not None:
            yield following, end


def _ring(order: list[int], ends: list[int], num_slots: int) -> Ring:
    num_slots = min(num_slots, len(order))
    waiting = deque(order)
    slot = [0] * len(order)
    following: list[int | None] = [None] * len(order)
    initial = [waiting.popleft() for _ in range(num_slots)]
    for position, microbatch in enumerate(initial):
        slot[microbatch] = position
    for microbatch in ends:
        if waiting:
            following[microbatch] = waiting.popleft()
            slot[following[microbatch]] = slot[microbatch]  # type: ignore[index]
    return Ring(num_slots, tuple(order), tuple(slot), tuple(initial), tuple(following))
