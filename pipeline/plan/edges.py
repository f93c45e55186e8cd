"""Edges between stages, and the receive buffers of workers, both derived from the schedule.

Activations go along an edge and gradients back, one message each for a micro-batch. A receive that is posted
only when its tensor is needed puts the whole transfer on the critical path, and posting everything at once
would need a buffer for every micro-batch. So each direction of an edge between workers has a ring of buffers:
the first receives are posted when the step begins, each further one when a buffer becomes free.
1F1B, stage 1 of 3, M = 5, activations, with as many buffers as the stage before has micro-batches in flight:

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
from collections import Counter, defaultdict
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
    """An edge from one stage to the next."""

    source: int
    target: int


Direction = tuple[int, bool]
"""The stage that an edge leaves, and whether gradients go back (True) or activations forward (False)."""
Rounds = dict[Action, int]
"""The round of each action, if every action takes one round and begins as soon as it can."""


class Ring(NamedTuple):
    """The receives of one direction of an edge: of the micro-batches `initial` they are posted when the step
    begins, of `following[m]` when the buffer of m is free again (None: nothing is left to post).
    """

    num_slots: int
    initial: tuple[int, ...]
    following: tuple[int | None, ...]

    @classmethod
    def of(cls, order: Sequence[int], ends: Sequence[int], num_slots: int) -> Ring:
        """The ring for micro-batches that are needed in that order and are done with in the order `ends`."""
        after = dict(zip(ends, order[num_slots:], strict=False))
        following = tuple([after.get(microbatch) for microbatch in range(len(order))])
        return cls(min(num_slots, len(order)), tuple(order[:num_slots]), following)


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
    """Whether a sender waits for the oldest of so many messages before it goes on, and lets go of it: it
    holds the latest of each direction, and of small ones all of a step.
    """
    return number > SENDS_ON_THE_WAY and number * oldest_bytes > small_bytes


def chain(num_stages: int) -> tuple[Edge, ...]:
    """The edges from each stage to the next."""
    return tuple([Edge(stage, stage + 1) for stage in range(num_stages - 1)])


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
    # In a pass of forwards alone a received tensor is copied out of its buffer when its action begins.
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
    unposted: int | None  # how many may be without a buffer when the sender goes on
    sent: int = 0
    posted: int = 0


def _as_a_rule(schedule: Schedule, number: int, back: bool) -> int:
    """The buffers of one direction of an edge.

    For activations, as many as the source has micro-batches in flight, so that it never computes an output
    that has no place to go, or as the target has, if it keeps them longer: a buffer is the kept input of its
    micro-batch until the end of the backward. Where the backward is split, one more: zero-bubble schedules
    keep as many everywhere, and a W ends just when the next input comes, which without a place would wait
    until its sender, which is computing, looks again. For gradients, one where a recomputation before every
    backward (but that of the last micro-batch) hides the transfer, two where nothing does.
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
    """The buffers with which the actions of these kinds come to an end, and their rounds. With a buffer for
    each micro-batch they do, unless their rows wait for each other.

    A sender goes on when at most `SENDS_ON_THE_WAY` of its messages are without a buffer; where it is
    `strict`, when none is. Forwards alone of several stages for each worker hold up no other worker.
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
    """The round in which each action is taken where all workers that can take one do; None where none can
    any more. `frees` says which rings an action gives a buffer back to.
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
    """By micro-batch, the number of calls that the receiver has made after its actions of the rounds before
    the message's round; nothing without rounds. `makers` are all actions that send a message.
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
