"""Backends with the rules of NCCL, and of gloo, between the ranks of one `World`.

What NCCL does, as far as a pipeline can tell:

- Two ranks get a communicator when the first message passes between them. The host stands still until both
  are there. It has one stream, so what it carries goes one after another, whatever the direction.
- Sends and receives are matched in the order in which they are given; there are no tags. A send is done when
  its receive is. Both must be of the same size.
- A kernel that waits occupies its device: who waits for the whole device waits for it.
- A wait holds up the device alone. After an abort it holds up nothing, and what was received is garbage.

Here the computation of a rank is its thread: what was enqueued before is done, and what a wait holds up is
the thread. A message moves when somebody waits for it and no earlier, so that whoever changes or frees it too
early changes what arrives; and memory is spoilt as soon as a receive is posted into it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch._C import _storage_Use_Count as use_count

from fakes.nccl_world import World

TYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}  # fmt: skip


class _Sent:
    """The memory of a message, without being a reason for it to stay."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage, self._offset = tensor.untyped_storage(), tensor.storage_offset()
        self._length, self._dtype = tensor.numel(), tensor.dtype
        self.num_bytes = tensor.numel() * tensor.element_size()

    def read(self) -> Tensor | None:
        """The bytes; None if nobody else holds them any more."""
        if use_count(self._storage._cdata) == 1:
            return None
        elements = torch.empty(0, dtype=self._dtype).set_(self._storage, self._offset, (self._length,))
        return elements.view(torch.uint8)


class _Kernel:
    """A send or a receive of one rank."""

    def __init__(self, pair: Pair, rank: int, sent: _Sent | None, place: Tensor | None) -> None:
        self._pair, self._rank, self.sent, self.place = pair, rank, sent, place
        self.done = False

    @property
    def num_bytes(self) -> int:
        if self.sent is not None:
            return self.sent.num_bytes
        assert self.place is not None
        return self.place.numel() * self.place.element_size()

    def wait(self) -> bool:
        """Holds up what the rank does next."""
        pair, rank = self._pair, self._rank
        pair.world.wait_until(rank, lambda: self.is_aborted or self.is_done(), f"a message over {pair}")
        return True

    @property
    def is_aborted(self) -> bool:
        return self._rank in self._pair.aborted

    def is_done(self) -> bool:
        self._pair.move()
        return self.done


class Pair:
    """The communicator of two ranks for one name."""

    def __init__(self, world: World, name: str, ranks: tuple[int, int]) -> None:
        self.world, self._name, self._ranks = world, name, ranks
        self.joined: set[int] = set()
        self.aborted: set[int] = set()
        self._queues: dict[int, deque[_Kernel]] = {rank: deque() for rank in ranks}

    def __str__(self) -> str:
        return f"{self._name!r} between ranks {self._ranks[0]} and {self._ranks[1]}"

    def join(self, rank: int) -> None:
        if rank not in self.joined:
            self.joined.add(rank)
            self.world.wait_until(rank, lambda: len(self.joined) == 2, f"the communicator {self}")

    def put(self, kernel: _Kernel, rank: int) -> _Kernel:
        self._queues[rank].append(kernel)
        self.world.shared.setdefault(("kernels", rank), []).append(kernel)
        return kernel

    def move(self) -> None:
        """Moves every message whose send and receive have come to the front."""
        one, other = self._queues.values()
        while one and other and not self.aborted:
            a, b = one[0], other[0]
            if (a.sent is None) == (b.sent is None):
                return  # two sends, or two receives: neither ends
            source, target = (a, b) if a.sent is not None else (b, a)
            if source.num_bytes != target.num_bytes:
                self.world.break_rule(
                    f"{source.num_bytes} bytes are sent and {target.num_bytes} expected over {self}"
                )
            assert source.sent is not None
            assert target.place is not None
            data = source.sent.read()
            if data is None:
                self.world.break_rule(f"a message over {self} was freed before it had left")
            target.place.data.view(-1).view(torch.uint8).copy_(data)
            a.done = b.done = True
            one.popleft()
            other.popleft()


class NcclBackend:
    """One rank's end of `name`."""

    def __init__(self, world: World, rank: int, name: str) -> None:
        self._world, self._rank, self._name = world, rank, name
        self._aborted = self._closed = False

    def name(self) -> str:
        return "nccl"

    def send(self, tensors: list[Tensor], target: int, tag: int) -> _Kernel:
        (tensor,) = tensors
        pair = self._joined(tensor, target)
        return pair.put(_Kernel(pair, self._rank, _Sent(tensor), None), self._rank)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Kernel:
        (tensor,) = tensors
        pair = self._joined(tensor, source)
        tensor.data.view(-1).view(torch.uint8).fill_(0xFF)  # NaN, -1, true
        return pair.put(_Kernel(pair, self._rank, None, tensor), self._rank)

    def abort(self) -> None:
        self._aborted = True
        for pair in self._pairs():
            pair.aborted.add(self._rank)

    def shutdown(self) -> None:
        """In torch this ends what has not left yet: the host must have waited for the device, since a wait
        for a message is no wait of the host's.
        """
        self._closed = True
        if not self._aborted and self._world.shared.get(("kernels", self._rank)):
            self._world.break_rule(f"{self._name!r} was shut down on rank {self._rank} with messages on it")

    def _pairs(self) -> list[Pair]:
        found = self._world.shared.setdefault(("pairs", self._name), {})
        return [pair for ranks, pair in found.items() if self._rank in ranks]

    def _joined(self, tensor: Tensor, peer: int) -> Pair:
        if tensor.dtype not in TYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if self._aborted or self._closed:
            raise RuntimeError(
                f"NCCL error in: somewhere.cpp:1\nLast error:\nNCCL communicator was aborted on rank "
                f"{self._rank}."
            )
        ranks = (min(self._rank, peer), max(self._rank, peer))
        pairs = self._world.shared.setdefault(("pairs", self._name), {})
        pair: Pair = pairs.setdefault(ranks, Pair(self._world, self._name, ranks))
        pair.join(self._rank)
        return pair


class _Letter:
    """A message between hosts: by tag, and gone at once."""

    def __init__(self, backend: HostBackend, source: int, tag: int, place: Tensor | None) -> None:
        self._backend, self._key, self._place = backend, (source, tag), place

    def wait(self) -> bool:
        if self._place is not None:
            self._place.copy_(self._backend.take(*self._key))
        return True


class HostBackend:
    """One rank's end of `name` over which hosts talk, as gloo does; a wait for it is the host's."""

    def __init__(self, world: World, rank: int, name: str, timeout_s: float) -> None:
        self._world, self._rank, self._name, self._timeout_s = world, rank, name, timeout_s

    def name(self) -> str:
        return "fake host"

    def _box(self, source: int, target: int, tag: int) -> deque[Tensor]:
        boxes: dict[Any, deque[Tensor]] = self._world.shared.setdefault(("boxes", self._name), {})
        return boxes.setdefault((source, target, tag), deque())

    def _closed(self) -> set[int]:
        closed: set[int] = self._world.shared.setdefault(("closed", self._name), set())
        return closed | self._world.dead

    def send(self, tensors: list[Tensor], target: int, tag: int) -> _Letter:
        self._box(self._rank, target, tag).append(tensors[0].clone())
        return _Letter(self, target, tag, None)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Letter:
        return _Letter(self, source, tag, tensors[0])

    def take(self, source: int, tag: int) -> Tensor:
        box = self._box(source, self._rank, tag)
        ends = {source, self._rank}
        try:
            with self._world.limited(self._rank, self._timeout_s, lambda: bool(ends & self._closed())):
                self._world.wait_until(self._rank, lambda: bool(box), f"a word of rank {source}")
        except TimeoutError as error:
            if ends & self._closed():
                raise RuntimeError("[host.cc:1] Connection closed by peer") from error
            raise RuntimeError(f"[host.cc:1] Timed out waiting {self._timeout_s:g} s") from error
        return box.popleft()

    def abort(self) -> None:
        self._world.shared.setdefault(("closed", self._name), set()).add(self._rank)

    def shutdown(self) -> None:
        """What was sent has left already."""
