"""When a receive may be posted on an accelerator: not before the message can come without this worker.

A receive over NCCL is a kernel that spins on the device until the sender's kernel is there. Whatever waits
for the whole device meanwhile (an allocator that gives memory back and tries again, a module that is loaded
at its first use, a `synchronize` of the user's) waits for the message too. That ends as long as the message
needs nothing that this worker has yet to enqueue, and never if it does: the host stands in the wait and
enqueues nothing. So each receive has an action of this worker after which it is posted, the last of its
actions that the message depends on. A send is such a kernel as well, and ends when its receive is posted, so
rings get as many slots as it takes for no send to wait for a later action of its own sender. Where the host
itself waits for messages, on CPUs, none of this matters, and receives are posted as early as their slots
allow (`ring`).

1F1B, stage 1 of 3, M = 5: the actions of its row and the receives that are posted behind them (a: activation,
g: gradient; the row is F0 F1 B0 F2 B1 F3 B2 F4 B3 B4, and the rings alone would post g0 and g1 at once):

    at once    a0 a1 a2
    F0         g0
    F1         g1
    B0         a3
    F2         g2
    B1         a4
    F3         g3
    F4         g4

That serves one worker that waits for its device while the others go on. Two that wait for theirs at the same
time, each for a message that the other has yet to send, no order of posting serves: a send is a kernel too.

Progress is counted in the calls that a transport gets anyway (`Posting.after`): one for each message that
leaves the worker, one for each micro-batch that a stage is done with. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from gpipe_bench.pipeline.plan.receiving.ring import (
    SENDS_ON_THE_WAY,
    Node,
    Ring,
    RingKey,
    Waits,
    circle,
    end_microbatches,
    followers_of,
    ring_of,
    slots_of_rings,
    waits_for_slots,
    waits_of,
)
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, Transfer, channels, derived, ends_of

# Receives ahead without a backward, when nothing is kept.
FORWARDS_AHEAD = 2


@dataclass(frozen=True)
class Posting:
    """The receives of one stage in one direction.

    `ring` is that of a training step and `small` the one for small messages. The receive of micro-batch m is
    posted when the worker has made `after[m]` calls, and in a pass of forwards alone `after_forward[m]`
    calls, of which `ahead` receives are posted ahead.
    """

    ring: Ring
    small: Ring
    after: tuple[int, ...]
    after_forward: tuple[int, ...] = ()
    ahead: int = FORWARDS_AHEAD


@derived
def postings(schedule: Schedule) -> dict[RingKey, Posting]:
    """For every stage that receives from another worker, and whether of gradients."""
    slots, latest = with_slots(schedule)
    ahead, latest_forward = with_forwards_ahead(schedule)
    training = [calls_of(schedule, row) for row in schedule.actions]
    forwards = [calls_of(schedule, row) for row in forward_rows(schedule)]
    of_ring = _of_ring(schedule)
    found = {}
    for key, messages in of_ring.items():
        stage, gradients = key
        worker, row = schedule.worker(stage), schedule.row(stage)
        order = [message.target.microbatch for message in messages]
        ends = end_microbatches(row)
        small = max(slots[key], schedule.in_flight(stage)) if gradients else slots[key]
        found[key] = Posting(
            ring_of(order, ends, slots[key]),
            ring_of(order, ends, small),
            _after(messages, training[worker], latest, worker),
            () if gradients else _after(messages, forwards[worker], latest_forward, worker),
            FORWARDS_AHEAD if gradients else ahead[key],
        )
    return found


Latest = dict[Node, list[int]]
"""By worker, the position in its row of the last action that must be done before; -1 if there is none. An
action counts as done before itself.
"""


def _after(messages: list[Transfer], calls: list[int], latest: Latest, worker: int) -> tuple[int, ...]:
    after = [0] * len(messages)
    for message in messages:
        position = latest[message.source][worker]
        after[message.target.microbatch] = calls[position] if position >= 0 else 0
    return tuple(after)


def calls_of(schedule: Schedule, row: tuple[Action, ...]) -> list[int]:
    """How many calls a worker has made when it has taken each action of its row."""
    ends = set(ends_of(row)) if any(action.kind is not Kind.F for action in row) else set()
    return list(accumulate((action in ends) + _leaves(schedule, action) for action in row))


def _leaves(schedule: Schedule, action: Action) -> bool:
    """Whether what the action makes goes to another worker."""
    if action.kind is Kind.F:
        other = action.stage + 1
    elif action.kind in (Kind.B, Kind.I):
        other = action.stage - 1
    else:
        return False
    return 0 <= other < schedule.num_stages and schedule.worker(other) != schedule.worker(action.stage)


def _of_ring(schedule: Schedule) -> dict[RingKey, list[Transfer]]:
    found: dict[RingKey, list[Transfer]] = {}
    for messages in channels(schedule).values():
        for message in messages:
            found.setdefault((message.target.stage, message.target.kind is not Kind.F), []).append(message)
    return found


@derived
def with_slots(schedule: Schedule) -> tuple[dict[RingKey, int], Latest]:
    """The slots of every ring of a training step, and what must be done before what."""
    slots = dict(slots_of_rings(schedule))
    waits = _in_turn(waits_of(schedule), channels(schedule).values())
    of_ring = _of_ring(schedule)
    ends = [ends_of(schedule.row(stage)) for stage in range(schedule.num_stages)]
    while True:
        for_slots = waits_for_slots(of_ring, ends, slots)
        late = circle(waits, for_slots)
        if not late:
            latest = _latest(schedule.actions, schedule, waits, for_slots)
            late = _held_up(schedule, schedule.actions, of_ring, latest)
        late = {key for key in late if slots[key] < len(of_ring[key])}
        if not late:
            return slots, latest
        for key in late:
            slots[key] += 1


@derived
def with_forwards_ahead(schedule: Schedule) -> tuple[dict[RingKey, int], Latest]:
    """The same of a pass of forwards alone."""
    rows = forward_rows(schedule)
    of_ring = {key: messages for key, messages in _of_ring(schedule).items() if not key[1]}
    ahead = dict.fromkeys(of_ring, FORWARDS_AHEAD)
    waits: Waits = {action: [] for row in rows for action in row}
    before: dict[Action, Action | None] = {}
    following: dict[Action, Action] = {}
    for row in rows:
        before.update({row[0]: None} if row else {})
        for earlier, later in pairwise(row):
            waits[later].append((earlier, None))
            before[later], following[earlier] = earlier, later
        for action in row:
            if action.stage > 0:
                waits[action].append((Action(action.stage - 1, Kind.F, action.microbatch), None))
    queues = [messages for (_, _, gradients), messages in channels(schedule).items() if not gradients]
    for messages in queues:
        for position, message in enumerate(messages):
            waits[message] = []
            waits[message.target].append((message, None))
            held_up = position + SENDS_ON_THE_WAY
            if not schedule.placement and held_up < len(messages):
                after = following.get(messages[held_up].source)
                if after is not None:
                    waits[after].append((message, None))
    waits = _in_turn(waits, queues)
    while True:
        # What is taken out of one buffer is copied, and the next receive posted, before the stage computes.
        for_slots: Waits = {}
        for key, messages in of_ring.items():
            for earlier_message, message in zip(messages, messages[ahead[key] :], strict=False):
                sources = [earlier_message.source, before[earlier_message.target]]
                for_slots[message] = [(source, key) for source in sources if source is not None]
        late = circle(waits, for_slots)
        if not late:
            latest = _latest(rows, schedule, waits, for_slots)
            late = _held_up(schedule, rows, of_ring, latest)
        late = {key for key in late if ahead[key] < len(of_ring[key])}
        if not late:
            return ahead, latest
        for key in late:
            ahead[key] += 1


def forward_rows(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    return tuple([tuple([a for a in row if a.kind is Kind.F]) for row in schedule.actions])


def _in_turn(waits: Waits, queues: Iterable[list[Transfer]]) -> Waits:
    """With the order in which the receives from one worker are posted."""
    for messages in queues:
        for earlier, later in pairwise(messages):
            waits[later].append((earlier, None))
    return waits


def _latest(
    rows: tuple[tuple[Action, ...], ...], schedule: Schedule, waits: Waits, for_slots: Waits
) -> Latest:
    """From the actions that wait for nothing to all others; there must be no circle."""
    position = {action: i for row in rows for i, action in enumerate(row)}
    followers, missing = followers_of(waits, for_slots)
    latest = {node: [-1] * schedule.num_workers for node in waits}
    free = [node for node, number in missing.items() if not number]
    while free:
        node = free.pop()
        mine = latest[node]
        if isinstance(node, Action):
            mine[schedule.worker(node.stage)] = position[node]
        for follower in followers[node]:
            latest[follower] = [max(pair) for pair in zip(latest[follower], mine, strict=True)]
            missing[follower] -= 1
            if not missing[follower]:
                free.append(follower)
    return latest


def _held_up(
    schedule: Schedule,
    rows: tuple[tuple[Action, ...], ...],
    of_ring: dict[RingKey, list[Transfer]],
    latest: Latest,
) -> set[RingKey]:
    """The rings of which a receive waits for what its sender does after the send."""
    position = {action: i for row in rows for i, action in enumerate(row)}
    return {
        key
        for key, messages in of_ring.items()
        for message in messages
        if latest[message][schedule.worker(message.source.stage)] > position[message.source]
    }
