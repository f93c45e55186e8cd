"""What joins the processes of a pipeline: latency and bandwidth, measured between neighbours.

A replay is only as honest as its link. Between the GPUs of a machine it may be NVLink, a switch or the host's
memory, which differ by a factor of thirty, and nothing else says which.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.planner.timing import CPU

PINGS = 20
BULK_BYTES = 2**26  # of a transfer that measures the bandwidth: half a millisecond over NVLink
TRANSFERS = 5


def measured(device: torch.device) -> Link:
    """The slowest of the links between neighbouring ranks of the default group. All ranks must call."""
    latencies_s, bandwidths = [], []
    for rank in range(dist.get_world_size() - 1):
        pair = rank, rank + 1
        bandwidth(pair, BULK_BYTES, device)  # connects, and warms up
        latencies_s.append(latency_s(pair, device))
        bandwidths.append(median([bandwidth(pair, BULK_BYTES, device) for _ in range(TRANSFERS)]))
    each = ", ".join(f"{one / 1e9:.1f} GB/s" for one in bandwidths)
    return Link(
        "between neighbours", max(latencies_s), min(bandwidths),
        source=f"measured between neighbouring ranks over {dist.get_backend()}, one at a time: {each}",
    )  # fmt: skip


def bandwidth(pair: tuple[int, int], num_bytes: int, device: torch.device = CPU) -> float:
    """Bytes per second of one transfer between two ranks, the slower direction; all ranks must call."""
    bulk, answer = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (num_bytes, 4))
    found = []
    for source, target in (pair, pair[::-1]):
        dist.barrier()
        start_s = time.perf_counter()
        _pass(bulk, source, target)
        _pass(answer, target, source)  # says that it has arrived
        devices.synchronize(device)
        found.append(num_bytes / (time.perf_counter() - start_s) if dist.get_rank() in pair else torch.inf)
    slowest = torch.tensor(found)
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    return float(slowest.min())


def latency_s(pair: tuple[int, int], device: torch.device = CPU) -> float:
    """Seconds one way of a message of four bytes, the median of several round trips; all ranks must call."""
    ball = torch.zeros(4, dtype=torch.uint8, device=device)
    found = []
    for _ in range(PINGS):
        start_s = time.perf_counter()
        _pass(ball, *pair)
        _pass(ball, *pair[::-1])
        devices.synchronize(device)
        found.append((time.perf_counter() - start_s) / 2)
    latency = torch.tensor([median(found)])
    dist.broadcast(latency, src=pair[0])
    return float(latency)


def _pass(tensor: Tensor, source: int, target: int) -> None:
    if dist.get_rank() == source:
        dist.send(tensor, target)
    elif dist.get_rank() == target:
        dist.recv(tensor, source)
