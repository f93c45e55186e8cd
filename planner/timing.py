"""Timing on a device from the host: start together, stop when the work is done; how fast it copies, and what.

A GPU runs behind the host and another process may still be busy, so a clock that is read without waiting for
both times something else. What an earlier step left (gradients, garbage to collect) is cleared before the
clock starts, so that no step pays for the one before it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.stage.trees import flatten

COPIED_BYTES = 2**25
CPU = torch.device("cpu")


def settle() -> None:
    """Before steps are timed: what lives by now, torch itself for the most part, is no longer looked through
    when garbage is collected between samples, which takes a quarter of a second each time.
    """
    gc.collect()
    gc.freeze()


def time_step(
    step: Callable[[], object] | None,
    layers: Iterable[nn.Module],
    *,
    repeats: int = 1,
    device: torch.device = CPU,
) -> float:
    """Seconds of one training step of `layers`, the mean of `repeats` in a row. It leaves their gradients.

    All processes must call and begin together; where `step` is None, this one only waits, which takes 0 s.
    """
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    gc.collect()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    if step is None:
        return 0.0
    devices.synchronize(device)
    start_s = time.perf_counter()
    for _ in range(repeats):
        step()
    devices.synchronize(device)
    return (time.perf_counter() - start_s) / repeats


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy in memory, which is what a message between two processes of a host is."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samples = []
    for _ in range(6):
        devices.synchronize(device)
        start_s = time.perf_counter()
        target.copy_(source)
        devices.synchronize(device)
        samples.append(time.perf_counter() - start_s)
    return COPIED_BYTES / median(samples[1:])


def boundary_bytes(layers: Sequence[nn.Module], microbatch: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes between each layer and the next: of distinct tensors, and of those that have a gradient."""
    ahead, back = list[int](), list[int]()
    was_training = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.eval()  # must not move batch normalization's averages
        with torch.no_grad():
            for layer in layers[:-1]:
                microbatch = layer(microbatch)
                tensors = flatten(microbatch)[0]
                ahead.append(sum(t.nbytes for t in tensors))
                back.append(sum(t.nbytes for t in tensors if t.is_floating_point()))
    finally:
        for layer, training in zip(layers, was_training, strict=True):
            layer.train(training)
    return tuple(ahead), tuple(back)
