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
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gpipe_bench.pipeline.plan.schedule import Kind, Schedule


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

    As many buffers as the stage before has micro-batches in flight: it never computes an output that has no
    place to go.
    """
    row = schedule.actions[stage]
    order = [action.microbatch for action in row if action.kind is Kind.F]
    return _ring(order, _ends(schedule, stage), schedule.in_flight(stage - 1))


def gradient_ring(schedule: Schedule, stage: int, *, small: bool = False) -> Ring:
    """Receives of the gradients of a stage's outputs. A buffer is free when its backward is done.

    One buffer where a recomputation separates two backwards, which hides the transfer; two where nothing
    does; one for every micro-batch in flight where messages are small.
    """
    row = schedule.actions[stage]
    order = [action.microbatch for action in row if action.kind in (Kind.B, Kind.I)]
    ahead = 2 if schedule.remat == "never" else 1
    halved = any(action.kind is Kind.W for action in row)
    slots = schedule.in_flight(stage) if halved or small else min(ahead, schedule.in_flight(stage))
    return _ring(order, _ends(schedule, stage), slots)


def _ends(schedule: Schedule, stage: int) -> list[int]:
    """Micro-batches in the order in which the stage is done with them."""
    row = schedule.actions[stage]
    halved = {action.microbatch for action in row if action.kind is Kind.W}
    return [
        action.microbatch
        for action in row
        if action.kind is (Kind.W if action.microbatch in halved else Kind.B)
    ]


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
