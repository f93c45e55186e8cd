"""How tensors move between processes: point-to-point, one process per stage.

Receives are posted ahead (`ring`), sends are not waited for until later messages that take memory have left
by the same way, and activations and gradients have connections of their own each, so that neither queues
behind the other. Which shapes travel the ranks learn from the first real micro-batch (`agreement`): the model
is never run on made-up data, which would move its batch-normalization averages and need memory of its own.
The first rank numbers the kinds of steps it meets (shapes, dtypes, training or not) and tells the number
before each step, so the other ranks need not see the batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe_bench.pipeline.errors import ActionError, PeerError, StoreError, summary
from gpipe_bench.pipeline.plan.ring import activation_ring, gradient_ring
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.ranks.failure import Blackboard, Lookout
from gpipe_bench.pipeline.ranks.introduction import meet
from gpipe_bench.pipeline.ranks.messages.agreement import MOST_TENSORS, Agreement, Outline
from gpipe_bench.pipeline.ranks.messages.connection import Buffer, Connection, Form, Work, backend
from gpipe_bench.pipeline.ranks.messages.control import Control, Header
from gpipe_bench.pipeline.ranks.messages.neighbour import Neighbour
from gpipe_bench.pipeline.ranks.messages.receiving import Receiver
from gpipe_bench.pipeline.ranks.messages.sending import Sender, changed, conform
from gpipe_bench.pipeline.ranks.store import Store
from gpipe_bench.pipeline.ranks.together import Together
from gpipe_bench.pipeline.stage.microbatch import Message, sizes
from gpipe_bench.pipeline.stage.stage import Gradients
from gpipe_bench.pipeline.transport import Plan

_LOSS_TAG = 2**29


class PointToPoint:
    """The transport of one stage in a process group whose rank k runs stage k.

    `timeout_s` bounds every wait for another rank; with `share_memory`, neighbours on one host exchange CPU
    tensors through memory. After a failure the pipeline's own connections are closed on all ranks; `group`
    itself is not touched.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        schedule: Schedule,
        device: torch.device,
        *,
        timeout_s: float,
        share_memory: bool = True,
    ) -> None:
        self.rank, self.num_stages = dist.get_rank(group), dist.get_world_size(group)
        self._schedule, self._device = schedule, device
        self._connections: list[Connection] = []
        self._lookout: Lookout | None = None
        self._failed: ActionError | None = None
        self._noticed = False  # a failure elsewhere, by the lookout
        store, cuda = Store(group), device.type != "cpu"
        self._blackboard = Blackboard(store, self.rank, self.num_stages)
        try:
            store.connect(timeout_s)
            near = meet(store, self.rank, self.num_stages, willing=share_memory, timeout_s=timeout_s)
            near = {} if cuda else near
            # Headers and outlines are read by the host, so they never go through NCCL.
            control = self._connect(store, "control", near, cuda=False, timeout_s=timeout_s)
            self._activations = self._connect(store, "activations", near, cuda=cuda, timeout_s=timeout_s)
            self._gradients = self._connect(store, "gradients", near, cuda=cuda, timeout_s=timeout_s)
        except (PeerError, StoreError) as error:
            raise self.abort(None, error) from error
        except Exception as error:
            self.abort(None, error)  # the other ranks must not wait
            raise
        self._together = Together(control, self.rank, self.num_stages)
        if cuda:
            self._lookout = Lookout(self._blackboard, self._notice, limit_s=timeout_s)
        self._agreements: list[Agreement] = []
        self._numbers: dict[Hashable, int] = {}  # of the agreements, by signature, on the first rank
        self._agreement = Agreement(())
        self._training = True
        # A receiver that knows no outline yet has posted nothing, and may wait for something else than it is
        # sent.
        self._patient = False
        self._control = Control(control, self.rank)
        self._activation_sender = Sender(self._activations)
        self._gradient_sender = Sender(self._gradients)
        self._loss_buffer: Buffer | None = None
        self._loss_work: Work | None = None
        row = schedule.actions[self.rank]
        self._gradient_kinds = {a.microbatch: a.kind for a in row if a.kind in (Kind.B, Kind.I)}
        self._inputs: Receiver | None = None
        self._output_gradients: Receiver | None = None
        if self.rank > 0:
            ring = activation_ring(schedule, self.rank)
            self._inputs = Receiver(self._activations, self.rank - 1, ring, device)
            self._control.expect_header()
        if self.rank + 1 < self.num_stages:
            ring = gradient_ring(schedule, self.rank)
            small = gradient_ring(schedule, self.rank, small=True)
            self._output_gradients = Receiver(self._gradients, self.rank + 1, ring, device, small=small)

    def _connect(
        self, store: Store, name: str, near: dict[int, Neighbour], *, cuda: bool, timeout_s: float
    ) -> Connection:
        ways = backend(store, self.rank, self.num_stages, name=name, cuda=cuda, timeout_s=timeout_s)
        self._connections.append(Connection(ways, len(self._connections), near))
        return self._connections[-1]

    def refresh(self) -> None:
        """Forgets what the ranks agreed on."""
        self._agreements.clear()
        self._numbers.clear()

    # A step

    def begin(self, plan: Plan | None, signature: Hashable) -> Plan:
        self._refuse_after_failure()
        self._refuse_after_notice()
        if plan is not None:
            number = self._numbers.setdefault(signature, len(self._numbers))
            header = Header(number, plan.examples, plan.training)
        else:
            header = self._control.receive_header()
        if self.rank + 1 < self.num_stages:
            self._control.send_header(header, bounded=self._patient)
        number, examples, self._training = header
        self._patient = number < len(self._agreements)
        if not self._patient:
            self._agreements.append(Agreement(sizes(examples, self._schedule.num_microbatches)))
        agreement = self._agreement = self._agreements[number]
        if self._inputs is not None:
            self._inputs.begin(agreement.activations, agreement.lengths, training=self._training)
        if self._output_gradients is not None and self._training:
            self._output_gradients.begin(agreement.gradients, agreement.lengths, training=True)
            self._post_loss()
        return Plan(examples, self._training)

    def send_activation(self, stage: int, microbatch: int, message: Message) -> None:
        agreement = self._agreement
        length = agreement.lengths[microbatch]
        target = Action(stage + 1, Kind.F, microbatch)
        outline = agreement.activations_sent.get(length)
        if outline is None:
            if len(message.tensors) > MOST_TENSORS:
                raise ValueError(
                    f"{len(message.tensors)} tensors leave stage {stage}; at most {MOST_TENSORS} can"
                )
            forms = tuple([Form.of(tensor) for tensor in message.tensors])
            outline = Outline(forms, message.structure, message.needs_grad)
            agreement.activations_sent[length] = outline
            self._control.send_outline(outline, target, bounded=self._patient)
        elif (message.structure, message.needs_grad) != (outline.structure, outline.needs_grad):
            raise changed(f"what the output of stage {stage} consists of and what needs a gradient")
        tensors = conform(message.tensors, outline, self._device, f"output of stage {stage}")
        self._activation_sender.send(tensors, target, bounded=self._patient)

    def receive_activation(self, stage: int, microbatch: int) -> Message:
        receiver, agreement = self._inputs, self._agreement
        assert receiver is not None
        source = Action(stage - 1, Kind.F, microbatch)
        length = agreement.lengths[microbatch]
        if not receiver.is_posted(microbatch):
            agreement.activations[length] = self._control.receive_outline(source)
            receiver.post()
        for work in receiver.works(microbatch):
            self._activations.wait(work, source, self.rank - 1)
        outline = agreement.activations[length]
        return Message(receiver.take(microbatch), outline.structure, outline.needs_grad)  # type: ignore[arg-type]

    def send_gradient(self, stage: int, microbatch: int, gradients: Gradients) -> None:
        agreement = self._agreement
        length = agreement.lengths[microbatch]
        target = Action(stage - 1, self._gradient_kinds[microbatch], microbatch)
        outline = agreement.gradients_sent.get(length)
        if outline is None:
            outline = Outline(tuple([None if g is None else Form.of(g) for g in gradients]))
            agreement.gradients_sent[length] = outline
            self._control.send_outline(outline, target, bounded=self._patient)
        tensors = conform(gradients, outline, self._device, f"gradient of the input of stage {stage}")
        self._gradient_sender.send(tensors, target, bounded=self._patient)

    def receive_gradient(self, stage: int, microbatch: int) -> Gradients:
        receiver, agreement = self._output_gradients, self._agreement
        assert receiver is not None
        source = Action(stage + 1, self._gradient_kinds[microbatch], microbatch)
        if not receiver.is_posted(microbatch):
            agreement.gradients[agreement.lengths[microbatch]] = self._control.receive_outline(source)
            receiver.post()
            self._post_loss()
        for work in receiver.works(microbatch):
            self._gradients.wait(work, source, self.rank + 1)
        return receiver.take(microbatch)

    def release(self, stage: int, microbatch: int) -> None:
        if self._inputs is not None:
            self._inputs.release(microbatch)
        if self._output_gradients is not None:
            self._output_gradients.release(microbatch)
            self._post_loss()

    def _notice(self) -> None:
        """Another rank has failed: releases the GPU from waiting for it. What it receives from here on is
        garbage, so this step raises when it ends, or else whatever is called next.
        """
        self._noticed = True
        for connection in (self._activations, self._gradients):
            connection.cut()

    def _refuse_after_failure(self) -> None:
        if self._failed is not None:
            raise RuntimeError(
                f"this pipeline has failed before ({self._failed}); build a new one on every rank"
            )

    def _refuse_after_notice(self) -> None:
        if self._noticed:
            raise PeerError(None, None, "another rank has failed", timed_out=False)

    def finish(self, loss: Tensor | None) -> Tensor | None:
        """The loss follows the gradients towards the first stage. When this returns all sends are gone, so
        that the process may exit.
        """
        if self._training:
            loss = self._pass_loss(loss)
        for sender in (self._activation_sender, self._gradient_sender, self._control):
            sender.finish()
        self._refuse_after_notice()  # or garbage would reach the optimizer
        return loss

    @contextmanager
    def together(self) -> Iterator[Together]:
        """For what all ranks do outside of a step; a rank that is missing there ends the pipeline as in one.

        Waits for the device, so that whatever it does after a failure elsewhere has been noticed.
        """
        self._refuse_after_failure()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        try:
            self._refuse_after_notice()
            yield self._together
        except PeerError as error:
            raise self.abort(None, error) from error

    def abort(self, action: Action | None, error: BaseException) -> ActionError:
        if self._failed is None:
            if self._lookout is not None:
                self._lookout.stop()
            if isinstance(error, StoreError):
                error = PeerError(None, None, str(error), timed_out=False)
            if isinstance(error, PeerError):
                self._failed = self._blackboard.explain(error)
            else:
                self._failed = self._blackboard.report(ActionError(action, summary(error), self.rank))
            for connection in self._connections:
                connection.cut()
        return self._failed

    # Parts of a step

    def _post_loss(self) -> None:
        """Posts the receive of the loss behind those of the gradients, whose queue it shares."""
        form, receiver = self._agreement.loss, self._output_gradients
        assert receiver is not None
        if form is None or self._loss_work is not None or receiver.num_unposted:
            return
        if self._loss_buffer is None or not form.fits(self._loss_buffer.tensor):
            self._loss_buffer = self._gradients.buffer(form, self.rank + 1, self._device)
        self._loss_work = self._gradients.receive(self._loss_buffer, self.rank + 1, _LOSS_TAG)
        self._gradients.flush(self.rank + 1)

    def _pass_loss(self, loss: Tensor | None) -> Tensor:
        agreement = self._agreement
        new = agreement.loss is None
        if loss is None:
            source = Action(self.rank + 1, Kind.B, 0)
            if agreement.loss is None:
                (agreement.loss,) = self._control.receive_outline(source).forms
            self._post_loss()
            assert self._loss_work is not None
            assert self._loss_buffer is not None
            self._gradients.wait(self._loss_work, source, self.rank + 1)
            self._loss_work = None
            loss = self._loss_buffer.tensor.clone()
        else:
            agreement.loss = Form.of(loss)
        if self.rank > 0:
            target = Action(self.rank - 1, Kind.B, 0)
            if new:
                self._control.send_outline(Outline((agreement.loss,)), target, bounded=self._patient)
            self._gradient_sender.send([loss], target, _LOSS_TAG, bounded=self._patient)
        return loss
