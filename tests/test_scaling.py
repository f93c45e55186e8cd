"""Scaled profiles equal direct ones to the byte, or are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench.pipeline.memory.boundary import Boundary, TensorSpec
from gpipe_bench.pipeline.memory.profile import Profiler
from gpipe_bench.pipeline.memory.sizes.scaling import Point, fit
from gpipe_bench.pipeline.memory.story import LayerProfile

PLANE = ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))  # quadratic in the width, affine in the micro-batch size
SAMPLES = [(4, 1), (6, 1), (10, 1), (4, 3), (6, 3)]


class Cell(nn.Module):
    """Two inputs, two outputs, one of them passed on; convolutions, pooling, normalization, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.norm = nn.BatchNorm2d(2 * width)
        self.reduce = nn.Sequential(
            nn.ReLU(), nn.MaxPool2d(3, 1, 1), nn.Conv2d(2 * width, width, 1), nn.Dropout(0.1)
        )

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        net, skip = value
        return self.reduce(self.norm(self.conv(net))) + skip.relu(), net


def at(point: Point, cell: nn.Module | None = None) -> LayerProfile:
    width, size = point
    spec = TensorSpec((size, width, 8, 8), torch.float32, True)
    return Profiler().layer(cell or Cell(width), Boundary((spec, spec), (0, 1), True))


def plain(profile: LayerProfile) -> dict[str, object]:
    """By value."""
    found = {field.name: getattr(profile, field.name) for field in dataclasses.fields(profile)}
    for name in ("free", "first", "later"):
        found[name] = dataclasses.asdict(found[name])  # type: ignore[call-overload]
    return found


@pytest.mark.parametrize("point", [(4, 1), (8, 1), (8, 2), (10, 3), (64, 7), (1, 2), (1024, 128)])
def test_a_scaled_profile_is_the_direct_one(point: Point) -> None:
    scaled = fit({sample: at(sample) for sample in SAMPLES}, PLANE)
    assert plain(scaled.at(point)) == plain(at(point))


def test_two_samples_that_lie_apart_are_enough() -> None:
    scaled = fit({sample: at(sample) for sample in [(4, 1), (10, 3)]}, PLANE)
    for point in [(4, 1), (8, 2), (64, 7)]:
        assert plain(scaled.at(point)) == plain(at(point))


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="1 profile cannot tell how sizes grow: give two or more"):
        fit({(4, 1): at((4, 1))}, PLANE)


@pytest.mark.parametrize(
    "points",
    [
        [(width, 1) for width in (2, 4, 6, 8, 10)],  # nothing tells what the micro-batch does
        [(2, 2), (4, 4)],  # a width times two grows like a micro-batch times two
    ],
)
def test_samples_that_do_not_spread_are_refused(points: list[Point]) -> None:
    samples = {point: at(point) for point in points}
    with pytest.raises(ValueError, match="do not tell the monomials apart: spread them out"):
        fit(samples, PLANE)


def weighing(elements: Callable[[int], int]) -> Callable[[int], nn.Module]:
    """A layer with as many weights as ``elements`` says for a width."""

    class Weighs(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(elements(width)))

        def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
            return value[0] * self.weight.sum() + value[1]

    return Weighs


@pytest.mark.parametrize(
    "elements",
    [
        lambda width: width**3,
        lambda width: width**2 + width,
        lambda width: 3 * width + 4,
        lambda width: width // 4 * 4 + 4,
        lambda width: width - 4,  # none at the first sample
    ],
    ids=["cubic", "sum", "affine", "rounded", "nothing at first"],
)
def test_a_size_that_is_no_monomial_is_refused(elements: Callable[[int], int]) -> None:
    build = weighing(elements)
    samples = {(width, size): at((width, size), build(width)) for width, size in [(4, 1), (10, 3)]}
    with pytest.raises(ValueError, match=r"layer Weighs has a size that is no monomial.* at \(10, 3\)"):
        fit(samples, PLANE)


@pytest.mark.parametrize(
    "other",
    [
        lambda width: nn.Sequential(Cell(width)),  # another name
        lambda width: Wrapped(width, twice=True),  # more storages
        lambda width: Wrapped(width, frozen=True),  # other gradients
    ],
)
def test_layers_that_behave_differently_are_refused(other) -> None:  # type: ignore[no-untyped-def]
    samples = {sample: at(sample, Wrapped(sample[0])) for sample in SAMPLES}
    fit(samples, PLANE)
    samples[5, 5] = at((5, 5), other(5))
    with pytest.raises(ValueError, match=r"layer Wrapped behaves differently at \(4, 1\) and \(5, 5\)"):
        fit(samples, PLANE)


class Wrapped(nn.Module):
    def __init__(self, width: int, *, twice: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.cell, self.twice = Cell(width).requires_grad_(not frozen), twice

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        net, skip = self.cell(value)
        return (net * 2 + 1 if self.twice else net), skip


def test_a_layout_that_changes_with_the_size_is_refused() -> None:
    class Transposes(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width

        def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
            total = value[0] + value[1]
            return total if self.width < 10 else total.clone().contiguous(memory_format=torch.channels_last)

    samples = {sample: at(sample, Transposes(sample[0])) for sample in SAMPLES}
    with pytest.raises(ValueError, match="layer Transposes behaves differently"):
        fit(samples, PLANE)


def test_sizes_that_are_not_whole_are_refused() -> None:
    def half(width: int) -> LayerProfile:
        spec = TensorSpec((1, width // 2), torch.float32, True)
        return Profiler().layer(nn.Tanh(), Boundary((spec,), (0,), False))

    scaled = fit({(width,): half(width) for width in (4, 8, 12)}, ((0,), (1,)))
    assert scaled.at((10,)).inputs.tensors[0].shape == (1, 5)
    with pytest.raises(ValueError, match=r"layer Tanh cannot be scaled to \(5,\): not a whole size there"):
        scaled.at((5,))
    with pytest.raises(ValueError, match="not a whole size"):
        scaled.at((-2,))
