"""Portals between processes: straight from the rank that stashes to the one that pops.

They have a connection and tags of their own, so that none queues behind another message, and their receives
are posted ahead into rings of their own (`plan.edges`). On accelerators, where messages are told apart by
their order alone, each line has a connection there and one back, and its receives are posted when their time
has come. No send is waited for while it may still be on its way. Through shared
memory it says itself when it has left; over a network, which says nothing before somebody waits, a portal has
arrived when its gradient is back, and a gradient when the step is over. What a portal consists of is told
once for each size of micro-batch, as for the other messages (`messages.agreement`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe_bench.pipeline.plan.edges import Edge, refuse_other_orders, rings_of
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.portals import Arrived
from gpipe_bench.pipeline.ranks.messages.agreement import MOST_MESSAGES, MOST_TENSORS, Agreement, Outline
from gpipe_bench.pipeline.ranks.messages.connection import Connection, Form, Work
from gpipe_bench.pipeline.ranks.messages.control import Control
from gpipe_bench.pipeline.ranks.messages.gate import Gate
from gpipe_bench.pipeline.ranks.messages.neighbour import Departure
from gpipe_bench.pipeline.ranks.messages.receiving import Receiver
from gpipe_bench.pipeline.ranks.messages.sending import changed, conform
from gpipe_bench.pipeline.stage.portals import changed as overwritten
from gpipe_bench.pipeline.stage.stage import Gradients
from gpipe_bench.pipeline.stage.tensors import version

# Above the tags of all that shares the connection of the outlines, below that of the headers.
_OUTLINES = 2**27


class _Sending(NamedTuple):
    work: Work
    connection: Connection
    tensor: Tensor  # kept until it is gone
    version: int
    line: Edge
    microbatch: int
    target: int
    action: Action  # what receives it

    @property
    def is_gone(self) -> bool:
        return isinstance(self.work, Departure) and self.work.gone


def refuse_portals(lines: Sequence[Edge], schedule: Schedule, *, accelerated: bool) -> None:
    """`ValueError` for what portals between processes cannot do."""
    between = [line for line in lines if schedule.worker(line.source) != schedule.worker(line.target)]
    if not between:
        return
    if accelerated:
        refuse_other_orders(schedule, lines)
    if 2 * len(lines) * schedule.num_microbatches > MOST_MESSAGES:
        raise ValueError(
            f"{len(lines)} lines of portals with {schedule.num_microbatches} micro-batches are more than "
            f"{MOST_MESSAGES} messages a step; choose fewer micro-batches"
        )
    for line in between:
        if len(line.names) > MOST_TENSORS:
            raise ValueError(
                f"{len(line.names)} portals lead from stage {line.source} to stage {line.target}; at most "
                f"{MOST_TENSORS} can"
            )


def portal_peers(lines: Sequence[Edge], schedule: Schedule, rank: int) -> set[int]:
    """The ranks that `rank` exchanges portals with."""
    pairs = [(schedule.worker(line.source), schedule.worker(line.target)) for line in lines]
    return {end for pair in pairs if rank in pair for end in pair} - {rank}


class LinesBetweenRanks:
    """One rank's ends of the `lines` of a pipeline.

    `connections` are those of the lines, by number and whether of gradients. With a `gate`, on accelerators,
    no receive is posted before its time.
    """

    def __init__(
        self,
        connections: Mapping[tuple[int, bool], Connection],
        control: Control,
        lines: Sequence[Edge],
        schedule: Schedule,
        rank: int,
        device: torch.device,
        gate: Gate | None = None,
    ) -> None:
        self._connections, self._control, self._lines = connections, control, tuple(lines)
        self._rank, self._device = rank, device
        self._agreement = Agreement(())
        self._own: dict[tuple[Edge, int], Arrived] = {}  # sent by this rank to itself
        self._own_gradients: dict[tuple[Edge, int], Gradients] = {}
        self._sent: list[_Sending] = []
        self._receivers: dict[tuple[int, bool], Receiver] = {}
        self._training = True
        self.follow(schedule, gate)

    def follow(self, schedule: Schedule, gate: Gate | None) -> None:
        """From the next step on, other rows for the same stages."""
        for receiver in self._receivers.values():
            receiver.close()
        self._schedule = schedule
        self._kinds = {(a.stage, a.microbatch): a.kind for a in schedule if a.kind in (Kind.B, Kind.I)}
        self._receivers = {}
        self._of_stage: dict[int, list[Receiver]] = {}
        rings = rings_of(schedule, self._lines, accelerated=gate is not None)
        for line in self._lines:
            for gradients in (False, True):
                stage, other = (line.source, line.target) if gradients else (line.target, line.source)
                if (line.number, gradients) not in rings or schedule.worker(stage) != self._rank:
                    continue
                tags = [self._tag(line, m, gradients) for m in range(schedule.num_microbatches)]
                receiver = Receiver(
                    self._connections[line.number, gradients],
                    schedule.worker(other),
                    rings[line.number, gradients],
                    self._device,
                    tags=[tag * MOST_TENSORS for tag in tags],
                    gate=gate,
                )
                self._receivers[line.number, gradients] = receiver
                self._of_stage.setdefault(stage, []).append(receiver)

    def _tag(self, line: Edge, microbatch: int, gradients: bool) -> int:
        return (
            2 * (line.number - self._schedule.num_stages + 1) + gradients
        ) * self._schedule.num_microbatches + microbatch

    def take_up(self, agreement: Agreement, *, training: bool) -> None:
        """The step that begins is of this kind."""
        self._agreement, self._training = agreement, training

    def begin(self) -> None:
        self._own.clear()
        self._own_gradients.clear()
        for (number, gradients), receiver in self._receivers.items():
            if self._training or not gradients:
                outlines = self._outlines(number, gradients)
                receiver.begin(outlines, self._agreement.lengths, training=self._training)

    def _outlines(self, number: int, gradients: bool) -> dict[int, Outline]:
        return self._agreement.of_portals.setdefault((number, gradients), {})

    def send(self, line: Edge, microbatch: int, message: Arrived) -> None:
        if self._schedule.worker(line.target) == self._rank:
            self._own[line, microbatch] = message
            return
        target = Action(line.target, Kind.F, microbatch)
        made = Outline(tuple([Form.of(tensor) for tensor in message.tensors]), None, message.needs_grad)
        self._send(line, microbatch, message.tensors, made, target, gradients=False)

    def receive(self, line: Edge, microbatch: int) -> Arrived:
        if (line.number, False) not in self._receivers:
            message = self._own.pop((line, microbatch))
            return message._replace(tensors=tuple([tensor.detach() for tensor in message.tensors]))
        source = Action(line.source, Kind.F, microbatch)
        tensors, outline = self._receive(line, microbatch, source, gradients=False)
        return Arrived(tuple([tensor for tensor in tensors if tensor is not None]), outline.needs_grad)

    def send_gradients(self, line: Edge, microbatch: int, gradients: Gradients) -> None:
        if self._schedule.worker(line.source) == self._rank:
            self._own_gradients[line, microbatch] = gradients
            return
        target = Action(line.source, self._kinds[line.source, microbatch], microbatch)
        made = Outline(tuple([None if g is None else Form.of(g) for g in gradients]))
        self._send(line, microbatch, gradients, made, target, gradients=True)

    def receive_gradients(self, line: Edge, microbatch: int) -> Gradients:
        if (line.number, True) not in self._receivers:
            return self._own_gradients.pop((line, microbatch))
        source = Action(line.target, self._kinds[line.target, microbatch], microbatch)
        gradients = self._receive(line, microbatch, source, gradients=True)[0]
        known = (line, microbatch, Kind.F)
        self._let_go([s for s in self._sent if (s.line, s.microbatch, s.action.kind) == known])
        return gradients

    def _send(
        self,
        line: Edge,
        microbatch: int,
        tensors: Sequence[Tensor | None],
        made: Outline,
        target: Action,
        *,
        gradients: bool,
    ) -> None:
        rank, tag = self._schedule.worker(target.stage), self._tag(line, microbatch, gradients)
        outlines, length = self._outlines(line.number, gradients), self._agreement.lengths[microbatch]
        what = f"{'gradient of ' * gradients}portal {', '.join(map(repr, line.names))}"
        outline = outlines.get(length)
        if outline is None:
            outline = outlines[length] = made
            self._control.send_outline(outline, rank, _OUTLINES + 2 * tag, target, bounded=False)
        elif made.needs_grad != outline.needs_grad:
            raise changed(f"what needs a gradient of {what}")
        self._let_go([sending for sending in self._sent if sending.is_gone])
        for i, tensor in enumerate(conform(tensors, outline, self._device, what)):
            if tensor.numel():
                connection = self._connections[line.number, gradients]
                work = connection.send(tensor, rank, tag * MOST_TENSORS + i, target)
                self._sent.append(
                    _Sending(work, connection, tensor, version(tensor), line, microbatch, rank, target)
                )

    def _receive(
        self, line: Edge, microbatch: int, source: Action, *, gradients: bool
    ) -> tuple[tuple[Tensor | None, ...], Outline]:
        receiver = self._receivers[line.number, gradients]
        outlines, length = self._outlines(line.number, gradients), self._agreement.lengths[microbatch]
        if not receiver.is_posted(microbatch):
            if length not in outlines:
                tag = _OUTLINES + 2 * self._tag(line, microbatch, gradients)
                rank = self._schedule.worker(source.stage)
                outlines[length] = self._control.receive_outline(rank, tag, source)
            receiver.post()
        receiver.wait(microbatch, source)
        return receiver.take(microbatch), outlines[length]

    def release(self, stage: int, microbatch: int) -> None:
        for receiver in self._of_stage.get(stage, ()):
            receiver.release(microbatch)

    def finish(self) -> None:
        self._let_go(self._sent)

    def _let_go(self, arrived: list[_Sending]) -> None:
        """Ends sends that have arrived, or at the end of a step will."""
        if not arrived:
            return
        for sending in arrived:
            sending.connection.wait(sending.work, sending.action, sending.target)
            if version(sending.tensor) != sending.version:
                raise overwritten(sending.line.names[0])
        over = {id(sending) for sending in arrived}
        self._sent = [sending for sending in self._sent if id(sending) not in over]

    def abort(self) -> None:
        self._own.clear()
        self._own_gradients.clear()
        self._sent.clear()
