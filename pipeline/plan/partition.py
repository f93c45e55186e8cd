"""Splits a sequence of layers into contiguous stages, exactly optimally.

The slowest stage limits a pipeline's speed, the stage with the most memory whether a model fits. The paper
asks for minimal variance of the stage costs (section 2.2); the library published with it uses a heuristic on
cumulative shares that may be 80% off the optimum and leave stages empty. Both are baselines to the exact
minimal bottleneck.

    costs   5 3 4 | 6 2 | 8        rule "bottleneck": minimise max(12, 8, 8)
                                   rule "variance":   minimise sum of (stage cost - mean)^2
                                   rule "cumulative": layer i goes to stage floor(K * share of costs[:i + 1])

`partition_by` takes costs that are no sums over layers, such as a stage's peak memory, where one more layer
may make a stage cheaper. Costs of layers are added as integers (a float is an integer over a power of two),
so that equal sums compare equal. Ties are broken alike on every machine: earlier stages get as many layers as
possible.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf, isfinite

Partition = tuple[range, ...]
"""The layer indices of each stage, in order, covering every layer once."""


def partition(costs: Sequence[float], num_stages: int, rule: str = "bottleneck") -> Partition:
    """Split layers with additive ``costs`` into ``num_stages`` contiguous non-empty stages, by one of RULES.
    `ValueError` for an unknown rule, a cost that is negative or not finite, and more stages than layers.
    """
    if rule not in RULES:
        raise ValueError(f"unknown partition rule {rule!r}: use one of {', '.join(RULES)}")
    check_counts(len(costs), num_stages)
    stages = RULES[rule](_as_integers(costs), num_stages)
    for index, stage in enumerate(stages):
        if not stage:
            raise ValueError(
                f"rule {rule!r} leaves stage {index} of {num_stages} empty for these costs: "
                "use rule 'bottleneck'"
            )
    return stages


def minimal_bottleneck(costs: Sequence[int], num_stages: int) -> Partition:
    """Minimise the largest stage sum, by bisection with a greedy feasibility test."""
    prefix = list(accumulate(costs, initial=0))
    low, high = max(max(costs), -(-prefix[-1] // num_stages)), prefix[-1]
    best = _fill(prefix, num_stages, high)
    while low < high:
        cap = (low + high) // 2
        stages = _fill(prefix, num_stages, cap)
        if stages is None:
            low = cap + 1
        else:
            best, high = stages, max(prefix[stage.stop] - prefix[stage.start] for stage in stages)
    assert best is not None  # everything in one stage always fits under the total
    return best


def _fill(prefix: Sequence[int], num_stages: int, cap: int) -> Partition | None:
    """Give each stage as many layers as ``cap`` and one layer for every later stage allow."""
    num_layers, start, stages = len(prefix) - 1, 0, []
    for remaining in range(num_stages - 1, -1, -1):
        stop = min(bisect_right(prefix, prefix[start] + cap) - 1, num_layers - remaining)
        if stop <= start:
            return None
        stages.append(range(start, stop))
        start = stop
    return tuple(stages) if start == num_layers else None


def minimal_variance(costs: Sequence[int], num_stages: int) -> Partition:
    """Minimise the sum of squared stage sums, which is the paper's variance up to a constant. The best start
    of a last stage grows with its stop, so the best start for a middle stop bounds those of the other stops.
    """
    prefix, num_layers = list(accumulate(costs, initial=0)), len(costs)
    best = [0] * (num_layers + 1)  # sum of squares, by layers covered so far
    choices: list[list[int]] = []
    for done in range(1, num_stages + 1):
        reached, choice = [0] * (num_layers + 1), [0] * (num_layers + 1)
        # Ranges of stops and starts to search; the first stage starts at layer 0.
        todo = [(done, num_layers, done - 1, num_layers - 1 if done > 1 else 0)]
        while todo:
            low, high, first, last = todo.pop()
            if low > high:
                continue
            stop = (low + high) // 2
            # The later start wins a tie, hence more layers in earlier stages.
            starts = range(first, min(last, stop - 1) + 1)
            reached[stop], start = min((best[s] + (prefix[stop] - prefix[s]) ** 2, -s) for s in starts)
            choice[stop] = -start
            todo += [(low, stop - 1, first, -start), (stop + 1, high, -start, last)]
        best = reached
        choices.append(choice)
    stages, stop = [], num_layers
    for choice in reversed(choices):
        stages.append(range(choice[stop], stop))
        stop = choice[stop]
    return tuple(reversed(stages))


def cumulative_shares(costs: Sequence[int], num_stages: int) -> Partition:
    """The heuristic of GPipe's library: layer i goes to stage floor(K * share of the costs up to layer i).
    Stages may be empty.
    """
    prefix = list(accumulate(costs, initial=0))
    total = max(prefix[-1], 1)
    owner = [min(num_stages * covered // total, num_stages - 1) for covered in prefix[1:]]
    cuts = [bisect_left(owner, stage) for stage in range(num_stages + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


RULES: dict[str, Callable[[Sequence[int], int], Partition]] = {
    "bottleneck": minimal_bottleneck,
    "variance": minimal_variance,
    "cumulative": cumulative_shares,
}


def check_counts(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}: a pipeline has at least one stage")
    if num_stages > num_layers:
        raise ValueError(
            f"cannot cut {num_layers} layers into {num_stages} non-empty stages: use at most {num_layers}"
        )


def _as_integers(costs: Sequence[float]) -> list[int]:
    """The costs times one common power of two, so that sums and comparisons are exact."""
    for index, cost in enumerate(costs):
        if not isfinite(cost) or cost < 0:
            raise ValueError(f"cost of layer {index} is {cost}: costs must be finite and not negative")
    ratios = [cost.as_integer_ratio() for cost in costs]
    scale = max(denominator for _, denominator in ratios)
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def partition_by(
    stage_cost: Callable[[int, int], int],
    num_layers: int,
    num_stages: int,
    *,
    cap: int,
    floor: Sequence[int] | None = None,
) -> Partition | None:
    """Minimise the largest ``stage_cost(start, stop)`` over all splits in which none exceeds ``cap``.

    ``floor`` may give lower bounds per layer, by which stages that are too long are skipped.
    """
    check_counts(num_layers, num_stages)
    bound = list(accumulate(floor if floor is not None else [0] * num_layers, initial=0))
    edges = _edges_under(stage_cost, bound, num_stages, _reachable_cap(stage_cost, bound, num_stages, cap))
    # By number of stages and start: the smallest possible largest cost of the layers behind.
    best: list[list[float]] = [[inf] * num_layers + [0]]
    for _ in range(num_stages):
        after = best[-1]
        row = [min([max(cost, after[stop]) for stop, cost in each], default=inf) for each in edges]
        best.append([*row, inf])
    limit = best[num_stages][0]
    if limit == inf:
        return None
    stages, start = [], 0
    for after in reversed(best[:num_stages]):
        stop = max(stop for stop, cost in edges[start] if max(cost, after[stop]) <= limit)
        stages.append(range(start, stop))
        start = stop
    return tuple(stages)


def fills(stage_cost: Callable[[int, int], int], num_stages: int, *, cap: int, floor: Sequence[int]) -> bool:
    """Whether greedy stages, each with as many layers as fit under ``cap``, take all layers. If so,
    `partition_by` finds a split; this needs a fraction of its stage costs.
    """
    return _greedy_bottleneck(stage_cost, list(accumulate(floor, initial=0)), num_stages, cap) is not None


def _reachable_cap(
    stage_cost: Callable[[int, int], int], bound: Sequence[int], num_stages: int, cap: int
) -> int:
    """A cap that some greedy split keeps; ``cap`` if none is found. The exact search evaluates far fewer
    stages under a tight cap.
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
    """Largest cost where each stage takes as many layers as fit; None if layers are left over."""
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
    """For each start the (stop, cost) of stages within the cap, without stages that cannot be part of a split
    into ``num_stages``.
    """
    num_layers = len(bound) - 1
    fewest = [0] + [num_stages + 1] * num_layers  # fewest stages before each start
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
