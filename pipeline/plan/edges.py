"""Edges: what stages send each other, and the buffers that workers receive it in, derived from the schedule.

An edge leads from one stage to the next; activations go along it and gradients back, one message each for a
micro-batch. Edges within a worker need no buffers.

A receive that is posted only when its tensor is needed puts the whole transfer on the critical path, and
posting everything at once would need a buffer for every micro-batch. So each direction of an edge has a ring
of buffers: the first receives are posted when the step begins, each further one when a buffer becomes free.
Where messages are small, all are posted at once. 1F1B, stage 1 of 3, M = 5, activations, with as many buffers
as the stage before has micro-batches in flight (3):

    begin: post 0, 1, 2      after B0: post 3 (buffer of 0)      after B1: post 4 (buffer of 1)

**That buffers suffice is shown by a run.** A message may wait for its buffer and, as few sends may be on
their way, its sender with it. Actions in rows with bounded buffers form a marked graph: whether it stops does
not depend on who goes first, so if one run ends, every run does. `_run` lets all workers that can take an
action take it, round by round; where none can, all rings get a buffer more.

**On accelerators** a receive or a send over NCCL is a kernel that spins on the device until its other end is
there, and a wait for the whole device (an allocator that gives memory back, a `synchronize` of the user's)
waits for it too. It never ends if the message needs work that this worker's host, which is in the wait, has
yet to enqueue. A message that is made in round r of the run depends on earlier rounds alone, so its receive
is posted behind this worker's actions of earlier rounds; and a worker goes on in the run only when the
receives of all that it has sent are posted. Two workers that wait for their devices at once, each for a
message that the other has yet to send, no order serves.

Several stages of a worker may receive from one other worker. Each has rings of its own, because its messages
have sizes of their own, but the receives of one direction from one worker are posted in the order of need
(`turns`): NCCL matches sends and receives by their order alone. That adds no wait: who needs a message has
needed those before it. Only the standard library is imported.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from .schedule import Action, Kind, Schedule, derived, ends_of, remat_of
from .walk import Transfer, Walk, channels

# Sends on the way, per direction, before the sender waits for the oldest. With one, a late receiver would
# hold up the sender at once; more would only keep more outputs alive, since the receiver has posted its
# receives already.
SENDS_ON_THE_WAY = 2
# Receives ahead without a backward, when nothing is kept.
FORWARDS_AHEAD = 2
SMALL_BYTES = 2**18
"""Total bytes of messages on their way, in one direction, whose memory does not matter."""


class Edge(NamedTuple):
    """An edge from one stage to the next, which has its source's number."""

    number: int
    source: int
    target: int


Direction = tuple[int, bool]
"""The number of an edge, and whether gradients go back (True) or activations forward (False)."""
Rounds = dict[Action, int]
"""The round of each action, if every action takes one round and begins as soon as it can."""


class Ring(NamedTuple):
    """The receives of one direction of an edge.

    `order` lists the micro-batches as they are needed, `slot[m]` is the buffer of micro-batch m, `initial`
    are posted when the step begins and `following[m]` when the buffer of m is free again (None: nothing is
    left to post).
    """

    num_slots: int
    order: tuple[int, ...]
    slot: tuple[int, ...]
    initial: tuple[int, ...]
    following: tuple[int | None, ...]


class Rings(NamedTuple):
    """The ring as a rule, and the one for small messages.

    On accelerators the receive of micro-batch m is posted when its worker has made `after[m]` calls: one for
    each message of the chain that leaves the worker, one for each micro-batch that a stage is done with. In
    a pass of forwards alone, whose buffers are free as soon as a message is taken, these are `after_forward`
    and the ring is `forward`.
    """

    tight: Ring
    small: Ring
    after: tuple[int, ...] = ()
    after_forward: tuple[int, ...] = ()
    forward: Ring | None = None

    def of(self, largest_bytes: int, small_bytes: int = SMALL_BYTES) -> Ring:
        """Returns the ring to use where no message takes more than `largest_bytes`."""
        return self.small if largest_bytes * self.small.num_slots <= small_bytes else self.tight


def is_one_too_many(number: int, oldest_bytes: int, small_bytes: int = SMALL_BYTES) -> bool:
    """Whether a sender waits for the oldest of so many messages before it goes on, and lets go of it.

    What is sent stays where it was made until then: the latest messages of each direction, and of small ones
    all of a step.
    """
    return number > SENDS_ON_THE_WAY and number * oldest_bytes > small_bytes


def chain(num_stages: int) -> tuple[Edge, ...]:
    """The edges from each stage to the next."""
    return tuple([Edge(stage, stage, stage + 1) for stage in range(num_stages - 1)])


def messages_of(schedule: Schedule, edge: Edge, *, back: bool) -> tuple[Transfer, ...]:
    """Every message of one direction of an edge in a step, in the order in which its receiver needs them."""
    source, target = (edge.target, edge.source) if back else edge[1:]
    kinds = (Kind.B, Kind.I) if back else (Kind.F,)
    made = {}
    if back:
        made = {action.microbatch: action for action in schedule.row(source) if action.kind in kinds}
    return tuple(
        [
            Transfer(made[action.microbatch] if back else Action(source, Kind.F, action.microbatch), action)
            for action in schedule.row(target)
            if action.kind in kinds
        ]
    )


def turns(schedule: Schedule, worker: int, source: int, *, back: bool) -> tuple[tuple[int, int], ...]:
    """(stage, micro-batch) of what `worker` receives from worker `source` along the chain or back, in the
    order in which the receives are posted.
    """
    messages = channels(schedule).get((source, worker, back), [])
    return tuple([(message.target.stage, message.target.microbatch) for message in messages])


@derived
def rings_of(schedule: Schedule, accelerated: bool = False) -> dict[Direction, Rings]:
    """The rings of every direction of an edge that joins two workers.

    `accelerated` says whether messages travel from device to device, where some rings need more buffers.
    """
    edges = [
        edge
        for edge in chain(schedule.num_stages)
        if schedule.worker(edge.source) != schedule.worker(edge.target)
    ]
    slots, rounds = _slots(schedule, accelerated)
    ahead, forward_rounds = _forwards_ahead(schedule) if accelerated else ({}, {})
    found = {}
    for edge in edges:
        for back in (False, True):
            stage = edge.source if back else edge.target
            messages = messages_of(schedule, edge, back=back)
            ends = [action.microbatch for action in ends_of(schedule.row(stage))]
            order, tight = [message.target.microbatch for message in messages], slots[edge.number, back]
            small = max(tight, schedule.in_flight(stage)) if back else tight
            few = ahead.get((edge.number, False), FORWARDS_AHEAD)
            forward = None if back else _ring(order, order, few)
            rings = Rings(_ring(order, ends, tight), _ring(order, ends, small), forward=forward)
            if accelerated:
                rings = rings._replace(after=_after(schedule, messages, rounds))
                if not back:
                    after = _after(schedule, messages, forward_rounds)
                    rings = rings._replace(after_forward=after)
            found[edge.number, back] = rings
    return found


@dataclass
class _Queue:
    """Messages from one worker to another whose receives are posted in one order, with their rings."""

    source: int
    target: int
    messages: list[tuple[Direction, Transfer]]
    unposted: int | None  # how many may be without a buffer when the sender goes on
    sent: int = 0
    posted: int = 0


def _queues(schedule: Schedule, kinds: tuple[Kind, ...], *, strict: bool) -> list[_Queue]:
    """All messages between workers that actions of these kinds make. A sender goes on when at most
    `SENDS_ON_THE_WAY` are without a buffer; where it is `strict`, when none is. Forwards alone of several
    stages for each worker hold up no other worker.
    """
    bounded = SENDS_ON_THE_WAY if len(kinds) > 1 or not schedule.placement else None
    found = []
    for (source, target, back), messages in channels(schedule).items():
        keyed = [((m.target.stage if back else m.source.stage, back), m) for m in messages]
        found.append(_Queue(source, target, keyed, 0 if strict else bounded))
    return [queue for queue in found if queue.messages[0][1].target.kind in kinds]


def _slots(schedule: Schedule, accelerated: bool) -> tuple[dict[Direction, int], Rounds]:
    """The buffers of every ring: what suffices as a rule, and more where the schedule would stop for good;
    and the round of each action.
    """
    edges = chain(schedule.num_stages)
    slots = {key: number for edge in edges for key, number in _as_a_rule(schedule, edge)}
    ends = {stage: ends_of(schedule.row(stage)) for stage in range(schedule.num_stages)}
    frees: dict[Action, list[Direction]] = {}
    for edge in edges:
        for back in (False, True):
            for action in ends[edge.source if back else edge.target]:
                frees.setdefault(action, []).append((edge.number, back))
    return _grown(schedule, tuple(Kind), slots, frees, strict=accelerated)


def _as_a_rule(schedule: Schedule, edge: Edge) -> list[tuple[Direction, int]]:
    """The buffers of both directions of an edge.

    For activations, as many as the source has micro-batches in flight, so that it never computes an output
    that has no place to go, or as the target has, if it keeps them longer: a buffer is the kept input of its
    micro-batch until the end of the backward. Where the backward is split, one more: zero-bubble schedules
    keep as many everywhere, and a W ends just when the next input comes, which without a place would wait
    until its sender, which is computing, looks again. For gradients, one where a recomputation before every
    backward (but that of the last micro-batch) hides the transfer, two where nothing does.
    """
    halved = [any(action.kind is Kind.W for action in schedule.row(stage)) for stage in edge[1:]]
    in_flight = [schedule.in_flight(stage) for stage in edge[1:]]
    hidden = remat_of(schedule.remat, edge.source) in ("always", "except_last")
    return [
        ((edge.number, False), max(in_flight[0], in_flight[1] + halved[1])),
        ((edge.number, True), in_flight[0] if halved[0] else min(1 if hidden else 2, in_flight[0])),
    ]


def _forwards_ahead(schedule: Schedule) -> tuple[dict[Direction, int], Rounds]:
    """Returns the buffers and rounds of a pass of forwards alone between accelerators. In such a pass a
    received tensor is copied out of its buffer when its action begins.
    """
    frees: dict[Action, list[Direction]] = {}
    slots: dict[Direction, int] = {}
    for edge in chain(schedule.num_stages):
        slots[edge.number, False] = FORWARDS_AHEAD
        for message in messages_of(schedule, edge, back=False):
            frees.setdefault(message.target, []).append((edge.number, False))
    return _grown(schedule, (Kind.F,), slots, frees, strict=True)


def _grown(
    schedule: Schedule,
    kinds: tuple[Kind, ...],
    slots: dict[Direction, int],
    frees: dict[Action, list[Direction]],
    *,
    strict: bool,
) -> tuple[dict[Direction, int], Rounds]:
    """The buffers with which the actions of these kinds come to an end, and their rounds. With a buffer for
    each micro-batch they do, unless their rows wait for each other.
    """
    while True:
        walk = Walk(schedule, kinds)
        rounds = _run(walk, _queues(schedule, kinds, strict=strict), slots, frees)
        if rounds is not None:
            return slots, rounds
        if min(slots.values(), default=schedule.num_microbatches) >= schedule.num_microbatches:
            raise walk.stopped()
        slots = {key: min(number + 1, schedule.num_microbatches) for key, number in slots.items()}


def _run(
    walk: Walk, queues: Sequence[_Queue], slots: dict[Direction, int], frees: dict[Action, list[Direction]]
) -> Rounds | None:
    """The round in which each action is taken where all workers that can take one do; None where none can
    any more. `frees` says which rings an action gives a buffer back to.
    """
    leaving: dict[Action, list[_Queue]] = {}
    arriving: dict[Action | None, list[tuple[_Queue, int]]] = {}
    by_sender: dict[int, list[_Queue]] = {}
    for queue in queues:
        by_sender.setdefault(queue.source, []).append(queue)
        for index, (_, message) in enumerate(queue.messages):
            leaving.setdefault(message.source, []).append(queue)
            arriving.setdefault(message.target, []).append((queue, index))
    used: Counter[Direction] = Counter()
    rounds: Rounds = {}

    def is_able(worker: int) -> bool:
        return (
            walk.is_ready(worker)
            and all(index < queue.posted for queue, index in arriving.get(walk.next[worker], ()))
            and all(
                queue.unposted is None or queue.sent - queue.posted <= queue.unposted
                for queue in by_sender.get(worker, ())
            )
        )

    number = 0
    while any(walk.next):
        for queue in queues:
            while queue.posted < len(queue.messages):
                key = queue.messages[queue.posted][0]
                if used[key] >= slots[key]:
                    break
                used[key] += 1
                queue.posted += 1
        able = [worker for worker in range(len(walk.next)) if is_able(worker)]
        if not able:
            return None
        for action in map(walk.take, able):
            walk.finish(action)
            rounds[action] = number
            for queue in leaving.get(action, ()):
                queue.sent += 1
            for key in frees.get(action, ()):
                used[key] -= 1
        number += 1
    return rounds


def _after(schedule: Schedule, messages: Sequence[Transfer], rounds: Rounds) -> tuple[int, ...]:
    """Returns, by micro-batch, the number of calls that the receiver has made after its actions of the rounds
    before the message's round.
    """
    worker = schedule.worker(messages[0].target.stage)
    row = [action for action in schedule.actions[worker] if action in rounds]
    ends = set(ends_of(tuple(row))) if len(row) == len(schedule.actions[worker]) else set()
    calls = [0, *accumulate((action in ends) + _leaves(schedule, action) for action in row)]
    own = [rounds[action] for action in row]
    after = [0] * len(messages)
    for message in messages:
        after[message.target.microbatch] = calls[bisect_left(own, rounds[message.source])]
    return tuple(after)


def _leaves(schedule: Schedule, action: Action) -> bool:
    """Whether what the action makes goes to another worker along the chain."""
    target = schedule.receiver(action)
    return target is not None and schedule.worker(target) != schedule.worker(action.stage)


def _ring(order: Sequence[int], ends: Sequence[int], num_slots: int) -> Ring:
    num_slots = min(num_slots, len(order))
    waiting = deque(order)
    slot = [0] * len(order)
    following: list[int | None] = [None] * len(order)
    initial = [waiting.popleft() for _ in range(num_slots)]
    for position, microbatch in enumerate(initial):
        slot[microbatch] = position
    for microbatch in ends:
        if waiting:
            following[microbatch] = now = waiting.popleft()
            slot[now] = slot[microbatch]
    return Ring(num_slots, tuple(order), tuple(slot), tuple(initial), tuple(following))
