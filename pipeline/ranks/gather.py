"""What all ranks of a pipeline find out together, outside of a step: is everybody building the same, and what
happened when.
"""

from __future__ import annotations

import socket
import time
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from gpipe_bench.pipeline.clock import Clock, conditions
from gpipe_bench.pipeline.plan.timeline import Event, Timeline
from gpipe_bench.pipeline.ranks.introduction import machine_id

_ROUND_TRIPS = 10
T = TypeVar("T")


def check_equal(group: dist.ProcessGroup, facts: object) -> None:
    """`ValueError` on every rank if `facts` is not the same everywhere."""
    for rank, other in enumerate(_everywhere(group, facts)):
        if rank == 0:
            first = other
        elif other != first:
            raise ValueError(
                f"rank {rank} builds another pipeline than rank 0: its layers, cuts, schedule or seed "
                "differ; give all "
                f"ranks the same arguments"
            )


def concatenate(group: dist.ProcessGroup, vector: Tensor) -> Tensor:
    """The vectors of all ranks, one after the other, on every rank."""
    lengths = _everywhere(group, len(vector))
    whole = vector.new_zeros(sum(lengths))
    start = sum(lengths[: dist.get_rank(group)])
    whole[start : start + len(vector)] = vector
    dist.all_reduce(whole, group=group)  # adds zeros, which changes no bit
    return whole


def gather_timeline(group: dist.ProcessGroup, clock: Clock, device: torch.device) -> Timeline:
    """The latest step of all ranks on one time axis, that of rank 0's host."""
    offset_ns = _clock_offset_ns(group, device)
    mine = (clock.events(offset_ns), f"{socket.gethostname()} {device}", conditions())
    ranks: list[tuple[tuple[Event, ...], str, dict[str, str]]] = _everywhere(group, mine)
    facts = {name: "; ".join(dict.fromkeys(rank[2][name] for rank in ranks)) for name in ranks[0][2]}
    events = [event for rank in ranks for event in rank[0]]
    return Timeline.of(events, len(ranks), devices=[rank[1] for rank in ranks], conditions=facts)


def _everywhere(group: dist.ProcessGroup, mine: T) -> list[T]:
    found: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found  # type: ignore[return-value]


def _clock_offset_ns(group: dist.ProcessGroup, device: torch.device) -> int:
    """What to add to this rank's clock to get rank 0's: the middle of the quickest of some round trips.

    Processes on one machine have one clock.
    """
    machines = _everywhere(group, machine_id())
    rank = dist.get_rank(group)
    stamp = torch.zeros(1, dtype=torch.int64, device=device)
    quickest_ns, offset_ns = 1 << 62, 0
    for other, machine in enumerate(machines):
        if machine == machines[0] or rank not in (0, other):
            continue
        for _ in range(_ROUND_TRIPS):
            if rank == 0:
                dist.recv(stamp, group=group, group_src=other)
                stamp.fill_(time.perf_counter_ns())
                dist.send(stamp, group=group, group_dst=other)
                continue
            sent_ns = time.perf_counter_ns()
            dist.send(stamp, group=group, group_dst=0)
            dist.recv(stamp, group=group, group_src=0)
            answer_ns, back_ns = int(stamp), time.perf_counter_ns()
            if back_ns - sent_ns < quickest_ns:
                quickest_ns, offset_ns = back_ns - sent_ns, answer_ns - (sent_ns + back_ns) // 2
    return offset_ns
