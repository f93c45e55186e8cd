"""The ways of what every rank learns: the header of a step and its loss.

Only the rank of the first stage sees the mini-batch. A header is known before anything happens, so it passes
from rank to rank, in the order of their first stages, along connections that are there anyway. The loss
becomes known in the middle of a step, while the other ranks compute; a rank that had to pass it on could do
so only between two actions, so the rank of the last stage tells each other rank itself. On accelerators,
where it is told when a step ends, it passes in the reverse order of the last stages, behind the gradients.

    one stage each    header 0 1 2 3    loss 3 to 0, 1 and 2    on accelerators 3 2 1 0
    in a V            header 0 1 2 3    loss 0 to 1, 2 and 3    on accelerators 0 1 2 3
"""

from __future__ import annotations

from typing import NamedTuple

from gpipe_bench.pipeline.plan.schedule import Schedule


class LossRoute(NamedTuple):
    """From whom a rank learns of the loss, None where it has it, and whom it tells."""

    source: int | None
    targets: tuple[int, ...]


def header_chain(schedule: Schedule) -> tuple[int, ...]:
    """The ranks in the order in which they learn of a step."""
    return tuple(dict.fromkeys(map(schedule.worker, range(schedule.num_stages))))


def loss_chain(schedule: Schedule) -> tuple[int, ...]:
    """The ranks in the order in which accelerators learn of the loss; it begins with the one that has it."""
    return tuple(dict.fromkeys(map(schedule.worker, reversed(range(schedule.num_stages)))))


def loss_route(schedule: Schedule, rank: int, *, accelerated: bool) -> LossRoute:
    """The part of `rank` in telling the loss."""
    chain = loss_chain(schedule)
    position = chain.index(rank)
    if accelerated:
        return LossRoute(chain[position - 1] if position else None, chain[position + 1 : position + 2])
    return LossRoute(chain[0], ()) if position else LossRoute(None, chain[1:])
