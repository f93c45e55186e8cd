"""The ways of what every rank learns: the header of a step and its loss.

Only the rank of the first stage sees the mini-batch. A header is known before anything happens, so it passes
from rank to rank, in the order of their first stages, along connections that are there anyway. The loss
becomes known in the middle of a step, while the other ranks compute; a rank that had to pass it on could do
so only between two actions, so the rank of the last stage tells each other rank itself.

    one stage each    header 0 1 2 3    loss 3 to 0, 1 and 2
    in a V            header 0 1 2 3    loss 0 to 1, 2 and 3
"""

from __future__ import annotations

from gpipe_bench.pipeline.plan.schedule import Schedule


def header_chain(schedule: Schedule) -> tuple[int, ...]:
    """The ranks in the order in which they learn of a step."""
    return tuple(dict.fromkeys(map(schedule.worker, range(schedule.num_stages))))


def loss_source(schedule: Schedule) -> int:
    """The rank that has the loss and tells all others."""
    return schedule.worker(schedule.num_stages - 1)
