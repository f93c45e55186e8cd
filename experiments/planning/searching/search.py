"""The best ways to train: every grid, schedule and number of micro-batches, each with the best cut for it.

A way has a bound from below that needs no cut: its work divided evenly, and a pipeline that has to be filled.
Ways are taken in the order of their bounds, and the search ends where a bound is above the last of the steps
that are kept; what is left cannot be among them. Of each grid and schedule the best number of micro-batches
is kept, or the answer would be one way with many of them.

Steps are those of `pipeline.plan.cutting`; whoever wants ranges, parts and jitter predicts the few that are
found (`predict`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from gpipe_bench.experiments.planning.candidate import Candidate
from gpipe_bench.experiments.planning.costs.costs import Costs
from gpipe_bench.experiments.planning.links import Places, places
from gpipe_bench.experiments.planning.models import Tie
from gpipe_bench.experiments.planning.request import Request
from gpipe_bench.experiments.planning.searching.footprints import Footprints
from gpipe_bench.experiments.planning.searching.grids import Grid, times_on
from gpipe_bench.experiments.planning.searching.room import Room, Rules, Walked
from gpipe_bench.experiments.planning.searching.space import Space, Way, ways
from gpipe_bench.pipeline.memory.stages.peaks import StageMemory
from gpipe_bench.pipeline.plan.cutting.best import EFFORT, Cut, best_cut
from gpipe_bench.pipeline.plan.cutting.times import LayerTimes
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.schedules.known import named

KEPT = 8
"""Ways that are kept; those that are printed are fewer."""
FIRST_EFFORT = 30_000
"""Actions to lay out for a cut before it is known whether its way is among the best."""


@dataclass(frozen=True)
class Found:
    """A way with its best cut, the seconds of a step, and the bytes of each worker."""

    candidate: Candidate
    step_s: float
    bound_s: float
    memory: tuple[StageMemory, ...]

    @property
    def peak(self) -> int:
        return max(each.peak for each in self.memory)

    @property
    def is_best_cut(self) -> bool:
        """Whether it is known that no other cut of this way is faster."""
        return self.bound_s >= self.step_s


@dataclass
class Search:
    """One search; what it has made for one way serves the next.

    Args:
        costs: of the layers, at every size that a way has
        request, space: what is given, what may be chosen
        ties: of the model
        progress: told how many ways are done, of how many
    """

    costs: Costs
    request: Request
    space: Space
    ties: tuple[Tie, ...] = ()
    progress: Callable[[int, int], None] = lambda done, total: None
    tried: int = 0
    skipped: int = 0  # whose bounds were too high
    _footprints: dict[tuple[int, bool], Footprints] = field(default_factory=dict, repr=False)
    _times: dict[tuple[object, ...], LayerTimes] = field(default_factory=dict, repr=False)
    _schedules: dict[tuple[str, int, int, int], Schedule] = field(default_factory=dict, repr=False)
    _walked: dict[tuple[str, int, int, int], Walked] = field(default_factory=dict, repr=False)
    _least: dict[Grid, int] = field(default_factory=dict, repr=False)

    def run(self, kept: int = KEPT) -> tuple[Found, ...]:
        """The best of each grid and schedule, the fastest first; none where nothing fits."""
        all_ways = list(self._fitting_sizes(ways(self.request, self.space, self.costs.num_layers)))
        bounds = sorted(
            ((self.bound_s(way), index) for index, way in enumerate(all_ways)), key=lambda b: b[0]
        )
        best: dict[tuple[Grid, str, int], tuple[Found, Way]] = {}
        limit_s = inf
        for done, (bound_s, index) in enumerate(bounds):
            self.progress(done, len(bounds))
            if bound_s >= limit_s:
                self.skipped += len(bounds) - done
                break
            way = all_ways[index]
            key = (way.grid, way.schedule, way.stages_per_worker)
            if key in best and bound_s >= best[key][0].step_s:
                self.skipped += 1
                continue
            found = self.best_of(way, FIRST_EFFORT)
            self.tried += 1
            if found is not None and (key not in best or found.step_s < best[key][0].step_s):
                best[key] = (found, way)
                steps_s = sorted(each.step_s for each, _ in best.values())
                limit_s = steps_s[kept - 1] if len(steps_s) >= kept else inf
        leading = sorted(best.values(), key=lambda each: each[0].step_s)[:kept]
        again = [
            found if found.is_best_cut else (self.best_of(way, EFFORT) or found) for found, way in leading
        ]
        return tuple(sorted(again, key=lambda found: found.step_s))

    def best_of(self, way: Way, effort: int, memory_bytes: int | None = None) -> Found | None:
        """The best cut of a way under a cap, the request's if not given; None where none fits."""
        cap = memory_bytes or self.request.memory_bytes
        schedule, near = self.schedule(way), self.places(way)
        room = self.room(way)
        if self._least_bytes(way, room) > cap:
            return None
        cut = best_cut(
            schedule,
            self.times(way, near),
            links=near.boundaries,
            fits=lambda worker, stages, remat: room.fits(worker, stages, remat, cap),
            remats=self.space.remats,
            effort=effort,
        )
        return None if cut is None else self.found(way, cut)

    def found(self, way: Way, cut: Cut) -> Found:
        """A cut of a way as an answer."""
        schedule, room, grid = self.schedule(way), self.room(way), way.grid
        homes = [schedule.stages_of(worker) for worker in range(schedule.num_workers)]
        memory = tuple(
            room.memory(worker, tuple(cut.stages[s] for s in mine), tuple(cut.remat[s] for s in mine))
            for worker, mine in enumerate(homes)
        )
        candidate = Candidate(
            cut=cut.stages, schedule=way.schedule, num_microbatches=way.num_microbatches, remat=cut.remat,
            num_workers=grid.pp, stages_per_worker=way.stages_per_worker, dp=grid.dp, fsdp=grid.fsdp,
            fsdp_level=grid.fsdp_level, tp=grid.tp,
        )  # fmt: skip
        return Found(candidate, cut.step_s, cut.bound_s, memory)

    def bound_s(self, way: Way) -> float:
        """Seconds that no cut of the way goes below.

        A stage begins when a micro-batch has been through all before it, and ends as long before the end, so
        the k-th stage may take (1 - 1/M)^k of what the first one may: with one stage per worker a step takes
        at least all the work of one micro-batch / (1 - (1 - 1/M)^K).
        """
        times = self.times(way, self.places(way))
        once_s = times.least_s(0, times.num_layers)
        count, workers = way.num_microbatches, way.grid.pp
        even_s = max(once_s * count / workers, times.beyond_s(0))
        if way.stages_per_worker > 1 or way.splits or count == 1:
            return even_s
        return max(even_s, once_s / (1 - (1 - 1 / count) ** workers))

    def schedule(self, way: Way) -> Schedule:
        """Its rows without recomputation."""
        key = self._rows_of(way)
        if key not in self._schedules:
            self._schedules[key] = named(
                way.schedule, way.grid.pp, way.num_microbatches, stages_per_worker=way.stages_per_worker
            )
        return self._schedules[key]

    @staticmethod
    def _rows_of(way: Way) -> tuple[str, int, int, int]:
        return way.schedule, way.grid.pp, way.stages_per_worker, way.num_microbatches

    def places(self, way: Way) -> Places:
        grid = way.grid
        placement = [worker for _ in range(way.stages_per_worker) for worker in range(grid.pp)]
        if way.stages_per_worker > 1:
            small = replace(way, num_microbatches=1)
            placement = list(self.schedule(small).placement) or placement
        return places(self.request, pp=grid.pp, dp=grid.dp, fsdp=grid.fsdp, tp=grid.tp, placement=placement)

    def times(self, way: Way, near: Places) -> LayerTimes:
        key = (way.grid, way.microbatch_size, way.splits)
        if key not in self._times:
            self._times[key] = times_on(way.grid, self.costs, way.microbatch_size, near, split=way.splits)
        return self._times[key]

    def room(self, way: Way) -> Room:
        """The memory of its workers."""
        return Room(
            self.footprints(way.microbatch_size, way.splits),
            self.schedule(way),
            Rules(self.request.optimizer, way.grid, self.ties),
            self._walked.setdefault(self._rows_of(way), Walked()),
        )

    def _least_bytes(self, way: Way, room: Room) -> int:
        """Of a way's grid, whatever its schedule and micro-batches; where that is too much nothing is cut."""
        if way.grid not in self._least:
            self._least[way.grid] = room.least_bytes()
        return self._least[way.grid]

    def footprints(self, microbatch_size: int, split: bool) -> Footprints:
        key = (microbatch_size, split)
        if key not in self._footprints:
            if self.costs.profiles is None:
                raise ValueError(
                    "these costs have no profiles, so nobody knows what fits: time the layers anew"
                )
            self._footprints[key] = Footprints(self.costs.profiles(microbatch_size, split))
        return self._footprints[key]

    def _fitting_sizes(self, given: Iterator[Way]) -> Iterator[Way]:
        """Those whose micro-batches have costs."""
        return (way for way in given if way.microbatch_size in self.costs.sizes)


def sizes_of(request: Request, space: Space, num_layers: int) -> Sequence[int]:
    """The micro-batch sizes that a search asks the costs of."""
    return sorted({way.microbatch_size for way in ways(request, space, num_layers)})
