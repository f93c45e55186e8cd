"""The cut of a model under one schedule: stages of even seconds that fit, then layers moved while the step
gets shorter.

    1. each stage takes as many layers as a limit of seconds allows and its worker has room for; the limit is
       narrowed down to the least with which all layers are placed
    2. layers move over one boundary at a time, as long as the step gets shorter (`steps.QuickSteps`)

Memory is part of the cost and no check afterwards: a cut of even seconds may fit with no recomputation that
there is, where another one does. A stage recomputes the least with which it fits; several stages of a worker
recompute alike. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from math import inf

from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.planner.candidate import REMATS
from gpipe_bench.planner.steps import LayerTimes, StageTimes, recomputed

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
            if found is None:
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
    first = list(_filled(stage_s, num_layers, schedule.num_stages)) if alone else []
    first += _even(times, schedule.num_stages)
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


def _filled(
    stage_s: Callable[[int, int, int], float], num_layers: int, num_stages: int
) -> Iterator[Partition]:
    """Stages filled up to the least limit; none where they cannot be filled at all. Longer stages take longer
    and need more, and the later a stage begins the less it needs.
    """

    def filled(limit_s: float) -> Partition | None:
        return _fill(
            lambda stage, start, stop: stage_s(stage, start, stop) <= limit_s, num_layers, num_stages
        )

    best = filled(_LONGEST_S)
    if best is None:
        return
    high_s = max(stage_s(stage, span.start, span.stop) for stage, span in enumerate(best))
    low_s = 0.0
    while high_s - low_s > NARROW * high_s:
        middle_s = (low_s + high_s) / 2
        found = filled(middle_s)
        if found is None:
            low_s = middle_s
        else:
            best, high_s = found, middle_s
    yield best


_LONGEST_S = 1e300  # less than what does not fit
