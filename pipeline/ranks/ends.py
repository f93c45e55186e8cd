"""The ends of a direction of an edge: how many messages are on their way, and into which memory they come.

A send that nobody waits for keeps its tensors alive, and one that is waited for at once makes its stage as
slow as the receiver; between the two is a short queue. A receive that is posted only when its message is
needed makes the sender wait, and one buffer for each micro-batch would give back the memory that a schedule
saves; so receives are posted in the order of need, each into its buffer of the ring (`plan.edges`), as soon
as a spec says how large the message is. A slot in whose memory something still lives is not overwritten:
it gets new memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan.edges import SMALL_BYTES, Rings, is_one_too_many
from ..plan.schedule import Action
from ..stage.trees import Message, Nested, Structure, portal_changed, version
from .wire import Buffer, Connection, TensorSpec, Transit, flat


class MessageSpec(NamedTuple):
    """A message without its data; of gradients, `tensors` holds None where none comes back."""

    tensors: tuple[TensorSpec | None, ...]
    structure: Structure = None
    needs_grad: tuple[bool, ...] = ()
    aliases: tuple[int, ...] = ()
    varies: bool = False  # whether another structure follows is told with each further message

    @classmethod
    def of(cls, message: Message, what: str) -> MessageSpec:
        for tensor in message.tensors:
            if tensor.layout is not torch.strided:
                raise ValueError(
                    f"the {what} is a tensor of the layout {tensor.layout}, and processes send each other "
                    "dense ones; let the layer give to_dense(), or keep it and the next one in one stage "
                    "(partition=)"
                )
        tensor_specs = tuple([TensorSpec.of(tensor) for tensor in message.tensors])
        varies = isinstance(message.structure, Nested)
        return cls(tensor_specs, message.structure, message.needs_grad, message.aliases, varies)

    @property
    def num_bytes(self) -> int:
        return sum(tensor_spec.num_bytes for tensor_spec in self.tensors if tensor_spec is not None)


class _Sending(NamedTuple):
    works: list[Transit]
    tensors: list[Tensor]  # kept until they are gone
    action: Action | None  # what receives them
    versions: list[int]


class Sender:
    """The end from which messages leave for rank `target`.

    No send of a portal, whose name is given, is waited for while it may still be on its way, and its tensors
    must not be changed in place before they have arrived.
    """

    def __init__(self, connection: Connection, target: int, portal: str | None = None) -> None:
        self._connection, self.target, self._portal = connection, target, portal
        self._queue: deque[_Sending] = deque()

    def send(
        self, tensors: list[Tensor], tag: int, action: Action | None = None, *, bounded: bool = False
    ) -> None:
        """Starts to send flat tensors, with `tag` and the following ones, to `action`, which an error will
        name; if `bounded`, waits for the oldest one where it is one too many.
        """
        queue, send, target = self._queue, self._connection.send, self.target
        works = [send(tensor, target, tag + i, action) for i, tensor in enumerate(tensors) if tensor.numel()]
        if self._portal is None:
            queue.append(_Sending(works, tensors, action, []))
            if bounded and is_one_too_many(
                len(queue), sum([t.nbytes for t in queue[0].tensors]), SMALL_BYTES
            ):
                self._wait(queue.popleft())
            return
        queue.append(_Sending(works, tensors, action, [version(tensor) for tensor in tensors]))
        while queue and all(getattr(work, "gone", False) for work in queue[0].works):
            self._wait(queue.popleft())

    def arrived(self, microbatch: int) -> None:
        """The message of a micro-batch is known to have arrived."""
        for sending in [each for each in self._queue if each.action and each.action.microbatch == microbatch]:
            self._queue.remove(sending)
            self._wait(sending)

    def finish(self) -> None:
        """Waits until everything is gone."""
        while self._queue:
            self._wait(self._queue.popleft())

    def _wait(self, sending: _Sending) -> None:
        for work in sending.works:
            self._connection.wait(work, sending.action, self.target)
        if self._portal is not None and sending.versions != [version(each) for each in sending.tensors]:
            raise portal_changed(self._portal)


def conform(
    tensors: Sequence[Tensor | None], spec: MessageSpec, device: torch.device, what: str
) -> list[Tensor]:
    """The tensors as the receiver expects them: as agreed, flat."""
    if len(tensors) != len(spec.tensors):
        raise changed(
            f"how many tensors make up the {what}, {len(spec.tensors)} before and {len(tensors)} now,"
        )
    found = []
    for tensor, wanted in zip(tensors, spec.tensors, strict=True):
        if wanted is None:
            if tensor is not None:
                raise changed(f"whether there is a {what}")
            tensor = torch.empty(0)
        elif tensor is None:
            tensor = wanted.empty(device).zero_()
        elif tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            now = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise changed(
                f"the shape or dtype of the {what}, {wanted.shape} {wanted.dtype} before and {now} now,"
            )
        elif tensor.stride() != wanted.stride or tensor.is_conj() or tensor.is_neg():
            tensor = wanted.empty(device).copy_(tensor)  # its memory is not what it says
        found.append(tensor if tensor.is_contiguous() else flat(tensor))
    return found


def changed(what: str) -> RuntimeError:
    """The error for a message that is not what was agreed on."""
    return RuntimeError(
        f"{what} changed since the ranks agreed on what travels; call Pipeline.refresh() on every rank "
        "after changing the model, and give every kind of mini-batch shapes, keys or flags of its own"
    )


class Progress:
    """How many calls the transport has had in a step: messages of the chain that have left the rank, and
    micro-batches that a stage is done with. On accelerators receives wait for their number (`plan.edges`).
    """

    def __init__(self) -> None:
        self.calls = 0


class ReceiveQueue:
    """The receives of one direction from one rank, which are posted in one order: NCCL takes what comes for
    the receive that was posted first. `order` has the receiver of each.
    """

    def __init__(self, connection: Connection, source: int, progress: Progress | None, *, back: bool) -> None:
        self.connection, self.source, self.progress, self.back = connection, source, progress, back
        self.order: Sequence[Receiver] = ()
        self.position = 0  # in it, of the next one to be posted

    def post(self) -> None:
        """Posts every receive that has its turn, a slot and a known spec, and whose time has come."""
        order, position = self.order, self.position
        while position < len(order) and order[position].post_next():
            position += 1
        self.position = position
        self.connection.flush(self.source)


_Buffers = tuple[Buffer | None, ...]


class Receiver:
    """The end at which messages arrive, each in its slot of the ring; `tags` is the first tag of the message
    of each micro-batch.
    """

    def __init__(self, queue: ReceiveQueue, rings: Rings, device: torch.device, tags: Sequence[int]) -> None:
        self.queue, self._rings, self._device, self._tags = queue, rings, device, tags
        self._ring = self._whole = rings.tight  # of this step, and of steps with a backward
        self._slots: dict[int, tuple[MessageSpec, _Buffers]] = {}
        self._posted: dict[int, tuple[_Buffers, list[Transit]]] = {}
        self._unposted: deque[int] = deque()  # have a slot, but perhaps no known spec yet
        self._after: Sequence[int] = ()  # calls of this rank before each receive
        self._outlines: dict[int, MessageSpec] = {}
        self._lengths: tuple[int, ...] = ()
        self._is_known = False  # whether there is a spec for each of the lengths
        self._training = True

    def begin(self, specs: dict[int, MessageSpec], lengths: tuple[int, ...], *, training: bool) -> None:
        """Starts a step, in which `specs` tell what is known of messages by their numbers of examples."""
        self._training = training
        self._posted.clear()
        if specs is not self._outlines or not self._is_known:
            self._outlines, self._lengths = specs, lengths
            self._is_known = all(length in specs for length in lengths)
            largest = max((spec.num_bytes for spec in specs.values()), default=0)
            self._whole = self._rings.of(largest, SMALL_BYTES) if self._is_known else self._rings.tight
        ring = self._whole if training or self._rings.forward is None else self._rings.forward
        if ring is not self._ring:
            for position in range(ring.num_slots, self._ring.num_slots):
                if position in self._slots:
                    self._give_back(self._slots.pop(position)[1])
            self._ring = ring
        self._after = self._rings.after if training else self._rings.after_forward
        self._unposted = deque(ring.initial)

    def post_next(self) -> bool:
        """Posts the next receive, to be followed by a flush, if it may be."""
        if not self._unposted:
            return False
        microbatch, queue = self._unposted[0], self.queue
        spec = self._outlines.get(self._lengths[microbatch])
        if spec is None:
            return False
        if queue.progress is not None and queue.progress.calls < self._after[microbatch]:
            return False
        self._unposted.popleft()
        buffers = self._buffers(microbatch, spec)
        tag, receive = self._tags[microbatch], queue.connection.receive
        works = [
            receive(buffer, queue.source, tag + i)
            for i, buffer in enumerate(buffers)
            if buffer is not None and buffer.flat.numel()
        ]
        self._posted[microbatch] = (buffers, works)
        return True

    def take(self, microbatch: int, action: Action) -> tuple[Tensor | None, ...]:
        """The tensors of a message that `action` sends, when they are there. A tensor that is kept keeps
        its memory.
        """
        if microbatch not in self._posted:  # its spec was not known
            self.queue.post()
        buffers, works = self._posted.pop(microbatch)
        for work in works:
            self.queue.connection.wait(work, action, self.queue.source)
        # `detach` makes a tensor of its own, so that it counts as a holder.
        tensors = tuple([None if buffer is None else buffer.tensor.detach() for buffer in buffers])
        if self._training:
            return tensors
        # The output may hold on to what comes in, so it gets memory of its own.
        tensors = tuple([None if tensor is None else tensor.clone() for tensor in tensors])
        self.release(microbatch)
        return tensors

    def release(self, microbatch: int) -> None:
        """The stage is done with the slot of a micro-batch."""
        following = self._ring.following[microbatch]
        if following is not None:
            self._unposted.append(following)
            self.queue.post()

    def close(self) -> None:
        """Gives all buffers back, between two steps."""
        for _, buffers in self._slots.values():
            self._give_back(buffers)
        self._slots.clear()

    def _buffers(self, microbatch: int, spec: MessageSpec) -> _Buffers:
        slot = self._ring.slot[microbatch]
        kept = self._slots.pop(slot, None)
        if kept is not None and kept[0].tensors == spec.tensors:
            buffers = kept[1]
            for buffer in buffers:
                if buffer is not None and buffer.holders.others:
                    buffers = self._without_holders(spec, buffers)
                    break
            self._slots[slot] = (spec, buffers)
            return buffers
        if kept is not None:
            self._give_back(kept[1])
            kept = None  # or its tensors would keep the memory from being used again
        buffers = self._make(spec)
        self._slots[slot] = (spec, buffers)
        return buffers

    def _without_holders(self, spec: MessageSpec, buffers: _Buffers) -> _Buffers:
        """New buffers in place of those in which something of an earlier message still lives."""
        found = list(buffers)
        for position, (buffer, tensor_spec) in enumerate(zip(buffers, spec.tensors, strict=True)):
            if buffer is not None and tensor_spec is not None and buffer.holders.others:
                self._give_back((buffer,))
                found[position] = self.queue.connection.buffer(tensor_spec, self.queue.source, self._device)
        return tuple(found)

    def _make(self, spec: MessageSpec) -> _Buffers:
        buffer, source, device = self.queue.connection.buffer, self.queue.source, self._device
        return tuple(
            [
                None if tensor_spec is None else buffer(tensor_spec, source, device)
                for tensor_spec in spec.tensors
            ]
        )

    def _give_back(self, buffers: _Buffers) -> None:
        for buffer in buffers:
            if buffer is not None:
                self.queue.connection.give_back(buffer, self.queue.source)
