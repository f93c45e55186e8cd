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
from dataclasses import dataclass

from gpipe_bench.pipeline.memory.counts import Step
from gpipe_bench.pipeline.memory.peaks import NOWHERE, Place
from gpipe_bench.pipeline.memory.stage_bytes import StageBytes
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


def places(stages: Sequence[StageBytes], schedule: Schedule, receive_ahead: Ahead) -> list[Place]:
    """Where the messages of each stage come into: over processes what other workers send comes into buffers
    that stay.
    """
    if not isinstance(receive_ahead, Transport):
        return [NOWHERE] * len(stages)
    found = []
    for index, stage in enumerate(stages):
        sizes = (stage.input_bytes, stage.output_gradient_bytes)
        others = [_comes_from_another(schedule, index, gradients=back) for back in (False, True)]
        num_bytes = 0
        for back in (False, True):
            if others[back]:
                ring = rings_of(schedule, accelerated=receive_ahead.accelerated)[
                    index if back else index - 1, back
                ]
                num_bytes += ring.of(sizes[back]).num_slots * sizes[back]
        inputs_there = others[False] or _is_held_by_sender(stages, schedule, index)
        found.append(Place(inputs_there, others[True], num_bytes))
    return found


def _comes_from_another(schedule: Schedule, stage: int, *, gradients: bool) -> bool:
    """Whether a stage receives activations, or gradients, from another worker."""
    other = stage + 1 if gradients else stage - 1
    return 0 <= other < schedule.num_stages and schedule.worker(other) != schedule.worker(stage)


def _is_held_by_sender(stages: Sequence[StageBytes], schedule: Schedule, index: int) -> bool:
    """Whether the stage before, on the same worker, has the input in its graph, which outlives this one's."""
    if index == 0 or any(action.kind is Kind.R for action in schedule.row(index - 1)):
        return False
    return stages[index - 1].sent.of_graph_bytes == stages[index].input_bytes > 0


@dataclass
class _Message:
    """A message on its way: its bytes as the sender counts them, and those that its worker holds for it."""

    message_bytes: int
    held_bytes: int


class Sends:
    """What one worker has sent and not waited for, as its actions go by. How long a message is waited for
    depends on its size, so that no numbers of micro-batches say it.
    """

    def __init__(self, schedule: Schedule, worker: int, stages: Sequence[StageBytes]) -> None:
        self._schedule, self._worker, self._stages = schedule, worker, stages
        self._ways: dict[tuple[int, bool], deque[_Message]] = {}
        self._with_graph: dict[tuple[int, int], _Message] = {}  # by stage and micro-batch
        self._held_bytes = 0

    def take(self, action: Action, step: Step) -> int:
        """What is held for messages in an action, beyond what its own moment says and graphs hold."""
        key, kind = (action.stage, action.microbatch), action.kind
        found, sent = self._held_bytes, self._stages[action.stage].sent
        if kind is Kind.B or kind is Kind.I:
            message = self._with_graph.pop(key, None)
            if message is not None:  # from here on nobody else holds it
                first, later, half = sent.longer
                found += half if kind is Kind.I else later if step.counts.after_backward else first
                message.held_bytes += sent.of_graph_bytes
                self._held_bytes += sent.of_graph_bytes
            self._send(action.stage - 1, True, sent.sent_back_bytes)
        elif kind is Kind.F:
            held = sent.sent_bytes - (0 if step.recomputed else sent.of_graph_bytes)
            message = self._send(action.stage + 1, False, held)
            if message is not None and not step.recomputed:
                self._with_graph[key] = message
        return found

    def _send(self, stage: int, gradients: bool, held_bytes: int) -> _Message | None:
        """To another worker, if the stage is one of another worker."""
        if not 0 <= stage < self._schedule.num_stages:
            return None
        target = self._schedule.worker(stage)
        if target == self._worker:
            return None
        received = self._stages[stage]
        message = _Message(received.output_gradient_bytes if gradients else received.input_bytes, held_bytes)
        way = self._ways.setdefault((target, gradients), deque())
        way.append(message)
        self._held_bytes += held_bytes
        if is_one_too_many(len(way), way[0].message_bytes):
            gone = way.popleft()
            self._held_bytes -= gone.held_bytes
            self._with_graph = {key: each for key, each in self._with_graph.items() if each is not gone}
        return message
