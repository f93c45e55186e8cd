"""The ways of what every rank learns: the header of a step and its loss.

Only the rank of the first stage sees the mini-batch, and only that of the last stage the loss, so both pass
from rank to rank. Each follows the messages of its direction, whose connections are there anyway: a header
goes to the ranks in the order of their first stages, the loss in the reverse order of their last ones.

    one stage each    header 0 1 2 3    loss 3 2 1 0
    in a V            header 0 1 2 3    loss 0 1 2 3
"""

from __future__ import annotations

from gpipe_bench.pipeline.plan.schedule import Schedule


def header_chain(schedule: Schedule) -> tuple[int, ...]:
    """The ranks in the order in which they learn of a step."""
    return tuple(dict.fromkeys(map(schedule.worker, range(schedule.num_stages))))


def loss_chain(schedule: Schedule) -> tuple[int, ...]:
    """The ranks in the order in which they learn of the loss."""
    return tuple(dict.fromkeys(map(schedule.worker, reversed(range(schedule.num_stages)))))
