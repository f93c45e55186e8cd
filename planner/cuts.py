"""The cut with the shortest step under one schedule, where every worker has room for its stages.

The slowest stage alone does not decide: layers at the front are waited for once by every worker behind them,
a message may be dearer than a layer, and what a stage must recompute depends on where it stands in the
schedule. So a cut is judged by its step (`steps.QuickSteps`), and cuts are left out by bounds from below.

    1. the cut with the smallest bound, by dynamic programming over (stage, first layer), or for large
       models by filling stages up to a bound that is narrowed down
    2. layers moved over one boundary at a time, as long as the step gets shorter
    3. all cuts whose bounds are below the best step so far, until none is left or the effort is spent

Where the third ends by itself the cut is the best one there is. `Cut.bound_s` says so: no cut has a shorter
step. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from math import comb, inf, prod

from gpipe_bench.pipeline.plan.links import FREE, Link
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.planner.candidate import REMATS
from gpipe_bench.planner.steps import LayerTimes, QuickSteps, coded, recomputed

EFFORT = 3_000_000
"""Actions that are laid out before the search settles for what it has: a few seconds."""
_MOST_CHOICES = 64
"""Of all workers together, that are tried each with each; beyond, one worker at a time."""
_ASKING = 1000
"""Actions that could be laid out while it is found out whether several stages of a worker fit."""
_CLOSE = 1 - 1e-12
"""Sums in another order differ by rounding."""

Fits = Callable[[int, tuple[range, ...], tuple[str, ...]], bool]
"""Whether a worker has room for stages of these layers, in the model's order, that recompute so much."""
Holds = Callable[[Partition, tuple[str, ...]], bool]
"""Whether all workers have room for the stages of a cut, which recompute so much, and their messages."""


@dataclass(frozen=True)
class Cut:
    """Stages, what each recomputes, the seconds of a step, and what no cut goes below: where that is as much,
    there is no better one.
    """

    stages: Partition
    remat: tuple[str, ...]
    step_s: float
    bound_s: float


def best_cut(
    schedule: Schedule,
    times: LayerTimes,
    *,
    links: Sequence[Link] = (),
    fits: Fits | None = None,
    holds: Holds | None = None,
    remats: Sequence[str] = REMATS,
    effort: int = EFFORT,
) -> Cut | None:
    """The cut with the shortest step, None where no cut fits that was looked at.

    Args:
        schedule: without recomputation, whatever its stages and workers.
        times: of the layers, at the micro-batch's size.
        links: one for each boundary between stages; messages take no time if not given.
        fits: whether a worker has room; any has if not given.
        holds: what is asked besides of a whole cut that would be the best so far.
        remats: what stages may recompute, of `candidate.REMATS`.
        effort: actions to lay out at most.

    Raises:
        ValueError: more stages than layers, or a schedule that recomputes.
    """
    if schedule.num_stages > times.num_layers:
        raise ValueError(
            f"cannot cut {times.num_layers} layers into {schedule.num_stages} stages: use at most "
            f"{times.num_layers}"
        )
    return _Search(schedule, times, tuple(links), Choices(fits, remats), effort, holds).run()


class Choices:
    """What the stages of a worker recompute: the least with which they fit.

    More recomputation never makes a step shorter: the same actions in the same order, some of them longer. So
    of one stage the first of `REMATS` that fits is the best one, whatever the other stages do. Several stages
    share their worker's memory; there, of two choices that fit, one is out of the question only if it
    recomputes at least as much on every stage.
    """

    def __init__(self, fits: Fits | None, remats: Sequence[str]) -> None:
        self._fits, self._remats = fits, sorted(remats, key=REMATS.index)
        self.asked = 0  # how often it was to be found out whether something fits
        self.of = cache(self._least)

    def _least(self, worker: int, stages: tuple[range, ...]) -> tuple[tuple[str, ...], ...]:
        """None of them recomputes as much as another one on every stage; none at all where nothing fits."""
        found: list[tuple[int, ...]] = []
        every = product(range(len(self._remats)), repeat=len(stages))
        for choice in sorted(every, key=lambda each: (sum(each), each)):
            if any(all(a <= b for a, b in zip(less, choice, strict=True)) for less in found):
                continue
            self.asked += self._fits is not None
            if self._fits is None or self._fits(worker, stages, self._named(choice)):
                found.append(choice)
        return tuple(map(self._named, found))

    def _named(self, choice: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self._remats[level] for level in choice)


class AloneBound:
    """What a step takes at least because of one of its stages, where every stage has a worker of its own.

    The stage is laid out alone: its first input comes when a micro-batch has been through all layers before
    it, further ones are there at once; a gradient comes back as soon as its micro-batch has been through all
    layers behind and back, however many of them are on their way; and when the stage is done, its last
    gradient still has all layers before to go. Nothing of that depends on where the other stages are cut, and
    every real step waits at least as long. So it is a bound from below on all cuts that have this stage.
    """

    def __init__(self, schedule: Schedule, times: LayerTimes, links: Sequence[Link]) -> None:
        self._times, self._links, self._count = times, links, schedule.num_microbatches
        self._rows = [[coded(action) for action in row] for row in schedule.actions]
        self._laid_out = cache(self._lay_out)

    def least_s(self, stage: int, start: int, stop: int, remat: str, *, messages: bool = True) -> float:
        """Seconds that a step takes at least with layers start..stop - 1 as this stage. Without `messages`
        they take no time, so that longer stages never have a smaller bound.
        """
        times = self._times
        head_s, tail_s, round_s = times.ahead_s(start), times.back_s(start), times.beyond_s(stop)
        if messages and start:
            link, (ahead, back) = self._links[stage - 1], times.message(start)
            head_s += link.occupied_s(ahead) + link.latency_s
            tail_s += link.occupied_s(back) + link.latency_s
        if messages and stop < times.num_layers:
            link, (ahead, back) = self._links[stage], times.message(stop)
            round_s += link.occupied_s(ahead) + link.occupied_s(back) + 2 * link.latency_s
        takes = times.at_least(start, stop)
        # The head only shifts everything.
        ends_s, sent_s = self._laid_out(stage, takes[:5], recomputed(remat, self._count), round_s)
        return head_s + max(ends_s + takes.after_s, sent_s + tail_s)

    def _lay_out(
        self, stage: int, takes: tuple[float, ...], again: int, round_s: float
    ) -> tuple[float, float]:
        """When a stage whose first input is there is done, and when it has sent its last gradient."""
        forward_s, again_s, backward_s, inputs_s, weights_s = takes
        now = sent = 0.0
        done = [0.0] * self._count
        for code, _, microbatch in self._rows[stage]:
            if code == 0:
                now += forward_s
                done[microbatch] = now
            elif code < 3:
                if microbatch < again:
                    now += again_s
                arrival = done[microbatch] + round_s
                takes_s = backward_s if code == 1 else inputs_s
                sent = now = (arrival if arrival > now else now) + takes_s
            else:
                now += weights_s
        return now, sent


class _Search:
    def __init__(
        self,
        schedule: Schedule,
        times: LayerTimes,
        links: tuple[Link, ...],
        choices: Choices,
        effort: int,
        holds: Holds | None,
    ) -> None:
        self.schedule, self.times, self.choices, self.holds = schedule, times, choices, holds
        self.stages, self.layers = schedule.num_stages, times.num_layers
        links = links or (FREE,) * (self.stages - 1)
        self.quick = QuickSteps(schedule, links)
        self.bounds = None if schedule.placement else AloneBound(schedule, times, links)
        self.homes = [schedule.stages_of(worker) for worker in range(schedule.num_workers)]
        self.left = effort  # actions
        self.is_exact = True
        self.best = Cut((), (), inf, 0.0)
        self.known: set[Partition] = set()  # that were looked at
        # Bounds of single stages, and for each stage and its first layer the least that the bounds of it and
        # all after it come to.
        self.table: list[dict[tuple[int, int], float]] = [{} for _ in range(self.stages)]
        self.floors: list[dict[int, float]] = [{} for _ in range(self.stages)] + [{self.layers: 0.0}]

    def run(self) -> Cut | None:
        row = 2 * self.schedule.num_microbatches
        bound_s = self._least_s()
        exact = self.bounds is not None and row * self.stages * self.layers**2 // 2 <= self.left // 2
        if exact:
            self._fill_floors()
            bound_s = max(bound_s, self.floors[0].get(0, inf))
            if bound_s == inf:
                return None
            self._look(self._along())
        else:
            for cut in self._starting_cuts():
                self._look(cut)
        self._move_layers()
        few = comb(self.layers - 1, self.stages - 1) * self.quick.num_actions <= self.left
        if self.best.step_s * _CLOSE > bound_s and (exact or (self.bounds is None and few)):
            (self._all_under_floors if exact else self._all_by_work)()
            if self.left > 0 and self.is_exact:
                bound_s = self.best.step_s
        if self.best.step_s == inf:
            return None
        if self.best.step_s * _CLOSE <= bound_s:
            bound_s = self.best.step_s
        return Cut(self.best.stages, self.best.remat, self.best.step_s, bound_s)

    def _least_s(self) -> float:
        """What no cut goes below, whatever fits: one micro-batch after another through all layers, and every
        worker with an equal share of the work, or what filling stages without regard to memory needs.
        """
        times, work_s = self.times, self.schedule.num_microbatches * self.times.least_s(0, self.layers)
        low_s = max(times.beyond_s(0), work_s / self.schedule.num_workers)
        if self.bounds is None:
            return low_s
        return self._narrowed(low_s, 2 * work_s + times.at_least(0, self.layers).after_s, messages=False)[0]

    def _narrowed(
        self, low_s: float, high_s: float, *, messages: bool = True
    ) -> tuple[float, Partition | None]:
        """A bound to which stages cannot be filled, close to the lowest to which they can, and their cut."""
        found = None
        while high_s - low_s > 1e-3 * high_s and self.left > 0:
            middle_s = (low_s + high_s) / 2
            tighter = self._fill(middle_s, messages=messages)
            if tighter is None:
                low_s = middle_s
            else:
                found, high_s = tighter, middle_s
        return low_s, found

    def _look(self, cut: Partition) -> bool:
        """Whether the cut is the best so far."""
        if cut in self.known:
            return False
        self.known.add(cut)
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
        before_s = self.best.step_s
        chosen: Iterator[tuple[tuple[str, ...], ...]] = product(*options)
        if prod(map(len, options)) > _MOST_CHOICES:
            self.is_exact = False
            chosen = _one_at_a_time(options)
        for choice in chosen:
            remat = [""] * len(cut)
            for mine, each in zip(self.homes, choice, strict=True):
                for stage, what in zip(mine, each, strict=True):
                    remat[stage] = what
            self.left -= self.quick.num_actions
            step_s = self.quick.makespan_s(takes, remat, messages)
            if step_s < self.best.step_s and (self.holds is None or self.holds(cut, tuple(remat))):
                self.best = Cut(cut, tuple(remat), step_s, 0.0)
        return self.best.step_s < before_s

    def _bound_s(self, stage: int, start: int, stop: int, *, messages: bool = True) -> float:
        """What a step takes at least with this stage, infinity where it does not fit; without `messages` also
        whatever fits.
        """
        assert self.bounds is not None
        remat = "never"
        if messages:
            options = self.choices.of(stage, (range(start, stop),))
            if not options:
                return inf
            remat = options[0][0]
        self.left -= 2 * self.schedule.num_microbatches
        return self.bounds.least_s(stage, start, stop, remat, messages=messages)

    def _fill_floors(self) -> None:
        for stage in range(self.stages - 1, -1, -1):
            after = self.floors[stage + 1]
            for start in range(stage, self.layers - (self.stages - stage) + 1) if stage else (0,):
                least_s = inf
                for stop in after:
                    if stop > start and (bound_s := self._bound_s(stage, start, stop)) < inf:
                        self.table[stage][start, stop] = bound_s
                        least_s = min(least_s, max(bound_s, after[stop]))
                if least_s < inf:
                    self.floors[stage][start] = least_s

    def _stops(self, stage: int, start: int) -> list[tuple[float, int]]:
        """Where a stage may end, with the least that the bounds come to from there, the smallest first."""
        table, after = self.table[stage], self.floors[stage + 1].items()
        return sorted(
            (max(table[start, stop], floor), stop) for stop, floor in after if (start, stop) in table
        )

    def _along(self) -> Partition:
        """The cut to which the floors lead."""
        ends = [0]
        for stage in range(self.stages):
            ends.append(self._stops(stage, ends[-1])[0][1])
        return _spans(ends)

    def _starting_cuts(self) -> Iterator[Partition]:
        """Even ones, and by bounds the one that can be filled up to the least."""
        work_s = [self.times.least_s(layer, layer + 1) for layer in range(self.layers)]
        yield partition(work_s, self.stages)
        yield partition([1.0] * self.layers, self.stages)
        if self.bounds is None:
            return
        low_s, high_s = self._least_s(), 0.0
        found = None
        while found is None and high_s < 64 * low_s:
            high_s = 2 * max(high_s, low_s)
            found = self._fill(high_s)
        if found is not None:
            yield self._narrowed(low_s, high_s)[1] or found

    def _fill(self, limit_s: float, *, messages: bool = True) -> Partition | None:
        """Gives each stage as many layers as its bound allows; with `messages` also as its memory does."""
        ends = [0]
        for stage in range(self.stages):
            start = low = ends[-1]
            high = self.layers - (self.stages - stage - 1)
            if stage == self.stages - 1:
                low = high - 1  # all that is left, or nothing
            while low < high:
                stop = (low + high + 1) // 2
                if self._bound_s(stage, start, stop, messages=messages) <= limit_s:
                    low = stop
                else:
                    high = stop - 1
            if low <= start or (stage == self.stages - 1 and low < self.layers):
                return None
            ends.append(low)
        return _spans(ends)

    def _move_layers(self) -> None:
        """Layers over one boundary at a time, while the step gets shorter."""
        changed = self.best.step_s < inf
        while changed and self.left > 0:
            changed = False
            for boundary, by in product(range(1, self.stages), (-1, 1, -2, 2)):
                ends = [stage.start for stage in self.best.stages] + [self.layers]
                ends[boundary] += by
                if ends[boundary - 1] < ends[boundary] < ends[boundary + 1] and self.left > 0:
                    changed |= self._look(_spans(ends))

    def _all_under_floors(self, ends: tuple[int, ...] = (0,)) -> None:
        """Every cut whose bounds are all below the best step, in the order of the bounds."""
        stage = len(ends) - 1
        if stage == self.stages and self.left > 0:
            self._look(_spans(ends))
            return
        for bound_s, stop in self._stops(stage, ends[-1]) if self.left > 0 else ():
            self.left -= 1
            if bound_s >= self.best.step_s * _CLOSE:
                break
            self._all_under_floors((*ends, stop))

    def _all_by_work(self, ends: tuple[int, ...] = (0,), busy_s: tuple[float, ...] = ()) -> None:
        """Every cut of which no worker has more work than the best step takes."""
        stage, start = len(ends) - 1, ends[-1]
        busy_s = busy_s or (0.0,) * self.schedule.num_workers
        if self.left <= 0:
            return
        if stage == self.stages:
            self._look(_spans(ends))
            return
        worker, last = self.schedule.worker(stage), self.layers - (self.stages - stage - 1)
        head_s = self.times.ahead_s(start) if stage == next(iter(self.homes[worker])) else 0.0
        for stop in range(last if stage == self.stages - 1 else start + 1, last + 1):
            self.left -= 1
            after_s = self.times.at_least(start, stop).after_s
            more_s = self.schedule.num_microbatches * self.times.least_s(start, stop) + after_s
            busy = list(busy_s)
            busy[worker] += more_s + head_s
            if busy[worker] < self.best.step_s * _CLOSE:
                self._all_by_work((*ends, stop), tuple(busy))


def _spans(ends: Sequence[int]) -> Partition:
    return tuple(range(a, b) for a, b in pairwise(ends))


def _one_at_a_time(options: Sequence[tuple[tuple[str, ...], ...]]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """The first of every worker, and every other one of one worker with the first of all others."""
    first = tuple(each[0] for each in options)
    yield first
    for worker, each in enumerate(options):
        for other in each[1:]:
            yield (*first[:worker], other, *first[worker + 1 :])
