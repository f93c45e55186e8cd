"""Messages from rank to rank: through shared memory to neighbours on this host, else through
torch.distributed.

The backends are torch.distributed's own, made directly on the process group's store. `dist.new_group` would
do the same, but names a group by how many the process has seen already, so that ranks with different pasts
wait for each other forever.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe_bench.pipeline.errors import PeerError
from gpipe_bench.pipeline.plan.schedule import Action
from gpipe_bench.pipeline.ranks.host import not_inherited
from gpipe_bench.pipeline.ranks.shared_memory import Arrival, Departure, Holders, Neighbour, wait_beside
from gpipe_bench.pipeline.ranks.store import Store, bounded

# What NCCL can name (`getNcclDataType`); a tensor of another type travels as bytes.
NCCL_TYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    }
)
# Thread blocks of a kernel that sends or receives. Each spins on a multiprocessor until its message has gone,
# and a rank may have one kernel in each direction to each neighbour at a time.
_MOST_CTAS = 4
# No message has this tag, so a receive of it can only time out.
_NEVER_SENT = 2**30


class Work(Protocol):
    """A message on its way: `wait` returns when the tensor may be used, on a GPU by what is enqueued
    afterwards.
    """

    def wait(self) -> object: ...


class Form(NamedTuple):
    """A tensor without its data, as it travels: dense, in the layout that its strides say."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        like = torch.empty_like(tensor, device="meta")  # dense also where the tensor is not
        return cls(tuple(tensor.shape), tuple(like.stride()), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        count = self.dtype.itemsize
        for length in self.shape:
            count *= length
        return count

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class Buffer(NamedTuple):
    """A tensor to receive into; `flat` is its memory as the network sees it."""

    tensor: Tensor
    flat: Tensor
    shared: Tensor | None  # the bytes, where a neighbour writes them
    holders: Holders  # of the memory: whether something made of an earlier message still lives in it


class Connection:
    """Messages of one kind between all ranks. Those of one direction and tag arrive in order.

    With `types`, those of the network, tensors of other types travel as bytes.
    """

    def __init__(
        self,
        backend: Any,
        channel: int,
        neighbours: dict[int, Neighbour],
        types: frozenset[torch.dtype] | None = None,
    ) -> None:
        self._backend, self._channel, self._neighbours = backend, channel, neighbours
        self._types = types

    @property
    def shared_bytes(self) -> int:
        """Of the buffers that neighbours write into, of all connections to them."""
        return sum(neighbour.buffer_bytes for neighbour in self._neighbours.values())

    def over_network(self) -> Connection:
        """The same without neighbours."""
        return Connection(self._backend, self._channel, {}, self._types)

    def buffer(self, form: Form, source: int, device: torch.device) -> Buffer:
        """Where to receive a tensor from rank `source`."""
        neighbour = self._neighbours.get(source)
        if neighbour is None or form.num_bytes == 0:
            tensor = form.empty(device)
            elements = flat(tensor)
            return Buffer(tensor, elements, None, Holders(tensor))
        try:
            shared = neighbour.empty(form.num_bytes)
        except RuntimeError as error:
            raise unreachable(None, source, error) from error
        memory = shared.view(form.dtype)
        tensor = memory.as_strided(form.shape, form.stride)
        return Buffer(tensor, memory, shared, Holders(tensor))

    def give_back(self, buffer: Buffer, source: int) -> None:
        """Allows the memory of a buffer from `source` to be used for another, once nothing lives in it."""
        if buffer.shared is not None:
            self._neighbours[source].give_back(buffer.shared)

    def receive(self, buffer: Buffer, source: int, tag: int, action: Action | None = None) -> Work:
        """Posts a receive, to be followed by `flush`; `action` is what an error will name."""
        try:
            if buffer.shared is not None:
                return self._neighbours[source].post(self._channel, tag, buffer.shared)
            return self._backend.recv([self._typed(buffer.flat)], source, tag)  # type: ignore[no-any-return]
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

    def send(self, tensor: Tensor, target: int, tag: int, action: Action | None = None) -> Work:
        """Starts to send a flat tensor, which must not change before the work is done."""
        neighbour = self._neighbours.get(target)
        try:
            if neighbour is not None:
                return neighbour.send(self._channel, tag, tensor)
            return self._backend.send([self._typed(tensor)], target, tag)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise unreachable(action, target, error) from error

    def _typed(self, tensor: Tensor) -> Tensor:
        if self._types is None or tensor.dtype in self._types:
            return tensor
        return tensor.view(-1).view(torch.uint8)

    def wait(self, work: Work, action: Action | None, peer: int) -> None:
        """Waits for a message from or to rank `peer`; `action` is what an error will name."""
        try:
            neighbours = self._neighbours.values()
            if not isinstance(work, Arrival | Departure) and any(each.is_busy for each in neighbours):
                wait_beside(work, neighbours)
            else:
                work.wait()
        except RuntimeError as error:
            raise unreachable(action, peer, error) from error

    def cut(self, *, beside: bool = False) -> None:
        """Makes every wait fail, here and on the other ranks; the connection cannot be used again.
        `beside`: by another thread than the one that uses it and may be waiting just now.
        """
        for neighbour in self._neighbours.values():
            neighbour.cut() if beside else neighbour.close()
        if self._backend.name() != "gloo":
            self._backend.abort()
            return
        # gloo closes all connections to other ranks when a wait for one of them times out; with those that
        # are closed already there is no wait.
        for peer in range(self._backend.size()):
            if peer != self._backend.rank():
                with contextlib.suppress(RuntimeError):
                    work = self._backend.recv([torch.empty(1)], peer, _NEVER_SENT)
                    work.wait(timedelta(milliseconds=1))

    def leave(self) -> None:
        """In a process that was forked: gives up what it must not hold, without a word to others."""
        for neighbour in self._neighbours.values():
            neighbour.leave()

    def close(self) -> None:
        """Ends the connection in good order, when everything sent is gone."""
        for neighbour in self._neighbours.values():
            neighbour.close()
        if self._backend.name() != "gloo":
            self._backend.shutdown()


def backend(store: Store, rank: int, size: int, *, name: str, accelerated: bool, timeout_s: float) -> Any:
    """gloo, or NCCL where `accelerated`, between all ranks of the store; all must call.

    `PeerError`, which cannot say of whom, if they are not all there in time.
    """
    keys, timeout = store.under(name), timedelta(seconds=timeout_s)

    def connect() -> Any:
        if not accelerated:
            return dist.ProcessGroupGloo(keys, rank, size, timeout)
        return dist.ProcessGroupNCCL(keys, rank, size, nccl_options(dist.ProcessGroupNCCL, timeout))

    try:
        with not_inherited():
            return bounded(connect, timeout_s + 1)  # its own timeout does not cover a store that is silent
    except (RuntimeError, TimeoutError) as error:
        cause = f"not all ranks connected within {timeout_s:g} s: {str(error).splitlines()[0]}"
        raise PeerError(None, None, cause, timed_out=True) from error


def nccl_options(nccl: Any, timeout: timedelta) -> Any:
    """Streams of high priority, and few thread blocks for a kernel, where this torch can say so."""
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = timeout
    config: Any = getattr(options, "config", None)
    if hasattr(config, "max_ctas"):
        config.max_ctas = _MOST_CTAS
    return options


def flat(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor in the order of its memory."""
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def unreachable(action: Action | None, peer: int, error: RuntimeError) -> PeerError:
    """What a connection's error means: the peer is gone, has not answered in time, or NCCL says why not."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if "NCCL" in lines[0]:
        # The first line names a place in torch's source, the last one the reason.
        what = f"is not reached by NCCL: {lines[-1]}"
        return PeerError(action, peer, what, timed_out="timed out" in lines[-1].lower())
    text = (
        lines[0].partition("] ")[2] or lines[0]
    )  # without the place in gloo's source, and without its advice
    text = text.partition(". This is typically")[0]
    if "timed out" in text.lower():
        return PeerError(action, peer, f"did not answer: {text}", timed_out=True)
    return PeerError(action, peer, f"disappeared: {text}", timed_out=False)
