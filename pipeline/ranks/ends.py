"""The two ends of an edge's direction: how many messages are on their way, and the memory that receives them.

A send that nobody waits for keeps its tensors alive, and one that is waited for at once makes its stage as
slow as the receiver; between the two is a short queue. Receives are posted in the order of need, as many as
the ring has slots (`plan.edges`), as soon as a spec says how large the message is.

The first rank alone sees the batch, and the shapes of what travels show in the first real micro-batch. What
ranks tell each other of that is read by the host before anything can be received, so it has a connection of
its own, which is never NCCL's, and queues behind no activation (`Control`). Between two ranks it is one
stream of frames: each holds a key, which says what it is about, and an object; what does not fit follows.

    a step             its header, from rank to rank in the order of their first stages
    an edge            a spec before the first message of each size, and, where messages are trees,
                       with each further one the structure if it is another one
    the loss           where hosts wait for messages
"""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PeerError
from ..plan.edges import SMALL_BYTES, Direction, Rings, is_one_too_many
from ..plan.schedule import Action
from ..stage.trees import Message, Nested, Structure
from .wire import Buffer, Connection, TensorSpec, Transit, flat


class MessageSpec(NamedTuple):
    """A message without its data. For gradients, `tensors` holds None where there is no gradient."""

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


class Sender:
    """The sending end of messages to rank `target`."""

    def __init__(self, connection: Connection, target: int) -> None:
        self._connection, self.target = connection, target
        self._queue: deque[_Sending] = deque()

    def send(
        self, tensors: list[Tensor], tag: int, action: Action | None = None, *, bounded: bool = False
    ) -> None:
        """Starts to send flat tensors, with `tag` and the following ones, to `action`, for errors; if
        `bounded`, waits for the oldest one where it is one too many.
        """
        queue, send, target = self._queue, self._connection.send, self.target
        works = [send(tensor, target, tag + i, action) for i, tensor in enumerate(tensors) if tensor.numel()]
        queue.append(_Sending(works, tensors, action))
        if bounded and is_one_too_many(len(queue), sum([t.nbytes for t in queue[0].tensors]), SMALL_BYTES):
            self.finish(len(queue) - 1)

    def finish(self, left: int = 0) -> None:
        """Waits until every message but the latest `left` is gone."""
        while len(self._queue) > left:
            works, _, action = self._queue.popleft()
            for work in works:
                self._connection.wait(work, action, self.target)


def conform(
    tensors: Sequence[Tensor | None], spec: MessageSpec, device: torch.device, what: str
) -> list[Tensor]:
    """The tensors in the agreed form, flat, as the receiver expects them."""
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
    """The error for a message that differs from the agreed form."""
    return RuntimeError(
        f"{what} changed since the ranks agreed on what travels; call Pipeline.refresh() on every rank "
        "after changing the model, and give every kind of mini-batch shapes, keys or flags of its own"
    )


class ReceiveQueue:
    """The receives of one direction from one rank, which are posted in one order, as NCCL matches them;
    `order` has the receiver of each. On accelerators receives wait for their number of `calls` in a step
    (`plan.edges`): messages of the chain that have left, and micro-batches that a stage is done with.
    """

    def __init__(self, connection: Connection, source: int, *, back: bool) -> None:
        self.connection, self.source, self.back = connection, source, back
        self.order: Sequence[Receiver] = ()
        self.position = self.calls = 0  # the position of the next one to be posted

    def post(self) -> None:
        """Posts every receive that has its turn, a slot and a known spec, and whose time has come."""
        order, position = self.order, self.position
        while position < len(order) and order[position].post_next():
            position += 1
        self.position = position
        self.connection.flush(self.source)


class Receiver:
    """The end at which messages arrive, as many as the ring has slots (`plan.edges`), each in memory of its
    own; `tags` is the first tag of the message of each micro-batch.
    """

    def __init__(self, queue: ReceiveQueue, rings: Rings, device: torch.device, tags: Sequence[int]) -> None:
        self.queue, self._rings, self._device, self._tags = queue, rings, device, tags
        self._ring = self._whole = rings.tight  # of this step, and of steps with a backward
        self._posted: dict[int, tuple[list[Buffer | None], list[Transit]]] = {}
        self._unposted: deque[int] = deque()  # have a slot, but perhaps no known spec yet
        self._after: Sequence[int] = ()  # calls of this rank before each receive
        self._specs: dict[int, MessageSpec] = {}
        self._lengths: tuple[int, ...] = ()
        self._is_known = False  # whether there is a spec for each of the lengths
        self._training = True

    def begin(self, specs: dict[int, MessageSpec], lengths: tuple[int, ...], *, training: bool) -> None:
        """Starts a step, in which `specs` tell what is known of messages by their numbers of examples."""
        self._training = training
        self._posted.clear()
        if specs is not self._specs or not self._is_known:
            self._specs, self._lengths = specs, lengths
            self._is_known = all(length in specs for length in lengths)
            largest = max((spec.num_bytes for spec in specs.values()), default=0)
            self._whole = self._rings.of(largest, SMALL_BYTES) if self._is_known else self._rings.tight
        self._ring = self._whole if training or self._rings.forward is None else self._rings.forward
        self._after = self._rings.after if training else self._rings.after_forward
        self._unposted = deque(self._ring.initial)

    def post_next(self) -> bool:
        """Posts the next receive, to be followed by a flush, if it may be."""
        if not self._unposted:
            return False
        microbatch, queue = self._unposted[0], self.queue
        spec = self._specs.get(self._lengths[microbatch])
        if spec is None or (self._after and queue.calls < self._after[microbatch]):
            return False
        self._unposted.popleft()
        buffer, receive = queue.connection.buffer, queue.connection.receive
        source, tag, device = queue.source, self._tags[microbatch], self._device
        buffers = [None if each is None else buffer(each, source, device) for each in spec.tensors]
        works = [
            receive(each, source, tag + i)
            for i, each in enumerate(buffers)
            if each is not None and each.flat.numel()
        ]
        self._posted[microbatch] = (buffers, works)
        return True

    def take(self, microbatch: int, action: Action) -> tuple[Tensor | None, ...]:
        """Waits for the message that `action` sends; returns its tensors."""
        if microbatch not in self._posted:  # its spec was not known
            self.queue.post()
        buffers, works = self._posted.pop(microbatch)
        for work in works:
            self.queue.connection.wait(work, action, self.queue.source)
        if not self._training:
            self.release(microbatch)
        return tuple([None if buffer is None else buffer.tensor.detach() for buffer in buffers])

    def release(self, microbatch: int) -> None:
        """Frees the slot of a micro-batch that the stage no longer needs."""
        following = self._ring.following[microbatch]
        if following is not None:
            self._unposted.append(following)
            self.queue.post()


# What ranks tell each other beside the tensors

_FRAME_BYTES, _LENGTH_BYTES = 1024, 8
_FRAME = TensorSpec((_FRAME_BYTES,), (1,), torch.uint8)
# Frames that may come from each rank before one is read; each frame takes a page of shared memory.
FRAMES_AHEAD = 2
_FRAME_TAG, _REST_TAG = 0, 1
# Kinds of steps that are known at a time.
MOST_AGREEMENTS = 256
_CPU = torch.device("cpu")


class Agreement:
    """Shapes of the messages of one kind of step. Micro-batches of one size have one spec."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths  # examples in each micro-batch
        self.specs: dict[Direction, dict[int, MessageSpec]] = defaultdict(dict)  # by number of examples
        self.loss: TensorSpec | None = None


class Agreements:
    """The agreements of the latest kinds of steps, by the numbers that the first rank gives them."""

    def __init__(self) -> None:
        self.found: dict[int, Agreement] = {}
        self._numbers: dict[Hashable, int] = {}  # by signature, on the first rank
        self._given = itertools.count()

    def number(self, signature: Hashable) -> int:
        """The number of steps of this kind, on the first rank."""
        if signature not in self._numbers:
            _add(self._numbers, signature, next(self._given))
        return self._numbers[signature]

    def add(self, number: int, lengths: tuple[int, ...]) -> Agreement:
        """The agreement of a new number."""
        made = Agreement(lengths)
        _add(self.found, number, made)
        return made

    def forget(self) -> None:
        """Forgets all agreements, on every rank alike."""
        self.found.clear()
        self._numbers.clear()


class Control:
    """One rank's end of the streams of frames to and from all others."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._senders: dict[int, Sender] = {}
        self._ahead: dict[int, int] = {}  # frames that may come from a rank before they are asked for
        self._posted: dict[int, deque[tuple[Buffer, Transit]]] = defaultdict(deque)
        self._unread: dict[tuple[int, Hashable], deque[Any]] = defaultdict(deque)  # by rank and key

    def expect(self, source: int, count: int = FRAMES_AHEAD) -> None:
        """Lets this many frames come from rank `source` before they are asked for."""
        self._ahead[source] = max(count, self._ahead.get(source, 0))
        self._post(source)

    def _post(self, source: int) -> None:
        """Posts receives for the frames that may come."""
        posted, connection = self._posted[source], self._connection
        if len(posted) < self._ahead[source]:
            while len(posted) < self._ahead[source]:
                buffer = connection.buffer(_FRAME, source, _CPU)
                posted.append((buffer, connection.receive(buffer, source, _FRAME_TAG)))
            connection.flush(source)

    def send(self, target: int, key: Hashable, content: Any, action: Action | None = None) -> None:
        """Tells rank `target` something about `key`; `action` is what an error will name."""
        data = pickle.dumps((key, content))
        whole = bytearray(_FRAME_BYTES)
        whole[: _LENGTH_BYTES + len(data)] = len(data).to_bytes(_LENGTH_BYTES, "little") + data
        frame = torch.frombuffer(whole, dtype=torch.uint8)
        if target not in self._senders:
            self._senders[target] = Sender(self._connection, target)
        self._senders[target].send([frame[:_FRAME_BYTES], frame[_FRAME_BYTES:]], _FRAME_TAG, action)

    def receive(self, source: int, key: Hashable, action: Action | None = None) -> Any:
        """Waits for the next frame of rank `source` about `key`."""
        if source not in self._ahead:
            self.expect(source)
        unread, posted = self._unread[source, key], self._posted[source]
        while not unread:
            if len(posted) < FRAMES_AHEAD:
                try:
                    self._post(source)
                except PeerError:  # a rank with no more to send may be gone
                    if not posted:
                        raise
            buffer, work = posted.popleft()
            self._connection.wait(work, action, source)
            data = buffer.tensor.numpy().tobytes()
            del buffer  # the next frame may take its memory
            end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
            if end > len(data):
                rest = TensorSpec((end - len(data),), (1,), torch.uint8)
                buffer = self._connection.buffer(rest, source, _CPU)
                work = self._connection.receive(buffer, source, _REST_TAG, action)
                self._connection.wait(work, action, source)
                data += buffer.tensor.numpy().tobytes()
            about, content = pickle.loads(data[_LENGTH_BYTES:end])
            self._unread[source, about].append(content)
        return unread.popleft()

    def finish(self) -> None:
        """Waits until every frame that was sent has left."""
        for source in self._ahead:
            with suppress(PeerError):  # a rank with no more to send may be gone
                self._post(source)
        for sender in self._senders.values():
            sender.finish()


def _add(known: dict[Any, Any], key: Hashable, value: object) -> None:
    known[key] = value
    if len(known) > MOST_AGREEMENTS:
        del known[next(iter(known))]
