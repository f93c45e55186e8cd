"""Simulates a pipeline's ranks in one process, over a network with NCCL's rules (`run`).

Every rank is a thread. One thread runs at a time until it has to wait; then the next one that can continues.
If none can, simulated time passes, and waits with a limit end. If that changes nothing, it is a deadlock, and
all waits end.

NCCL's rules, as far as they matter to a pipeline:

- Two ranks get a communicator when the first message passes between them. The host stands still until both
  are there. It has one stream, so what it carries goes one after another, whatever the direction.
- Sends and receives are matched in the order in which they are given; there are no tags. A send is done when
  its receive is. Both must be of the same size.
- A kernel that waits occupies its device: who waits for the whole device waits for it.
- A wait holds up the device alone. After an abort it holds up nothing, and what was received is garbage.

A message is copied when it is waited for and no earlier, so that a tensor changed or freed too early changes
what arrives; and memory is overwritten when a receive is posted into it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _storage_Use_Count as use_count

from gpipe_bench.pipeline.ranks.connect import Network

T = TypeVar("T")
TYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}  # fmt: skip

# How long nothing may happen while some ranks still watch: more than any of them waits.
_PATIENCE_S = 200.0


class Deadlock(BaseException):
    """No rank can continue."""


class RuleBroken(BaseException):
    """An action that would hang real hardware or give wrong numbers."""


class Killed(BaseException):
    """The end of a rank that is killed, raised when all others have ended."""


@dataclass
class _Waiter:
    rank: int
    condition: Callable[[], bool]
    what: str
    deadline_s: float = math.inf
    error: BaseException | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class World:
    """`size` ranks and what they share."""

    def __init__(self, size: int) -> None:
        self.size, self.now_s = size, 0.0
        self.shared: dict[Any, Any] = {}  # by keys that the fakes agree on
        self.dead: set[int] = set()
        self._waiters: list[_Waiter] = []
        self._watches: list[tuple[int, Callable[[], bool], float, float]] = []
        self._limits: dict[int, tuple[float, Callable[[], bool]]] = {}
        self._last_s = 0.0  # when a rank last continued
        self._over: BaseException | None = None
        self._ended = threading.Event()

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Runs `function` on each rank; returns results or errors, raises `Deadlock` and `RuleBroken`."""
        found: list[Any] = [None] * self.size

        def begin(rank: int, waiter: _Waiter) -> None:
            waiter.go.acquire()
            try:
                found[rank] = function(rank)
            except BaseException as error:
                found[rank] = error
            self._hand_on()

        threads = []
        for rank in range(self.size):
            waiter = _Waiter(rank, lambda: True, "its turn")
            self._waiters.append(waiter)
            threads.append(threading.Thread(target=begin, args=(rank, waiter), daemon=True))
            threads[-1].start()
        self._hand_on()
        self._ended.wait()
        for thread in threads:
            thread.join()
        if self._over is not None:
            raise self._over
        return found

    def wait_until(self, rank: int, condition: Callable[[], bool], what: str) -> None:
        """Lets others run until `condition` holds; `TimeoutError` if the rank has a limit."""
        if condition():
            return
        if self._over is not None or self._ended.is_set():
            raise self._over or RuntimeError(f"rank {rank} waits for {what} after the end")
        limit_s, given_up = self._limits.get(rank, (math.inf, None))
        self._wait(_Waiter(rank, lambda: condition() or bool(given_up and given_up()), what, limit_s))
        if given_up is not None and not condition() and given_up():
            raise TimeoutError("given up")

    def break_rule(self, what: str) -> None:
        """Ends the simulation with `RuleBroken`."""
        self._over = self._over or RuleBroken(what)
        raise self._over

    def kill(self, rank: int) -> None:
        """Ends the calling rank without telling the others."""
        self.dead.add(rank)
        self._wait(_Waiter(rank, lambda: False, "nothing any more"))

    @contextmanager
    def limited(self, rank: int, limit_s: float, given_up: Callable[[], bool]) -> Iterator[None]:
        """Limits the rank's waits to `limit_s` altogether, or until they are given up."""
        self._limits[rank] = self.now_s + limit_s, given_up
        try:
            yield
        finally:
            del self._limits[rank]

    def sleep(self, rank: int, seconds: float) -> None:
        """Lets others run for some simulated seconds."""
        waiter = _Waiter(rank, lambda: False, f"{seconds:g} s", self.now_s + seconds)
        with suppress(TimeoutError):
            self._wait(waiter)

    def watch(self, rank: int, look: Callable[[], bool], interval_s: float) -> Callable[[], None]:
        """Calls `look` every `interval_s` until it is true; returns a function that ends this."""
        over = threading.Event()
        entry = (rank, lambda: over.is_set() or look(), interval_s, self.now_s + interval_s)
        self._watches.append(entry)
        return over.set

    def _wait(self, waiter: _Waiter) -> None:
        self._waiters.append(waiter)
        self._hand_on()
        waiter.go.acquire()
        if waiter.error is not None:
            raise waiter.error

    def _hand_on(self) -> None:
        """The calling thread ends or waits: another one continues."""
        while True:
            try:
                ready = [each for each in self._waiters if each.error is not None or each.condition()]
            except RuleBroken as error:
                ready = self._end_all(error)
            if ready:
                chosen = ready[0]
                self._waiters.remove(chosen)
                self._last_s = self.now_s
                chosen.go.release()
                return
            if not self._waiters:
                self._ended.set()
                return
            if {each.rank for each in self._waiters} <= self.dead:
                for each in self._waiters:
                    each.error = Killed()
            elif not self._let_time_pass():
                waits = "; ".join(f"rank {each.rank} waits for {each.what}" for each in self._waiters)
                self._end_all(Deadlock(waits))

    def _end_all(self, error: BaseException) -> list[_Waiter]:
        self._over = self._over or error
        for each in self._waiters:
            each.error = self._over
        return list(self._waiters)

    def _let_time_pass(self) -> bool:
        """Advances time until a rank looks or gives up; returns whether that may change anything."""
        deadlines = [each.deadline_s for each in self._waiters]
        looks = [next_s for rank, _, _, next_s in self._watches if rank not in self.dead]
        next_s = min(deadlines + looks)
        if next_s == math.inf or (next_s > self._last_s + _PATIENCE_S and min(deadlines) == math.inf):
            return False
        self.now_s = next_s
        watches, self._watches = self._watches, []
        for rank, look, interval_s, at_s in watches:
            if at_s > next_s or rank in self.dead:
                self._watches.append((rank, look, interval_s, at_s))
            elif not look():
                self._watches.append((rank, look, interval_s, at_s + interval_s))
        for each in self._waiters:
            if each.deadline_s <= next_s:
                each.error = TimeoutError(f"{each.what}: timed out")
        return True


class _Sent:
    """A message's memory, held by a weak reference."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage, self._offset = tensor.untyped_storage(), tensor.storage_offset()
        self._length, self._dtype = tensor.numel(), tensor.dtype
        self.num_bytes = tensor.numel() * tensor.element_size()

    def read(self) -> Tensor | None:
        """The bytes; None if they were freed."""
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
        """Delays the rank's next operations."""
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
        """Copies every message whose send and receive are both first in their queues."""
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
        """In torch this ends unsent messages: the host must have waited for the device, since waiting for a
        message does not block the host.
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
    """A message between hosts: matched by tag, and sent at once."""

    def __init__(self, backend: HostBackend, source: int, tag: int, place: Tensor | None) -> None:
        self._backend, self._key, self._place = backend, (source, tag), place

    def wait(self) -> bool:
        if self._place is not None:
            self._place.copy_(self._backend.take(*self._key))
        return True


class HostBackend:
    """One rank's end of `name` for messages between hosts, as with gloo; a wait blocks the host."""

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
        """All messages were sent at once."""


class _Store:
    """The keys that the ranks of one pipeline share."""

    host, is_in_rank = 0, True

    def __init__(self, world: World, number: int, rank: int, timeout_s: float) -> None:
        self._world, self.rank, self.ranks, self.timeout_s = world, rank, tuple(range(world.size)), timeout_s
        self._values: dict[str, bytes] = world.shared.setdefault(("store", number), {})

    def exchange(self, what: str, mine: str) -> list[str]:
        self._values[f"{what} of {self.rank}"] = mine.encode()
        keys = [f"{what} of {other}" for other in self.ranks]
        self._world.wait_until(self.rank, lambda: all(key in self._values for key in keys), what)
        return [self._values[key].decode() for key in keys]

    def failure(self, limit_s: float = 1.0) -> bytes | None:
        return self._values.get("failure")

    def set_failure(self, text: str) -> bytes:
        return self._values.setdefault("failure", text.encode())


class FakeNetwork(Network):
    """The network of a `World`'s ranks; the CPU stands for an accelerator each."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self._num_pipelines = 0

    def store(self, timeout_s: float) -> Any:
        self._num_pipelines += 1
        return _Store(self.world, self._num_pipelines, self.rank, timeout_s)

    def is_accelerated(self, device: torch.device) -> bool:
        return True

    def synchronize(self, device: torch.device | None = None) -> None:
        """Waits for the whole device: for every kernel that this rank has enqueued."""
        kernels = self.world.shared.setdefault(("kernels", self.rank), [])
        self.world.wait_until(
            self.rank,
            lambda: all(kernel.is_done() or kernel.is_aborted for kernel in kernels),
            "its whole device",
        )
        kernels.clear()

    def mark(self, device: torch.device) -> Any:
        """What was waited for is there when it is made: the thread is the device."""
        return SimpleNamespace(query=lambda: True)

    def backend(self, store: Any, name: str, *, accelerated: bool, sums: bool = False) -> Any:
        name = f"{name} of pipeline {self._num_pipelines}"
        if accelerated:
            return NcclBackend(self.world, self.rank, name)
        return HostBackend(self.world, self.rank, name, store.timeout_s)

    def bounded(
        self, device: torch.device, call: Callable[[], T], limit_s: float, given_up: Callable[[], bool]
    ) -> T:
        with self.world.limited(self.rank, limit_s, given_up):
            return call()

    def watch(self, look: Callable[[], bool], interval_s: float) -> Callable[[], None]:
        return self.world.watch(self.rank, look, interval_s)

    def now(self) -> float:
        return self.world.now_s

    def sleep(self, seconds: float) -> None:
        self.world.sleep(self.rank, seconds)


def run(size: int, function: Callable[[FakeNetwork], T]) -> list[T]:
    """Runs `function` on `size` ranks; returns results or errors, raises `Deadlock` and `RuleBroken`."""
    world = World(size)
    return world.run(lambda rank: function(FakeNetwork(world, rank)))
