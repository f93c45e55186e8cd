"""Who talks to whom, and over which connections: the messages of edges, the header of a step and its loss.

A connection takes what is sent between two ranks in one order, so activations and gradients have one each.
Where ranks have several stages, activations also go down the ranks and gradients up, which gets connections
of its own: over NCCL a rank that waits on a connection cannot send on it. Portals have a connection of their
own, so that none queues behind another message; between accelerators, where messages are told apart by their
order alone, each edge of a portal has one there and one back.

Only the rank of the first stage sees the mini-batch. A header is known before anything happens, so it passes
from rank to rank, in the order of their first stages, along connections that are there anyway. The loss
becomes known in the middle of a step, while the other ranks compute; a rank that had to pass it on could do
so only between two actions, so the rank of the last stage tells each other rank itself. On accelerators,
where it is told when a step ends, it passes in the reverse order of the last stages, behind the gradients.

    one stage each    header 0 1 2 3    loss 3 to 0, 1 and 2    on accelerators 3 2 1 0
    in a V            header 0 1 2 3    loss 0 to 1, 2 and 3    on accelerators 0 1 2 3
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gpipe_bench.pipeline.plan.edges import Direction, Edge, refuse_other_orders
from gpipe_bench.pipeline.plan.schedule import Schedule, channels

# Tensors of a message have tags of their own (`first_tag` + position).
MOST_TENSORS = 64
# Below the tags of what is no activation and no gradient.
MOST_MESSAGES = 2**28 // MOST_TENSORS

Way = tuple[bool, bool]
"""Whether gradients travel, or activations, and whether to a higher rank."""


def first_tag(direction: Direction, microbatch: int, num_microbatches: int) -> int:
    """The tag of the first tensor of a message."""
    number, back = direction
    return ((2 * number + back) * num_microbatches + microbatch) * MOST_TENSORS


def names_of_ways(schedule: Schedule) -> dict[Way, str]:
    """A name for each way that messages of the chain take."""
    names = {(False, True): "activations", (True, False): "gradients"}
    for source, target, back in channels(schedule):
        names.setdefault((back, target > source), "gradients up" if back else "activations down")
    return names


def refuse_edges(schedule: Schedule, portals: Sequence[Edge], *, accelerated: bool) -> None:
    """`ValueError` for more messages than there are tags, and for portals that processes cannot exchange."""
    num_edges = schedule.num_stages + len(portals)
    if 2 * num_edges * schedule.num_microbatches > MOST_MESSAGES:
        raise ValueError(
            f"{schedule.num_stages} stages and {len(portals)} portals between them with "
            f"{schedule.num_microbatches} micro-batches are more than {MOST_MESSAGES} messages a step; "
            "choose fewer micro-batches"
        )
    if accelerated:
        refuse_other_orders(schedule, portals)
    for edge in portals:
        between = schedule.worker(edge.source) != schedule.worker(edge.target)
        if between and len(edge.names) > MOST_TENSORS:
            raise ValueError(
                f"{len(edge.names)} portals lead from stage {edge.source} to stage {edge.target}; at most "
                f"{MOST_TENSORS} can"
            )


def peers(schedule: Schedule, rank: int, portals: Sequence[Edge] = ()) -> set[int]:
    """The ranks that `rank` exchanges messages with in a step, where hosts wait for them: tensors, the header
    and the loss.
    """
    pairs = {(source, target) for source, target, _ in channels(schedule)}
    pairs |= {(schedule.worker(edge.source), schedule.worker(edge.target)) for edge in portals}
    pairs |= set(pairwise(header_chain(schedule)))
    pairs |= {(loss_chain(schedule)[0], other) for other in loss_chain(schedule)}
    return {end for pair in pairs if rank in pair for end in pair} - {rank}


class Route(NamedTuple):
    """From whom a rank learns something, None where it has it, and whom it tells."""

    source: int | None
    targets: tuple[int, ...]


def header_chain(schedule: Schedule) -> tuple[int, ...]:
    """The ranks in the order in which they learn of a step."""
    return tuple(dict.fromkeys(map(schedule.worker, range(schedule.num_stages))))


def loss_chain(schedule: Schedule) -> tuple[int, ...]:
    """The ranks in the order in which accelerators learn of the loss; it begins with the one that has it."""
    return tuple(dict.fromkeys(map(schedule.worker, reversed(range(schedule.num_stages)))))


def header_route(schedule: Schedule, rank: int) -> Route:
    """The part of `rank` in passing on headers."""
    return _along(header_chain(schedule), rank)


def loss_route(schedule: Schedule, rank: int, *, accelerated: bool) -> Route:
    """The part of `rank` in telling the loss."""
    chain = loss_chain(schedule)
    if accelerated:
        return _along(chain, rank)
    return Route(None, chain[1:]) if rank == chain[0] else Route(chain[0], ())


def _along(chain: Sequence[int], rank: int) -> Route:
    position = chain.index(rank)
    return Route(chain[position - 1] if position else None, tuple(chain[position + 1 : position + 2]))
