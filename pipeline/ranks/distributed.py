"""How tensors move between processes: point-to-point, one process per worker.

Receives are posted ahead (`ring`), sends are not waited for until later messages that take memory have left
by the same way, and activations and gradients have connections of their own each, so that neither queues
behind the other (`ways`). What a rank sends to itself stays where it is. Which shapes travel the ranks learn
from the first real micro-batch (`agreement`): the model is never run on made-up data, which would move its
batch-normalization averages and need memory of its own. The first rank numbers the kinds of steps it meets
(shapes, dtypes, training or not) and tells the number before each step, so the other ranks need not see the
batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe_bench.pipeline.errors import ActionError, PeerError, StoreError
from gpipe_bench.pipeline.plan.portals import Line
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.ranks.connecting.network import Network, network_of
from gpipe_bench.pipeline.ranks.connecting.opening import open_connections
from gpipe_bench.pipeline.ranks.connecting.ties import Ties
from gpipe_bench.pipeline.ranks.failures.job import Job
from gpipe_bench.pipeline.ranks.messages.agreement import (
    MOST_TENSORS,
    Agreement,
    Agreements,
    Outline,
    first_tag,
)
from gpipe_bench.pipeline.ranks.messages.connection import Form
from gpipe_bench.pipeline.ranks.messages.control import Control, Header, Of
from gpipe_bench.pipeline.ranks.messages.gate import Gate
from gpipe_bench.pipeline.ranks.messages.loss import Loss
from gpipe_bench.pipeline.ranks.messages.news import News
from gpipe_bench.pipeline.ranks.messages.receiving import Receiver
from gpipe_bench.pipeline.ranks.messages.sending import changed, conform
from gpipe_bench.pipeline.ranks.messages.sharing import Shared, Sharing
from gpipe_bench.pipeline.ranks.portals import LinesBetweenRanks, refuse_portals
from gpipe_bench.pipeline.ranks.routes import header_chain, loss_route
from gpipe_bench.pipeline.ranks.together import Together
from gpipe_bench.pipeline.ranks.ways import receivers, senders
from gpipe_bench.pipeline.stage.microbatch import Message, sizes
from gpipe_bench.pipeline.stage.stage import Gradients
from gpipe_bench.pipeline.stage.trees import Nested
from gpipe_bench.pipeline.transport import Plan


class PointToPoint:
    """The transport of one worker in a process group whose rank k runs the stages of worker k.

    `timeout_s` bounds every wait for another rank; with `share_memory`, ranks on one host exchange CPU
    tensors through memory; `portals` are the lines between all stages; `job` are all processes of the grid
    that the pipeline is a part of. After a failure the pipeline's own
    connections are closed on all ranks; `group` itself is not touched.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Network,
        schedule: Schedule,
        device: torch.device,
        *,
        timeout_s: float,
        share_memory: bool = True,
        portals: Sequence[Line] = (),
        job: Job | None = None,
    ) -> None:
        network = network_of(group)
        refuse_portals(portals, schedule, accelerated=network.is_accelerated(device))
        self.rank, self.size = network.rank, network.size
        self._schedule, self._device = schedule, device
        ties = self._ties = Ties(network, device, timeout_s=timeout_s, job=job)
        accelerated = ties.is_accelerated
        try:
            control, self._together, self._ways, loss, of_portals = open_connections(
                ties, schedule, portals, share_memory=share_memory
            )
        except (PeerError, StoreError) as error:
            raise self.abort(None, error) from error
        except Exception as error:
            self.abort(None, error)  # the other ranks must not wait
            raise
        # Dropped, or when the process ends; without an accelerator nothing is on its way then.
        self.close = weakref.finalize(self, ties.close)
        self.close.atexit = accelerated or ties.job.is_grid
        self._agreements = Agreements()
        self._agreement = Agreement(())
        self._training = True
        # A receiver that knows no outline yet has posted nothing, and may wait for something else than it is
        # sent.
        self._patient = False
        self._control = Control(control, self.rank, header_chain(schedule))
        self._own: dict[tuple[int, int, bool], Message | Gradients] = {}  # sent by this rank to itself
        self.lines: LinesBetweenRanks | None = None
        self._take_ends()
        if portals:
            self.lines = LinesBetweenRanks(
                of_portals, self._control, portals, schedule, self.rank, device, self._gate
            )
        route = loss_route(schedule, self.rank, accelerated=accelerated)
        self._loss = Loss(loss, self._control, route, device, early=not accelerated)
        self._sharing = Sharing(self._control)
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
        self._gate = Gate() if self._ties.is_accelerated else None
        # By stage, and the turns of those that receive from one rank.
        (self._inputs, turns), (self._output_gradients, more) = [
            receivers(schedule, self.rank, self._ways, self._device, gradients=gradients, gate=self._gate)
            for gradients in (False, True)
        ]
        self._turns = [*turns, *more]

    def follow(self, schedule: Schedule) -> None:
        """From the next step on, other rows for the same stages, on every rank: the connections stay."""
        assert schedule.placement == self._schedule.placement
        assert schedule.num_microbatches == self._schedule.num_microbatches
        for receiver in (*self._inputs.values(), *self._output_gradients.values()):
            receiver.close()
        self._schedule = schedule
        self._take_ends()
        if self.lines is not None:
            self.lines.follow(schedule, self._gate)

    def refresh(self) -> None:
        """Forgets what the ranks agreed on."""
        self._agreements.forget()

    @property
    def shared_bytes(self) -> int:
        """Of the buffers that messages come into, where these are memory that two processes map."""
        return self._ties.shared_bytes

    # A step

    def begin(self, plan: Plan | None, signature: Hashable) -> Plan:
        self._ties.refuse_after_failure()
        self._ties.refuse_after_notice()
        if plan is not None:
            number = self._agreements.number(signature)
            shared = self._sharing.announce(plan.shared)
            header = Header(number, plan.examples, plan.training, shared)
        else:
            header = self._control.receive_header()
        self._control.send_header(header, bounded=self._patient)
        number, examples, self._training, told = header
        message = self._sharing.pass_on(Shared(told), plan and plan.shared, bounded=self._patient)
        agreement = self._agreements.find(number)
        self._patient = agreement is not None
        if agreement is None:
            lengths = sizes(examples, self._schedule.num_microbatches)
            agreement = self._agreements.add(Agreement(lengths, self._schedule.stages_of(self.rank)))
        self._agreement = agreement
        self._own.clear()
        if self._gate is not None:
            self._gate.begin(training=self._training)
        for turn in self._turns:
            turn.begin()
        for stage, receiver in self._inputs.items():
            outlines = agreement.of_stage[stage].activations
            receiver.begin(outlines, agreement.lengths, training=self._training)
        if self._training:
            for stage, receiver in self._output_gradients.items():
                receiver.begin(agreement.of_stage[stage].gradients, agreement.lengths, training=True)
            self._loss.post(agreement.loss)
        self._news.begin(agreement)
        if self.lines is not None:
            self.lines.take_up(agreement, training=self._training)
        return Plan(examples, self._training, message)

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
            outline = Outline(forms, message.structure, message.needs_grad, varies)
            outlines.activations_sent[length] = outline
            self._control.send_outline(outline, rank, Of.ACTIVATION, target, bounded=self._bounded)
            known = False
        else:
            new = message.structure != outline.structure
            if message.needs_grad != outline.needs_grad or (new and not outline.varies):
                raise changed(f"what the output of stage {stage} consists of and what needs a gradient")
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
        return Message(receiver.take(microbatch), outline.structure, outline.needs_grad)  # type: ignore[arg-type]

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

    def send_loss(self, loss: Tensor) -> None:
        self._loss.send(loss, self._agreement)

    def finish(self) -> Tensor | None:
        """When this returns, all sends are gone if the host waits for messages; on an accelerator all are
        given to the device, which `close` waits for before the process may exit.
        """
        loss = self._loss.settle(self._agreement) if self._training else None
        for sender in self._senders.values():
            sender.finish()
        self._control.finish()
        self._news.finish()
        self._ties.refuse_after_notice()  # or garbage would reach the optimizer
        return loss

    @contextmanager
    def together(self) -> Iterator[Together]:
        """For what all ranks do outside of a step; a rank that is missing there ends the pipeline as in one.

        Waits for the device, so that whatever it does after a failure elsewhere has been noticed.
        """
        self._ties.refuse_after_failure()
        self._ties.synchronize()
        try:
            self._ties.refuse_after_notice()
            yield self._together
        except (RuntimeError, StoreError) as error:
            if isinstance(error, ActionError) or not self.is_let_down(error):
                raise
            raise self.abort(None, error) from error

    @contextmanager
    def all_together(self) -> Iterator[Together]:
        """The same for all processes of the job."""
        job = self._ties.job
        with self.together():
            try:
                yield job.together(self._ties.timeout_s)
            except PeerError as error:
                raise error.numbered(job.ranks) from error

    def is_let_down(self, error: BaseException) -> bool:
        """Whether an error says that another rank is missing."""
        return self._ties.let_down(error) is not None

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        return self._ties.abort(action, error)
