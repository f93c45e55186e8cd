"""Seconds that no cut of a way goes below, known before anything of it is cut or laid out.

    work     all of it, divided evenly; one micro-batch after another through all layers; a pipeline that has
             to be filled, and emptied, once for every worker
    memory   a worker holds as many layers as its memory has room for with the graphs that its row keeps at
             a time, or more of them that are recomputed, which takes longer. Where all workers together hold
             fewer layers than there are in a step of T, every step is longer than T.

The second counts the largest kind of equal layers alone, and of what they hold only what adds up layer by
layer, so it is never above the step of a real cut. In a model whose layers are all different it says little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from gpipe_bench.pipeline.memory.profile import ModelProfile
from gpipe_bench.pipeline.memory.stages.peaks import rule_of
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.planner.grids import Grid
from gpipe_bench.planner.layer_times import LayerTimes
from gpipe_bench.planner.models import Tie
from gpipe_bench.planner.space import Way

EVEN = 0.95
"""Share of the step with even stages, less what uneven ones gain where a pipeline is filled, below which the
best cut of a large way is not expected."""
PRECISION = 1e-4
"""To which the bound by memory is narrowed down."""
_NO_STEP = 64
"""Times the bound by work: where a step of that does not do, no step does."""


def by_work_s(way: Way, times: LayerTimes) -> float:
    """Seconds of a step at least, whatever the memory.

    A stage begins when a micro-batch has been through all before it, and ends as long before the end, so
    the k-th stage may take (1 - 1/M)^k of what the first one may: with one stage per worker a step takes
    at least all the work of one micro-batch / (1 - (1 - 1/M)^K).
    """
    once_s = times.least_s(0, times.num_layers)
    count, workers = way.num_microbatches, way.grid.pp
    even_s = max(once_s * count / workers, times.beyond_s(0))
    if not _fills(way) or count == 1:
        return even_s
    return max(even_s, once_s / (1 - (1 - 1 / count) ** workers))


def even_share(workers: int, count: int) -> float:
    """Of a step with even stages, what a better cut takes at about least. Uneven stages are faster where a
    pipeline is filled: (M + K - 1) / K with even ones, 1 / (1 - (1 - 1/M)^K) with the best. No bound.
    """
    return EVEN * workers / (workers + count - 1) / (1 - (1 - 1 / count) ** workers)


def _fills(way: Way) -> bool:
    """Whether a worker waits for all workers before it, and they for it: one stage each, whole backwards."""
    return way.stages_per_worker == 1 and not way.splits


@dataclass(frozen=True)
class Equals:
    """The kind of equal layers that takes most of a step, on one grid at one micro-batch size.

    Args:
        count: how many there are
        work_s, again_s: of one on one micro-batch; its recomputation
        first_bytes, later_bytes: that a worker holds of one until its first gradients are made, and after it
        saved_bytes: of one micro-batch's graph
    """

    count: int
    work_s: float
    again_s: float
    first_bytes: float
    later_bytes: float
    saved_bytes: float


def equals_of(
    profile: ModelProfile, times: LayerTimes, grid: Grid, optimizer: str, ties: Sequence[Tie]
) -> Equals | None:
    """None where layers of that kind share weights, or do not take the same time."""
    layers = profile.layers
    work: dict[int, float] = {}
    for number, layer in enumerate(layers):
        work[id(layer)] = work.get(id(layer), 0.0) + times.least_s(number, number + 1)
    kind = max(work, key=work.__getitem__)
    numbers = [number for number, layer in enumerate(layers) if id(layer) == kind]
    if any(number in tie.layers for tie in ties for number in numbers):
        return None
    one, rule = layers[numbers[0]], rule_of(optimizer)
    weights, trained = one.parameter_bytes, sum(one.trained_sizes)
    state = rule.state * trained
    if grid.fsdp_level == 3:
        first, later = (weights + state) / grid.fsdp, (weights + state + trained) / grid.fsdp
    elif grid.fsdp_level == 2:  # all of the weights are gathered, beside the shards
        first = weights + (weights + state) / grid.fsdp
        later = first + trained
    else:
        first, later = weights + state, weights + state + trained
    # Sums of many layers differ by rounding.
    work_s = min(times.least_s(number, number + 1) for number in numbers) * (1 - 1e-9)
    again_s = min(times.stage(n, n + 1).again_s - times.action_s.get("R", 0.0) for n in numbers)
    return Equals(len(numbers), work_s, max(0.0, again_s * (1 - 1e-9)), first, later, one.first.kept_inside)


Graphs = tuple[tuple[int, int], ...]
"""Of each worker, how many graphs it keeps at a time of that of its stages of which it keeps the fewest:
before its first gradients are made, and afterwards."""


def graphs_of(schedule: Schedule) -> Graphs:
    """Of a schedule without recomputation."""
    found = []
    for worker, row in enumerate(schedule.actions):
        fewest = [_graphs(row, stage) for stage in schedule.stages_of(worker)]
        found.append((min(first for first, _ in fewest), min(later for _, later in fewest)))
    return tuple(found)


def _graphs(row: Sequence[Action], stage: int) -> tuple[int, int]:
    alive = first = later = 0
    made = False
    for action in row:
        if action.stage != stage:
            continue
        kind = action.kind
        if kind is Kind.F:
            alive += 1
            first = max(first, alive)
            if made:
                later = max(later, alive)
        elif kind is not Kind.W:
            alive -= 1
        made = made or kind in (Kind.B, Kind.W)
    return first, later


def by_memory_s(
    way: Way, equals: Equals, graphs: Graphs, cap: int, remats: Sequence[str], least_s: float
) -> float:
    """Seconds of a step at least under a cap, infinity where no cut fits; not less than `least_s`."""
    count, fills = way.num_microbatches, _fills(way)
    again = [{"except_last": count - 1, "always": count}[each] for each in remats if each != "never"]
    worker = _Worker(equals, cap, "never" in remats, min(again) / count if again else None, count > 1)

    def holds(step_s: float) -> bool:
        """Whether the workers hold all layers in a step of that; one waits for those before it."""
        there = before_s = 0.0
        for first, later in graphs:
            most = worker.most((step_s - before_s) / count, first, later, way.stages_per_worker > 1)
            there += most
            if fills:
                before_s += most * equals.work_s
        return there >= equals.count

    low_s, high_s = least_s, least_s
    if holds(least_s * (1 - 1e-9)):
        return least_s
    while not holds(high_s):
        low_s, high_s = high_s, 2 * high_s
        if high_s > _NO_STEP * least_s:
            return inf
    while high_s - low_s > PRECISION * high_s:
        middle_s = (low_s + high_s) / 2
        if holds(middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s


@dataclass(frozen=True)
class _Worker:
    """What a worker may hold; `again` is the share of its micro-batches that are recomputed where any are."""

    equals: Equals
    cap: int
    never: bool
    again: float | None
    has_later: bool  # more than one micro-batch, so that some action finds gradients

    def most(self, microbatch_s: float, first: int, later: int, several: bool) -> float:
        """Layers in so many seconds for each micro-batch; of several stages some may be recomputed."""
        one, cap = self.equals, self.cap
        held = one.later_bytes if self.has_later else one.first_bytes
        kept = one.first_bytes + first * one.saved_bytes
        if later:
            kept = max(kept, one.later_bytes + later * one.saved_bytes)
        kept = max(kept, held)
        alone = min(_over(microbatch_s, one.work_s), _over(cap, kept)) if self.never else 0.0
        if self.again is None:
            return alone
        longer_s = one.work_s + self.again * one.again_s
        lean = held if several else held + one.saved_bytes
        recomputed = min(_over(microbatch_s, longer_s), _over(cap, lean))
        best = max(alone, recomputed)
        det = one.work_s * lean - longer_s * kept
        if not several or not self.never or det >= 0:
            return best
        kept_layers = (microbatch_s * lean - longer_s * cap) / det
        lean_layers = (one.work_s * cap - kept * microbatch_s) / det
        return max(best, kept_layers + lean_layers) if min(kept_layers, lean_layers) >= 0 else best


def _over(whole: float, each: float) -> float:
    return whole / each if each > 0 else inf
