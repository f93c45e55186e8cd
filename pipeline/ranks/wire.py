"""Messages from rank to rank: through shared memory to neighbours on this host, else through
torch.distributed.

Outside of steps all ranks find out small things together, rarely (`ObjectCollectives`). torch's collectives
wait as long as the user's process group says, and cannot say for whom. Here each rank waits for every other
one by itself, so that an error names the one that is missing.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import PeerError
from ..plan.schedule import Action
from .shared_memory import Neighbour

# What NCCL can name (`getNcclDataType`); a tensor of another type travels as bytes.
NCCL_TYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    }
)
# That count between two looks: a process that somebody has stopped has not waited meanwhile.
_MOST_BETWEEN_LOOKS_S = 1.0
# No message has this tag, so a receive of it can only time out.
_NEVER_SENT = 2**30


class Transit(Protocol):
    """A message on its way: `wait` returns when the tensor may be used, on a GPU by what is enqueued
    afterwards.
    """

    def wait(self) -> object: ...


class TensorSpec(NamedTuple):
    """A tensor without its data, as it travels: dense, in the layout that its strides say."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        like = torch.empty_like(tensor, device="meta")  # dense also where the tensor is not
        return cls(tuple(tensor.shape), tuple(like.stride()), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class Buffer(NamedTuple):
    """A tensor to receive into; `flat` is its memory as the network sees it."""

    tensor: Tensor
    flat: Tensor
    shared: Tensor | None = None  # the bytes, where a neighbour writes them


class DeviceWaits:
    """The ranks that an accelerator waits for, in the order of its waits.

    The host goes on while its device waits, perhaps in vain. So an event (a mark) is recorded behind every
    wait that the device is given, and behind what it computes, and the thread that watches the rank looks for
    the first mark that the device has not reached. `now` is a clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._looked_s, self._waited_s = now, now(), 0.0
        self._mark: Callable[[], Any] | None = None
        self._marks: deque[_Mark] = deque()

    def begin(self, mark: Callable[[], Any]) -> None:
        """Watches an accelerator from now on; `mark` enqueues an event on it."""
        self._mark = mark

    @contextlib.contextmanager
    def waiting(self, action: Action | None, peer: int | None) -> Iterator[None]:
        """In the block the device is told to wait for rank `peer`, which is to take `action`."""
        if self._mark is None:
            yield
            return
        mark = _Mark(action, peer)
        self._marks.append(mark)  # before, because a host may wait too: for room in the device's queue
        yield
        mark.event = self._mark()

    def note(self) -> None:
        """Requires the device to finish its work so far in time, too."""
        with self.waiting(None, None):
            pass

    def overdue(self, limit_s: float) -> PeerError | None:
        """Returns an error if the device has not moved for `limit_s`. One thread calls it now and then."""
        now_s = self._now()
        elapsed_s, self._looked_s = min(now_s - self._looked_s, _MOST_BETWEEN_LOOKS_S), now_s
        marks = self._marks
        while marks and (event := marks[0].event) is not None and event.query():
            marks.popleft()
            self._waited_s = -elapsed_s
        if not marks:
            self._waited_s = 0.0
            return None
        self._waited_s += elapsed_s
        if self._waited_s <= limit_s:
            return None
        what = f"did not answer: a device has waited for {limit_s:g} s"
        return PeerError(marks[0].action, marks[0].peer, what, timed_out=True)


@dataclass(slots=True)
class _Mark:
    """Where the device waits for rank `peer`; `event` once the wait has been given to it."""

    action: Action | None
    peer: int | None
    event: Any = None


class Connection:
    """Messages of one kind between all ranks, which errors call `ranks`. Those of one direction and tag
    arrive in order.

    Messages to and from `neighbours` take this `channel` of their shared memory. With `types`, those of the
    network, tensors of other types travel as bytes; waits that hold up an accelerator alone are noted in
    `waits`.
    """

    def __init__(
        self,
        backend: Any,
        ranks: Sequence[int],
        neighbours: Mapping[int, Neighbour] | None = None,
        channel: int = 0,
        *,
        types: frozenset[torch.dtype] | None = None,
        waits: DeviceWaits | None = None,
    ) -> None:
        self.backend, self.ranks, self._neighbours, self._channel = backend, ranks, neighbours or {}, channel
        self._types, self._waits = types, waits

    @property
    def shared_bytes(self) -> int:
        """Size of the buffers that neighbours write into, over all connections to them."""
        return sum(neighbour.buffer_bytes for neighbour in self._neighbours.values())

    def buffer(self, tensor_spec: TensorSpec, source: int, device: torch.device) -> Buffer:
        """Where to receive a tensor from rank `source`."""
        neighbour = self._neighbours.get(source)
        num_bytes = math.prod(tensor_spec.shape) * tensor_spec.dtype.itemsize
        if neighbour is None or num_bytes == 0:
            tensor = tensor_spec.empty(device)
            return Buffer(tensor, flat(tensor))
        try:
            shared = neighbour.empty(num_bytes)
        except RuntimeError as error:
            raise unreachable(None, self.ranks[source], error) from error
        memory = shared.view(tensor_spec.dtype)
        return Buffer(memory.as_strided(tensor_spec.shape, tensor_spec.stride), memory, shared)

    def receive(self, buffer: Buffer, source: int, tag: int, action: Action | None = None) -> Transit:
        """Posts a receive, to be followed by `flush`; `action` is what an error will name."""
        try:
            if buffer.shared is not None:
                return self._neighbours[source].post(self._channel, tag, buffer.shared)
            return self.backend.recv([self._typed(buffer.flat)], source, tag)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise unreachable(action, self.ranks[source], error) from error

    def flush(self, source: int) -> None:
        """Makes posted receives known to rank `source`."""
        neighbour = self._neighbours.get(source)
        if neighbour is not None:
            try:
                neighbour.flush()
            except RuntimeError as error:
                raise unreachable(None, self.ranks[source], error) from error

    def send(self, tensor: Tensor, target: int, tag: int, action: Action | None = None) -> Transit:
        """Starts to send a flat tensor, which must not change before the work is done."""
        neighbour = self._neighbours.get(target)
        try:
            if neighbour is not None:
                return neighbour.send(self._channel, tag, tensor)
            return self.backend.send([self._typed(tensor)], target, tag)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise unreachable(action, self.ranks[target], error) from error

    def _typed(self, tensor: Tensor) -> Tensor:
        if self._types is None or tensor.dtype in self._types:
            return tensor
        return tensor.view(-1).view(torch.uint8)

    def wait(self, work: Transit, action: Action | None, peer: int) -> None:
        """Waits for a message from or to rank `peer`; `action` is what an error will name."""
        try:
            if self._waits is not None:
                with self._waits.waiting(action, self.ranks[peer]):
                    work.wait()
                return
            work.wait()
        except RuntimeError as error:
            raise unreachable(action, self.ranks[peer], error) from error

    def cut(self, *, beside: bool = False) -> None:
        """Makes every wait fail, here and on the other ranks; the connection cannot be used again.
        `beside`: by another thread than the one that uses it and may be waiting just now.
        """
        for neighbour in self._neighbours.values():
            neighbour.cut() if beside else neighbour.close()
        if self.backend is None:  # it was closed
            return
        if self.backend.name() != "gloo":
            self.backend.abort()
            return
        # gloo closes all connections to other ranks when a wait for one of them times out; with those that
        # are closed already there is no wait.
        for peer in range(self.backend.size()):
            if peer != self.backend.rank():
                with contextlib.suppress(RuntimeError):
                    work = self.backend.recv([torch.empty(1)], peer, _NEVER_SENT)
                    work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Ends the connection in good order, when everything sent is gone. Closing again does nothing."""
        for neighbour in self._neighbours.values():
            neighbour.close()
        if self.backend is None:
            return
        if self.backend.name() != "gloo":
            self.backend.shutdown()
            return
        self.backend = None


def flat(tensor: Tensor) -> Tensor:
    """Returns all elements of a dense tensor in memory order."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def unreachable(action: Action | None, peer: int, error: RuntimeError) -> PeerError:
    """Explains a connection's error: the peer is gone, has not answered in time, or NCCL gives a reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if "NCCL" in lines[0]:
        # The first line names a place in torch's source, the last one the reason.
        what = f"is not reached by NCCL: {lines[-1]}"
        return PeerError(action, peer, what, timed_out="timed out" in lines[-1].lower())
    text = cleaned(lines[0])
    if "timed out" in text.lower():
        return PeerError(action, peer, f"did not answer: {text}", timed_out=True)
    return PeerError(action, peer, f"disappeared: {text}")


def cleaned(line: str) -> str:
    """A line of gloo's without the place in its source, and without its advice."""
    return (line.partition("] ")[2] or line).partition(". This is typically")[0]


_LENGTH_TAG, _DATA_TAG, _NUMBER_TAG, _TENSOR_TAG = range(2**27, 2**27 + 4)
T = TypeVar("T")


class ObjectCollectives:
    """One rank's part in what all ranks of a connection do at the same time. Every method may raise
    `PeerError`.
    """

    def __init__(self, connection: Connection, rank: int) -> None:
        # Without neighbours' shared memory, whose messages move only while their sender waits for one.
        self._connection, self.rank, self.size = connection, rank, len(connection.ranks)

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
        if not like.numel():
            return torch.empty_like(like)
        tensor_spec = TensorSpec.of(torch.empty(like.shape, dtype=like.dtype, device="meta"))
        return self._receive(tensor_spec, source, _TENSOR_TAG).to(like.device)

    def _send(self, tensor: Tensor, target: int, tag: int) -> None:
        self._connection.wait(self._connection.send(tensor, target, tag), None, target)

    def _receive(self, tensor_spec: TensorSpec, source: int, tag: int) -> Tensor:
        buffer = self._connection.buffer(tensor_spec, source, torch.device("cpu"))
        self._connection.wait(self._connection.receive(buffer, source, tag), None, source)
        return buffer.tensor
