"""How long a step takes, for many cuts of one model under one schedule, and which cut takes least.

A search looks at hundreds of thousands of stages, so the seconds of any are a few look-ups (`LayerTimes`) and
a step is one pass over lists of numbers (`QuickSteps`). What the collectives of a grid add depends on which
layers a stage has: it is computed once for each stage, as `predict` does in its replay, and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, product
from math import inf
from typing import Any, NamedTuple

from gpipe_bench.pipeline.plan.links import FREE, Bucket, Gather, Link
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.walk import execution_order

from .candidate import REMATS, WRAPPED, Grid
from .collectives import Collectives, forward_kind
from .costs import Costs, SizeCosts, inside
from .request import Request


def recomputed(remat: str, num_microbatches: int) -> int:
    """The micro-batches below this number are recomputed by the schedule."""
    return {"except_last": num_microbatches - 1, "always": num_microbatches}.get(remat, 0)


class StageTimes(NamedTuple):
    """Seconds of a stage: of each action of one micro-batch, and after its last action."""

    forward_s: float
    again_s: float  # R
    backward_s: float  # B
    inputs_s: float  # I; infinite where the backward is not split
    weights_s: float  # W
    after_s: float  # the optimizer
    buckets: tuple[Bucket, ...] = ()
    gathers: tuple[Gather, ...] = ()

    def microbatch_s(self, remat: str) -> float:
        """Seconds of one micro-batch, forward and backward."""
        back_s = min(self.backward_s, self.inputs_s + self.weights_s)
        return self.forward_s + back_s + self.again_s * (remat in ("except_last", "always"))


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of stages of any layers on one micro-batch, and what lies between the layers.

    Args:
        size: costs of the layers
        update_s: of the optimizer, of each layer; nothing if not given
        split: whether backwards are I and W, where the layers have them
        collectives: what a grid adds; nothing if not given
    """

    size: SizeCosts
    update_s: Sequence[float] = ()
    split: bool = True
    collectives: Collectives | None = None
    _stages: dict[tuple[int, int, str], StageTimes] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_layers(self) -> int:
        return self.size.num_layers

    def action_s(self, kind: str, span: range, remat: str) -> float:
        """Seconds of an action of a stage of these layers, its waits left out; `kind` as in `kinds_of`."""
        takes_s = self.size.seconds(inside(kind, remat), span)
        shards = self.collectives.shards if self.collectives else None
        return takes_s if shards is None else max(0.0, takes_s + shards.more(kind, span))

    def stage(self, start: int, stop: int, remat: str = "never") -> StageTimes:
        """Returns the times of a stage of layers start..stop - 1 with this recomputation."""
        key = (start, stop, remat if remat in WRAPPED else "never")
        if key not in self._stages:
            self._stages[key] = self._stage(range(start, stop), key[2])
        return self._stages[key]

    def _stage(self, span: range, remat: str) -> StageTimes:
        more, known = self.collectives, self.size.layers_s
        halves = self.split and "I" in known
        forward, again, *back = (
            self.action_s(kind, span, remat) if kind in known else 0.0
            for kind in (forward_kind(known), "R", "B", *("IW" * halves))
        )  # fmt: skip
        ahead_s, back_s = more.waits_s(span, remat) if more else (0.0, 0.0)
        return StageTimes(
            forward + ahead_s, again + ahead_s, back[0] + back_s,
            *((back[1] + back_s, back[2]) if halves else (inf, 0.0)),
            sum(self.update_s[span.start : span.stop]),
            more.buckets(span) if more else (), more.gathers(span) if more else (),
        )  # fmt: skip

    def work_s(self, span: range) -> float:
        """Seconds of layers on one micro-batch without their gathers, with a whole or a split backward."""
        forward_s, *back_s = (
            self.size.seconds(kind, span) if kind in self.size.layers_s else inf
            for kind in (forward_kind(self.size.layers_s), "B", *("IW" * self.split))
        )
        return forward_s + min(back_s[0], sum(back_s[1:]) if self.split else inf)

    def passed_s(self, boundary: int) -> float:
        """Least seconds of a micro-batch on all layers before `boundary`: forward, and back in whole B."""
        known = self.size.layers_s
        kinds = (forward_kind(known), *("B" * (not (self.split and "I" in known))))
        return sum(self.size.seconds(kind, range(boundary)) for kind in kinds) if boundary else 0.0

    def message(self, boundary: int) -> tuple[float, float]:
        """Bytes over a cut in front of layer `boundary`, forward and back."""
        ahead = self.size.activation_bytes
        back = self.size.gradient_bytes or ahead
        return (ahead[boundary - 1], back[boundary - 1]) if ahead else (0.0, 0.0)


def times_on(grid: Grid, costs: Costs, microbatch_size: int, request: Request, *, split: bool) -> LayerTimes:
    """The times of the layers on a grid; ValueError for a size or a grid that the costs know nothing of."""
    costs = costs.on(microbatch_size, grid.tp, sharded=request.gathers_half(grid.fsdp))
    more = Collectives(grid, request, costs, microbatch_size, split=split)
    update_s = more.shards.update_s if more.shards else [each / grid.fsdp for each in costs.update_s]
    return LayerTimes(costs.at(microbatch_size), update_s, split, more)


class QuickSteps:
    """Steps of a schedule without recomputation; what is recomputed is said for each step. `links` has one
    for each boundary between stages, or is empty where messages take no time.

    A search asks for the end of thousands of steps whose order of actions is known, so that is put into lists
    of numbers once. The same rules lead to the same numbers as in the replay, but for a link whose two
    directions wait for each other: each is taken for itself, as who comes first is not known beforehand.
    """

    def __init__(self, schedule: Schedule, links: Sequence[Link] = ()) -> None:
        self.schedule = schedule
        self.links = tuple(links) or (FREE,) * (schedule.num_stages - 1)
        homes = self._homes = [schedule.worker(stage) for stage in range(schedule.num_stages)]
        # Which of the possible orders it is does not matter: messages leave a worker in the order of its row.
        self._order = [
            (_CODES[a.kind], a.stage, a.microbatch, homes[a.stage]) for a in execution_order(schedule)
        ]
        # Links from worker to worker by number, each direction for itself; -1 within a worker.
        numbers: dict[tuple[int, int], int] = {}

        def number(a: int, b: int) -> int:
            return -1 if a == b else numbers.setdefault((a, b), len(numbers))

        self._ahead = [number(a, b) for a, b in pairwise(homes)]
        self._back = [number(b, a) for a, b in pairwise(homes)]
        self._num_links = len(numbers)

    def makespan_s(
        self,
        stages: Sequence[StageTimes],
        remat: Sequence[str],
        messages: Sequence[tuple[float, float]] = (),
    ) -> float:
        """Seconds of a step.

        Args:
            stages: of each stage.
            remat: what each stage recomputes, one of REMATS.
            messages: bytes over each boundary between stages, forward and back; none if not given.
        """
        last, count = len(stages) - 1, self.schedule.num_microbatches
        given = list(zip(self.links, messages or [(0.0, 0.0)] * last, strict=True))
        ahead_s = [link.occupied_s(size) for link, (size, _) in given]
        back_s = [link.occupied_s(size) for link, (_, size) in given]
        latency_s = [link.latency_s for link in self.links]
        forward_s, again_s, backward_s, inputs_s, weights_s, after_s, sums, gathers = zip(
            *stages, strict=True
        )
        again = [recomputed(each, count) for each in remat]
        inputs = [[0.0] * count for _ in stages]
        gradients = [[0.0] * count for _ in stages]
        free = [0.0] * self.schedule.num_workers
        busy = [0.0] * self._num_links
        ended = [(0.0, 0.0)] * len(stages)  # the last action: when, and how long it took
        waits = self._fetched(gathers)
        through_ahead, through_back = self._ahead, self._back
        for code, stage, microbatch, worker in self._order:
            now = free[worker]
            if code == 0:
                arrival = inputs[stage][microbatch]
                now = arrival if arrival > now else now
                if waits[stage]:
                    now = _waiting(waits[stage], now, forward_s[stage])
                    waits[stage] = ()
                now += forward_s[stage]
                if stage < last:
                    link = through_ahead[stage]
                    if link < 0:
                        inputs[stage + 1][microbatch] = now
                    else:
                        start = busy[link]
                        sent = busy[link] = (start if start > now else now) + ahead_s[stage]
                        inputs[stage + 1][microbatch] = sent + latency_s[stage]
            elif code < 3:
                if microbatch < again[stage]:
                    now += again_s[stage]
                arrival = gradients[stage][microbatch]
                takes_s = backward_s[stage] if code == 1 else inputs_s[stage]
                now = (arrival if arrival > now else now) + takes_s
                ended[stage] = now, takes_s
                if stage:
                    link = through_back[stage - 1]
                    if link < 0:
                        gradients[stage - 1][microbatch] = now
                    else:
                        start = busy[link]
                        sent = busy[link] = (start if start > now else now) + back_s[stage - 1]
                        gradients[stage - 1][microbatch] = sent + latency_s[stage - 1]
            else:
                now += weights_s[stage]
                ended[stage] = now, weights_s[stage]
            free[worker] = now
        if any(sums):
            reduced = [0.0] * len(free)
            order = sorted(range(len(stages)), key=lambda stage: ended[stage][0])
            for stage in order:
                (end_s, takes_s), worker = ended[stage], self._homes[stage]
                for bucket in sums[stage]:
                    ready_s = end_s - takes_s + bucket.ready * takes_s
                    reduced[worker] = max(ready_s, reduced[worker]) + bucket.takes_s
            free = list(map(max, free, reduced))
        for worker, seconds in zip(self._homes, after_s, strict=True):
            free[worker] += seconds
        return max(free)

    def _fetched(self, gathers: Sequence[tuple[Gather, ...]]) -> list[tuple[tuple[float, float], ...]]:
        """For each stage, the shares of its first forward at which fetches are needed, and when those end."""
        ends, found = [0.0] * self.schedule.num_workers, []
        for worker, each in zip(self._homes, gathers, strict=True):
            there = []
            for gather in each:
                ends[worker] += gather.takes_s
                there.append((gather.needed, ends[worker]))
            found.append(tuple(there))
        return found


class LongSteps:
    """Steps of a schedule (`rows`) of many micro-batches, from two shorter ones: it repeats itself."""

    def __init__(self, rows: Callable[[int], Schedule], num_microbatches: int, links: Sequence[Link]) -> None:
        workers = rows(1).num_workers
        short, longer = 4 * workers, 6 * workers
        self._share = (num_microbatches - short) / (longer - short)
        counts = (short, longer) if num_microbatches > longer else (num_microbatches,)
        self._steps = [QuickSteps(rows(count), links) for count in counts]

    def makespan_s(self, *step: Any) -> float:
        """Same as `QuickSteps.makespan_s`."""
        first, *more = (steps.makespan_s(*step) for steps in self._steps)
        return first + self._share * (more[0] - first) if more else first


def _waiting(needs: Sequence[tuple[float, float]], start_s: float, takes_s: float) -> float:
    """Returns the start time at which an action would end at the same time without the waits inside it."""
    late_s = start_s
    for share, there_s in needs:
        late_s = max(late_s, there_s - share * takes_s)
    return late_s


_CODES = {Kind.F: 0, Kind.B: 1, Kind.I: 2, Kind.W: 3}


# The cut of a way under its schedule: each stage takes as many layers as a limit of seconds allows and its
# worker has room for, with the least limit that places all of them; then layers move over one boundary at a
# time while the step gets shorter. Memory is part of the cost: a cut of even seconds may fit under no
# recomputation, where another one does. A worker's stages recompute the least with which they fit, all alike.

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
    """The cut with the shortest step that was found, None where none fits. ValueError for more stages than
    layers.

    Args:
        schedule: without recomputation, whatever its stages and workers.
        times: of the layers, at the micro-batch's size.
        lasts: what a step takes.
        fits: whether a worker has room; any has if not given.
        remats: what stages may recompute, what takes least first.
        looks: cuts to look at beyond the first.
        below_s: seconds that the step must stay below; a way whose cuts cannot is left before any is tried.
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
        """Whether a worker has time for all micro-batches, from the first one's way in to the last's out."""
        remat = least_remat(stage, (range(start, stop),))
        return remat is not None and times.passed_s(start) + busy_s(range(start, stop), remat) < below_s

    alone = not schedule.placement
    if alone and below_s < inf and not _fill(in_time, num_layers, schedule.num_stages):
        return None
    full = filled(stage_s, num_layers, schedule.num_stages) if alone else None
    work_s = [times.work_s(range(layer, layer + 1)) for layer in range(num_layers)]
    even = (partition(each, schedule.num_stages) for each in (work_s, [1.0] * num_layers))
    first = dict.fromkeys([full, *even] if full else even)
    best = min(filter(None, map(look, first)), key=lambda cut: cut.step_s, default=None)
    known, left, changed = set(first), looks, True
    while best is not None and changed:
        changed = False
        for boundary, by in product(range(1, len(best.stages)), (-1, 1, -2, 2)):
            other = moved(best.stages, boundary, by)
            if other is None or other in known or left <= 0:
                continue
            known.add(other)
            left -= 1
            found = look(other)
            if found is not None and found.step_s < best.step_s:
                best, changed = found, True
    return best


def moved(cut: Partition, boundary: int, by: int) -> Partition | None:
    """The cut with the end of stage `boundary` - 1 moved by so many layers; None if that empties a stage."""
    ends = [span.start for span in cut] + [cut[-1].stop]
    ends[boundary] += by
    return spans(ends) if ends[boundary - 1] < ends[boundary] < ends[boundary + 1] else None


def spans(ends: Sequence[int]) -> Partition:
    """Stages between these layers."""
    return tuple(range(a, b) for a, b in pairwise(ends))


def _fill(takes: Callable[[int, int, int], bool], num_layers: int, num_stages: int) -> Partition | None:
    """Stages of as many layers as each takes, fewer the earlier it begins; None where layers are left."""
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
    """Stages filled up to the least limit of their cost (stage, first layer, end), within a share `narrow`;
    None where none holds them. Longer stages cost more, and earlier ones.
    """

    def within(limit: float) -> Partition | None:
        return _fill(lambda *stage: cost(*stage) <= limit, num_layers, num_stages)

    best = within(1e300)  # less than what does not fit
    if best is None:
        return None
    low, high = 0.0, float(max(cost(stage, span.start, span.stop) for stage, span in enumerate(best)))
    while high - low > narrow * high:
        middle = (low + high) / 2
        if (found := within(middle)) is None:
            low = middle
        else:
            best, high = found, middle
    return best
