"""The split by memory is the best of all splits, and its peaks are the memory model's."""

from __future__ import annotations

from itertools import combinations, pairwise

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
    one_f_one_b,
    pipeline_memory,
)
from gpipe_bench.pipeline.memory.boundary import TensorSpec
from gpipe_bench.pipeline.memory.peaks import OPTIMIZERS
from gpipe_bench.pipeline.memory.trace import LayerProfile

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


def splits(num_layers: int, num_stages: int) -> list[tuple[range, ...]]:
    return [
        tuple(range(a, b) for a, b in pairwise((0, *cuts, num_layers)))
        for cuts in combinations(range(1, num_layers), num_stages - 1)
    ]


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

    best = min(map(fullest, splits(len(layers), num_stages)))
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
        for split in splits(num_layers, num_stages):
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


def test_one_stage_of_1f1b_can_be_asked_for_its_peaks() -> None:
    layers, loss = profiled([4] * 4)
    schedule = one_f_one_b(1, 8, "never")
    (alone,) = pipeline_memory(layers, loss, [range(3)], schedule)
    assert StagePeaks(layers, loss, schedule).peak(0, 3) == alone.peak
