"""The cut with the shortest step under one schedule, where every worker has room for its stages.

The slowest stage alone does not decide: layers at the front are waited for once by every worker behind them,
a message may be dearer than a layer, and what a stage must recompute depends on where it stands in the
schedule. So a cut is judged by its step (`quick`), and cuts are left out by bounds from below (`alone`).

    1. the cut with the smallest bound, by dynamic programming over (stage, first layer), or for large
       models by filling stages up to a bound that is narrowed down
    2. layers moved over one boundary at a time, as long as the step gets shorter
    3. all cuts whose bounds are below the best step so far, until none is left or the effort is spent

Where the third ends by itself the cut is the best one there is. `Cut.bound_s` says so: no cut has a shorter
step. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import comb, inf, prod

from gpipe_bench.pipeline.plan.links import FREE, Link
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.planner.alone import AloneBound
from gpipe_bench.planner.choices import Choices, Fits
from gpipe_bench.planner.layer_times import REMATS, LayerTimes
from gpipe_bench.planner.quick import QuickSteps

EFFORT = 3_000_000
"""Actions that are laid out before the search settles for what it has: a few seconds."""
_MOST_CHOICES = 64
"""Of all workers together, that are tried each with each; beyond, one worker at a time."""
_ASKING = 1000
"""Actions that could be laid out while it is found out whether several stages of a worker fit."""
_CLOSE = 1 - 1e-12
"""Sums in another order differ by rounding."""


@dataclass(frozen=True)
class Cut:
    """Stages, what each recomputes, the seconds of a step, and what no cut goes below."""

    stages: Partition
    remat: tuple[str, ...]
    step_s: float
    bound_s: float

    @property
    def is_best(self) -> bool:
        """Whether it is known that there is no better one."""
        return self.bound_s >= self.step_s


def best_cut(
    schedule: Schedule,
    times: LayerTimes,
    *,
    links: Sequence[Link] = (),
    fits: Fits | None = None,
    remats: Sequence[str] = REMATS,
    effort: int = EFFORT,
) -> Cut | None:
    """The cut with the shortest step, None where no cut fits that was looked at.

    Args:
        schedule: without recomputation, whatever its stages and workers.
        times: of the layers, at the micro-batch's size.
        links: one for each boundary between stages; messages take no time if not given.
        fits: whether a worker has room; any has if not given.
        remats: what stages may recompute, of `times.REMATS`.
        effort: actions to lay out at most.

    Raises:
        ValueError: more stages than layers, or a schedule that recomputes.
    """
    if schedule.num_stages > times.num_layers:
        raise ValueError(
            f"cannot cut {times.num_layers} layers into {schedule.num_stages} stages: use at most "
            f"{times.num_layers}"
        )
    return _Search(schedule, times, tuple(links), Choices(fits, remats), effort).run()


class _Search:
    def __init__(
        self, schedule: Schedule, times: LayerTimes, links: tuple[Link, ...], choices: Choices, effort: int
    ) -> None:
        self.schedule, self.times, self.choices = schedule, times, choices
        self.links = links or (FREE,) * (schedule.num_stages - 1)
        self.quick = QuickSteps(schedule, self.links)
        self.bounds = None if schedule.placement else AloneBound(schedule, times, self.links)
        self.homes = [schedule.stages_of(worker) for worker in range(schedule.num_workers)]
        self.left = effort  # actions
        self.is_exact = True
        self.cut: Partition = ()
        self.remat: tuple[str, ...] = ()
        self.step_s = inf
        self.known: set[tuple[int, ...]] = set()  # starts of the stages of cuts that were looked at

    def run(self) -> Cut | None:
        stages, layers = self.schedule.num_stages, self.times.num_layers
        row = 2 * self.schedule.num_microbatches
        bound_s = self._least_s()
        exact = self.bounds is not None and row * stages * layers * layers // 2 <= self.left // 2
        if exact:
            floors = self._floors()
            bound_s = max(bound_s, floors[0].get(0, inf))
            if bound_s == inf:
                return None
            self._look(self._along(floors))
        else:
            floors = []
            for cut in self._starting_cuts():
                self._look(cut)
        self._move_layers()
        if self.step_s * _CLOSE <= bound_s:
            return self._found(bound_s)
        few = comb(layers - 1, stages - 1) * self.quick.num_actions <= self.left
        if exact or (self.bounds is None and few):
            self._all_better(floors)
            if self.left > 0 and self.is_exact:
                bound_s = self.step_s
        return self._found(bound_s)

    def _found(self, bound_s: float) -> Cut | None:
        if self.step_s == inf:
            return None
        if self.step_s * _CLOSE <= bound_s:
            bound_s = self.step_s
        return Cut(self.cut, self.remat, self.step_s, bound_s)

    def _least_s(self) -> float:
        """What no cut goes below, whatever fits: one micro-batch after another through all layers, and every
        worker with an equal share of the work, or what filling stages without regard to memory needs.
        """
        takes, count = self.times.stage(0, self.times.num_layers), self.schedule.num_microbatches
        work_s = count * self.times.least_s(0, self.times.num_layers)
        through_s = self.times.beyond_s(0)
        least_s = max(through_s, work_s / self.schedule.num_workers)
        if self.bounds is None:
            return least_s
        high_s, low_s = 2 * work_s + takes.after_s, least_s
        while high_s - low_s > 1e-3 * high_s and self.left > 0:
            middle_s = (low_s + high_s) / 2
            if self._fill(middle_s, messages=False) is None:
                low_s = middle_s
            else:
                high_s = middle_s
        return low_s

    def _look(self, cut: Partition) -> bool:
        """Whether the cut is the best so far."""
        key = tuple(stage.start for stage in cut)
        if key in self.known:
            return False
        self.known.add(key)
        before = self.choices.asked
        options = []
        for worker, mine in enumerate(self.homes):
            options.append(self.choices.of(worker, tuple(cut[stage] for stage in mine)))
            if not options[-1]:
                break
        self.left -= (50 if self.bounds is not None else _ASKING) * (self.choices.asked - before)
        if not options[-1]:
            return False
        takes = [self.times.stage(stage.start, stage.stop) for stage in cut]
        messages = [self.times.message(stage.start) for stage in cut[1:]]
        before_s = self.step_s
        if prod(map(len, options)) <= _MOST_CHOICES:
            chosen: Iterator[tuple[tuple[str, ...], ...]] = product(*options)
        else:
            self.is_exact = False
            chosen = _one_at_a_time(options)
        for choice in chosen:
            remat = [""] * len(cut)
            for mine, each in zip(self.homes, choice, strict=True):
                for stage, what in zip(mine, each, strict=True):
                    remat[stage] = what
            self.left -= self.quick.num_actions
            step_s = self.quick.makespan_s(takes, remat, messages)
            if step_s < self.step_s:
                self.cut, self.remat, self.step_s = cut, tuple(remat), step_s
        return self.step_s < before_s

    def _bound_s(self, stage: int, start: int, stop: int) -> float:
        """What a step takes at least with this stage, infinity where it does not fit."""
        assert self.bounds is not None
        options = self.choices.of(stage, (range(start, stop),))
        if not options:
            return inf
        self.left -= 2 * self.schedule.num_microbatches
        return self.bounds.least_s(stage, start, stop, options[0][0])

    def _floors(self) -> list[dict[int, float]]:
        """For each stage and its first layer, the least that the bounds of it and all after it come to."""
        stages, layers = self.schedule.num_stages, self.times.num_layers
        floors: list[dict[int, float]] = [{} for _ in range(stages)] + [{layers: 0.0}]
        self.table: list[dict[tuple[int, int], float]] = [{} for _ in range(stages)]
        for stage in range(stages - 1, -1, -1):
            after = floors[stage + 1]
            for start in range(stage, layers - (stages - stage) + 1) if stage else (0,):
                least_s = inf
                for stop in after:
                    if stop > start:
                        bound_s = self._bound_s(stage, start, stop)
                        if bound_s < inf:
                            self.table[stage][start, stop] = bound_s
                            least_s = min(least_s, max(bound_s, after[stop]))
                if least_s < inf:
                    floors[stage][start] = least_s
        return floors

    def _along(self, floors: list[dict[int, float]]) -> Partition:
        """The cut to which the floors lead."""
        found, start = [], 0
        for stage, table in enumerate(self.table):
            after = floors[stage + 1]
            stop = min(
                (stop for first, stop in table if first == start),
                key=lambda stop: (max(table[start, stop], after[stop]), stop),
            )
            found.append(range(start, stop))
            start = stop
        return tuple(found)

    def _starting_cuts(self) -> Iterator[Partition]:
        """Even ones, and by bounds the one that can be filled up to the least."""
        times, stages = self.times, self.schedule.num_stages
        work_s = [times.least_s(layer, layer + 1) for layer in range(times.num_layers)]
        yield partition(work_s, stages)
        yield partition([1.0] * times.num_layers, stages)
        if self.bounds is None:
            return
        low_s, high_s = self._least_s(), 0.0
        found = None
        while found is None and high_s < 64 * low_s:
            high_s = 2 * max(high_s, low_s)
            found = self._fill(high_s)
        while found is not None and high_s - low_s > 1e-3 * high_s and self.left > 0:
            middle_s = (low_s + high_s) / 2
            tighter = self._fill(middle_s)
            if tighter is None:
                low_s = middle_s
            else:
                found, high_s = tighter, middle_s
        if found is not None:
            yield found

    def _fill(self, limit_s: float, *, messages: bool = True) -> Partition | None:
        """Gives each stage as many layers as its bound allows; with `messages` also as its memory does."""
        assert self.bounds is not None
        layers, stages, start = self.times.num_layers, self.schedule.num_stages, 0
        found = []
        for stage in range(stages):
            low, high = start, layers - (stages - stage - 1)
            if stage == stages - 1:
                low = high - 1  # all that is left, or nothing
            while low < high:
                stop = (low + high + 1) // 2
                if messages:
                    bound_s = self._bound_s(stage, start, stop)
                else:
                    self.left -= 2 * self.schedule.num_microbatches
                    bound_s = self.bounds.least_s(stage, start, stop, "never", messages=False)
                if bound_s <= limit_s:
                    low = stop
                else:
                    high = stop - 1
            if low <= start or (stage == stages - 1 and low < layers):
                return None
            found.append(range(start, low))
            start = low
        return tuple(found)

    def _move_layers(self) -> None:
        """Layers over one boundary at a time, while the step gets shorter."""
        changed = self.step_s < inf
        while changed and self.left > 0:
            changed = False
            for boundary in range(1, len(self.cut)):
                for by in (-1, 1, -2, 2):
                    starts = [stage.start for stage in self.cut] + [self.times.num_layers]
                    starts[boundary] += by
                    if starts[boundary - 1] < starts[boundary] < starts[boundary + 1] and self.left > 0:
                        changed |= self._look(tuple(range(a, b) for a, b in pairwise(starts)))

    def _all_better(self, floors: list[dict[int, float]]) -> None:
        """Every cut whose bounds are all below the best step, in the order of the bounds."""
        stages, layers = self.schedule.num_stages, self.times.num_layers
        count = self.schedule.num_microbatches

        def go(found: tuple[range, ...], busy_s: tuple[float, ...]) -> None:
            stage, start = len(found), found[-1].stop if found else 0
            if self.left <= 0:
                return
            if stage == stages:
                self._look(found)
                return
            if self.bounds is not None:
                after = floors[stage + 1]
                stops = sorted(
                    (max(self.table[stage].get((start, stop), inf), floor), stop)
                    for stop, floor in after.items()
                    if stop > start
                )
                for bound_s, stop in stops:
                    self.left -= 1
                    if bound_s >= self.step_s * _CLOSE:
                        break
                    go((*found, range(start, stop)), ())
                return
            worker = self.schedule.worker(stage)
            last = layers - (stages - stage - 1)
            for stop in range(last if stage == stages - 1 else start + 1, last + 1):
                self.left -= 1
                after_s = self.times.stage(start, stop).after_s
                more_s = count * self.times.least_s(start, stop) + after_s
                first = next(iter(self.homes[worker]))
                head_s = self.times.ahead_s(start) if stage == first else 0.0
                busy = list(busy_s)
                busy[worker] += more_s + head_s
                if busy[worker] < self.step_s * _CLOSE:
                    go((*found, range(start, stop)), tuple(busy))

        go((), (0.0,) * self.schedule.num_workers)


def _one_at_a_time(options: Sequence[tuple[tuple[str, ...], ...]]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """The first of every worker, and every other one of one worker with the first of all others."""
    first = tuple(each[0] for each in options)
    yield first
    for worker, each in enumerate(options):
        for other in each[1:]:
            yield (*first[:worker], other, *first[worker + 1 :])
