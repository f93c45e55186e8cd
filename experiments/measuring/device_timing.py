"""Timing on a device from the host: start together, stop when the work is done; and how fast it copies.

A GPU runs behind the host and another process may still be busy, so a clock that is read without waiting for
both times something else.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import distributed as dist

COPIED_BYTES = 2**25


def barrier() -> None:
    """Waits for the other processes, where there are any."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def synchronize(device: torch.device) -> None:
    """Waits for what was enqueued on a GPU; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy in memory, which is what a message between two processes of a host is."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samples = []
    for _ in range(6):
        synchronize(device)
        start_s = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        samples.append(time.perf_counter() - start_s)
    return COPIED_BYTES / median(samples[1:])
