"""Which ways the messages of a schedule take between ranks, and who waits at their ends.

A connection takes what is sent between two ranks in one order, so activations and gradients have one each.
Where ranks have several stages, activations also go down the ranks and gradients up, which gets connections
of its own: over NCCL a rank that waits on a connection cannot send on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from gpipe_bench.pipeline.plan.edges import Edge, rings_of, turns
from gpipe_bench.pipeline.plan.schedule import Schedule, channels
from gpipe_bench.pipeline.ranks.messages.agreement import MOST_MESSAGES, first_tag
from gpipe_bench.pipeline.ranks.messages.connection import Connection
from gpipe_bench.pipeline.ranks.messages.gate import Gate
from gpipe_bench.pipeline.ranks.messages.receiving import Receiver, Turns
from gpipe_bench.pipeline.ranks.messages.sending import Sender
from gpipe_bench.pipeline.ranks.routes import header_chain, loss_route

Way = tuple[bool, bool]
"""Whether gradients travel, or activations, and whether to a higher rank."""


def names_of_ways(schedule: Schedule) -> dict[Way, str]:
    """A name for each way that messages take. `ValueError` for more messages than there are tags."""
    if schedule.num_stages * schedule.num_microbatches > MOST_MESSAGES:
        raise ValueError(
            f"{schedule.num_stages} stages with {schedule.num_microbatches} micro-batches are more than "
            f"{MOST_MESSAGES} messages a step; choose fewer micro-batches"
        )
    names = {(False, True): "activations", (True, False): "gradients"}
    for source, target, gradients in channels(schedule):
        names.setdefault((gradients, target > source), "gradients up" if gradients else "activations down")
    return names


def peers(schedule: Schedule, rank: int) -> set[int]:
    """The ranks that `rank` exchanges messages with in a step, where hosts wait for them: tensors, the header
    and the loss.
    """
    pairs = {(source, target) for source, target, _ in channels(schedule)}
    pairs |= set(pairwise(header_chain(schedule)))
    pairs |= {(rank, target) for target in loss_route(schedule, rank, accelerated=False).targets}
    source = loss_route(schedule, rank, accelerated=False).source
    if source is not None:
        pairs.add((source, rank))
    return {end for pair in pairs if rank in pair for end in pair} - {rank}


def senders(schedule: Schedule, rank: int, ways: Mapping[Way, Connection]) -> dict[tuple[int, bool], Sender]:
    """One for each rank that `rank` sends to and for gradients or not."""
    return {
        (target, gradients): Sender(ways[gradients, target > rank], target)
        for source, target, gradients in channels(schedule)
        if source == rank
    }


def receivers(
    schedule: Schedule,
    rank: int,
    ways: Mapping[Way, Connection],
    device: torch.device,
    *,
    gradients: bool,
    gate: Gate | None = None,
    portals: Sequence[Edge] = (),
) -> tuple[dict[int, Receiver], list[Turns]]:
    """One for each stage of `rank` that receives from another rank, by stage, and the turns that those take
    which receive from one rank. With a `gate`, on accelerators, no receive is posted before its time.
    """
    found: dict[int, Receiver] = {}
    shared: list[Turns] = []
    rings = rings_of(schedule, portals if gate else (), accelerated=gate is not None)
    for source, target, backward in channels(schedule):
        if target != rank or backward is not gradients:
            continue
        order = [stage for stage, _ in turns(schedule, rank, source, back=gradients)]
        stages = tuple(dict.fromkeys(order))
        in_turn = Turns(order) if len(stages) > 1 else None
        for stage in stages:
            found[stage] = Receiver(
                ways[gradients, rank > source],
                source,
                rings[stage if gradients else stage - 1, gradients],
                device,
                tags=[first_tag(stage, m, schedule.num_stages) for m in range(schedule.num_microbatches)],
                turns=in_turn,
                gate=gate,
            )
            if in_turn is not None:
                in_turn.receivers[stage] = found[stage]
        if in_turn is not None:
            shared.append(in_turn)
    return found, shared
