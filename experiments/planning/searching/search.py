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
from heapq import heapify, heappop, heappush
from math import comb, inf

from gpipe_bench.experiments.planning.candidate import Candidate
from gpipe_bench.experiments.planning.costs.costs import Costs
from gpipe_bench.experiments.planning.links import Places, places
from gpipe_bench.experiments.planning.models import Tie
from gpipe_bench.experiments.planning.request import Request
from gpipe_bench.experiments.planning.searching.bounds import (
    Equals,
    Graphs,
    by_memory_s,
    by_work_s,
    equals_of,
    even_share,
    graphs_of,
)
from gpipe_bench.experiments.planning.searching.footprints import Footprints
from gpipe_bench.experiments.planning.searching.grids import Grid, times_on
from gpipe_bench.experiments.planning.searching.lately import Lately
from gpipe_bench.experiments.planning.searching.room import Room, Rules, Walked
from gpipe_bench.experiments.planning.searching.space import Space, Way, ways
from gpipe_bench.pipeline.memory.stages.peaks import StageMemory
from gpipe_bench.pipeline.plan.cutting.best import EFFORT, Cut, best_cut
from gpipe_bench.pipeline.plan.cutting.quick import QuickSteps
from gpipe_bench.pipeline.plan.cutting.times import LayerTimes, StageTimes
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.schedules.known import named

KEPT = 8
"""Ways that are kept; those that are printed are fewer."""
FEW_CUTS = 100_000
"""Cuts of a way that is not large."""
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
    _number: int = 0  # of all ways
    _footprints: dict[tuple[int, bool], Footprints] = field(default_factory=dict, repr=False)
    _placements: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict, repr=False)
    _places: dict[tuple[object, ...], Places] = field(default_factory=dict, repr=False)
    _times: dict[tuple[object, ...], LayerTimes] = field(default_factory=dict, repr=False)
    _schedules: Lately[Schedule] = field(default_factory=lambda: Lately[Schedule](), repr=False)
    _quick: Lately[QuickSteps] = field(default_factory=lambda: Lately[QuickSteps](), repr=False)
    _walked: Lately[Walked] = field(default_factory=lambda: Lately[Walked](), repr=False)
    _even: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False)
    _equals: dict[tuple[object, ...], Equals | None] = field(default_factory=dict, repr=False)
    _graphs: dict[tuple[str, int, int, int], Graphs] = field(default_factory=dict, repr=False)
    _least: dict[Grid, int] = field(default_factory=dict, repr=False)

    def run(self, kept: int | None = KEPT) -> tuple[Found, ...]:
        """The best of each grid and schedule, the fastest first, so many of them; none where nothing fits.

        What is not among them has a bound above the last of them, or is slower in a first cut (`tried`).
        With None every way that fits, whatever its step.
        """
        best: dict[object, tuple[Found, Way]] = {}
        limit_s = inf
        for bound_s, way in self._in_order():
            if bound_s >= limit_s:
                break
            key = way if kept is None else (way.grid, way.schedule, way.stages_per_worker)
            if key in best and bound_s >= best[key][0].step_s:
                continue
            found = self.best_of(way, FIRST_EFFORT)
            self.tried += 1
            if found is not None and (key not in best or found.step_s < best[key][0].step_s):
                best[key] = (found, way)
                if kept is not None and len(best) >= kept:
                    limit_s = sorted(each.step_s for each, _ in best.values())[kept - 1]
        self.skipped = self._number - self.tried
        leading = sorted(best.values(), key=lambda each: each[0].step_s)[:kept]
        again = [
            found if found.is_best_cut else (self.best_of(way, EFFORT) or found) for found, way in leading
        ]
        return tuple(sorted(again, key=lambda found: found.step_s))

    def _in_order(self) -> Iterator[tuple[float, Way]]:
        """Ways that may fit, each with its bound; what takes longer to know is asked of those alone whose
        turn it would be without it. Large ways come in the order of their even steps, which are no bounds.
        """
        every = list(self._fitting_sizes(ways(self.request, self.space, self.costs.num_layers)))
        self._number = len(every)
        asks = (self.bound_s, self._even_s)
        waiting = [(self.by_work_s(way), 0, index) for index, way in enumerate(every)]
        heapify(waiting)
        while waiting:
            at_s, asked, index = heappop(waiting)
            if asked == len(asks):
                yield at_s, every[index]
                continue
            self.progress(self._number - len(waiting), self._number)
            at_s = max(at_s, asks[asked](every[index]))
            if at_s < inf:
                heappush(waiting, (at_s, asked + 1, index))

    def _even_s(self, way: Way) -> float:
        """What a way that is too large to be cut exactly takes at about least: its step with even stages and
        messages that take no time, whatever fits. With a layer for each stage it is the step of the only cut
        there is, and a bound; 0 of a way that is not too large.
        """
        stages, layers = way.num_stages, self.costs.num_layers
        times = self.times(way, self.places(way))
        if stages == layers:
            takes, share = tuple(times.stage(layer, layer + 1) for layer in range(layers)), 1.0
        elif comb(layers - 1, stages - 1) > FEW_CUTS:
            ahead, again, back, inputs, weights = (each / stages for each in times.stage(0, layers)[:5])
            takes = (StageTimes(ahead, again, back, inputs, weights, 0.0),) * stages
            share = even_share(way.grid.pp, way.num_microbatches)
        else:
            return 0.0
        key = (*self._rows_of(way), takes)
        if key not in self._even:
            steps = self._quick.of(self._rows_of(way), lambda: QuickSteps(self.schedule(way)))
            self._even[key] = share * steps.makespan_s(takes, ["never"] * stages)
        return self._even[key]

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
        """Seconds that no cut of the way goes below, infinity where none fits."""
        least_s = self.by_work_s(way)
        equals = self._equals_of(way, self.times(way, self.places(way)))
        if equals is None:
            return least_s
        cap, remats = self.request.memory_bytes, self.space.remats
        return by_memory_s(way, equals, self._graphs_of(way), cap, remats, least_s)

    def by_work_s(self, way: Way) -> float:
        """The same whatever the memory."""
        return by_work_s(way, self.times(way, self.places(way)))

    def _equals_of(self, way: Way, times: LayerTimes) -> Equals | None:
        key = (way.grid, way.microbatch_size, way.splits)
        if key not in self._equals:
            self._equals[key] = None
            if self.costs.profiles is not None:
                profile = self.costs.profiles(way.microbatch_size, False)
                self._equals[key] = equals_of(profile, times, way.grid, self.request.optimizer, self.ties)
        return self._equals[key]

    def _graphs_of(self, way: Way) -> Graphs:
        """Those of fewer micro-batches, where there are many: of more there are never fewer."""
        few = min(way.num_microbatches, 2 * way.grid.pp)
        key = self._rows_of(replace(way, num_microbatches=few))
        if key not in self._graphs:
            self._graphs[key] = graphs_of(
                named(way.schedule, way.grid.pp, few, stages_per_worker=way.stages_per_worker)
            )
        return self._graphs[key]

    def schedule(self, way: Way) -> Schedule:
        """Its rows without recomputation."""
        return self._schedules.of(
            self._rows_of(way),
            lambda: named(
                way.schedule, way.grid.pp, way.num_microbatches, stages_per_worker=way.stages_per_worker
            ),
        )

    @staticmethod
    def _rows_of(way: Way) -> tuple[str, int, int, int]:
        return way.schedule, way.grid.pp, way.stages_per_worker, way.num_microbatches

    def places(self, way: Way) -> Places:
        grid, per_worker = way.grid, way.stages_per_worker
        placement = [worker for _ in range(per_worker) for worker in range(grid.pp)]
        if per_worker > 1:
            given = (way.schedule, grid.pp, per_worker)
            if given not in self._placements:
                small = named(way.schedule, grid.pp, 1, stages_per_worker=per_worker)
                self._placements[given] = small.placement
            placement = list(self._placements[given]) or placement
        key = (grid, *placement)
        if key not in self._places:
            self._places[key] = places(
                self.request, pp=grid.pp, dp=grid.dp, fsdp=grid.fsdp, tp=grid.tp, placement=placement
            )
        return self._places[key]

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
            self._walked.of(self._rows_of(way), Walked),
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
