"""Contiguous split of layers into stages, exactly optimal, without third-party code.

The slowest stage sets the pace of a pipeline and the fullest one decides whether a model fits, so a split
that is "about even" is a measurement error of everything built on it. GPipe's text asks for minimal variance
of the stage costs (section 2.2); the library that was published with it uses a cumulative-share heuristic
that may be 80% off the optimum and may leave stages empty. Both are here as named baselines beside the
exact minimal bottleneck.

    costs   5 3 4 | 6 2 | 8        rule "bottleneck": minimise max(12, 8, 8)
                                   rule "variance":   minimise sum of (stage cost - mean)^2
                                   rule "cumulative": layer i goes to stage floor(K * share of costs[:i + 1])

All arithmetic is on integers (a float is an integer over a power of two), so that equal costs compare equal
and ties are broken the same way on every machine: earlier stages take as many layers as they may.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import isfinite, isqrt

Partition = tuple[range, ...]
"""The layer indices of each stage, in order, covering every layer once."""


def partition(costs: Sequence[float], num_stages: int, rule: str = "bottleneck") -> Partition:
    """Split layers with additive ``costs`` into ``num_stages`` contiguous non-empty stages.

    ``rule`` is one of RULES. Raises ValueError for an unknown rule, a cost that is negative or not finite,
    and a number of stages that the layers cannot fill.
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
    """Minimise the largest stage sum, by bisection over the answer with a greedy feasibility test."""
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
    """Minimise the sum of squared stage sums; with a fixed mean that is the paper's minimal variance.

    Dynamic program over (stages, layers), exact. It only visits cuts that can occur in an optimum: if a known
    split has summed squared deviation D from the mean, the first k stages of a better one are off k means by
    some x with x^2 / k + x^2 / (K - k) <= D, because evenly spread deviations have the least squares.
    """
    prefix, num_layers = list(accumulate(costs, initial=0)), len(costs)
    total = prefix[-1]
    # Deviations in units of 1 / num_stages, to stay on integers.
    spread = sum((num_stages * (b - a) - total) ** 2 for a, b in pairwise(_even_cuts(prefix, num_stages)))

    best: dict[int, int] = {0: 0}  # layers covered so far -> minimal sum of squares
    choices: list[dict[int, int]] = []
    for done in range(1, num_stages + 1):
        radius = isqrt(spread * done * (num_stages - done) // num_stages)
        least = bisect_left(prefix, -((radius - done * total) // num_stages), done)
        most = bisect_right(prefix, (done * total + radius) // num_stages) - 1
        reached: dict[int, int] = {}
        choice: dict[int, int] = {}
        for stop in range(max(least, done), min(most, num_layers - (num_stages - done)) + 1):
            end = prefix[stop]
            # The later start wins a tie, hence more layers in earlier stages.
            options = (
                (squares + (end - prefix[start]) ** 2, -start)
                for start, squares in best.items()
                if start < stop
            )
            found = min(options, default=None)
            if found is not None:
                reached[stop], choice[stop] = found[0], -found[1]
        best = reached
        choices.append(choice)

    stages, stop = [], num_layers
    for choice in reversed(choices):
        stages.append(range(choice[stop], stop))
        stop = choice[stop]
    return tuple(reversed(stages))


def _even_cuts(prefix: Sequence[int], num_stages: int) -> list[int]:
    """Costs covered at cuts near k / K of the total, with at least one layer in each stage."""
    cuts, num_layers = [0], len(prefix) - 1
    for done in range(1, num_stages + 1):
        wanted = done * prefix[-1] // num_stages
        above = bisect_left(prefix, wanted)
        nearest = above if above == 0 or prefix[above] - wanted < wanted - prefix[above - 1] else above - 1
        cuts.append(min(max(nearest, cuts[-1] + 1), num_layers - (num_stages - done)))
    return [prefix[cut] for cut in cuts]


def cumulative_shares(costs: Sequence[int], num_stages: int) -> Partition:
    """The heuristic of GPipe's library: layer i goes to stage floor(K * share of the costs up to and with i).

    A stage may come out empty, which `partition` reports as an error.
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
