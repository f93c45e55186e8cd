"""Workers with several stages as a search asks for them: walked once without sizes, for hundreds of cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpipe_bench.pipeline.memory.stages.copies import shadowed
from gpipe_bench.pipeline.memory.stages.demands import Demand, Walk
from gpipe_bench.pipeline.memory.stages.footprint import Footprint
from gpipe_bench.pipeline.memory.stages.peaks import StageMemory, memory_at, optimizer_state, rule_of
from gpipe_bench.pipeline.memory.stages.rows.row import at_rest, summed
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule


class _Held(NamedTuple):
    """`row.Held` of one moment."""

    whole: int
    graphs: int
    halves: int
    inputs_ahead: int
    gradients_ahead: int
    after_first_backward: bool
    after_first_inputs: bool
    unrecomputed: int
    again_graphs: int
    again_halves: int
    stays: bool


class WorkerMoment(NamedTuple):
    """An action of a worker with several stages, without sizes: what it finds, what the other stages hold,
    and which messages from one of them to another wait.
    """

    stage: int
    demand: Demand
    others: tuple[tuple[int, _Held], ...]
    waiting: tuple[tuple[int, Kind], ...]


def worker_moments(
    schedule: Schedule, number: int, row: Sequence[Action], receive_ahead: int
) -> tuple[WorkerMoment, ...]:
    """The different moments of one worker, whose receives are posted ahead, when it takes `row`.

    A long row repeats itself: hundreds of actions find the same numbers of micro-batches as ones before.
    """
    mine = schedule.stages_of(number)
    walks = {stage: Walk([a for a in row if a.stage == stage], receive_ahead) for stage in mine}
    waiting: list[tuple[int, Kind]] = []
    found: dict[tuple[object, ...], WorkerMoment] = {}
    for action in row:
        stage, kind = action.stage, action.kind
        forward = kind is Kind.F
        moves = forward or kind is Kind.B or kind is Kind.I
        way = Kind.F if forward else Kind.B
        if moves and (stage, way) in waiting:
            waiting.remove((stage, way))
        others = tuple([(other, _counts(walk)) for other, walk in walks.items() if other != stage])
        demand = walks[stage].take(action)
        key = (stage, replace(demand, when=""), others, tuple(sorted(waiting)))
        if key not in found:
            found[key] = WorkerMoment(stage, demand, others, tuple(waiting))
        target = stage + 1 if forward else stage - 1
        if moves and target in walks:
            waiting.append((target, way))
    return tuple(found.values())


def _counts(walk: Walk) -> _Held:
    return _Held(
        walk.whole, walk.graphs, walk.halves, walk.inputs_ahead, walk.gradients_ahead,
        walk.after_first_backward, walk.after_first_inputs, walk.unrecomputed, walk.again_graphs,
        walk.again_halves, walk.stays,
    )  # fmt: skip


def worker_memory(
    moments: Sequence[WorkerMoment],
    held: Mapping[int, Footprint],
    rests: Mapping[int, Footprint],
    num_microbatches: int,
    optimizer: str,
) -> StageMemory:
    """The fullest moment of one worker, whatever the others hold.

    A search asks this of a worker whose other workers are not cut yet, for hundreds of cuts.

    Args:
        moments: of the worker, as `worker_moments` finds them.
        held: its stages by their numbers, in the actions of a step.
        rests: the same in the optimizer's step.
        num_microbatches: M.
        optimizer: "sgd", "rmsprop" or "adam".
    """
    rule = rule_of(optimizer)
    again = {moment.stage for moment in moments if moment.demand.recomputed}
    held, rests = (
        {stage: shadowed(each) if stage in again else each for stage, each in given.items()}
        for given in (held, rests)
    )
    states = {stage: optimizer_state(each, rule) for stage, each in rests.items()}
    fullest = summed(
        [
            memory_at(each, None, rule, states[stage], num_microbatches, is_first=stage == 0)
            for stage, each in rests.items()
        ],
        shared=True,
    )
    most = fullest.peak
    at: tuple[StageMemory, list[StageMemory], int] | None = None
    known: dict[tuple[int, _Held], StageMemory] = {}
    for moment in moments:
        stage = moment.stage
        now = memory_at(
            held[stage], moment.demand, rule, states[stage], num_microbatches, is_first=stage == 0
        )
        others = []
        for other, counts in moment.others:
            if (other, counts) not in known:
                known[other, counts] = at_rest(held[other], counts, states[other], num_microbatches, other)
            others.append(known[other, counts])
        waiting = sum(
            [
                held[target].input_bytes if kind is Kind.F else held[target].output_gradient_bytes
                for target, kind in moment.waiting
            ]
        )
        peak = now.peak + waiting + sum([each.peak for each in others])
        if peak > most:
            most, at = peak, (now, others, waiting)
    if at is not None:
        now, others, waiting = at
        return summed([now, *others], transients=waiting)
    return fullest
