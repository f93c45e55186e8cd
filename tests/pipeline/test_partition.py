"""Every rule of partitioning and the split by memory against brute force, and the figures that peers'
heuristics are known to give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe_bench.pipeline import (
    Boundary,
    Profiler,
    Schedule,
    StagePeaks,
    gpipe,
    naive,
    partition,
    pipeline_memory,
)
from gpipe_bench.pipeline.memory.peaks import OPTIMIZERS
from gpipe_bench.pipeline.memory.trace import LayerProfile, TensorSpec
from gpipe_bench.pipeline.plan.partition import Partition, cumulative_shares, fills, partition_by

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
def test_rules_equal_brute_force(costs: list[float], num_stages: int) -> None:
    def largest(split: Partition) -> Fraction:
        return max(stage_sums(costs, split))

    def squares(split: Partition) -> Fraction:
        return sum((cost**2 for cost in stage_sums(costs, split)), Fraction(0))

    num_stages = min(num_stages, len(costs))
    for rule, worth in (("bottleneck", largest), ("variance", squares)):
        found = partition(costs, num_stages, rule)
        assert_covers(found, len(costs), num_stages)
        assert worth(found) == min(map(worth, all_splits(len(costs), num_stages)))


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
    assert not fills(stage_cost, num_stages, cap=cap, floor=floor) or found is not None
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

    assert partition_by(stage_cost, 3, 2, cap=5) == (range(1), range(1, 3))
    assert partition_by(stage_cost, 3, 2, cap=4) is None


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
def test_the_papers_deepest_model_is_partitioned(rule: str) -> None:
    """Work that grew faster than layers times stages would take minutes."""
    costs = [65.5e6, *[50358272.0 + 3 * (layer % 7) for layer in range(1663)], 131e6]
    assert_covers(partition(costs, 128, rule), 1665, 128)


PROFILER = Profiler()
WIDTHS = (4, 16, 64)


def image(features: int, *, grad: bool = False) -> Boundary:
    return Boundary((TensorSpec((8, features), torch.float32, grad),), (0,), False)


def profiled(widths: list[int], *, nonlinear: bool = False) -> tuple[tuple[LayerProfile, ...], LayerProfile]:
    """Layers between boundaries of these widths: thin boundaries are cheap cuts."""
    layers = [
        nn.Sequential(nn.Linear(a, b), nn.Tanh()) if nonlinear else nn.Linear(a, b)
        for a, b in pairwise(widths)
    ]
    return PROFILER.model(layers, square, image(widths[0]), image(widths[-1]))


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


schedules = st.sampled_from(
    [
        lambda k: gpipe(k, 4, "always"),
        lambda k: gpipe(k, 4, "never"),
        lambda k: naive(k),
        lambda k: gpipe(k, 1),
    ]
)


@settings(max_examples=60, derandomize=True)
@given(
    st.lists(st.sampled_from(WIDTHS), min_size=2, max_size=8), st.booleans(), st.integers(1, 4), schedules,
    st.sampled_from(list(OPTIMIZERS)), st.integers(0, 1), st.floats(0.3, 1.2),
)  # fmt: skip
def test_the_split_is_the_best_of_all(
    widths: list[int], nonlinear: bool, num_stages: int, build, optimizer: str, ahead: int, tightness: float
) -> None:  # type: ignore[no-untyped-def]
    num_stages = min(num_stages, len(widths) - 1)
    layers, loss = profiled(widths, nonlinear=nonlinear)
    schedule: Schedule = build(num_stages)

    def fullest(split: tuple[range, ...]) -> int:
        found = pipeline_memory(layers, loss, split, schedule, optimizer, receive_ahead=ahead)
        return max(stage.peak for stage in found)

    best = min(map(fullest, all_splits(len(layers), num_stages)))
    peaks = StagePeaks(layers, loss, schedule, optimizer, receive_ahead=ahead)
    found = peaks.partition(best)
    assert found is not None, "a cap that the best split just meets"
    assert fullest(found) == best
    assert peaks.partition(best - 1) is None
    cap = int(best * tightness)
    assert (peaks.partition(cap) is None) == (cap < best)
    for limit in (best, best - 1, cap):
        assert StagePeaks(layers, loss, schedule, optimizer, receive_ahead=ahead).fits(limit) == (
            limit >= best
        )


@settings(max_examples=40, derandomize=True)
@given(
    st.lists(st.sampled_from(WIDTHS), min_size=2, max_size=7), schedules, st.sampled_from(list(OPTIMIZERS))
)
def test_every_stage_has_its_own_peak_and_none_is_below_its_floor(
    widths: list[int], build, optimizer: str
) -> None:  # type: ignore[no-untyped-def]
    layers, loss = profiled(widths, nonlinear=True)
    num_layers = len(layers)
    for num_stages in {1, min(3, num_layers)}:
        schedule: Schedule = build(num_stages)
        peaks = StagePeaks(layers, loss, schedule, optimizer)
        floor = peaks.floor()
        for split in all_splits(num_layers, num_stages):
            found = pipeline_memory(layers, loss, split, schedule, optimizer)
            for span, stage in zip(split, found, strict=True):
                assert peaks.peak(span.start, span.stop) == stage.peak
                assert peaks.memory(span.start, span.stop).peak == stage.peak
                assert sum(floor[span.start : span.stop]) <= stage.peak


def test_equal_layers_in_other_places_are_not_taken_for_one_another() -> None:
    """The first stage owns the batch, the last one the targets and the loss."""
    layers, loss = profiled([64] * 6)
    peaks = StagePeaks(layers, loss, gpipe(2, 4, "always"))
    assert layers[1] is layers[2]
    assert peaks.peak(1, 3) == peaks.peak(2, 4)
    assert len({peaks.peak(0, 2), peaks.peak(1, 3), peaks.peak(3, 5)}) == 3
