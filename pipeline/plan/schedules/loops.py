"""Schedules of workers whose stages go round in a loop: interleaved and breadth-first.

With v stages each, a worker waits v times less for its first and its last micro-batch than with one stage of
the same layers: the bubble is (W - 1)(F + B) / v for W workers. The price is v times as many messages.
"""

from __future__ import annotations

from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, check_sizes
from gpipe_bench.pipeline.plan.schedules.placement import loop


def interleaved(num_workers: int, num_microbatches: int, stages_per_worker: int = 2) -> Schedule:
    """Megatron's interleaved 1F1B (arXiv 2104.04473, section 2.2): groups of micro-batches go through all
    stages of a worker before the next group comes.

    A group has as many micro-batches as there are workers, so that the first of a group is back when the last
    has left. Where M is no multiple, the first groups take what is over, one each or more.

    2 workers with stages 0 2 and 1 3, M = 3, which is one group:

        worker 0 | 0F0 0F1 0F2 2F0 2F1 2F2 .   2B0 2B0 .   2B1 2B1 .   2B2 2B2 0B0 0B0 0B1 0B1 0B2 0B2
        worker 1 | .   1F0 1F1 1F2 3F0 3B0 3B0 3F1 3B1 3B1 3F2 3B2 3B2 1B0 1B0 1B1 1B1 1B2 1B2
    """
    check_sizes(num_workers, num_microbatches, "never")
    placement = loop(num_workers, stages_per_worker)
    num_groups = max(1, num_microbatches // num_workers)
    size, over = divmod(num_microbatches, num_groups)
    turns, first = range(stages_per_worker), 0
    forwards: list[tuple[int, int]] = []  # (turn, micro-batch)
    backwards: list[tuple[int, int]] = []
    for group in range(num_groups):
        group_size = size + (group < over)
        microbatches = range(first, first + group_size)
        forwards += [(turn, m) for turn in turns for m in microbatches]
        backwards += [(turn, m) for turn in reversed(turns) for m in microbatches]
        first += group_size
    largest = size + (over > 0)
    rows = []
    for worker in range(num_workers):
        warm_up = 2 * (num_workers - 1 - worker) + (stages_per_worker - 1) * largest
        row = [_action(num_workers, worker, turn, Kind.F, m) for turn, m in forwards[:warm_up]]
        for position, (turn, m) in enumerate(backwards):
            for ahead, microbatch in forwards[warm_up + position : warm_up + position + 1]:
                row.append(_action(num_workers, worker, ahead, Kind.F, microbatch))
            row.append(_action(num_workers, worker, turn, Kind.B, m))
        rows.append(tuple(row))
    return Schedule("interleaved", len(placement), num_microbatches, "never", tuple(rows), placement)


def breadth_first(num_workers: int, num_microbatches: int, stages_per_worker: int = 2) -> Schedule:
    """Breadth-first (arXiv 2211.05953): all micro-batches through a worker's first stage, then all through
    its second, and back in reverse order. GPipe in a loop: the bubble of `interleaved`, the activations of
    GPipe; a stage's weights are wanted in two runs, which is what sharded parameters ask for.

    2 workers with stages 0 2 and 1 3, M = 2:

        worker 0 | 0F0 0F1 2F0 2F1 .   .   .   2B1 2B1 2B0 2B0 0B1 0B1 0B0 0B0
        worker 1 | .   1F0 1F1 3F0 3F1 3B1 3B1 3B0 3B0 1B1 1B1 1B0 1B0
    """
    check_sizes(num_workers, num_microbatches, "never")
    placement, turns = loop(num_workers, stages_per_worker), range(stages_per_worker)
    microbatches = range(num_microbatches)
    rows = []
    for worker in range(num_workers):
        there = [_action(num_workers, worker, turn, Kind.F, m) for turn in turns for m in microbatches]
        back = [Action(action.stage, Kind.B, action.microbatch) for action in reversed(there)]
        rows.append((*there, *back))
    return Schedule("breadth-first", len(placement), num_microbatches, "never", tuple(rows), placement)


def _action(num_workers: int, worker: int, turn: int, kind: Kind, microbatch: int) -> Action:
    return Action(turn * num_workers + worker, kind, microbatch)
