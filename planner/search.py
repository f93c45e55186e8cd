"""The best ways to train: every grid, schedule and number of micro-batches, each with the best cut for it.

A way has a bound from below that needs no cut: its work divided evenly, and a pipeline that has to be filled.
Ways are taken in the order of their bounds, and the search ends where a bound is above the last of the steps
that are kept; what is left cannot be among them. Of each group of ways, such as those of one grid and
schedule, the best is kept.

Steps are those of `planner.cuts`; whoever wants ranges, parts and jitter predicts the few that are
found (`predict`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import comb, inf

from gpipe_bench.planner.bounds import (
    by_memory_s,
    by_work_s,
    even_share,
)
from gpipe_bench.planner.candidate import Candidate
from gpipe_bench.planner.costs import Costs
from gpipe_bench.planner.cuts import EFFORT, Cut, best_cut
from gpipe_bench.planner.found import Found
from gpipe_bench.planner.grids import Grid
from gpipe_bench.planner.layer_times import StageTimes
from gpipe_bench.planner.models import Tie
from gpipe_bench.planner.parts import Parts, rows_of
from gpipe_bench.planner.quick import QuickSteps
from gpipe_bench.planner.request import Request
from gpipe_bench.planner.room import Room
from gpipe_bench.planner.shortfall import Smallest
from gpipe_bench.planner.space import Space, Way, ways

KEPT = 8
"""Ways that are kept; those that are printed are fewer."""
FEW_CUTS = 100_000
"""Cuts of a way that is not large."""
FIRST_EFFORT = 30_000
"""Actions to lay out for a cut before it is known whether its way is among the best."""
CUTS_ANEW = 4
"""Cuts of a way until its messages fit, too; each leaves room for those of the one before."""


def grid_and_schedule(way: Way) -> Hashable:
    """Ways that differ in micro-batches alone are one group, or the answer would be one way with many."""
    return way.grid, way.schedule, way.stages_per_worker


@dataclass
class Search:
    """One search. Its `parts` are what it knows of single ways.

    Args:
        costs: of the layers, at every size that a way has
        request, space: what is given, what may be chosen
        ties: of the model
        progress: told how many ways are done, of how many
        least: the cut with the smallest peak, which is taken where no other is found
    """

    costs: Costs
    request: Request
    space: Space
    ties: tuple[Tie, ...] = ()
    progress: Callable[[int, int], None] = lambda done, total: None
    least: Callable[[], Smallest | None] = lambda: None
    tried: int = 0
    skipped: int = 0  # whose bounds were too high
    _number: int = 0  # of all ways
    _even: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False)
    _least: dict[Grid, int] = field(default_factory=dict, repr=False)
    _best: dict[tuple[Way, int], Found] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.cap = self.request.usable_bytes
        self.parts = Parts(self.costs, self.request, self.ties)

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
        best: dict[Hashable, tuple[Found, Way]] = {}
        limit_s, tried = inf, 0
        for bound_s, way in self._in_order():
            if bound_s >= limit_s:
                break
            group = of_each(way)
            if group in best and bound_s >= best[group][0].step_s:
                continue
            found = self.best_of(way, FIRST_EFFORT, below_s=best[group][0].step_s if group in best else inf)
            tried += 1
            if found is not None:
                best[group] = (found, way)
                if kept is not None and len(best) >= kept:
                    limit_s = sorted(each.step_s for each, _ in best.values())[kept - 1]
        if cap is None:
            self.tried, self.skipped = tried, self._number - tried
        leading = sorted(best.values(), key=lambda each: each[0].step_s)[:kept]
        again = [
            found if found.is_best_cut else (self.best_of(way, EFFORT) or found) for found, way in leading
        ]
        least = self.least() if cap is None and not again else None
        if least is not None and least.peak <= self.cap:
            again = list(self._as_found(least))
        return tuple(sorted(again, key=lambda found: found.step_s))

    def _as_found(self, least: Smallest) -> Iterator[Found]:
        size = self.request.batch_size // least.grid.replicas // least.num_microbatches
        if size not in self.costs.sizes:
            return
        way = Way(least.grid, least.schedule, least.stages_per_worker, least.num_microbatches, size)
        times, links = self.parts.times(way), self.parts.boundaries(way)
        remat = tuple(each for each in least.choices if isinstance(each, str))  # as plans have it
        step_s = QuickSteps(self.parts.schedule(way), links).makespan_s(
            [times.stage(stage.start, stage.stop) for stage in least.cut],
            remat,
            [times.message(stage.start) for stage in least.cut[1:]],
        )
        yield self.found(way, Cut(least.cut, remat, step_s, 0.0))

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
        times = self.parts.times(way)
        if stages == layers:
            takes, share = tuple(times.stage(layer, layer + 1) for layer in range(layers)), 1.0
        elif comb(layers - 1, stages - 1) > FEW_CUTS:
            ahead, again, back, inputs, weights = (each / stages for each in times.stage(0, layers)[:5])
            takes = (StageTimes(ahead, again, back, inputs, weights, 0.0),) * stages
            share = even_share(way.grid.pp, way.num_microbatches)
        else:
            return 0.0
        key = (*rows_of(way), takes)
        if key not in self._even:
            steps = self.parts.quick(way)
            self._even[key] = share * steps.makespan_s(takes, ["never"] * stages)
        return self._even[key]

    def best_of(
        self, way: Way, effort: int, memory_bytes: int | None = None, below_s: float = inf
    ) -> Found | None:
        """The best cut of a way under a cap, the search's if not given; None where none fits, or none that
        takes less than `below_s`.

        The cut is made with one receive ahead. What the transport holds beyond that is known of a whole cut
        only: where it is too much, the way is cut anew, and every worker has as much less room.
        """
        cap = memory_bytes or self.cap
        known = self._best.get((way, effort))
        if known is not None and known.peak <= cap:
            return known if known.step_s < below_s else None
        room = self.parts.room(way)
        if self._least_bytes(way, room) > cap:
            return None
        caps, bound_s = [cap] * way.grid.pp, 0.0
        for _ in range(CUTS_ANEW):
            cut = self._cut(way, room, caps, effort)
            if cut is None or cut.step_s >= below_s:
                return None
            bound_s = bound_s or cut.bound_s  # of any cut of the way; with less room there are fewer
            found = self.found(way, replace(cut, bound_s=bound_s))
            if found.peak <= cap:
                self._best[way, effort] = found
                return found
            more = room.messages(cut.stages, cut.remat, self.request.accelerated)
            caps = [min(before, cap - each) for before, each in zip(caps, more, strict=True)]
        return None

    def _cut(self, way: Way, room: Room, caps: list[int], effort: int) -> Cut | None:
        return best_cut(
            self.parts.schedule(way),
            self.parts.times(way),
            links=self.parts.boundaries(way),
            fits=lambda worker, stages, remat: room.fits(worker, stages, remat, caps[worker]),
            remats=self.space.remats,
            effort=effort,
        )

    def found(self, way: Way, cut: Cut) -> Found:
        """A cut of a way as an answer."""
        grid = way.grid
        memory = self.parts.room(way).counted(cut.stages, cut.remat, self.request.accelerated)
        candidate = Candidate(
            cut=cut.stages, schedule=way.schedule, num_microbatches=way.num_microbatches, remat=cut.remat,
            num_workers=grid.pp, stages_per_worker=way.stages_per_worker, dp=grid.dp, fsdp=grid.fsdp,
            fsdp_level=grid.fsdp_level, tp=grid.tp,
        )  # fmt: skip
        return Found(candidate, cut.step_s, cut.bound_s, memory)

    def bound_s(self, way: Way) -> float:
        """Seconds that no cut of the way goes below, infinity where none fits."""
        least_s = self.by_work_s(way)
        equals = self.parts.equals(way)
        if equals is None:
            return least_s
        cap, remats = self.cap, self.space.remats
        return by_memory_s(way, equals, self.parts.graphs(way), cap, remats, least_s)

    def by_work_s(self, way: Way) -> float:
        """The same whatever the memory."""
        return by_work_s(way, self.parts.times(way))

    def _least_bytes(self, way: Way, room: Room) -> int:
        """Of a way's grid, whatever its schedule and micro-batches; where that is too much nothing is cut."""
        if way.grid not in self._least:
            self._least[way.grid] = room.least_bytes()
        return self._least[way.grid]

    def _fitting_sizes(self, given: Iterator[Way]) -> Iterator[Way]:
        """Those whose micro-batches have costs."""
        return (way for way in given if way.microbatch_size in self.costs.sizes)
