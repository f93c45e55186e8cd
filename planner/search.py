"""The best ways to train: every grid, schedule and number of micro-batches, each with a good cut for it.

A way takes about as long as its work divided evenly, and a pipeline that has to be filled. Ways are taken in
the order of that, and the search ends where it is above the last of the steps that are kept. Of each group of
ways, such as those of one grid and schedule, the best is kept, and its cut improved at the end.

Step times are those of `cuts`; `predict` gives ranges, parts and jitter for the few ways that are found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from math import inf

from gpipe_bench.pipeline.memory.peaks import Optimizer, StageMemory
from gpipe_bench.pipeline.memory.workers import SharedWeight
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.planner.candidate import Candidate, Grid, Way
from gpipe_bench.planner.costs import Costs
from gpipe_bench.planner.cuts import Cut, best_cut
from gpipe_bench.planner.infeasible import Smallest
from gpipe_bench.planner.memory import Footprints, Known, Room, Rows
from gpipe_bench.planner.request import Request, Space, Topology, splits_some, ways
from gpipe_bench.planner.steps import LayerTimes, LongSteps, times_on

KEPT = 8
"""Number of ways that are kept; fewer are printed."""
ABOUT = 0.97
"""Share of a way's estimated step time that bounds the step times of all its cuts from below."""
LOOKS = 60
"""Cuts that are tried for each kept way, beyond the first."""
CUTS_ANEW = 4
"""Most cuts of a way until its messages fit, too; each cut leaves room for the messages of the last one."""
_LATELY = 64
"""Number of long schedules whose rows are cached; many ways use them in turn, and all are too many."""


@dataclass(frozen=True)
class Found:
    """A way with its cut, the seconds of a step, and the bytes of each worker."""

    way: Way
    candidate: Candidate
    step_s: float
    memory: tuple[StageMemory, ...]

    @property
    def peak(self) -> int:
        return max(each.peak for each in self.memory)


def grid_and_schedule(way: Way) -> Hashable:
    """Ways that differ in micro-batches alone are one group, or the answer would be one way with many."""
    return way.grid, way.schedule, way.stages_per_worker


@dataclass
class Search:
    """One search, and what it knows of single ways.

    Args:
        costs: of the layers, at every size that a way has
        request, space: what is given, what may be chosen
        ties_over: the model's, of one of so many ranks that compute a layer together
        progress: told how many ways are done, of how many
        least: the cut with the smallest peak, which is taken where no other is found
        tried, skipped: ways that were cut, and those that take about as long as none that is kept
    """

    costs: Costs
    request: Request
    space: Space
    ties_over: Callable[[int], tuple[SharedWeight, ...]] = lambda tp: ()
    progress: Callable[[int, int], None] = lambda done, total: None
    least: Callable[[], Smallest | None] = lambda: None
    tried: int = 0
    skipped: int = 0
    _best: dict[tuple[Way, int], Found] = field(default_factory=dict, repr=False)
    _known: dict[Way, Known] = field(default_factory=lambda: defaultdict(dict), repr=False)

    def __post_init__(self) -> None:
        self.cap = self.request.usable_bytes
        self._halves = splits_some(self.request, self.space)
        lately = lru_cache(_LATELY)
        self._rows, self._steps = lately(self._rows_of), lately(self._steps_of)
        self._footprints, self._times = cache(self._footprints_of), cache(self._times_of)
        self._boundaries = cache(self._links_of)

    def run(
        self,
        kept: int | None = KEPT,
        of_each: Callable[[Way], Hashable] = grid_and_schedule,
        cap: int | None = None,
    ) -> tuple[Found, ...]:
        """The best of each group of ways, the fastest first, so many of them; none where nothing fits.

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
        best: dict[Hashable, Found] = {}
        limit_s, tried = inf, 0
        for number, (about_s, _, way) in enumerate(
            sorted((self.about_s(way), number, way) for number, way in enumerate(every))
        ):
            self.progress(number, len(every))
            if about_s >= limit_s:
                break
            group = of_each(way)
            below_s = min(limit_s, best[group].step_s if group in best else inf)
            if about_s >= below_s:
                continue
            found = self.best_of(way, below_s=below_s)
            tried += 1
            if found is not None and found.step_s < below_s:
                best[group] = found
                if kept is not None and len(best) >= kept:
                    limit_s = sorted(each.step_s for each in best.values())[kept - 1]
        if cap is None:
            self.tried, self.skipped = tried, len(every) - tried
        leading = sorted(best.values(), key=lambda each: each.step_s)[:kept]
        again = [self.best_of(each.way, LOOKS) or each for each in leading]
        least = self.least() if cap is None and not again else None
        if least is not None and least.peak <= self.cap and least.way.microbatch_size in self.costs.sizes:
            step_s = self.step_s(least.way, least.cut, least.choices)
            again = [self.found(least.way, Cut(least.cut, least.choices, step_s))]
        return tuple(sorted(again, key=lambda found: found.step_s))

    def about_s(self, way: Way) -> float:
        """Seconds of a step about, whatever the memory, and rather less.

        A stage begins when a micro-batch has been through all before it, and ends as long before the end, so
        the k-th stage may take (1 - 1/M)^k of what the first one may: with one stage per worker and whole
        backwards a step takes all the work of one micro-batch / (1 - (1 - 1/M)^K).
        """
        times, count, workers = self.times(way), way.num_microbatches, way.grid.pp
        once_s = times.stage(0, times.num_layers).microbatch_s("never") * ABOUT
        if way.stages_per_worker > 1 or way.splits or count == 1:
            return once_s * count / workers
        return max(once_s * count / workers, once_s / (1 - (1 - 1 / count) ** workers))

    def best_of(self, way: Way, looks: int = 0, below_s: float = inf) -> Found | None:
        """A good cut of a way that fits, whose step takes less than `below_s`; None where none was found.

        The cut is made with one receive ahead. What the transport holds beyond that is known of a whole cut
        only: where it is too much, the way is cut anew, and every worker has as much less room as the last
        cut's messages take.
        """
        known = self._best.get((way, looks))
        if known is not None and known.peak <= self.cap:
            return known
        if self._weights_bytes(way) > self.cap:
            return None
        room = self.room(way)
        if room.least_bytes() > self.cap:
            return None
        caps = [self.cap] * way.grid.pp
        for _ in range(CUTS_ANEW):
            cut = best_cut(
                self.schedule(way),
                self.times(way),
                self._steps(way).makespan_s,
                fits=partial(_fits, room, caps),
                remats=self.remats(way),
                looks=looks,
                below_s=below_s,
            )
            if cut is None or cut.step_s >= below_s:
                break
            found = self.found(way, cut, room)
            if found.peak <= self.cap:
                self._best[way, looks] = found
                return found
            alone = room.alone(cut.stages, cut.remat)
            more = [each.peak - less.peak for each, less in zip(found.memory, alone, strict=True)]
            caps = [min(before, self.cap - each) for before, each in zip(caps, more, strict=True)]
        return None

    def _weights_bytes(self, way: Way) -> float:
        """Lower bound of the weights, gradients and optimizer state on the fullest worker between steps.
        It needs no profile.
        """
        sizes = sum(map(sum, self.costs.parameter_bytes))
        shared = sum(tie.num_bytes * (len(tie.layers) - 1) for tie in self.ties_over(1))
        held = (2 + Optimizer.named(self.request.optimizer).state) * (sizes - shared)
        return held / (way.grid.pp * way.grid.fsdp * way.grid.tp)

    def remats(self, way: Way) -> tuple[str, ...]:
        """Returns the recomputations that the way's stages may use, the fastest first. On one worker a whole
        stage's recomputation overlaps no waiting; where every pass gathers, R gathers once more.
        """
        known = [each for each in self.space.remats if each in self.costs.at(way.microbatch_size).remats]
        if way.grid.pp == 1 and "blocks" in known:
            return tuple(each for each in known if each not in ("except_last", "always"))
        if way.grid.fsdp_level == 3:
            return tuple(sorted(known, key=("never", "selective", "blocks").__contains__, reverse=True))
        return tuple(known)

    def found(self, way: Way, cut: Cut, room: Room | None = None) -> Found:
        """A cut of a way as an answer."""
        memory = (room or self.room(way)).counted(cut.stages, cut.remat, self.request.accelerated)
        return Found(way, way.candidate(cut.stages, cut.remat), cut.step_s, memory)

    def step_s(self, way: Way, stages: Partition, remat: tuple[str, ...]) -> float:
        """Seconds of a step with that cut."""
        times = self.times(way)
        takes = [times.stage(span.start, span.stop, each) for span, each in zip(stages, remat, strict=True)]
        messages = [times.message(span.start) for span in stages[1:]]
        return self._steps(way).makespan_s(takes, remat, messages)

    def schedule(self, way: Way) -> Schedule:
        """Returns the schedule of the way, without recomputation."""
        return self._rows(*_rows_key(way)).schedule

    def boundaries(self, way: Way) -> tuple[Link, ...]:
        """Returns the links between the way's stages."""
        return self._boundaries(way.grid, way.schedule, way.stages_per_worker)

    def times(self, way: Way) -> LayerTimes:
        """Returns the times of the layers in this way."""
        return self._times(way.grid, way.microbatch_size, way.splits)

    def room(self, way: Way) -> Room:
        """Returns the memory model of the way's workers."""
        footprints = self._footprints(
            way.microbatch_size, self._halves, way.grid.tp, self.request.gathers_half(way.grid.fsdp)
        )
        return Room(
            footprints, self._rows(*_rows_key(way)), way.grid, self.request.optimizer,
            self.ties_over(way.grid.tp), self._known[way], self.costs.gathered_share,
        )  # fmt: skip

    def _rows_of(self, name: str, workers: int, per_worker: int, count: int) -> Rows:
        return Rows(named(name, workers, count, stages_per_worker=per_worker))

    def _steps_of(self, way: Way) -> LongSteps:
        name, workers, per_worker, count = _rows_key(way)

        def rows(number: int) -> Schedule:
            return self._rows(name, workers, per_worker, number).schedule

        return LongSteps(rows, count, self.boundaries(way))

    def _topology(self, grid: Grid) -> Topology:
        return Topology(self.request, grid, self.costs.sums_beside(self.request.link))

    def _links_of(self, grid: Grid, name: str, per_worker: int) -> tuple[Link, ...]:
        small = named(name, grid.pp, 1, stages_per_worker=per_worker)
        return self._topology(grid).boundaries([small.worker(stage) for stage in range(small.num_stages)])

    def _times_of(self, grid: Grid, size: int, split: bool) -> LayerTimes:
        costs = self.costs.on(size, grid.tp, sharded=self.request.gathers_half(grid.fsdp))
        shards = costs.shards(size, grid.fsdp, grid.fsdp_level, self.request.link)
        ahead = self.request.accelerated
        return times_on(grid, costs, size, self._topology(grid), split=split, ahead=ahead, shards=shards)

    def _footprints_of(self, size: int, split: bool, tp: int, sharded: bool) -> Footprints:
        profiles = self.costs.profiles
        if profiles is None:
            raise ValueError("these costs have no profiles, so nobody knows what fits: time the layers anew")
        return Footprints(
            lambda remat: profiles(size, split_backward=split, tp=tp, remat=remat, sharded=sharded)
        )


def _fits(
    room: Room, left: list[int], worker: int, stages: tuple[range, ...], remat: tuple[str, ...]
) -> bool:
    return room.fits(worker, stages, remat, left[worker])


def _rows_key(way: Way) -> tuple[str, int, int, int]:
    """Returns the values on which the rows of the way's schedule depend."""
    return way.schedule, way.grid.pp, way.stages_per_worker, way.num_microbatches
