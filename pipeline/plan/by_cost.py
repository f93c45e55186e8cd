"""Contiguous splits by a cost of stages that is no sum over layers, such as the peak memory of a stage.

Nothing is assumed of such costs: adding a layer may even make a stage cheaper, where it moves the cut to a
thinner boundary. Ties are broken as in `plan.partition`: earlier stages take as many layers as they may.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from gpipe_bench.pipeline.plan.partition import Partition, check_counts


def partition_by(
    stage_cost: Callable[[int, int], int],
    num_layers: int,
    num_stages: int,
    *,
    cap: int,
    floor: Sequence[int] | None = None,
) -> Partition | None:
    """Minimise the largest ``stage_cost(start, stop)`` over all splits in which none exceeds ``cap``.

    For costs that do not add up layer by layer, such as the peak memory of a stage; nothing is assumed of
    them (adding a layer may even make a stage cheaper, where it moves the cut to a thinner boundary).
    ``floor`` may give additive lower bounds per layer with which hopelessly long stages are not looked at.
    Returns None if no split fits under ``cap``.
    """
    check_counts(num_layers, num_stages)
    bound = list(accumulate(floor if floor is not None else [0] * num_layers, initial=0))
    cap = _reachable_cap(stage_cost, bound, num_stages, cap)
    edges = _edges_under(stage_cost, bound, num_stages, cap)
    candidates = sorted({cost for row in edges for _, cost in row})
    if not candidates or not _suffix_counts(edges, num_layers, candidates[-1])[0] >> num_stages & 1:
        return None
    # Smallest candidate under which exactly `num_stages` stages can cover all layers.
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _suffix_counts(edges, num_layers, candidates[middle])[0] >> num_stages & 1:
            high = middle
        else:
            low = middle + 1
    limit = candidates[low]
    counts = _suffix_counts(edges, num_layers, limit)
    stages, start = [], 0
    for remaining in range(num_stages - 1, -1, -1):
        stop = max(stop for stop, cost in edges[start] if cost <= limit and counts[stop] >> remaining & 1)
        stages.append(range(start, stop))
        start = stop
    return tuple(stages)


def can_partition_by(
    stage_cost: Callable[[int, int], int],
    num_layers: int,
    num_stages: int,
    *,
    cap: int,
    floor: Sequence[int] | None = None,
) -> bool:
    """Whether `partition_by` finds a split under ``cap``, for a fraction of the stage costs.

    A search over models asks this of each and wants the best split of the last one only. Greedy filling
    mostly finds some split; only where it does not are all stages looked at.
    """
    check_counts(num_layers, num_stages)
    bound = list(accumulate(floor if floor is not None else [0] * num_layers, initial=0))
    if bound[-1] > num_stages * cap:
        return False
    if _greedy_bottleneck(stage_cost, bound, num_stages, cap) is not None:
        return True
    edges = _edges_under(stage_cost, bound, num_stages, cap)
    return bool(_suffix_counts(edges, num_layers, cap)[0] >> num_stages & 1)


def leanest(stage_cost: Callable[[int, int, int], int], num_layers: int, num_stages: int) -> Partition:
    """Minimise the largest ``stage_cost(stage, start, stop)`` over all splits, whatever the costs are.

    For stages of which each holds something else, as under 1F1B, where the first keeps K micro-batches and
    the last one. Every stage is looked at, so this is for models of dozens of layers.
    """
    check_counts(num_layers, num_stages)
    least: dict[int, tuple[int, int]] = {num_layers: (0, num_layers)}  # from a layer on: cost, next start
    tables = []
    for stage in range(num_stages - 1, -1, -1):
        starts = range(stage, num_layers - (num_stages - stage) + 1) if stage else range(1)
        found = {}
        for start in starts:
            # The later stop wins a tie, hence more layers in earlier stages.
            cost, stop = min(
                (max(stage_cost(stage, start, stop), rest), -stop)
                for stop, (rest, _) in least.items()
                if stop > start
            )
            found[start] = (cost, -stop)
        least = found
        tables.append(found)
    stages, start = [], 0
    for table in reversed(tables):
        stop = table[start][1]
        stages.append(range(start, stop))
        start = stop
    return tuple(stages)


def _reachable_cap(
    stage_cost: Callable[[int, int], int], bound: Sequence[int], num_stages: int, cap: int
) -> int:
    """A cap that some split keeps, not above ``cap``, by greedy filling; ``cap`` itself if that finds none.

    Only a head start for the exact search, which looks at far fewer stages under a tight cap.
    """
    low, high = -(-bound[-1] // num_stages), cap
    while high - low > max(high // 64, 1):
        middle = (low + high) // 2
        reached = _greedy_bottleneck(stage_cost, bound, num_stages, middle)
        if reached is None:
            low = middle
        else:
            high = reached
    return high


def _greedy_bottleneck(
    stage_cost: Callable[[int, int], int], bound: Sequence[int], num_stages: int, cap: int
) -> int | None:
    """Largest cost when each stage takes as many layers as fit, None if some are left over."""
    num_layers, start, largest = len(bound) - 1, 0, 0
    for remaining in range(num_stages - 1, -1, -1):
        furthest = min(bisect_right(bound, bound[start] + cap) - 1, num_layers - remaining)
        for stop in range(furthest, start, -1):
            cost = stage_cost(start, stop)
            if cost <= cap:
                break
        else:
            return None
        start, largest = stop, max(largest, cost)
    return largest if start == num_layers else None


def _edges_under(
    stage_cost: Callable[[int, int], int], bound: Sequence[int], num_stages: int, cap: int
) -> list[list[tuple[int, int]]]:
    """For each start the (stop, cost) of stages within the cap that can be part of a split within the cap.

    Stages are left out that nothing reaches, and those after which the rest is too much for the stages left.
    """
    num_layers = len(bound) - 1
    fewest = [0] + [num_stages + 1] * num_layers  # stages to get there
    edges: list[list[tuple[int, int]]] = []
    for start in range(num_layers):
        row: list[tuple[int, int]] = []
        left = num_stages - fewest[start] - 1  # stages for what follows this one
        if left >= 0:
            furthest = min(bisect_right(bound, bound[start] + cap) - 1, num_layers)
            nearest = max(start + 1, bisect_left(bound, bound[-1] - left * cap))
            for stop in range(nearest, furthest + 1):
                cost = stage_cost(start, stop)
                if cost <= cap:
                    row.append((stop, cost))
                    fewest[stop] = min(fewest[stop], fewest[start] + 1)
        edges.append(row)
    return edges


def _suffix_counts(edges: Sequence[Sequence[tuple[int, int]]], num_layers: int, limit: int) -> list[int]:
    """Bit k of entry i: layers i.. can be covered by exactly k stages of at most ``limit`` each."""
    counts = [0] * num_layers + [1]
    for start in range(num_layers - 1, -1, -1):
        bits = 0
        for stop, cost in edges[start]:
            if cost <= limit:
                bits |= counts[stop]
        counts[start] = bits << 1
    return counts
