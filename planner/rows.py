"""The rows of one schedule as a search asks for their memory: walked once without sizes, for hundreds of
cuts, grids and micro-batch sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from operator import le

from gpipe_bench.pipeline.memory.counts import Moment, row_moments, steps
from gpipe_bench.pipeline.plan.remat import Choice, recomputes
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule


class Rows:
    """Of a schedule without recomputation; receives are posted one ahead between workers."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ahead = 1 if schedule.num_workers > 1 else 0
        self.homes = [schedule.stages_of(worker) for worker in range(schedule.num_workers)]
        self.moments, self.most_graphs = cache(self._moments), cache(self._most_graphs)

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

    def _moments(self, worker: int, remat: tuple[Choice, ...]) -> tuple[Moment, ...]:
        """The different moments of one worker. A long row repeats itself: hundreds of actions find the same
        numbers of micro-batches as ones before.
        """
        row = self._row(worker, remat)
        if len(remat) == 1:
            return tuple(Moment(self.homes[worker][0], step, (), ()) for step in steps(row, self.ahead))
        found: dict[Moment, Moment] = {}
        for _, moment in row_moments(row, self.ahead):
            found.setdefault(moment._replace(step=moment.step._replace(when="")), moment)
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
