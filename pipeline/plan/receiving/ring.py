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

Several stages of a worker may receive from one other worker. Each has a ring of its own, because its messages
have sizes of their own, but the receives of one direction from one worker are posted in the order of need,
whichever stage they are for (`turns`): NCCL matches sends and receives by their order alone. That adds no
wait: who needs a message has needed those before it, and who is held up by it was held up by those before it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from gpipe_bench.pipeline.plan.remat import choice_of
from gpipe_bench.pipeline.plan.schedule import (
    Action,
    Kind,
    Schedule,
    Transfer,
    channels,
    dependencies,
    derived,
    ends_of,
)

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
    has no place to go, or as this stage has, if it keeps them longer. Where the backward is split, one more:
    zero-bubble schedules keep as many everywhere, and a W ends just when the next input comes. Without a
    place for it that input would wait until its sender, which is computing, looks again.
    """
    row = schedule.row(stage)
    order = [action.microbatch for action in row if action.kind is Kind.F]
    return ring_of(order, end_microbatches(row), slots_of_rings(schedule)[stage, False])


def gradient_ring(schedule: Schedule, stage: int, *, small: bool = False) -> Ring:
    """Receives of the gradients of a stage's outputs. A buffer is free when its backward is done.

    One buffer where a recomputation separates two backwards, which hides the transfer; two where nothing
    does; one for every micro-batch in flight where messages are small.
    """
    row = schedule.row(stage)
    order = [action.microbatch for action in row if action.kind in (Kind.B, Kind.I)]
    num_slots = slots_of_rings(schedule)[stage, True]
    if small:
        num_slots = max(num_slots, schedule.in_flight(stage))
    return ring_of(order, end_microbatches(row), num_slots)


def turns(schedule: Schedule, worker: int, source: int, *, gradients: bool) -> tuple[tuple[int, int], ...]:
    """(stage, micro-batch) of the messages that `worker` receives from worker `source`, in the order in which
    their receives are posted.
    """
    messages = channels(schedule).get((source, worker, gradients), [])
    return tuple([(message.target.stage, message.target.microbatch) for message in messages])


def end_microbatches(row: tuple[Action, ...]) -> list[int]:
    return [action.microbatch for action in ends_of(row)]


RingKey = tuple[int, bool]  # receiving stage, and whether of gradients
Node = Action | Transfer  # an action, or the posting of the receive of a message
Waits = dict[Node, list[tuple[Node, RingKey | None]]]  # what for, and on which ring


@derived
def slots_of_rings(schedule: Schedule) -> dict[RingKey, int]:
    """The slots of every ring: what suffices as a rule, and more where the schedule would stop for good."""
    slots: dict[RingKey, int] = {}
    for stage in range(schedule.num_stages):
        in_flight = schedule.in_flight(stage)
        # A recomputation before every backward, but for that of the last micro-batch, is what separates them.
        ahead = 1 if choice_of(schedule.remat, stage) in ("always", "except_last") else 2
        halved = any(action.kind is Kind.W for action in schedule.row(stage))
        if stage > 0:
            slots[stage, False] = max(schedule.in_flight(stage - 1), in_flight + halved)
        if stage + 1 < schedule.num_stages:
            slots[stage, True] = in_flight if halved else min(ahead, in_flight)
    waits = waits_of(schedule)
    ends = [ends_of(schedule.row(stage)) for stage in range(schedule.num_stages)]
    posted: dict[RingKey, list[Transfer]] = {}
    for messages in channels(schedule).values():
        for message in messages:
            posted.setdefault((message.target.stage, message.target.kind is not Kind.F), []).append(message)
    while closed := circle(waits, waits_for_slots(posted, ends, slots)):
        for ring in closed:
            slots[ring] += 1
    return slots


def waits_of(schedule: Schedule) -> Waits:
    """Every wait but those for slots."""
    waits: Waits = {
        action: [(source, None) for source in sources] for action, sources in dependencies(schedule).items()
    }
    after: dict[Action, Action] = {}
    for row in schedule.actions:
        for earlier, later in pairwise(row):
            waits[later].append((earlier, None))
            after[earlier] = later
    for messages in channels(schedule).values():
        for position, message in enumerate(messages):
            waits[message] = []
            waits[message.target].append((message, None))
            # The sender goes on from the send that is one too many on the way when the oldest has left.
            held_up = position + SENDS_ON_THE_WAY
            if held_up < len(messages) and (following := after.get(messages[held_up].source)) is not None:
                waits[following].append((message, None))
    return waits


def waits_for_slots(
    posted: dict[RingKey, list[Transfer]], ends: list[list[Action]], slots: dict[RingKey, int]
) -> Waits:
    """Which receive is posted at which end of a micro-batch, because that frees its slot."""
    return {
        messages[position]: [(ends[ring[0]][position - slots[ring]], ring)]
        for ring, messages in posted.items()
        for position in range(slots[ring], len(messages))
    }


def followers_of(waits: Waits, for_slots: Waits) -> tuple[dict[Node, list[Node]], dict[Node, int]]:
    """Who waits for each node, and for how many each of them waits."""
    followers: dict[Node, list[Node]] = {node: [] for node in waits}
    missing: dict[Node, int] = {}
    for node, reasons in waits.items():
        sources = [*reasons, *for_slots.get(node, ())]
        missing[node] = len(sources)
        for source, _ in sources:
            followers[source].append(node)
    return followers, missing


def circle(waits: Waits, for_slots: Waits) -> set[RingKey]:
    """The rings on a circle of waits, if there is one."""
    followers, missing = followers_of(waits, for_slots)
    free = [node for node, number in missing.items() if not number]
    while free:
        for follower in followers[free.pop()]:
            missing[follower] -= 1
            if not missing[follower]:
                free.append(follower)
    stuck = next((node for node, number in missing.items() if number), None)
    if stuck is None:
        return set()
    # Whoever is left waits for another that is left, so going back from one to the next closes a circle.
    path: dict[Node, RingKey | None] = {}
    while stuck not in path:
        sources = [*waits[stuck], *for_slots.get(stuck, ())]
        before, path[stuck] = next((source, ring) for source, ring in sources if missing[source])
        stuck = before
    nodes = list(path)
    return {ring for node in nodes[nodes.index(stuck) :] if (ring := path[node]) is not None}


def ring_of(order: list[int], ends: list[int], num_slots: int) -> Ring:
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
