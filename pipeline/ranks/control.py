"""What the ranks tell each other beside the tensors: small objects, in order, and what they agree on.

The first rank alone sees the batch, and the shapes of what travels show in the first real micro-batch. All of
that is read by the host before anything can be received, so it has a connection of its own, which is never
NCCL's, and queues behind no activation. Between two ranks it is one stream of frames: each holds a key, which
says what it is about, and an object; what does not fit follows. Some receives of frames are always posted.

    a step             its header, from rank to rank in the order of their first stages
    an edge            a spec before the first message of each size, and, where messages are trees,
                       with each further one the structure if it is another one
    the loss           where hosts wait for messages

Outside of steps all ranks of a group find out small things together, rarely (`ObjectCollectives`): whether
all ranks build the same, what happened when, and sums of weights that ranks share. torch's collectives wait
as long as the user's process group says, half an hour by default, and cannot say for whom. Here each rank
waits for every other one by itself, so that an error names the one that is missing.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..clock import Clock, conditions
from ..errors import PeerError
from ..plan.edges import Direction
from ..plan.schedule import Action, Schedule
from ..plan.timeline import Event, Timeline
from .ends import MessageSpec, Sender
from .wire import Buffer, Connection, TensorSpec, Transit

_FRAME = TensorSpec((1024,), (1,), torch.uint8)
_LENGTH_BYTES = 8
# Frames that may come from each rank before one is read; each frame takes a page of shared memory.
FRAMES_AHEAD = 2
_FRAME_TAG, _REST_TAG = 0, 1
# Kinds of steps that are known at a time; with one more the ranks begin anew.
MOST_AGREEMENTS = 256
_CPU = torch.device("cpu")


class Agreement:
    """Shapes of the messages of one kind of step. Micro-batches of one size have one spec."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths  # examples in each micro-batch
        self.specs: dict[Direction, dict[int, MessageSpec]] = defaultdict(dict)  # by number of examples
        self.loss: TensorSpec | None = None


class Agreements:
    """The agreements of all kinds of steps so far, by the numbers that the first rank gives them."""

    def __init__(self) -> None:
        self._found: list[Agreement] = []
        self._numbers: dict[Hashable, int] = {}  # by signature, on the first rank

    def number(self, signature: Hashable) -> int:
        """The number of steps of this kind, on the first rank; -1 if all are to be forgotten and this is the
        first of new ones.
        """
        if signature in self._numbers or len(self._numbers) < MOST_AGREEMENTS:
            return self._numbers.setdefault(signature, len(self._numbers))
        self._numbers = {signature: 0}
        return -1

    def find(self, number: int) -> Agreement | None:
        """The agreement of that number; None if it is the first step of its kind."""
        if number < 0:
            self._found.clear()
            return None
        return self._found[number] if number < len(self._found) else None

    def add(self, agreement: Agreement) -> Agreement:
        """Adds an agreement, which gets the next number."""
        self._found.append(agreement)
        return agreement

    def forget(self) -> None:
        """Forgets all agreements, on every rank alike."""
        self._found.clear()
        self._numbers.clear()


class Control:
    """One rank's end of the streams of frames to and from all others."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._senders: dict[int, Sender] = {}
        self._posted: dict[int, deque[tuple[Buffer, Transit]]] = {}
        self._free: dict[int, list[Buffer]] = {}  # have been read
        self._unread: dict[tuple[int, Hashable], deque[Any]] = defaultdict(deque)  # by rank and key

    def expect(self, source: int, count: int = FRAMES_AHEAD) -> None:
        """Lets this many frames come from rank `source` before they are asked for."""
        posted, free = self._posted.setdefault(source, deque()), self._free.setdefault(source, [])
        missing = count - len(posted) - len(free)
        if missing > 0:
            free += [self._connection.buffer(_FRAME, source, _CPU) for _ in range(missing)]
            self._post(source)

    def _post(self, source: int) -> None:
        """Posts receives into the frames that have been read."""
        free, posted = self._free[source], self._posted[source]
        if free:
            while free:
                posted.append((free[-1], self._connection.receive(free[-1], source, _FRAME_TAG)))
                free.pop()
            self._connection.flush(source)

    def send(self, target: int, key: Hashable, content: Any, action: Action | None = None) -> None:
        """Tells rank `target` something about `key`; `action` is what an error will name."""
        data = pickle.dumps((key, content))
        whole = bytearray(_FRAME.num_bytes)
        whole[: _LENGTH_BYTES + len(data)] = len(data).to_bytes(_LENGTH_BYTES, "little") + data
        frames = torch.frombuffer(whole, dtype=torch.uint8)
        size = _FRAME.num_bytes
        parts = [frames] if len(frames) == size else [frames[:size], frames[size:]]
        if target not in self._senders:
            self._senders[target] = Sender(self._connection, target)
        self._senders[target].send(parts, _FRAME_TAG, action)

    def receive(self, source: int, key: Hashable, action: Action | None = None) -> Any:
        """The next that rank `source` tells about `key`."""
        if source not in self._posted:
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
            self._free[source].append(buffer)
            end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
            if end > len(data):
                rest = TensorSpec((end - len(data),), (1,), torch.uint8)
                data += self._receive_now(rest, source, _REST_TAG, action).numpy().tobytes()
            about, content = pickle.loads(data[_LENGTH_BYTES:end])
            self._unread[source, about].append(content)
        return unread.popleft()

    def finish(self) -> None:
        """Waits until everything that was sent is gone, as it is for others in turn."""
        for source in self._posted:
            with suppress(PeerError):  # a rank with no more to send may be gone
                self._post(source)
        for sender in self._senders.values():
            sender.finish()

    def _receive_now(self, tensor_spec: TensorSpec, source: int, tag: int, action: Action | None) -> Tensor:
        buffer = self._connection.buffer(tensor_spec, source, _CPU)
        if tensor_spec.num_bytes:
            self._connection.wait(self._connection.receive(buffer, source, tag, action), action, source)
        data = buffer.tensor.clone()
        self._connection.give_back(buffer, source)
        return data


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def packed(tensor: Tensor) -> tuple[torch.dtype, Sequence[int], bytes]:
    """A small tensor as an object, with its bits."""
    return tensor.dtype, tuple(tensor.shape), _bits(tensor.cpu()).numpy().tobytes()


def unpacked(content: tuple[torch.dtype, Sequence[int], bytes], device: torch.device) -> Tensor:
    dtype, shape, data = content
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape).to(device)


_LENGTH_TAG, _DATA_TAG, _NUMBER_TAG, _TENSOR_TAG = range(2**27, 2**27 + 4)
T = TypeVar("T")


class ObjectCollectives:
    """One rank's part in what `size` ranks do at the same time. Every method may raise `PeerError`."""

    def __init__(self, connection: Connection, rank: int, size: int) -> None:
        # Without the neighbours' shared memory, whose messages move only while their sender waits for one.
        self._connection = connection.over_network()
        self.rank, self.size = rank, size

    def gather(self, mine: T) -> list[T]:
        """Returns the `mine` of every rank, in rank order; every rank must call it."""
        data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent = [
            (rank, self._connection.send(tensor, rank, tag))
            for rank in others
            for tensor, tag in ((length, _LENGTH_TAG), (data, _DATA_TAG))
        ]
        found = [mine] * self.size
        for rank in others:
            num_bytes = int(self._receive(TensorSpec((1,), (1,), torch.int64), rank, _LENGTH_TAG))
            received = self._receive(TensorSpec((num_bytes,), (1,), torch.uint8), rank, _DATA_TAG)
            found[rank] = pickle.loads(received.numpy().tobytes())
        for rank, work in sent:
            self._connection.wait(work, None, rank)
        return found

    def send_tensor(self, tensor: Tensor | None, target: int) -> None:
        """Sends a tensor, or that there is none, to a rank that calls `receive_tensor`."""
        self._send(torch.tensor([tensor is not None]), target, _NUMBER_TAG)
        if tensor is not None and tensor.numel():
            self._send(tensor.detach().cpu().contiguous(), target, _TENSOR_TAG)

    def receive_tensor(self, like: Tensor, source: int) -> Tensor | None:
        """A tensor of the shape and dtype of `like`, on its device."""
        if not self._receive(TensorSpec((1,), (1,), torch.bool), source, _NUMBER_TAG):
            return None
        tensor_spec = TensorSpec.of(torch.empty(like.shape, dtype=like.dtype, device="meta"))
        received = (
            self._receive(tensor_spec, source, _TENSOR_TAG) if like.numel() else torch.empty(like.shape)
        )
        return received.to(like.device, like.dtype)

    def _send(self, tensor: Tensor, target: int, tag: int) -> None:
        self._connection.wait(self._connection.send(tensor, target, tag), None, target)

    def _receive(self, tensor_spec: TensorSpec, source: int, tag: int) -> Tensor:
        buffer = self._connection.buffer(tensor_spec, source, torch.device("cpu"))
        self._connection.wait(self._connection.receive(buffer, source, tag), None, source)
        return buffer.tensor


def check_equal(found: Sequence[object], who: str = "rank") -> None:
    """`ValueError`, on every rank alike, if what the ranks (or what `who` says) build is not the same."""
    for rank, other in enumerate(found):
        if other != found[0]:
            raise ValueError(
                f"{who} {rank} builds another pipeline than {who} 0: its layers, cuts, schedule or seed "
                "differ; give all ranks the same arguments"
            )


def gather_timeline(
    collectives: ObjectCollectives, clock: Clock, device: torch.device, schedule: Schedule
) -> Timeline:
    """The latest step of all ranks on one time axis: the clocks of hosts are as equal as these keep them."""
    # Actions are timed by a clock that never goes back; where it stands on the one that tells the time.
    offset_ns = time.time_ns() - time.perf_counter_ns()
    mine = (clock.events(offset_ns), f"{socket.gethostname()} {device}", conditions())
    ranks: list[tuple[tuple[Event, ...], str, dict[str, str]]] = collectives.gather(mine)
    return Timeline.of(
        [event for rank in ranks for event in rank[0]],
        schedule.num_stages,
        devices=[ranks[schedule.worker(stage)][1] for stage in range(schedule.num_stages)],
        conditions={name: "; ".join(dict.fromkeys(rank[2][name] for rank in ranks)) for name in ranks[0][2]},
        placement=schedule.placement,
    )
