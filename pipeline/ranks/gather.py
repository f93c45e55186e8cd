"""What all ranks of a pipeline find out together, outside of a step.

That is whether everybody builds the same, and what happened when.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import torch

from gpipe_bench.pipeline.clock import Clock, conditions
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.timeline import Event, Span, Timeline
from gpipe_bench.pipeline.ranks.connecting.introduction import machine_id
from gpipe_bench.pipeline.ranks.together import Together

_ROUND_TRIPS = 10


def check_equal(found: Sequence[object], who: str = "rank") -> None:
    """`ValueError`, on every rank alike, if what the ranks (or what `who` says) build is not the same."""
    for rank, other in enumerate(found):
        if rank == 0:
            first = other
        elif other != first:
            raise ValueError(
                f"{who} {rank} builds another pipeline than {who} 0: its layers, cuts, schedule or seed "
                "differ; give all ranks the same arguments"
            )


def gather_timeline(together: Together, clock: Clock, device: torch.device, schedule: Schedule) -> Timeline:
    """The latest step of all ranks on one time axis, that of rank 0's host."""
    offset_ns = _clock_offset_ns(together)
    sums = clock.collectives(offset_ns)
    mine = (clock.events(offset_ns), f"{socket.gethostname()} {device}", conditions(), sums)
    ranks: list[tuple[tuple[Event, ...], str, dict[str, str], tuple[Span, ...]]] = together.gather(mine)
    facts = {name: "; ".join(dict.fromkeys(rank[2][name] for rank in ranks)) for name in ranks[0][2]}
    events = [event for rank in ranks for event in rank[0]]
    devices = [ranks[schedule.worker(stage)][1] for stage in range(schedule.num_stages)]
    return Timeline.of(
        events,
        schedule.num_stages,
        devices=devices,
        conditions=facts,
        placement=schedule.placement,
        collectives=[span for rank in ranks for span in rank[3]],
    )


def _clock_offset_ns(together: Together) -> int:
    """What to add to this rank's clock to get rank 0's: the middle of the quickest of some round trips.

    Processes on one machine have one clock.
    """
    machines = together.gather(machine_id())
    quickest_ns, offset_ns = 1 << 62, 0
    for other, machine in enumerate(machines):
        if machine == machines[0] or together.rank not in (0, other):
            continue
        for _ in range(_ROUND_TRIPS):
            if together.rank == 0:
                together.receive(other)
                together.send(time.perf_counter_ns(), other)
                continue
            sent_ns = time.perf_counter_ns()
            together.send(sent_ns, 0)
            answer_ns = together.receive(0)
            back_ns = time.perf_counter_ns()
            if back_ns - sent_ns < quickest_ns:
                quickest_ns, offset_ns = back_ns - sent_ns, answer_ns - (sent_ns + back_ns) // 2
    return offset_ns
