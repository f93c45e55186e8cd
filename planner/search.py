"""The best ways to train: every grid, schedule and number of micro-batches, each with a good cut for it.

A way takes about as long as its work divided evenly, and a pipeline that has to be filled. Ways are taken in
the order of that, and the search ends where it is above the last of the steps that are kept. Of each group of
ways, such as those of one grid and schedule, the best is kept, and its cut improved at the end.

Step times are those of `steps`; `predict` gives ranges, parts and jitter for the few ways that are found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import pairwise, product
from math import inf

from gpipe_bench.pipeline.memory.peaks import Optimizer, StageMemory
from gpipe_bench.pipeline.memory.workers import SharedWeight
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.planner.candidate import REMATS, Candidate, Grid, Way
from gpipe_bench.planner.costs import Costs
from gpipe_bench.planner.memory import LATELY, Room, Rooms
from gpipe_bench.planner.request import Request, Space, Topology, splits_some, ways
from gpipe_bench.planner.steps import LayerTimes, LongSteps, StageTimes, recomputed, times_on

KEPT = 8
"""Number of ways that are kept; fewer are printed."""
ABOUT = 0.97
"""Share of a way's estimated step time that bounds the step times of all its cuts from below."""
LOOKS = 60
"""Cuts that are tried for each kept way, beyond the first."""
CUTS_ANEW = 4
"""Most cuts of a way until its messages fit, too; each cut leaves room for the messages of the last one."""


@dataclass(frozen=True)
class Found:
    """A way with its cut, the bytes of each worker, and the seconds of a step where they are known."""

    way: Way
    candidate: Candidate
    memory: tuple[StageMemory, ...]
    step_s: float = inf

    @property
    def peak(self) -> int:
        return max(each.peak for each in self.memory)

    @property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each worker."""
        rows = self.candidate.rows(1, recomputes=False)
        return tuple(tuple(rows.stages_of(worker)) for worker in range(len(self.memory)))

    def layers_of(self, worker: int) -> str:
        """`0-3`, or `0-3 8-11` where the worker has two stages."""
        spans = [self.candidate.cut[stage] for stage in self.homes[worker]]
        return " ".join(f"{span.start}-{span.stop - 1}" for span in spans)

    def where(self) -> str:
        """The stage that is fullest, and when."""
        worst = max(range(len(self.memory)), key=lambda worker: self.memory[worker].peak)
        home = "stage" if len(self.homes[worst]) == 1 else "worker"
        kinds = set(self.candidate.remat)
        again = kinds.pop() if len(kinds) == 1 else "some"
        again = {"always": "everything", "never": "nothing"}.get(again, again)
        return (
            f"on {home} {worst} (layers {self.layers_of(worst)}) at {self.memory[worst].when}, with "
            f"{self.way.grid}, {self.way.schedule}, {self.way.num_microbatches} micro-batches and {again} "
            "recomputed"
        )


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
        tried, skipped: ways that were cut, and those that take about as long as none that is kept
    """

    costs: Costs
    request: Request
    space: Space
    ties_over: Callable[[int], tuple[SharedWeight, ...]] = lambda tp: ()
    progress: Callable[[int, int], None] = lambda done, total: None
    tried: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        self.cap = self.request.usable_bytes
        self.room = Rooms(
            self.costs.profiles,
            self.request,
            self.ties_over,
            split=splits_some(self.request, self.space),
        )
        self._steps, self._times = lru_cache(LATELY)(self._steps_of), cache(self._times_of)
        self._boundaries = cache(self._links_of)

    def run(
        self,
        kept: int | None = KEPT,
        of_each: Callable[[Way], Hashable] = grid_and_schedule,
    ) -> tuple[Found, ...]:
        """The best of each group of ways, the fastest first, so many of them; none where nothing fits.

        Args:
            kept: groups of which the best is wanted; None for every group that has a way that fits
            of_each: the group of a way
        """
        every = [
            way
            for way in ways(self.request, self.space, self.costs.num_layers)
            if way.microbatch_size in self.costs.sizes
        ]
        best: dict[Hashable, Found] = {}
        limit_s = inf
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
            self.tried += 1
            if found is not None and found.step_s < below_s:
                best[group] = found
                if kept is not None and len(best) >= kept:
                    limit_s = sorted(each.step_s for each in best.values())[kept - 1]
        self.skipped = len(every) - self.tried
        leading = sorted(best.values(), key=lambda each: each.step_s)[:kept]
        again = [self.best_of(each.way, LOOKS) or each for each in leading]
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
        memory = (room or self.room(way)).counted(cut.stages, cut.remat)
        return Found(way, way.candidate(cut.stages, cut.remat), memory, cut.step_s)

    def step_s(self, way: Way, stages: Partition, remat: tuple[str, ...]) -> float:
        """Seconds of a step with that cut."""
        times = self.times(way)
        takes = [times.stage(span.start, span.stop, each) for span, each in zip(stages, remat, strict=True)]
        messages = [times.message(span.start) for span in stages[1:]]
        return self._steps(way).makespan_s(takes, remat, messages)

    def schedule(self, way: Way) -> Schedule:
        """Returns the schedule of the way, without recomputation."""
        return self.room.rows(way).schedule

    def boundaries(self, way: Way) -> tuple[Link, ...]:
        """Returns the links between the way's stages."""
        return self._boundaries(way.grid, way.schedule, way.stages_per_worker)

    def times(self, way: Way) -> LayerTimes:
        """Returns the times of the layers in this way."""
        return self._times(way.grid, way.microbatch_size, way.splits)

    def _steps_of(self, way: Way) -> LongSteps:
        def rows(count: int) -> Schedule:
            return self.room.rows(way, count).schedule

        return LongSteps(rows, way.num_microbatches, self.boundaries(way))

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


def _fits(
    room: Room, left: list[int], worker: int, stages: tuple[range, ...], remat: tuple[str, ...]
) -> bool:
    return room.fits(worker, stages, remat, left[worker])


# The cut of a way under its schedule: each stage takes as many layers as a limit of seconds allows and its
# worker has room for, with the least limit that places all of them; then layers move over one boundary at a
# time while the step gets shorter. Memory is part of the cost and no check afterwards: a cut of even
# seconds may fit with no recomputation that there is, where another one does. A stage recomputes the least
# with which it fits; several stages of a worker recompute alike.

NARROW = 2e-3
"""Relative precision to which the limit of seconds is narrowed down."""

Fits = Callable[[int, tuple[range, ...], tuple[str, ...]], bool]
"""Whether a worker has room for stages of these layers, in the model's order, that recompute so much."""
Lasts = Callable[[Sequence[StageTimes], Sequence[str], Sequence[tuple[float, float]]], float]
"""Seconds of a step, as `QuickSteps.makespan_s`."""


@dataclass(frozen=True)
class Cut:
    """Stages, what each recomputes, and the seconds of a step."""

    stages: Partition
    remat: tuple[str, ...]
    step_s: float


def best_cut(
    schedule: Schedule,
    times: LayerTimes,
    lasts: Lasts,
    *,
    fits: Fits | None = None,
    remats: Sequence[str] = REMATS,
    looks: int = 0,
    below_s: float = inf,
) -> Cut | None:
    """The cut with the shortest step that was found, None where none fits.

    Args:
        schedule: without recomputation, whatever its stages and workers.
        times: of the layers, at the micro-batch's size.
        lasts: what a step takes.
        fits: whether a worker has room; any has if not given.
        remats: what stages may recompute, what takes least first.
        looks: cuts to look at beyond the first.
        below_s: what the step must take less than; where no cut can, that is found out before any is tried.

    Raises:
        ValueError: more stages than layers.
    """
    num_layers, homes = times.num_layers, [schedule.stages_of(w) for w in range(schedule.num_workers)]
    if schedule.num_stages > num_layers:
        raise ValueError(
            f"cannot cut {num_layers} layers into {schedule.num_stages} stages: use at most {num_layers}"
        )

    count = schedule.num_microbatches

    @cache
    def least_remat(worker: int, stages: tuple[range, ...]) -> str | None:
        """Returns the least recomputation with which the stages fit."""
        every = ((each,) * len(stages) for each in remats)
        return next((each[0] for each in every if fits is None or fits(worker, stages, each)), None)

    def busy_s(span: range, remat: str) -> float:
        """Seconds that all micro-batches of a step keep a worker busy with a stage."""
        takes, again = times.stage(span.start, span.stop, remat), recomputed(remat, count)
        return count * takes.microbatch_s("never") + again * takes.again_s

    def look(stages: Partition) -> Cut | None:
        if any(sum(busy_s(stages[stage], "never") for stage in mine) >= below_s for mine in homes):
            return None
        remat = [""] * len(stages)
        for worker, mine in enumerate(homes):
            found = least_remat(worker, tuple(stages[stage] for stage in mine))
            if found is None or sum(busy_s(stages[stage], found) for stage in mine) >= below_s:
                return None
            for stage in mine:
                remat[stage] = found
        takes = [times.stage(span.start, span.stop, r) for span, r in zip(stages, remat, strict=True)]
        step_s = lasts(takes, remat, [times.message(span.start) for span in stages[1:]])
        return Cut(stages, tuple(remat), step_s)

    def stage_s(stage: int, start: int, stop: int) -> float:
        """Seconds of one micro-batch on a stage that is alone on its worker."""
        remat = least_remat(stage, (range(start, stop),))
        return inf if remat is None else times.stage(start, stop, remat).microbatch_s(remat)

    def in_time(stage: int, start: int, stop: int) -> bool:
        """Whether a worker, once the first micro-batch has come through the stages before its own, has time
        for all of them, and for the last one's way back through these.
        """
        remat = least_remat(stage, (range(start, stop),))
        if remat is None:
            return False
        return times.passed_s(start) + busy_s(range(start, stop), remat) < below_s

    alone = not schedule.placement
    if alone and below_s < inf and not _fill(in_time, num_layers, schedule.num_stages):
        return None
    full = filled(stage_s, num_layers, schedule.num_stages) if alone else None
    first = [full, *_even(times, schedule.num_stages)] if full else [*_even(times, schedule.num_stages)]
    best = min(filter(None, map(look, dict.fromkeys(first))), key=lambda cut: cut.step_s, default=None)
    known, left, changed = set(first), looks, True
    while best is not None and changed:
        changed = False
        for boundary, by in product(range(1, len(best.stages)), (-1, 1, -2, 2)):
            ends = [span.start for span in best.stages] + [num_layers]
            ends[boundary] += by
            moved = spans(ends) if ends[boundary - 1] < ends[boundary] < ends[boundary + 1] else None
            if moved is None or moved in known or left <= 0:
                continue
            known.add(moved)
            left -= 1
            found = look(moved)
            if found is not None and found.step_s < best.step_s:
                best, changed = found, True
    return best


def spans(ends: Sequence[int]) -> Partition:
    """Stages between these layers."""
    return tuple(range(a, b) for a, b in pairwise(ends))


def _even(times: LayerTimes, stages: int) -> Iterator[Partition]:
    """Yields two even cuts: by the seconds of the layers, and by their number."""
    layers = range(times.num_layers)
    yield partition([times.work_s(layer, layer + 1) for layer in layers], stages)
    yield partition([1.0] * len(layers), stages)


def _fill(takes: Callable[[int, int, int], bool], num_layers: int, num_stages: int) -> Partition | None:
    """Stages of as many layers as each one takes, which are fewer the earlier it begins; None where the last
    takes less than all that are left.
    """
    ends = [0]
    for stage in range(num_stages):
        low, high = ends[-1], num_layers - (num_stages - stage - 1)
        while low < high:
            stop = (low + high + 1) // 2
            low, high = (stop, high) if takes(stage, ends[-1], stop) else (low, stop - 1)
        if low == ends[-1]:
            return None
        ends.append(low)
    return spans(ends) if ends[-1] == num_layers else None


def filled(
    cost: Callable[[int, int, int], float], num_layers: int, num_stages: int, narrow: float = NARROW
) -> Partition | None:
    """Stages filled up to the least limit of their cost (stage, first layer, end), which is found up to a
    share `narrow` of it; None where they cannot be filled at all. Longer stages cost more, and the later a
    stage begins the less it costs.
    """

    def within(limit: float) -> Partition | None:
        return _fill(lambda *stage: cost(*stage) <= limit, num_layers, num_stages)

    best = within(_MOST)
    if best is None:
        return None
    low, high = 0.0, float(max(cost(stage, span.start, span.stop) for stage, span in enumerate(best)))
    while high - low > narrow * high:
        middle = (low + high) / 2
        found = within(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


_MOST = 1e300  # less than what does not fit
