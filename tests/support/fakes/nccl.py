"""A pipeline's ranks in one process, over a network with NCCL's rules: `run` and the network it gives."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from fakes.nccl_backend import HostBackend, NcclBackend
from fakes.nccl_world import World
from gpipe_bench.pipeline.ranks.connect import Network

T = TypeVar("T")


class _Store:
    """The keys that the ranks of one pipeline share."""

    host, is_in_rank = 0, True

    def __init__(self, world: World, number: int, rank: int) -> None:
        self._world, self._rank = world, rank
        self._values: dict[str, bytes] = world.shared.setdefault(("store", number), {})

    def exchange(self, what: str, mine: str, *, rank: int, size: int, timeout_s: float) -> list[str]:
        self._values[f"{what} of {rank}"] = mine.encode()
        keys = [f"{what} of {other}" for other in range(size)]
        self._world.wait_until(self._rank, lambda: all(key in self._values for key in keys), what)
        return [self._values[key].decode() for key in keys]

    def set(self, key: str, value: str, limit_s: float = 1.0) -> None:
        self._values[key] = value.encode()

    def get(self, key: str, limit_s: float = 1.0) -> bytes | None:
        return self._values.get(key)

    def append(self, key: str, value: str) -> None:
        self._values[key] = self._values.get(key, b"") + value.encode()

    def set_first(self, key: str, value: str) -> bytes:
        return self._values.setdefault(key, value.encode())


class FakeNetwork(Network):
    """The ranks of a `World`, whose CPU stands for an accelerator each."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.gpu = f"GPU-{rank}"
        self._num_pipelines = 0

    def store(self, timeout_s: float) -> Any:
        self._num_pipelines += 1
        return _Store(self.world, self._num_pipelines, self.rank)

    def is_accelerated(self, device: torch.device) -> bool:
        return True

    def identity(self, device: torch.device) -> str:
        return self.gpu

    def synchronize(self, device: torch.device | None = None) -> None:
        """A wait for the whole device: for every kernel that this rank has given it."""
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

    def backend(self, store: Any, name: str, *, accelerated: bool, timeout_s: float) -> Any:
        name = f"{name} of pipeline {self._num_pipelines}"
        if accelerated:
            return NcclBackend(self.world, self.rank, name)
        return HostBackend(self.world, self.rank, name, timeout_s)

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


def run(size: int, function: Callable[[FakeNetwork], T], **options: Any) -> list[T]:
    """What `function` returns or raises on each of `size` ranks. `Deadlock` and `RuleBroken` are raised."""
    world = World(size, **options)
    return world.run(lambda rank: function(FakeNetwork(world, rank)))
