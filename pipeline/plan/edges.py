"""Edges between stages, and each worker's receive buffers, derived from the schedule.

Each micro-batch sends activations along an edge and gradients back. A receive posted only when its tensor is
needed puts the whole transfer on the critical path; posting all at once needs a buffer for every micro-batch.
So each direction of an edge between workers has a ring of buffers: the first receives are posted when the
step begins, the next whenever a buffer is free. 1F1B, stage 1 of 3, M = 5, activations, with as many buffers
as the stage before has micro-batches in flight:

    begin: post 0, 1, 2      after B0: post 3 (buffer of 0)      after B1: post 4 (buffer of 1)

**A simulated run shows that the buffers suffice.** A message may wait for a buffer and, as few sends may be
in progress, its sender with it. Actions in rows with bounded buffers form a marked graph, whose deadlocks do
not depend on timing: if one run ends, every run does. In `_run` all workers that can take an action do, round
by round; if none can, every ring gets one more buffer.

**On accelerators** an NCCL send or receive is a kernel that occupies the device until its peer is there, and
whatever waits for the whole device (an allocator that frees memory, a user's `synchronize`) waits for it too:
forever, if the message depends on work that this worker's host, now waiting, has yet to enqueue. A message
made in round r of the run depends on earlier rounds alone. So its receive is posted after this worker's
actions of earlier rounds, and in the run a worker goes on only when receives of all its sends are posted. No
order helps two workers that wait for their devices at once, each for a message that the other has yet to
send.

Several stages of a worker may receive from one worker. Each has its own rings, because message sizes differ,
but the receives of one direction between two workers are posted in the order of need (`turns`): NCCL matches
sends and receives by order alone. That adds no waiting: a message is needed after those before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from .schedule import Action, Kind, Schedule, derived, ends_of, remat_of
from .walk import Transfer, Walk, channels

# Sends in progress, per direction, before the sender waits for the oldest. With one, a late receiver would
# stop the sender at once; more would only keep outputs alive longer, since receives are posted early.
SENDS_ON_THE_WAY = 2
# Receives posted ahead in a pass without backwards, which keeps nothing.
FORWARDS_AHEAD = 2
SMALL_BYTES = 2**18
"""Messages in progress in one direction may hold so much memory without a limit on their number."""


class Edge(NamedTuple):
    """An edge from one stage to the next."""

    source: int
    target: int


Direction = tuple[int, bool]
"""The stage that an edge leaves, and whether gradients go back (True) or activations forward (False)."""
Rounds = dict[Action, int]
"""The round of each action in the simulated run."""


class Ring(NamedTuple):
    """The receives of one direction of an edge: those of micro-batches `initial` are posted when the step
    begins, that of `following[m]` when the buffer of m is free (None: none is left).
    """

    num_slots: int
    initial: tuple[int, ...]
    following: tuple[int | None, ...]

    @classmethod
    def of(cls, order: Sequence[int], ends: Sequence[int], num_slots: int) -> Ring:
        """The ring for micro-batches that are received in the given order and whose buffers are free in the
        order `ends`.
        """
        after = dict(zip(ends, order[num_slots:], strict=False))
        following = tuple([after.get(microbatch) for microbatch in range(len(order))])
        return cls(min(num_slots, len(order)), tuple(order[:num_slots]), following)


class Rings(NamedTuple):
    """The default ring, and the one for small messages.

    On accelerators the receive of micro-batch m is posted after `after[m]` calls of its worker: one for each
    message sent to a neighbour stage, one for each micro-batch that a stage has finished. `after_forward` and
    `forward` are the calls and the ring of a pass without backwards, which frees a buffer as soon as its
    message is taken.
    """

    tight: Ring
    small: Ring
    after: tuple[int, ...] = ()
    after_forward: tuple[int, ...] = ()
    forward: Ring | None = None

    def of(self, largest_bytes: int, small_bytes: int = SMALL_BYTES) -> Ring:
        """The ring to use if no message takes more than `largest_bytes`."""
        return self.small if largest_bytes * self.small.num_slots <= small_bytes else self.tight


def is_one_too_many(number: int, oldest_bytes: int, small_bytes: int = SMALL_BYTES) -> bool:
    """Whether a sender with so many sends in progress must wait for the oldest, and free it: it keeps the
    latest of each direction, and all small ones of a step.
    """
    return number > SENDS_ON_THE_WAY and number * oldest_bytes > small_bytes


def chain(num_stages: int) -> tuple[Edge, ...]:
    """The edges from each stage to the next."""
    return tuple([Edge(stage, stage + 1) for stage in range(num_stages - 1)])


def turns(schedule: Schedule, worker: int, source: int, *, back: bool) -> tuple[tuple[int, int], ...]:
    """(stage, micro-batch) of the activations, or with `back` the gradients, that `worker` receives from
    worker `source`, in the order in which the receives are posted.
    """
    messages = channels(schedule).get((source, worker, back), [])
    return tuple([(message.target.stage, message.target.microbatch) for message in messages])


@derived
def rings_of(schedule: Schedule, accelerated: bool = False) -> dict[Direction, Rings]:
    """The rings of both directions of all edges between two workers.

    `accelerated`: messages travel between devices (NCCL), where some rings need more buffers.
    """
    directions: dict[Direction, list[Transfer]] = {}
    for message in [each for messages in channels(schedule).values() for each in messages]:
        directions.setdefault(_direction(message), []).append(message)
    makers = {message.source for messages in directions.values() for message in messages}
    frees: dict[Action, list[Direction]] = defaultdict(list)
    few_frees: dict[Action, list[Direction]] = defaultdict(list)
    for (number, back), messages in directions.items():
        for action in ends_of(schedule.row(number if back else number + 1)):
            frees[action].append((number, back))
        for message in messages:
            few_frees[message.target].append((number, back))
    slots, rounds = _grown(
        schedule, tuple(Kind), {each: _as_a_rule(schedule, *each) for each in directions}, frees, accelerated
    )
    # A pass without backwards copies a received tensor out of its buffer when the action begins.
    few, forward_rounds = dict.fromkeys(directions, FORWARDS_AHEAD), Rounds()
    if accelerated:
        few, forward_rounds = _grown(schedule, (Kind.F,), few, few_frees, True)
    else:
        rounds = {}
    found = {}
    for (number, back), messages in directions.items():
        row = schedule.row(number if back else number + 1)
        order, ends = [m.target.microbatch for m in messages], [a.microbatch for a in ends_of(row)]
        tight, after = slots[number, back], _after(schedule, messages, rounds, makers)
        small = max(tight, schedule.in_flight(number)) if back else tight
        rings = Rings(Ring.of(order, ends, tight), Ring.of(order, ends, small), after)
        if not back:
            after = _after(schedule, messages, forward_rounds, makers)
            rings = rings._replace(forward=Ring.of(order, order, few[number, back]), after_forward=after)
        found[number, back] = rings
    return found


def _direction(message: Transfer) -> Direction:
    back = message.target.kind is not Kind.F
    return (message.target if back else message.source).stage, back


@dataclass
class _Queue:
    """Messages from one worker to another whose receives are posted in one order."""

    source: int
    messages: list[Transfer]
    unposted: int | None  # sends without a buffer that let the sender go on; None: any
    sent: int = 0
    posted: int = 0


def _as_a_rule(schedule: Schedule, number: int, back: bool) -> int:
    """The default number of buffers of one direction of an edge.

    For activations: as many as the source has micro-batches in flight, so that every output has a buffer, or
    as the target has, if more: a buffer holds its micro-batch's input until the end of the backward. One more
    where the backward is split: there a W ends just when the next input arrives, which would wait until its
    busy sender looks again. For gradients: one where recomputation before every backward (but the last
    micro-batch's) hides the transfer, else two.
    """
    source, target = schedule.in_flight(number), schedule.in_flight(number + 1)
    is_halved = any(action.kind is Kind.W for action in schedule.row(number if back else number + 1))
    if not back:
        return max(source, target + is_halved)
    return source if is_halved else min(2 if remat_of(schedule.remat, number) == "never" else 1, source)


def _grown(
    schedule: Schedule,
    kinds: tuple[Kind, ...],
    slots: dict[Direction, int],
    frees: dict[Action, list[Direction]],
    strict: bool,
) -> tuple[dict[Direction, int], Rounds]:
    """The numbers of buffers with which the run of these kinds of actions ends, and the actions' rounds. With
    a buffer for each micro-batch it ends, unless rows wait for each other.

    A sender goes on if at most `SENDS_ON_THE_WAY` of its messages lack a buffer; if `strict`, none may.
    Passes without backwards of workers with several stages have no such limit: they stop no other worker.
    """
    unposted = 0 if strict else None
    if not strict and (len(kinds) > 1 or not schedule.placement):
        unposted = SENDS_ON_THE_WAY
    while True:
        walk = Walk(schedule, kinds)
        queues = [
            _Queue(source, messages, unposted)
            for (source, _, _), messages in channels(schedule).items()
            if messages[0].target.kind in kinds
        ]
        rounds = _run(walk, queues, slots, frees)
        if rounds is not None:
            return slots, rounds
        if min(slots.values(), default=schedule.num_microbatches) >= schedule.num_microbatches:
            raise walk.stopped()
        slots = {key: min(number + 1, schedule.num_microbatches) for key, number in slots.items()}


def _run(
    walk: Walk, queues: Sequence[_Queue], slots: dict[Direction, int], frees: dict[Action, list[Direction]]
) -> Rounds | None:
    """The round of each action where all workers that can take one do; None if the run stops early. `frees`
    gives the rings that an action frees a buffer of.
    """
    leaving: dict[Action, list[_Queue]] = {}
    arriving: dict[Action | None, list[tuple[_Queue, int]]] = {}
    by_sender: dict[int, list[_Queue]] = {}
    for queue in queues:
        by_sender.setdefault(queue.source, []).append(queue)
        for index, message in enumerate(queue.messages):
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
                key = _direction(queue.messages[queue.posted])
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


def _after(
    schedule: Schedule, messages: Sequence[Transfer], rounds: Rounds, makers: set[Action]
) -> tuple[int, ...]:
    """By micro-batch, the receiver's number of calls after its actions in rounds before the message's; empty
    without rounds. `makers` are all actions that send.
    """
    if not rounds:
        return ()
    whole = schedule.actions[schedule.worker(messages[0].target.stage)]
    row = [action for action in whole if action in rounds]
    ends = set(ends_of(whole)) if len(row) == len(whole) else set()
    calls = [0, *accumulate((action in ends) + (action in makers) for action in row)]
    own = [rounds[action] for action in row]
    after = {message.target.microbatch: bisect_left(own, rounds[message.source]) for message in messages}
    return tuple([calls[after[microbatch]] for microbatch in range(len(messages))])
