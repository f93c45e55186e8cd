"""The best ways to train: every grid, schedule and number of micro-batches, each with the best cut for it.

A way has a bound from below that needs no cut: its work divided evenly, and a pipeline that has to be filled.
Ways are taken in the order of their bounds, and the search ends where a bound is above the last of the steps
that are kept; what is left cannot be among them. Of each group of ways, such as those of one grid and
schedule, the best is kept.

Steps are those of `cuts`; whoever wants ranges, parts and jitter predicts the few that are found (`predict`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from heapq import heapify, heappop, heappush
from math import comb, inf
from typing import Any

from gpipe_bench.pipeline.memory.peaks import StageMemory
from gpipe_bench.pipeline.memory.workers import SharedWeight
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.planner.candidate import Candidate, Grid, Way
from gpipe_bench.planner.costs import Costs
from gpipe_bench.planner.cuts import EFFORT, Cut, best_cut
from gpipe_bench.planner.infeasible import Smallest
from gpipe_bench.planner.memory import Footprints, Known, Room, Rows
from gpipe_bench.planner.request import Request, Space, Topology, ways
from gpipe_bench.planner.steps import LayerTimes, QuickSteps, StageTimes, times_on

KEPT = 8
"""Ways that are kept; those that are printed are fewer."""
FEW_CUTS = 100_000
"""Cuts of a way that is not large."""
ALL_CUTS = 300
"""Of a way that is so small that its best cut is found at once."""
EVEN = 0.95
"""Share of the step with even stages, less what uneven ones gain where a pipeline is filled, below which the
best cut of a large way is not expected."""
FIRST_EFFORT = 30_000
"""Actions to lay out for a cut of any other before it is known whether its way is among the best."""
CUTS_ANEW = 4
"""Cuts of a way until its messages fit, too; each leaves room for those of the one before."""
_LATELY = 32
"""Rows of long schedules that are remembered: many ways use them in turn, and all of them are too many."""


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


def grid_and_schedule(way: Way) -> Hashable:
    """Ways that differ in micro-batches alone are one group, or the answer would be one way with many."""
    return way.grid, way.schedule, way.stages_per_worker


@dataclass
class Search:
    """One search, and what it knows of single ways.

    Args:
        costs: of the layers, at every size that a way has
        request, space: what is given, what may be chosen
        ties: of the model
        progress: told how many ways are done, of how many
        least: the cut with the smallest peak, which is taken where no other is found
        tried, skipped: ways that were cut, and those whose bounds were too high
    """

    costs: Costs
    request: Request
    space: Space
    ties: tuple[SharedWeight, ...] = ()
    progress: Callable[[int, int], None] = lambda done, total: None
    least: Callable[[], Smallest | None] = lambda: None
    tried: int = 0
    skipped: int = 0
    _best: dict[tuple[Way, int], Found] = field(default_factory=dict, repr=False)
    _known: dict[Way, Known] = field(default_factory=lambda: defaultdict(dict), repr=False)

    def __post_init__(self) -> None:
        self.cap = self.request.usable_bytes
        lately = lru_cache(_LATELY)
        self._rows, self._quick = lately(self._rows_of), lately(self._quick_of)
        self._footprints, self._times = cache(self._footprints_of), cache(self._times_of)
        self._boundaries, self._even = cache(self._links_of), cache(self._even_of)

    def run(
        self,
        kept: int | None = KEPT,
        of_each: Callable[[Way], Hashable] = grid_and_schedule,
        cap: int | None = None,
    ) -> tuple[Found, ...]:
        """The best of each group of ways, the fastest first, so many of them; none where nothing fits.

        What is not among them has a bound above the last of them, or is slower in a first cut (`tried`).

        Args:
            kept: groups of which the best is wanted; None for every group that has a way that fits
            of_each: the group of a way
            cap: bytes of an accelerator, those that the request leaves if not given; caps become lower from
                search to search
        """
        self.cap = self.request.usable_bytes if cap is None else cap
        every = [
            way
            for way in ways(self.request, self.space, self.costs.num_layers)
            if way.microbatch_size in self.costs.sizes
        ]
        best: dict[Hashable, tuple[Found, Way]] = {}
        limit_s, tried = inf, 0
        for bound_s, way in self._in_order(every):
            if bound_s >= limit_s:
                break
            group = of_each(way)
            below_s = best[group][0].step_s if group in best else inf
            if bound_s >= below_s:
                continue
            effort = EFFORT if self._num_cuts(way) <= ALL_CUTS else FIRST_EFFORT
            found = self.best_of(way, effort, below_s=below_s)
            tried += 1
            if found is not None:
                best[group] = (found, way)
                if kept is not None and len(best) >= kept:
                    limit_s = sorted(each.step_s for each, _ in best.values())[kept - 1]
        if cap is None:
            self.tried, self.skipped = tried, len(every) - tried
        leading = sorted(best.values(), key=lambda each: each[0].step_s)[:kept]
        again = [
            found if found.is_best_cut else (self.best_of(way, EFFORT) or found) for found, way in leading
        ]
        least = self.least() if cap is None and not again else None
        if least is not None and least.peak <= self.cap:
            again = list(self._as_found(least))
        return tuple(sorted(again, key=lambda found: found.step_s))

    def _as_found(self, least: Smallest) -> Iterator[Found]:
        way = least.way
        if way.microbatch_size not in self.costs.sizes:
            return
        remat = tuple(each for each in least.choices if isinstance(each, str))  # as plans have it
        step_s = self.step_s(way, Cut(least.cut, remat, 0.0, 0.0))
        yield self.found(way, Cut(least.cut, remat, step_s, 0.0))

    def _in_order(self, every: list[Way]) -> Iterator[tuple[float, Way]]:
        """Ways with their bounds; what takes longer to know is asked of those alone whose turn it would be
        without it. Large ways come in the order of their even steps, which are no bounds.
        """
        waiting = [(self.bound_s(way), False, index) for index, way in enumerate(every)]
        heapify(waiting)
        while waiting:
            at_s, asked, index = heappop(waiting)
            if asked:
                yield at_s, every[index]
                continue
            self.progress(len(every) - len(waiting), len(every))
            heappush(waiting, (max(at_s, self._even_s(every[index])), True, index))

    def bound_s(self, way: Way) -> float:
        """Seconds of a step at least, whatever the memory.

        A stage begins when a micro-batch has been through all before it, and ends as long before the end, so
        the k-th stage may take (1 - 1/M)^k of what the first one may: with one stage per worker and whole
        backwards a step takes at least all the work of one micro-batch / (1 - (1 - 1/M)^K).
        """
        times, count, workers = self.times(way), way.num_microbatches, way.grid.pp
        once_s = times.least_s(0, times.num_layers)
        even_s = max(once_s * count / workers, times.beyond_s(0))
        if way.stages_per_worker > 1 or way.splits or count == 1:
            return even_s
        return max(even_s, once_s / (1 - (1 - 1 / count) ** workers))

    def _num_cuts(self, way: Way) -> int:
        return comb(self.costs.num_layers - 1, way.num_stages - 1)

    def _even_s(self, way: Way) -> float:
        """What a way that is too large to be cut exactly takes at about least: its step with even stages and
        messages that take no time, whatever fits. With a layer for each stage it is the step of the only cut
        there is, and a bound; 0 of a way that is not too large.
        """
        stages, layers = way.num_stages, self.costs.num_layers
        times = self.times(way)
        if stages == layers:
            return self._even(_rows_key(way), tuple(times.at_least(each, each + 1) for each in range(layers)))
        if self._num_cuts(way) <= FEW_CUTS:
            return 0.0
        forward_s, again_s, backward_s, inputs_s, weights_s = times.at_least(0, layers)[:5]
        even = StageTimes(
            forward_s / stages,
            again_s / stages,
            backward_s / stages,
            inputs_s / stages,
            weights_s / stages,
            0.0,
        )
        even_s = self._even(_rows_key(way), (even,) * stages)
        # Uneven stages are faster where a pipeline is filled: (M + K - 1) / K with even ones, 1 / (1 - (1 -
        # 1/M)^K) with the best.
        count, workers = way.num_microbatches, way.grid.pp
        return even_s * EVEN * workers / (workers + count - 1) / (1 - (1 - 1 / count) ** workers)

    def best_of(
        self, way: Way, effort: int, memory_bytes: int | None = None, below_s: float = inf
    ) -> Found | None:
        """The best cut of a way under a cap, the search's if not given; None where none fits, or none that
        takes less than `below_s`.

        The cut is made with one receive ahead. What the transport holds beyond that is known of a whole cut
        only: where it is too much, the way is cut anew, and every worker has as much less room as the last
        cut's messages take. A way of few cuts is also asked of each whole cut that would be the best.
        """
        cap = memory_bytes or self.cap
        known = self._best.get((way, effort))
        if known is not None and known.peak <= cap:
            return known if known.step_s < below_s else None
        room, accelerated = self.room(way), self.request.accelerated
        if room.least_bytes() > cap:
            return None
        caps, bound_s, few = [cap] * way.grid.pp, 0.0, self._num_cuts(way) <= ALL_CUTS
        best: Found | None = None

        def holds(stages: Partition, remat: tuple[str, ...]) -> bool:
            return max(each.peak for each in room.counted(stages, remat, accelerated)) <= cap

        for attempt in range(CUTS_ANEW):
            whole = few and attempt == 1
            left = [cap] * way.grid.pp if whole else caps
            cut = best_cut(
                self.schedule(way),
                self.times(way),
                links=self.boundaries(way),
                fits=partial(_fits, room, left),
                holds=holds if whole else None,
                remats=self.space.remats,
                effort=effort,
            )
            if cut is None or cut.step_s >= below_s:
                if whole:
                    continue
                break
            bound_s = bound_s or cut.bound_s  # of any cut of the way; with less room there are fewer
            found = self.found(way, replace(cut, bound_s=bound_s), room)
            if found.peak > cap:
                alone = room.alone(cut.stages, cut.remat)
                more = [each.peak - less.peak for each, less in zip(found.memory, alone, strict=True)]
                caps = [min(before, cap - each) for before, each in zip(caps, more, strict=True)]
                continue
            best = found if best is None or found.step_s < best.step_s else best
            if not whole:
                break
        if best is not None:
            self._best[way, effort] = best
        return best

    def found(self, way: Way, cut: Cut, room: Room | None = None) -> Found:
        """A cut of a way as an answer."""
        memory = (room or self.room(way)).counted(cut.stages, cut.remat, self.request.accelerated)
        return Found(way.candidate(cut.stages, cut.remat), cut.step_s, cut.bound_s, memory)

    def step_s(self, way: Way, cut: Cut) -> float:
        """Seconds of a step with that cut."""
        times, steps = self.times(way), QuickSteps(self.schedule(way), self.boundaries(way))
        takes = [times.stage(stage.start, stage.stop) for stage in cut.stages]
        return steps.makespan_s(takes, cut.remat, [times.message(stage.start) for stage in cut.stages[1:]])

    def schedule(self, way: Way) -> Schedule:
        """Its rows without recomputation."""
        return self._rows(*_rows_key(way)).schedule

    def boundaries(self, way: Way) -> tuple[Link, ...]:
        """What lies between its stages."""
        return self._boundaries(way.grid, way.schedule, way.stages_per_worker)

    def times(self, way: Way) -> LayerTimes:
        """What spans of layers take there."""
        return self._times(way.grid, way.microbatch_size, way.splits)

    def room(self, way: Way) -> Room:
        """The memory of its workers."""
        footprints = self._footprints(way.microbatch_size, way.splits, way.grid.tp)
        rows, known = self._rows(*_rows_key(way)), self._known[way]
        return Room(footprints, rows, way.grid, self.request.optimizer, self.ties, known)

    def _rows_of(self, name: str, workers: int, per_worker: int, count: int) -> Rows:
        return Rows(named(name, workers, count, stages_per_worker=per_worker))

    def _quick_of(self, *rows: Any) -> QuickSteps:
        return QuickSteps(self._rows(*rows).schedule)  # messages take no time

    def _even_of(self, rows: Any, takes: tuple[StageTimes, ...]) -> float:
        return self._quick(*rows).makespan_s(takes, ["never"] * len(takes))

    def _topology(self, grid: Grid) -> Topology:
        return Topology(self.request, grid, self.costs.sums_beside(self.request.link))

    def _links_of(self, grid: Grid, name: str, per_worker: int) -> tuple[Link, ...]:
        small = named(name, grid.pp, 1, stages_per_worker=per_worker)
        return self._topology(grid).boundaries([small.worker(stage) for stage in range(small.num_stages)])

    def _times_of(self, grid: Grid, size: int, split: bool) -> LayerTimes:
        shards = self.costs.shards(size, grid.fsdp, grid.fsdp_level, self.request.link)
        shards = shards if grid.tp == 1 else None
        ahead = self.request.accelerated
        return times_on(grid, self.costs, size, self._topology(grid), split=split, ahead=ahead, shards=shards)

    def _footprints_of(self, size: int, split: bool, tp: int) -> Footprints:
        if self.costs.profiles is None:
            raise ValueError("these costs have no profiles, so nobody knows what fits: time the layers anew")
        return Footprints(self.costs.profiles(size, split, tp))


def _fits(
    room: Room, left: list[int], worker: int, stages: tuple[range, ...], remat: tuple[str, ...]
) -> bool:
    return room.fits(worker, stages, remat, left[worker])


def _rows_key(way: Way) -> tuple[str, int, int, int]:
    """What the rows of its schedule depend on."""
    return way.schedule, way.grid.pp, way.stages_per_worker, way.num_microbatches
