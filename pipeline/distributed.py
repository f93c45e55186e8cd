"""How tensors move between processes: torch.distributed point-to-point, one process per stage.

Receives are posted ahead (`ring`), sends are not waited for until a second later message leaves by the same
way, and activations and gradients have connections of their own each, so that neither queues behind the
other.

Nobody declares shapes. The first real micro-batch of each size is preceded by a description of what it
consists of, and likewise its gradient; from then on receives of that kind can be posted ahead. The model is
never run on made-up data, which would move its batch-normalization averages and need memory of its own. The
first rank numbers the kinds of steps it meets (shapes, dtypes, training or not) and tells the number before
each step, so the other ranks need not see the batch.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from pipeline.clock import Clock, conditions
from pipeline.connection import Connection, connect, cut, store_of, unreachable
from pipeline.errors import ActionError, PeerError, summary
from pipeline.failure import Blackboard
from pipeline.microbatch import Message, Structure, sizes
from pipeline.ring import Ring, activation_ring, gradient_ring
from pipeline.schedule import Action, Kind, Schedule
from pipeline.stage import Gradients
from pipeline.timeline import Event, Timeline
from pipeline.transport import Plan

# Sends on the way, per direction. With one, a late receiver would hold up the sender at once; more would only
# keep more outputs alive, since the receiver has posted its receives already.
SENDS_ON_THE_WAY = 2
# Tensors of a message have tags of their own: micro-batch * MOST_TENSORS + position.
MOST_TENSORS = 64


class Form(NamedTuple):
    """A tensor without its data, as it travels: dense, in the layout that its strides say."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        like = torch.empty_like(tensor, device="meta")  # dense also where the tensor is not
        return cls(tuple(tensor.shape), tuple(like.stride()), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def fits(self, tensor: Tensor) -> bool:
        return tensor.shape == self.shape and tensor.dtype == self.dtype


class Outline(NamedTuple):
    """A message without its data; of gradients, `forms` holds None where none comes back."""

    forms: tuple[Form | None, ...]
    structure: Structure = None
    needs_grad: tuple[bool, ...] = ()


class Agreement:
    """What is known of the messages of one kind of step. Micro-batches of one size have one outline."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths  # examples in each micro-batch
        self.activations: dict[int, Outline] = {}  # received, by the size of the micro-batch
        self.activations_sent: dict[int, Outline] = {}
        self.gradients: dict[int, Outline] = {}  # received
        self.gradients_sent: dict[int, Outline] = {}
        self.loss: Form | None = None


class _Buffers(NamedTuple):
    """The tensors of one message, as the stage sees them and, flat, as the network does."""

    forms: tuple[Form | None, ...]
    tensors: tuple[Tensor | None, ...]
    flat: list[Tensor]

    @classmethod
    def make(cls, forms: tuple[Form | None, ...], device: torch.device) -> _Buffers:
        tensors = tuple([None if form is None else form.empty(device) for form in forms])
        return cls(forms, tensors, [_flat(tensor) for tensor in tensors if tensor is not None])


class _Receiver:
    """One direction of receiving: posts receives in the order of need, each into its slot of the ring."""

    def __init__(self, connection: Connection, source: int, ring: Ring, device: torch.device) -> None:
        self._connection, self._source, self._ring, self._device = connection, source, ring, device
        self._slots: list[_Buffers | None] = [None] * ring.num_slots
        self._posted: dict[int, tuple[_Buffers, list[dist.Work]]] = {}
        self._unposted: deque[int] = deque()  # have a slot, but perhaps no known outline yet
        self._outlines: dict[int, Outline] = {}
        self._lengths: tuple[int, ...] = ()
        self._training = True
        self.num_unposted = 0  # micro-batches of this step whose receive is yet to be posted

    def begin(self, outlines: dict[int, Outline], lengths: tuple[int, ...], *, training: bool) -> None:
        self._outlines, self._lengths, self._training = outlines, lengths, training
        self._posted.clear()
        self.num_unposted = len(lengths)
        # Without a backward nothing is kept, and two receives ahead are enough.
        self._unposted = deque(self._ring.initial if training else range(min(2, len(lengths))))
        self.post()

    def post(self) -> None:
        """Posts every receive that has a slot, as far as the outlines are known."""
        while self._unposted:
            microbatch = self._unposted[0]
            outline = self._outlines.get(self._lengths[microbatch])
            if outline is None:
                return
            self._unposted.popleft()
            self.num_unposted -= 1
            buffers = self._buffers(microbatch, outline.forms)
            tag = microbatch * MOST_TENSORS
            try:
                works = [
                    self._connection.recv([t], self._source, tag + i) for i, t in enumerate(buffers.flat)
                ]
            except RuntimeError as error:
                raise unreachable(None, self._source, error) from error
            self._posted[microbatch] = (buffers, works)

    def is_posted(self, microbatch: int) -> bool:
        return microbatch in self._posted

    def take(self, microbatch: int) -> tuple[tuple[Tensor | None, ...], list[dist.Work]]:
        """The tensors of a posted receive, and what to wait for before they hold their data."""
        buffers, works = self._posted.pop(microbatch)
        if not self._training and microbatch + 2 < len(self._lengths):
            self._unposted.append(microbatch + 2)
            self.post()
        return buffers.tensors, works

    def release(self, microbatch: int) -> None:
        following = self._ring.following[microbatch]
        if following is not None:
            self._unposted.append(following)
            self.post()

    def _buffers(self, microbatch: int, forms: tuple[Form | None, ...]) -> _Buffers:
        if not self._training:
            return _Buffers.make(forms, self._device)
        slot = self._ring.slot[microbatch]
        buffers = self._slots[slot]
        if buffers is None or buffers.forms != forms:
            self._slots[slot] = None  # not both at a time
            buffers = self._slots[slot] = _Buffers.make(forms, self._device)
        return buffers


class _Sending(NamedTuple):
    works: list[dist.Work]
    tensors: list[Tensor]  # kept until the network has them
    action: Action  # what receives them


class PointToPoint:
    """The transport of one stage in a process group whose rank k runs stage k.

    `timeout_s` bounds every wait for another rank. After a failure the pipeline's own connections are
    closed on all ranks; `group` itself is not touched.
    """

    def __init__(
        self, group: dist.ProcessGroup, schedule: Schedule, device: torch.device, timeout_s: float
    ) -> None:
        self.rank = dist.get_rank(group)
        self.num_stages = dist.get_world_size(group)
        self._group, self._schedule, self._device, self._timeout_s = group, schedule, device, timeout_s
        store, cuda = store_of(group), device.type != "cpu"
        self._control = self._connect(store, "control", cuda=False)
        self._activations = self._connect(store, "activations", cuda=cuda)
        self._gradients = self._connect(store, "gradients", cuda=cuda)
        self._blackboard = Blackboard(store, group)
        self._failed: ActionError | None = None
        self._agreements: list[Agreement] = []
        self._numbers: dict[Hashable, int] = {}  # of the agreements, by signature, on the first rank
        self._agreement = Agreement(())
        self._training = True
        self._header = torch.zeros(3, dtype=torch.int64)
        self._outlines_on_the_way: deque[_Sending] = deque()
        self._activations_on_the_way: deque[_Sending] = deque()
        self._gradients_on_the_way: deque[_Sending] = deque()
        self._patient = (
            False  # a receiver that knows no outline yet has not posted and may wait for something else
        )
        self._loss_work: tuple[Tensor, dist.Work] | None = None
        row = schedule.actions[self.rank]
        self._gradient_kinds = {a.microbatch: a.kind for a in row if a.kind in (Kind.B, Kind.I)}
        self._activation_receiver = self._gradient_receiver = None
        if self.rank > 0:
            ring = activation_ring(schedule, self.rank)
            self._activation_receiver = _Receiver(self._activations, self.rank - 1, ring, device)
        if self.rank + 1 < self.num_stages:
            ring = gradient_ring(schedule, self.rank)
            self._gradient_receiver = _Receiver(self._gradients, self.rank + 1, ring, device)

    def refresh(self) -> None:
        """Forgets what the ranks agreed on."""
        self._agreements.clear()
        self._numbers.clear()

    def check_equal(self, facts: object) -> None:
        """`ValueError` on every rank if `facts` is not the same everywhere."""
        everywhere: list[object] = [None] * self.num_stages
        dist.all_gather_object(everywhere, facts, group=self._group)
        for rank, other in enumerate(everywhere):
            if other != everywhere[0]:
                raise ValueError(
                    f"rank {rank} builds another pipeline than rank 0: its layers, cuts, schedule or seed "
                    "differ; give "
                    f"all ranks the same arguments"
                )

    def concatenate(self, vector: Tensor) -> Tensor:
        """The vectors of all ranks, one after the other, on every rank."""
        lengths: list[int] = [0] * self.num_stages
        dist.all_gather_object(lengths, len(vector), group=self._group)
        whole = vector.new_zeros(sum(lengths))
        start = sum(lengths[: self.rank])
        whole[start : start + len(vector)] = vector
        dist.all_reduce(whole, group=self._group)  # adds zeros, which changes no bit
        return whole

    def gather_timeline(self, clock: Clock) -> Timeline:
        """The latest step of all ranks on one time axis, that of rank 0's host."""
        offset_ns = self._clock_offset_ns()
        everywhere: list[tuple[tuple[Event, ...], str, dict[str, str]] | None] = [None] * self.num_stages
        mine = (clock.events(offset_ns), f"{socket.gethostname()} {self._device}", conditions())
        dist.all_gather_object(everywhere, mine, group=self._group)
        ranks = [entry for entry in everywhere if entry is not None]
        facts = {name: "; ".join(dict.fromkeys(rank[2][name] for rank in ranks)) for name in ranks[0][2]}
        events = [event for rank in ranks for event in rank[0]]
        return Timeline.of(events, self.num_stages, devices=[rank[1] for rank in ranks], conditions=facts)

    def _clock_offset_ns(self) -> int:
        """What to add to this rank's clock to get rank 0's: half of the quickest of some round trips."""
        hosts: list[str] = [""] * self.num_stages
        dist.all_gather_object(hosts, socket.gethostname(), group=self._group)
        best_ns, offset_ns = 1 << 62, 0
        stamp = torch.zeros(1, dtype=torch.int64)
        for rank, host in enumerate(hosts):
            if host == hosts[0] or self.rank not in (0, rank):
                continue
            for _ in range(10):
                if self.rank == 0:
                    self._receive_now(self._control, stamp, rank, 0)
                    stamp[0] = time.perf_counter_ns()
                    self._send_now(self._control, stamp, rank, 0)
                else:
                    sent_ns = time.perf_counter_ns()
                    self._send_now(self._control, stamp, 0, 0)
                    self._receive_now(self._control, stamp, 0, 0)
                    back_ns = time.perf_counter_ns()
                    if back_ns - sent_ns < best_ns:
                        best_ns, offset_ns = back_ns - sent_ns, int(stamp) - (sent_ns + back_ns) // 2
        return offset_ns

    # A step

    def begin(self, plan: Plan | None, signature: Hashable) -> Plan:
        if self._failed is not None:
            raise RuntimeError(
                f"this pipeline has failed before ({self._failed}); build a new one on every rank"
            )
        header = self._header
        if plan is not None:
            number = self._numbers.setdefault(signature, len(self._numbers))
            header[0], header[1], header[2] = number, plan.examples, int(plan.training)
        else:
            self._receive_now(self._control, header, self.rank - 1, 0)
        if self.rank + 1 < self.num_stages:
            self._send_now(self._control, header, self.rank + 1, 0)
        number, examples, training = header.tolist()
        self._training = bool(training)
        self._patient = number < len(self._agreements)
        if not self._patient:
            self._agreements.append(Agreement(sizes(examples, self._schedule.num_microbatches)))
        agreement = self._agreement = self._agreements[number]
        if self._activation_receiver is not None:
            self._activation_receiver.begin(agreement.activations, agreement.lengths, training=self._training)
        if self._gradient_receiver is not None and self._training:
            self._gradient_receiver.begin(agreement.gradients, agreement.lengths, training=True)
            self._post_loss()
        return Plan(examples, self._training)

    def send_activation(self, stage: int, microbatch: int, message: Message) -> None:
        agreement = self._agreement
        length = agreement.lengths[microbatch]
        outline = agreement.activations_sent.get(length)
        if outline is None:
            if len(message.tensors) > MOST_TENSORS:
                raise ValueError(
                    f"{len(message.tensors)} tensors leave stage {stage}; at most {MOST_TENSORS} can"
                )
            forms = tuple([Form.of(tensor) for tensor in message.tensors])
            outline = Outline(forms, message.structure, message.needs_grad)
            agreement.activations_sent[length] = outline
            self._send_outline(outline, Action(stage + 1, Kind.F, microbatch))
        elif (message.structure, message.needs_grad) != (outline.structure, outline.needs_grad):
            raise RuntimeError(
                _changed(f"what the output of stage {stage} consists of and what needs a gradient")
            )
        tensors = self._flatten(message.tensors, outline, f"output of stage {stage}")
        target = Action(stage + 1, Kind.F, microbatch)
        self._send(self._activations, tensors, target, self._activations_on_the_way)

    def receive_activation(self, stage: int, microbatch: int) -> Message:
        receiver, agreement = self._activation_receiver, self._agreement
        assert receiver is not None
        length = agreement.lengths[microbatch]
        source = Action(stage - 1, Kind.F, microbatch)
        if not receiver.is_posted(microbatch):
            agreement.activations[length] = self._receive_outline(source)
            receiver.post()
        outline = agreement.activations[length]
        tensors, works = receiver.take(microbatch)
        for work in works:
            self._wait(work, source, self.rank - 1)
        return Message(tensors, outline.structure, outline.needs_grad)  # type: ignore[arg-type]

    def send_gradient(self, stage: int, microbatch: int, gradients: Gradients) -> None:
        agreement = self._agreement
        length = agreement.lengths[microbatch]
        outline = agreement.gradients_sent.get(length)
        target = Action(stage - 1, self._gradient_kinds[microbatch], microbatch)
        if outline is None:
            outline = Outline(tuple([None if g is None else Form.of(g) for g in gradients]))
            agreement.gradients_sent[length] = outline
            self._send_outline(outline, target)
        tensors = self._flatten(gradients, outline, f"gradient of the input of stage {stage}")
        self._send(self._gradients, tensors, target, self._gradients_on_the_way)

    def receive_gradient(self, stage: int, microbatch: int) -> Gradients:
        receiver, agreement = self._gradient_receiver, self._agreement
        assert receiver is not None
        source = Action(stage + 1, self._gradient_kinds[microbatch], microbatch)
        if not receiver.is_posted(microbatch):
            agreement.gradients[agreement.lengths[microbatch]] = self._receive_outline(source)
            receiver.post()
            self._post_loss()
        tensors, works = receiver.take(microbatch)
        for work in works:
            self._wait(work, source, self.rank + 1)
        return tensors

    def release(self, stage: int, microbatch: int) -> None:
        if self._activation_receiver is not None:
            self._activation_receiver.release(microbatch)
        if self._gradient_receiver is not None:
            self._gradient_receiver.release(microbatch)
            self._post_loss()

    def finish(self, loss: Tensor | None) -> Tensor | None:
        """The loss follows the gradients towards the first stage. All sends are on the wire when this
        returns, so that a process may exit.
        """
        if self._training:
            loss = self._pass_loss(loss)
        for queue in (self._activations_on_the_way, self._gradients_on_the_way, self._outlines_on_the_way):
            for sending in queue:
                self._wait_sent(sending)
            queue.clear()
        return loss

    def abort(self, action: Action | None, error: Exception) -> ActionError:
        if self._failed is None:
            if isinstance(error, PeerError):
                self._failed = self._blackboard.explain(error)
            else:
                self._failed = self._blackboard.report(ActionError(action, summary(error), self.rank))
            cut([self._activations, self._gradients, self._control])
        return self._failed

    # Parts of a step

    def _send(
        self,
        connection: Connection,
        tensors: list[Tensor],
        target: Action,
        queue: deque[_Sending],
        tag: int | None = None,
    ) -> None:
        tag = target.microbatch * MOST_TENSORS if tag is None else tag
        try:
            works = [connection.send([tensor], target.stage, tag + i) for i, tensor in enumerate(tensors)]
        except RuntimeError as error:
            raise unreachable(target, target.stage, error) from error
        queue.append(_Sending(works, tensors, target))
        if self._patient and len(queue) > SENDS_ON_THE_WAY:
            self._wait_sent(queue.popleft())

    def _flatten(self, tensors: Sequence[Tensor | None], outline: Outline, what: str) -> list[Tensor]:
        """The tensors as the receiver expects them: of the agreed forms, flat."""
        flat = []
        for tensor, form in zip(tensors, outline.forms, strict=True):
            if form is None:
                if tensor is not None:
                    raise RuntimeError(_changed(f"whether there is a {what}"))
                continue
            if tensor is None:
                tensor = form.empty(self._device).zero_()
            elif not form.fits(tensor):
                raise RuntimeError(
                    _changed(f"the shape or dtype of the {what}, {form.shape} {form.dtype} before and now "
                             f"{tuple(tensor.shape)} {tensor.dtype},")
                )  # fmt: skip
            if tensor.stride() != form.stride:
                tensor = form.empty(self._device).copy_(tensor)
            flat.append(_flat(tensor))
        return flat

    def _post_loss(self) -> None:
        """Posts the receive of the loss behind those of the gradients, whose queue it shares."""
        form, receiver = self._agreement.loss, self._gradient_receiver
        assert receiver is not None
        if form is not None and self._loss_work is None and receiver.num_unposted == 0:
            loss = form.empty(self._device)
            try:
                self._loss_work = (loss, self._gradients.recv([loss], self.rank + 1, _LOSS_TAG))
            except RuntimeError as error:
                raise unreachable(None, self.rank + 1, error) from error

    def _pass_loss(self, loss: Tensor | None) -> Tensor:
        agreement = self._agreement
        new = agreement.loss is None
        end = Action(self.rank + 1, Kind.B, 0)
        if loss is None:
            if agreement.loss is None:
                (agreement.loss,) = self._receive_outline(end).forms
            self._post_loss()
            assert self._loss_work is not None
            loss, work = self._loss_work
            self._wait(work, end, self.rank + 1)
            self._loss_work = None
        else:
            agreement.loss = Form.of(loss)
        if self.rank > 0:
            target = Action(self.rank - 1, Kind.B, 0)
            if new:
                self._send_outline(Outline((agreement.loss,)), target)
            self._send(self._gradients, [loss], target, self._gradients_on_the_way, tag=_LOSS_TAG)
        return loss

    def _send_outline(self, outline: Outline, target: Action) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(tuple(outline))), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self._send(self._control, [length, data], target, self._outlines_on_the_way, tag=_OUTLINE_TAG)

    def _receive_outline(self, source: Action) -> Outline:
        length = torch.zeros(1, dtype=torch.int64)
        self._receive_now(self._control, length, source.stage, _OUTLINE_TAG, source)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._receive_now(self._control, data, source.stage, _OUTLINE_TAG + 1, source)
        return Outline(*pickle.loads(data.numpy().tobytes()))

    def _send_now(self, connection: Connection, tensor: Tensor, peer: int, tag: int) -> None:
        try:
            connection.send([tensor], peer, tag).wait()
        except RuntimeError as error:
            raise unreachable(None, peer, error) from error

    def _receive_now(
        self, connection: Connection, tensor: Tensor, peer: int, tag: int, action: Action | None = None
    ) -> None:
        try:
            connection.recv([tensor], peer, tag).wait()
        except RuntimeError as error:
            raise unreachable(action, peer, error) from error

    def _wait(self, work: dist.Work, action: Action | None, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise unreachable(action, peer, error) from error

    def _wait_sent(self, sending: _Sending) -> None:
        for work in sending.works:
            self._wait(work, sending.action, sending.action.stage)

    def _connect(self, store: Any, name: str, *, cuda: bool) -> Connection:
        return connect(store, self.rank, self.num_stages, name=name, cuda=cuda, timeout_s=self._timeout_s)


_OUTLINE_TAG, _LOSS_TAG = 1, 2**29


def _flat(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor in the order of its memory, as one dimension."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _changed(what: str) -> str:
    return (
        f"{what} changed since the ranks agreed on what travels; call Pipeline.refresh() on every rank "
        "after changing "
        f"the model, and give every kind of mini-batch shapes of its own"
    )
