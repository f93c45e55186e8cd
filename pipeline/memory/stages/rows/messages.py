"""What messages take where each worker is a process of its own, by the rules that the engine goes by.

    received    buffers of the rings of `plan.edges`, which stay from step to step: their bytes are
                there at every moment, and no input or gradient that a stage works on adds to them
    sent        outputs and gradients until their sender has waited for them: the latest of each way
                between two workers, or all of a step's where they are small

Counted is what a worker's device holds. Between CPUs of one host the buffers lie in memory that two processes
map; that is counted with the worker that receives, who made it, and with nobody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpipe_bench.pipeline.memory.stages.footprint import Footprint
from gpipe_bench.pipeline.plan.edges import is_one_too_many, rings_of
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule


@dataclass(frozen=True)
class Transport:
    """Messages between workers in processes of their own.

    Args:
        accelerated: whether from device to device, as over NCCL; between hosts' memories otherwise.
    """

    accelerated: bool = False


Ahead = int | Transport | None
"""How messages are counted: with a number of receives posted ahead, whichever transport there is; with those
that the transport posts, and what it has sent; or as in one process, where each waits from when it is sent.
"""


def comes_from_another(schedule: Schedule, stage: int, *, gradients: bool) -> bool:
    """Whether a stage receives activations, or gradients, from another worker."""
    other = stage + 1 if gradients else stage - 1
    return 0 <= other < schedule.num_stages and schedule.worker(other) != schedule.worker(stage)


def received_apart(stage: Footprint, index: int, schedule: Schedule, transport: Transport) -> Footprint:
    """Stage `index` of a schedule as it is where what other workers send comes into buffers that stay."""
    num_bytes, found = 0, stage
    if comes_from_another(schedule, index, gradients=False):
        num_bytes += _buffers(schedule, index, stage.input_bytes, transport, gradients=False)
        found = replace(found, messages=replace(found.messages, apart=True))
    if comes_from_another(schedule, index, gradients=True):
        num_bytes += _buffers(schedule, index, stage.output_gradient_bytes, transport, gradients=True)
        received = stage.messages.received_bytes
        halves = stage.halves
        found = replace(
            found,
            output_gradient_bytes=0,
            backward_first=stage.backward_first.without(received),
            backward=stage.backward.without(received),
            halves=halves if halves is None else halves.apart or halves,
        )
    return replace(found, messages=replace(found.messages, buffer_bytes=num_bytes)) if num_bytes else found


def _buffers(
    schedule: Schedule, stage: int, message_bytes: int, transport: Transport, *, gradients: bool
) -> int:
    edge = stage if gradients else stage - 1
    found = rings_of(schedule, accelerated=transport.accelerated)[edge, gradients]
    return found.of(message_bytes).num_slots * message_bytes


def all_received_apart(
    stages: Sequence[Footprint], schedule: Schedule, receive_ahead: Ahead
) -> tuple[Footprint, ...]:
    """The stages as they are over processes, if there is a transport."""
    if not isinstance(receive_ahead, Transport):
        return tuple(stages)
    found = [received_apart(stage, index, schedule, receive_ahead) for index, stage in enumerate(stages)]
    for index in range(len(stages)):
        if _is_held_by_sender(stages, schedule, index):
            found[index] = replace(found[index], messages=replace(found[index].messages, apart=True))
    return tuple(found)


def _is_held_by_sender(stages: Sequence[Footprint], schedule: Schedule, index: int) -> bool:
    """Whether the stage before, on the same worker, has the input in its graph, which outlives this one's."""
    if index == 0 or comes_from_another(schedule, index, gradients=False):
        return False
    recomputed = any(action.kind is Kind.R for action in schedule.row(index - 1))
    return not recomputed and stages[index - 1].messages.of_graph_bytes == stages[index].input_bytes > 0


@dataclass
class _Sent:
    """A message on its way: its bytes as the sender counts them, and those that its worker holds for it."""

    message_bytes: int
    held_bytes: int


class Sends:
    """What one worker has sent and not waited for, as its actions go by."""

    def __init__(self, schedule: Schedule, worker: int, stages: Sequence[Footprint]) -> None:
        self._schedule, self._worker, self._stages = schedule, worker, stages
        self._ways: dict[tuple[int, bool], deque[_Sent]] = {}
        self._with_graph: dict[tuple[int, int], _Sent] = {}  # by stage and micro-batch
        self._recomputed = {
            (action.stage, action.microbatch) for action in schedule.actions[worker] if action.kind is Kind.R
        }
        self.held_bytes = 0

    def take(self, action: Action, *, is_first_backward: bool) -> int:
        """What is held for messages in an action, beyond what its own moment says and graphs hold."""
        key, kind = (action.stage, action.microbatch), action.kind
        found, stage = self.held_bytes, self._stages[action.stage]
        if kind is Kind.B or kind is Kind.I:
            sent = self._with_graph.pop(key, None)
            if sent is not None:  # from here on nobody else holds it
                first, later, half = stage.messages.longer
                found += half if kind is Kind.I else first if is_first_backward else later
                sent.held_bytes += stage.messages.of_graph_bytes
                self.held_bytes += stage.messages.of_graph_bytes
            self._send(action.stage - 1, True, stage.messages.sent_back_bytes)
        elif kind is Kind.F:
            with_graph = key not in self._recomputed
            held = stage.messages.sent_bytes - with_graph * stage.messages.of_graph_bytes
            sent = self._send(action.stage + 1, False, held)
            if sent is not None and with_graph:
                self._with_graph[key] = sent
        return found

    def _send(self, stage: int, gradients: bool, held_bytes: int) -> _Sent | None:
        """To another worker, if the stage is one of another worker."""
        if not 0 <= stage < self._schedule.num_stages:
            return None
        target = self._schedule.worker(stage)
        if target == self._worker:
            return None
        received = self._stages[stage]
        sent = _Sent(received.output_gradient_bytes if gradients else received.input_bytes, held_bytes)
        way = self._ways.setdefault((target, gradients), deque())
        way.append(sent)
        self.held_bytes += held_bytes
        if is_one_too_many(len(way), way[0].message_bytes):
            gone = way.popleft()
            self.held_bytes -= gone.held_bytes
            self._with_graph = {key: each for key, each in self._with_graph.items() if each is not gone}
        return sent
