"""What connects the ranks of a pipeline: who they are, the keys they share, backends for messages, and time.

Everything that a transport asks of the world outside of its process is asked here, so that it can run in
another world: one that keeps the rules of an accelerator's network, but in one process, without a device and
without a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.ranks.failures.watching import watch_in_thread
from gpipe_bench.pipeline.ranks.store import Store, bounded
from gpipe_bench.pipeline.ranks.wire import backend

T = TypeVar("T")


class Network:
    """The processes of a process group of torch.distributed, seen from one of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def store(self) -> Store:
        """Keys for one more pipeline."""
        return Store(self._group)

    def is_accelerated(self, device: torch.device) -> bool:
        """Whether messages from and to the device are waited for by the device, behind the host."""
        return devices.is_accelerator(device)

    def identity(self, device: torch.device) -> str:
        """Equal on two ranks only if they use one piece of hardware."""
        return devices.identity(device)

    def synchronize(self, device: torch.device) -> None:
        """Waits until the device has done all it was given."""
        devices.synchronize(device)

    def backend(self, store: Store, name: str, *, accelerated: bool, timeout_s: float) -> Any:
        """Connects all ranks for messages of one kind; all must call."""
        return backend(store, self.rank, self.size, name=name, accelerated=accelerated, timeout_s=timeout_s)

    def bounded(
        self, device: torch.device, call: Callable[[], T], limit_s: float, given_up: Callable[[], bool]
    ) -> T:
        """What `call` returns or raises, in a thread for which `device` is the current one; `TimeoutError`
        if it does neither within `limit_s` or if it is `given_up`.
        """

        def on_device() -> T:
            with devices.on(device):
                return call()

        return bounded(on_device, limit_s, given_up)

    def watch(self, look: Callable[[], bool], interval_s: float) -> Callable[[], None]:
        """Calls `look` beside everything else, again and again until it is true or what this returns is
        called.
        """
        return watch_in_thread(look, interval_s)

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Lets the others go on."""
        time.sleep(seconds)


def network_of(group: dist.ProcessGroup | Network) -> Network:
    """The network of a process group; one that is given stays as it is."""
    return group if isinstance(group, Network) else Network(group)
