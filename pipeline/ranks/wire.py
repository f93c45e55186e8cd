"""Messages from rank to rank: through shared memory to neighbours on this host, else through
torch.distributed.

The backends are torch.distributed's own, made directly on the process group's store. `dist.new_group` would
do the same, but names a group by how many the process has seen already, so that ranks with different pasts
wait for each other forever.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from ..errors import PeerError
from ..plan.schedule import Action
from .shared_memory import Holders, Neighbour
from .store import Store, bounded

# What NCCL can name (`getNcclDataType`); a tensor of another type travels as bytes.
NCCL_TYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    }
)
# Thread blocks of a kernel that sends or receives. Each spins on a multiprocessor until its message has gone,
# and a rank may have one kernel in each direction to each neighbour at a time. Sums take what they like.
_MOST_CTAS = 4
# When torch's own watchdog gives up, it ends the process a minute later, without an exception; so it is not
# to, and `DeviceWaits` does. It also ends it when NCCL has an error, unless this says 0 while a backend is
# made.
_NEVER = timedelta(days=1000)
_ENDS_PROCESSES = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
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
    shared: Tensor | None  # the bytes, where a neighbour writes them
    holders: Holders  # of the memory: whether something made of an earlier message still lives in it


class DeviceWaits:
    """The ranks that an accelerator waits for, in the order of its waits.

    The host goes on while its device waits, and would not know that the device waits in vain. So an event (a
    mark) is recorded behind every wait that the device is given, and behind what it computes. The thread that
    watches the rank looks for the first mark that the device has not reached. `now` is a clock in seconds.
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


class _Mark:
    """Where the device waits for rank `peer`; `event` once the wait has been given to it."""

    __slots__ = ("action", "event", "peer")

    def __init__(self, action: Action | None, peer: int | None) -> None:
        self.action, self.peer, self.event = action, peer, None


class Connection:
    """Messages of one kind between all ranks. Those of one direction and tag arrive in order.

    With `types`, those of the network, tensors of other types travel as bytes; `waits` is where a wait that
    holds up an accelerator alone is noted.
    """

    def __init__(
        self,
        backend: Any,
        channel: int,
        neighbours: dict[int, Neighbour],
        types: frozenset[torch.dtype] | None = None,
        waits: DeviceWaits | None = None,
    ) -> None:
        self.backend, self._channel, self._neighbours = backend, channel, neighbours
        self._types, self._waits = types, waits
        self._bare: Connection | None = None

    @property
    def shared_bytes(self) -> int:
        """Size of the buffers that neighbours write into, over all connections to them."""
        return sum(neighbour.buffer_bytes for neighbour in self._neighbours.values())

    def over_network(self) -> Connection:
        """Returns the same connection without neighbours: everything goes over the network."""
        self._bare = Connection(self.backend, self._channel, {}, self._types)
        return self._bare

    def buffer(self, tensor_spec: TensorSpec, source: int, device: torch.device) -> Buffer:
        """Where to receive a tensor from rank `source`."""
        neighbour = self._neighbours.get(source)
        if neighbour is None or tensor_spec.num_bytes == 0:
            tensor = tensor_spec.empty(device)
            elements = flat(tensor)
            return Buffer(tensor, elements, None, Holders(tensor))
        try:
            shared = neighbour.empty(tensor_spec.num_bytes)
        except RuntimeError as error:
            raise unreachable(None, source, error) from error
        memory = shared.view(tensor_spec.dtype)
        tensor = memory.as_strided(tensor_spec.shape, tensor_spec.stride)
        return Buffer(tensor, memory, shared, Holders(tensor))

    def give_back(self, buffer: Buffer, source: int) -> None:
        """Allows the memory of a buffer from `source` to be used for another, once nothing lives in it."""
        if buffer.shared is not None:
            self._neighbours[source].give_back(buffer.shared)

    def receive(self, buffer: Buffer, source: int, tag: int, action: Action | None = None) -> Transit:
        """Posts a receive, to be followed by `flush`; `action` is what an error will name."""
        try:
            if buffer.shared is not None:
                return self._neighbours[source].post(self._channel, tag, buffer.shared)
            return self.backend.recv([self._typed(buffer.flat)], source, tag)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise unreachable(action, source, error) from error

    def flush(self, source: int) -> None:
        """Makes posted receives known to rank `source`."""
        neighbour = self._neighbours.get(source)
        if neighbour is not None:
            try:
                neighbour.flush()
            except RuntimeError as error:
                raise unreachable(None, source, error) from error

    def send(self, tensor: Tensor, target: int, tag: int, action: Action | None = None) -> Transit:
        """Starts to send a flat tensor, which must not change before the work is done."""
        neighbour = self._neighbours.get(target)
        try:
            if neighbour is not None:
                return neighbour.send(self._channel, tag, tensor)
            return self.backend.send([self._typed(tensor)], target, tag)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise unreachable(action, target, error) from error

    def _typed(self, tensor: Tensor) -> Tensor:
        if self._types is None or tensor.dtype in self._types:
            return tensor
        return tensor.view(-1).view(torch.uint8)

    def wait(self, work: Transit, action: Action | None, peer: int) -> None:
        """Waits for a message from or to rank `peer`; `action` is what an error will name."""
        try:
            if self._waits is not None:
                with self._waits.waiting(action, peer):
                    work.wait()
                return
            work.wait()
        except RuntimeError as error:
            raise unreachable(action, peer, error) from error

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
        """Ends the connection in good order, when everything sent is gone. With gloo, whose threads and
        sockets end then, it takes 10 ms for each rank. Closing again does nothing.
        """
        for neighbour in self._neighbours.values():
            neighbour.close()
        if self.backend is None:
            return
        if self.backend.name() != "gloo":
            self.backend.shutdown()
            return
        self.backend = None
        if self._bare is not None:
            self._bare.backend = None


def backend(
    store: Store,
    rank: int,
    size: int,
    *,
    name: str,
    accelerated: bool,
    timeout_s: float,
    sums: bool = False,
) -> Any:
    """gloo, or NCCL where `accelerated`, between all ranks of the store; all must call. `sums`: it is for
    collectives, not for messages. Waits in gloo end after the timeout, those of a device are `DeviceWaits`.

    `PeerError`, which cannot say of whom, if they are not all there in time or one of them has failed.
    """
    keys = store.under(name)

    def connect() -> Any:
        if not accelerated:
            return dist.ProcessGroupGloo(keys, rank, size, timedelta(seconds=timeout_s))
        before = os.environ.get(_ENDS_PROCESSES)
        os.environ[_ENDS_PROCESSES] = "0"
        try:
            return dist.ProcessGroupNCCL(keys, rank, size, nccl_options(dist.ProcessGroupNCCL, sums=sums))
        finally:
            del os.environ[_ENDS_PROCESSES]
            if before is not None:
                os.environ[_ENDS_PROCESSES] = before

    try:
        # Its own timeout does not cover a store that is silent.
        return bounded(connect, timeout_s + 1, store.has_failed)
    except (RuntimeError, TimeoutError) as error:
        store.give_up()
        cause = f"not all ranks connected within {timeout_s:g} s: {str(error).splitlines()[0]}"
        raise PeerError(None, None, cause, timed_out=True) from error


def nccl_options(nccl: Any, *, sums: bool) -> Any:
    """Streams of high priority, and few thread blocks for messages, where this torch can say so."""
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = _NEVER
    config: Any = getattr(options, "config", None)
    if not sums and hasattr(config, "max_ctas"):
        config.max_ctas = _MOST_CTAS
    return options


def bound_waits(group: Any, timeout_s: float) -> None:
    """Sets the timeout of a process group that the pipeline did not make, if its host waits. With NCCL the
    device waits, torch's watchdog would end the process, and `DeviceWaits` bounds the waits instead.
    """
    group.set_timeout(_NEVER if group.name() == "nccl" else timedelta(seconds=timeout_s))


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
    return PeerError(action, peer, f"disappeared: {text}", timed_out=False)


def cleaned(line: str) -> str:
    """A line of gloo's without the place in its source, and without its advice."""
    return (line.partition("] ")[2] or line).partition(". This is typically")[0]
