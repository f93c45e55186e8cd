"""What a rank exchanges with others in a step: activations there, gradients back.

Activations and gradients have connections of their own each, so that neither queues behind the other
(`ways`). What a rank sends to itself stays where it is. Which shapes travel shows in the first real
micro-batch of a kind, whose sender tells them (`agreement`). Who opens the connections, and what a step
begins and ends with, is in `distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.ranks.messages.agreement import MOST_TENSORS, Agreement, Outline, first_tag
from gpipe_bench.pipeline.ranks.messages.connection import Connection, Form
from gpipe_bench.pipeline.ranks.messages.control import Control, Of
from gpipe_bench.pipeline.ranks.messages.gate import Gate
from gpipe_bench.pipeline.ranks.messages.news import News
from gpipe_bench.pipeline.ranks.messages.receiving import Receiver
from gpipe_bench.pipeline.ranks.messages.sending import changed, conform
from gpipe_bench.pipeline.ranks.routes import header_chain
from gpipe_bench.pipeline.ranks.ways import Way, receivers, senders
from gpipe_bench.pipeline.stage.stage import Gradients
from gpipe_bench.pipeline.stage.trees import Message, Nested


class Exchange:
    """Rank `rank`'s ends of the `ways`, and what goes over them; `control` is what outlines go over.

    With `accelerated` devices, what holds back receives is asked at every message (`gate`).
    """

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        device: torch.device,
        ways: Mapping[Way, Connection],
        control: Connection,
        *,
        accelerated: bool,
        portals: Sequence[Edge] = (),
    ) -> None:
        self.rank = rank
        self._schedule, self._device, self._ways = schedule, device, ways
        self._accelerated, self._portals = accelerated, tuple(portals)
        self._agreement = Agreement(())
        self._training = True
        # A receiver that knows no outline yet has posted nothing, and may wait for something else than it is
        # sent.
        self._patient = False
        self._control = Control(control, rank, header_chain(schedule))
        self._own: dict[tuple[int, int, bool], Message | Gradients] = {}  # sent by this rank to itself
        self._take_ends()
        sources = {stage: schedule.worker(stage - 1) for stage in self._inputs}
        self._news = News(control, schedule, sources)

    def _take_ends(self) -> None:
        """Makes this rank's ends of the ways, as the schedule needs them."""
        schedule = self._schedule
        self._senders = senders(schedule, self.rank, self._ways)
        self._gradient_kinds = {
            (action.stage, action.microbatch): action.kind
            for action in schedule
            if action.kind in (Kind.B, Kind.I)
        }
        self._gate = Gate() if self._accelerated else None
        # By stage, and the turns of those that receive from one rank.
        (self._inputs, turns), (self._output_gradients, more) = [
            receivers(
                schedule, self.rank, self._ways, self._device,
                gradients=gradients, gate=self._gate, portals=self._portals,
            )
            for gradients in (False, True)
        ]  # fmt: skip
        self._turns = [*turns, *more]

    @property
    def _bounded(self) -> bool:
        """Whether a sender may wait for its receiver. Forwards alone have no rings that would say for certain
        that two workers who send to each other don't wait for each other.
        """
        return self._patient and (self._training or not self._schedule.placement)

    def send_activation(self, stage: int, microbatch: int, message: Message) -> None:
        rank = self._schedule.worker(stage + 1)
        if rank == self.rank:
            self._own[stage + 1, microbatch, False] = message
            return
        outlines, length = self._agreement.of_stage[stage], self._agreement.lengths[microbatch]
        target = Action(stage + 1, Kind.F, microbatch)
        outline = outlines.activations_sent.get(length)
        if outline is None:
            if len(message.tensors) > MOST_TENSORS:
                raise ValueError(
                    f"{len(message.tensors)} tensors leave stage {stage}; at most {MOST_TENSORS} can"
                )
            forms = tuple([Form.of(tensor) for tensor in message.tensors])
            varies = isinstance(message.structure, Nested)
            outline = Outline(forms, message.structure, message.needs_grad, message.aliases, varies)
            outlines.activations_sent[length] = outline
            self._control.send_outline(outline, rank, Of.ACTIVATION, target, bounded=self._bounded)
            known = False
        else:
            new = message.structure != outline.structure
            if message.needs_grad != outline.needs_grad or (new and not outline.varies):
                raise changed(f"what the output of stage {stage} consists of and what needs a gradient")
            if message.aliases and not set(message.aliases) <= set(outline.aliases):
                raise changed(f"which tensors of the output of stage {stage} share memory")
            known = True
        tensors = conform(message.tensors, outline, self._device, f"output of stage {stage}")
        if known and outline.varies:
            self._news.send(new, rank, target)
            if new:
                outline = outlines.activations_sent[length] = outline._replace(structure=message.structure)
                self._control.send_outline(outline, rank, Of.ACTIVATION, target, bounded=self._bounded)
        tag = first_tag(stage + 1, microbatch, self._schedule.num_stages)
        self._senders[rank, False].send(tensors, tag, target, bounded=self._bounded)
        if self._gate is not None:
            self._gate.step()

    def receive_activation(self, stage: int, microbatch: int) -> Message:
        receiver = self._inputs.get(stage)
        if receiver is None:
            return self._own.pop((stage, microbatch, False))  # type: ignore[return-value]
        outlines, source = self._agreement.of_stage[stage].activations, Action(stage - 1, Kind.F, microbatch)
        length = self._agreement.lengths[microbatch]
        known = outlines.get(length)
        if known is not None and known.varies and self._news.is_new(stage, microbatch, source):
            rank = self._schedule.worker(stage - 1)
            outlines[length] = self._control.receive_outline(rank, Of.ACTIVATION, source)
        self._post(receiver, outlines, microbatch, source, Of.ACTIVATION)
        receiver.wait(microbatch, source)
        outline = outlines[length]
        tensors: Any = receiver.take(microbatch)
        return Message(tensors, outline.structure, outline.needs_grad, outline.aliases)

    def send_gradient(self, stage: int, microbatch: int, gradients: Gradients) -> None:
        rank = self._schedule.worker(stage - 1)
        if rank == self.rank:
            self._own[stage - 1, microbatch, True] = gradients
            return
        outlines, length = self._agreement.of_stage[stage], self._agreement.lengths[microbatch]
        target = Action(stage - 1, self._gradient_kinds[stage - 1, microbatch], microbatch)
        outline = outlines.gradients_sent.get(length)
        if outline is None:
            outline = Outline(tuple([None if g is None else Form.of(g) for g in gradients]))
            outlines.gradients_sent[length] = outline
            self._control.send_outline(outline, rank, Of.GRADIENT, target, bounded=self._bounded)
        tensors = conform(gradients, outline, self._device, f"gradient of the input of stage {stage}")
        tag = first_tag(stage - 1, microbatch, self._schedule.num_stages)
        self._senders[rank, True].send(tensors, tag, target, bounded=self._bounded)
        if self._gate is not None:
            self._gate.step()

    def receive_gradient(self, stage: int, microbatch: int) -> Gradients:
        receiver = self._output_gradients.get(stage)
        if receiver is None:
            return self._own.pop((stage, microbatch, True))  # type: ignore[return-value]
        source = Action(stage + 1, self._gradient_kinds[stage + 1, microbatch], microbatch)
        outlines = self._agreement.of_stage[stage].gradients
        self._post(receiver, outlines, microbatch, source, Of.GRADIENT)
        receiver.wait(microbatch, source)
        return receiver.take(microbatch)

    def _post(
        self, receiver: Receiver, outlines: dict[int, Outline], microbatch: int, source: Action, of: Of
    ) -> None:
        """Posts the receive of a message that is needed now, if it is not posted yet: its outline was not
        known.
        """
        if not receiver.is_posted(microbatch):
            length, rank = self._agreement.lengths[microbatch], self._schedule.worker(source.stage)
            if length not in outlines:
                outlines[length] = self._control.receive_outline(rank, of, source)
            receiver.post()

    def release(self, stage: int, microbatch: int) -> None:
        if self._gate is not None:
            self._gate.step()
        if (receiver := self._inputs.get(stage)) is not None:
            receiver.release(microbatch)
        if (receiver := self._output_gradients.get(stage)) is not None:
            receiver.release(microbatch)
