"""The rows of one schedule as a search asks for their memory: walked once without sizes, for hundreds of
cuts, grids and micro-batch sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter, le
from typing import NamedTuple

from gpipe_bench.pipeline.memory.stages.copies import shadowed
from gpipe_bench.pipeline.memory.stages.demands import Demand, Walk, demands
from gpipe_bench.pipeline.memory.stages.footprint import Footprint
from gpipe_bench.pipeline.memory.stages.peaks import Optimizer, StageMemory, memory_at, optimizer_state
from gpipe_bench.pipeline.memory.stages.rows.row import at_rest, summed
from gpipe_bench.pipeline.plan.remat import Choice, recomputes
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


_counts = attrgetter(*_Held._fields)


class Moment(NamedTuple):
    """An action of a worker with several stages, without sizes: what it finds, what the other stages hold,
    and which messages from one of them to another wait.
    """

    stage: int
    demand: Demand
    others: tuple[tuple[int, _Held], ...]
    waiting: tuple[tuple[int, Kind], ...]


class Rows:
    """Of a schedule without recomputation; receives are posted one ahead between workers."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ahead = 1 if schedule.num_workers > 1 else 0
        self.homes = [schedule.stages_of(worker) for worker in range(schedule.num_workers)]
        self.demands, self.moments = cache(self._demands), cache(self._moments)
        self.most_graphs = cache(self._most_graphs)

    def recomputed(self, remat: Sequence[Choice]) -> Schedule:
        """The whole schedule with R before each backward of what its stages recompute."""
        rows = [self._row(worker, [remat[stage] for stage in mine]) for worker, mine in enumerate(self.homes)]
        return replace(self.schedule, remat=tuple(remat), actions=tuple(rows))

    def _row(self, worker: int, remat: Sequence[Choice]) -> tuple[Action, ...]:
        count = self.schedule.num_microbatches
        again = dict(zip(self.homes[worker], remat, strict=True))
        row: list[Action] = []
        for action in self.schedule.actions[worker]:
            if action.kind in (Kind.B, Kind.I) and recomputes(again[action.stage], action.microbatch, count):
                row.append(Action(action.stage, Kind.R, action.microbatch))
            row.append(action)
        return tuple(row)

    def _demands(self, worker: int, remat: Choice) -> tuple[Demand, ...]:
        """What a worker's only stage finds."""
        return demands(self._row(worker, (remat,)), self.ahead)

    def _moments(self, worker: int, remat: tuple[Choice, ...]) -> tuple[Moment, ...]:
        """The different moments of one worker. A long row repeats itself: hundreds of actions find the same
        numbers of micro-batches as ones before.
        """
        row = self._row(worker, remat)
        walks = {
            stage: Walk([a for a in row if a.stage == stage], self.ahead) for stage in self.homes[worker]
        }
        waiting: list[tuple[int, Kind]] = []
        found: dict[tuple[object, ...], Moment] = {}
        for action in row:
            stage, forward = action.stage, action.kind is Kind.F
            moves = action.kind in (Kind.F, Kind.B, Kind.I)
            way = Kind.F if forward else Kind.B
            if moves and (stage, way) in waiting:
                waiting.remove((stage, way))
            others = tuple((o, _Held(*_counts(walk))) for o, walk in walks.items() if o != stage)
            demand = walks[stage].take(action)
            key = (stage, replace(demand, when=""), others, tuple(sorted(waiting)))
            if key not in found:
                found[key] = Moment(stage, demand, others, tuple(waiting))
            target = stage + 1 if forward else stage - 1
            if moves and target in walks:
                waiting.append((target, way))
        return tuple(found.values())

    def _most_graphs(self, worker: int) -> tuple[tuple[int, ...], ...]:
        """How many graphs of each of its stages a worker keeps at a time that recomputes nothing, without
        what another moment has at least as many of.
        """
        counts, found = dict.fromkeys(self.homes[worker], 0), set[tuple[int, ...]]()
        for action in self.schedule.actions[worker]:
            if action.kind is Kind.F:
                counts[action.stage] += 1
            elif action.kind is not Kind.W:
                found.add(tuple(counts.values()))  # before anything is let go there are most
                counts[action.stage] -= 1
        return tuple(
            one for one in found if not any(other != one and all(map(le, one, other)) for other in found)
        )

    def fullest(
        self,
        worker: int,
        remat: tuple[Choice, ...],
        held: Mapping[int, Footprint],
        rests: Mapping[int, Footprint],
        rule: Optimizer,
    ) -> StageMemory:
        """The fullest moment of a worker with several stages, whatever the others hold; `held` are its stages
        in the actions of a step, `rests` in the optimizer's step.
        """
        moments, count = self.moments(worker, remat), self.schedule.num_microbatches
        again = {moment.stage for moment in moments if moment.demand.recomputed}
        held, rests = (
            {stage: shadowed(each) if stage in again else each for stage, each in given.items()}
            for given in (held, rests)
        )
        states = {stage: optimizer_state(each, rule) for stage, each in rests.items()}

        def at(stages: Mapping[int, Footprint], stage: int, demand: Demand | None) -> StageMemory:
            return memory_at(stages[stage], demand, rule, states[stage], count, is_first=stage == 0)

        @cache
        def resting(stage: int, counts: _Held) -> StageMemory:
            return at_rest(held[stage], counts, states[stage], count, stage)

        fullest = summed([at(rests, stage, None) for stage in rests], shared=True)
        most, found = fullest.peak, None
        for moment in moments:
            now = at(held, moment.stage, moment.demand)
            others = [resting(*each) for each in moment.others]
            waiting = sum(
                held[target].input_bytes if kind is Kind.F else held[target].output_gradient_bytes
                for target, kind in moment.waiting
            )
            peak = now.peak + waiting + sum(each.peak for each in others)
            if peak > most:
                most, found = peak, (now, others, waiting)
        if found is None:
            return fullest
        now, others, waiting = found
        return summed([now, *others], transients=waiting)
