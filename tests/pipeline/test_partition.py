"""Every rule against brute force, and the figures that peers' heuristics are known to give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from work_done import lines_run

from gpipe_bench.pipeline import partition
from gpipe_bench.pipeline.plan.partition import (
    Partition,
    can_partition_by,
    cumulative_shares,
    leanest,
    partition_by,
)

costs_lists = st.one_of(
    st.lists(st.integers(0, 30), min_size=1, max_size=9),
    st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=9),
)


def all_splits(num_layers: int, num_stages: int) -> Iterator[Partition]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        edges = (0, *cuts, num_layers)
        yield tuple(range(a, b) for a, b in pairwise(edges))


def stage_sums(costs: Sequence[float], stages: Partition) -> list[Fraction]:
    return [sum((Fraction(costs[layer]) for layer in stage), Fraction(0)) for stage in stages]


def assert_covers(stages: Partition, num_layers: int, num_stages: int) -> None:
    assert len(stages) == num_stages
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert all(len(stage) > 0 for stage in stages)


@settings(max_examples=100)
@given(costs_lists, st.integers(1, 9))
def test_bottleneck_equals_brute_force(costs: list[float], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))
    stages = partition(costs, num_stages, "bottleneck")
    assert_covers(stages, len(costs), num_stages)
    best = min(max(stage_sums(costs, split)) for split in all_splits(len(costs), num_stages))
    assert max(stage_sums(costs, stages)) == best


@settings(max_examples=100)
@given(costs_lists, st.integers(1, 9))
def test_variance_equals_brute_force(costs: list[float], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))
    stages = partition(costs, num_stages, "variance")
    assert_covers(stages, len(costs), num_stages)

    def squares(split: Partition) -> Fraction:
        return sum((cost**2 for cost in stage_sums(costs, split)), Fraction(0))

    assert squares(stages) == min(squares(split) for split in all_splits(len(costs), num_stages))


@settings(max_examples=100)
@given(st.data(), st.integers(1, 7), st.integers(1, 7), st.integers(0, 40))
def test_arbitrary_stage_costs_equal_brute_force(
    data: st.DataObject, num_layers: int, num_stages: int, cap: int
) -> None:
    num_stages = min(num_stages, num_layers)
    floor = data.draw(st.lists(st.integers(0, 5), min_size=num_layers, max_size=num_layers))
    extra = data.draw(st.lists(st.integers(0, 25), min_size=64, max_size=64))

    def stage_cost(start: int, stop: int) -> int:  # not monotone, but never below its floor
        return sum(floor[start:stop]) + extra[(8 * start + stop) % 64]

    found = partition_by(stage_cost, num_layers, num_stages, cap=cap, floor=floor)
    bottlenecks = [
        max(stage_cost(stage.start, stage.stop) for stage in split)
        for split in all_splits(num_layers, num_stages)
    ]
    fits = can_partition_by(stage_cost, num_layers, num_stages, cap=cap, floor=floor)
    assert fits == (min(bottlenecks) <= cap)
    if min(bottlenecks) > cap:
        assert found is None
    else:
        assert found is not None
        assert_covers(found, num_layers, num_stages)
        assert max(stage_cost(stage.start, stage.stop) for stage in found) == min(bottlenecks)


def test_a_split_that_filling_to_the_brim_misses_is_found() -> None:
    """Greedy filling takes layers 0 and 1 together, and then the last stage is too full."""
    costs = {(0, 1): 4, (0, 2): 3, (1, 3): 5, (2, 3): 9}

    def stage_cost(start: int, stop: int) -> int:
        return costs.get((start, stop), 99)

    assert can_partition_by(stage_cost, 3, 2, cap=5)
    assert not can_partition_by(stage_cost, 3, 2, cap=4)


def test_what_cannot_fit_for_its_floor_alone_costs_no_look_at_a_stage() -> None:
    def stage_cost(start: int, stop: int) -> int:
        raise AssertionError("three layers of 5 do not fit twice into 7")

    assert not can_partition_by(stage_cost, 3, 2, cap=7, floor=[5, 5, 5])


def test_ties_fill_earlier_stages_first() -> None:
    assert partition([1] * 6, 4) == (range(2), range(2, 4), range(4, 5), range(5, 6))
    assert partition([1] * 5, 2, "variance") == (range(3), range(3, 5))
    assert partition_by(lambda a, b: b - a, 5, 2, cap=9) == (range(3), range(3, 5))


def test_the_cumulative_heuristic_is_off_by_one_and_may_leave_stages_empty() -> None:
    assert [len(stage) for stage in partition([1] * 16, 4, "cumulative")] == [3, 4, 4, 5]
    assert [len(stage) for stage in partition([1] * 24, 8, "cumulative")] == [2, 3, 3, 3, 3, 3, 3, 4]
    assert [len(stage) for stage in cumulative_shares([6, 1, 1, 1, 1], 4)] == [0, 0, 2, 3]


def test_equal_floats_are_not_told_apart_by_rounding() -> None:
    """With float sums 0.1 + 0.2 + ... differs by position; exact sums give the even split."""
    assert [len(stage) for stage in partition([0.1] * 30, 10)] == [3] * 10
    assert [len(stage) for stage in partition([0.1] * 30, 10, "variance")] == [3] * 10


@pytest.mark.parametrize("rule", ["bottleneck", "variance", "cumulative"])
def test_the_work_grows_with_layers_times_stages_and_no_faster(rule: str) -> None:
    """Of the paper's deepest model; looking at all pairs of cuts would be a thousand times as much."""
    costs = [65.5e6, *[50358272.0 + 3 * (layer % 7) for layer in range(1663)], 131e6]
    found = []
    lines = lines_run(lambda: found.append(partition(costs, 128, rule)), "gpipe_bench.pipeline")
    assert 1665 < lines < 2 * 1665 * 128
    assert_covers(found[0], 1665, 128)


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_leanest_equals_brute_force_whatever_stages_cost(layers: int, stages: int, random: Random) -> None:
    if stages > layers:
        with pytest.raises(ValueError, match=f"use at most {layers}"):
            leanest(lambda *_: 0, layers, stages)
        return
    cost = {
        (stage, start, stop): random.randrange(20)
        for stage in range(stages)
        for start in range(layers)
        for stop in range(start + 1, layers + 1)
    }

    def largest(split: Partition) -> int:
        return max(cost[stage, each.start, each.stop] for stage, each in enumerate(split))

    found = leanest(lambda *where: cost[where], layers, stages)
    assert_covers(found, layers, stages)
    assert largest(found) == min(map(largest, all_splits(layers, stages)))
