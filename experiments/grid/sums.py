"""What summing gradients over processes takes here: the link of replicas, as sums of two sizes tell it.

Replicas do not sum over what carries a pipeline's messages: those lie in memory that two processes map, sums
go through torch's collectives and are added up by the cores that compute.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from gpipe_bench.pipeline.plan.links import Link

SUM_BYTES = (2**16, 2**24)
"""A sum that is all latency, and one that is all bytes."""


def sums_s(repeats: int = 9) -> tuple[float, ...]:
    """Median seconds of a sum over all processes, of each of `SUM_BYTES`; all processes call."""
    return tuple(_sum_s(num_bytes, repeats) for num_bytes in SUM_BYTES)


def _sum_s(num_bytes: int, repeats: int) -> float:
    import torch
    from torch import distributed as dist

    numbers, found = torch.zeros(num_bytes // 4), []
    for _ in range(repeats):
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_reduce(numbers)
        found.append(time.perf_counter() - start_s)
    return median(found[2:])


def link_of(sums_s: Sequence[float], source: str) -> Link:
    """The link on which the ring of two takes as long as two sums did; both of its directions at a time."""
    (small, large), (short_s, long_s) = SUM_BYTES, sums_s
    per_byte_s = max(long_s - short_s, 1e-12) / (large - small)
    latency_s = max(short_s - small * per_byte_s, 0.0) / 2  # two hops
    return Link("sums of two processes", latency_s, 1 / per_byte_s, source=source)
