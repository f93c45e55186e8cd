"""Profiles of a family of layers from two of them, exactly.

A search over widths and micro-batch sizes would profile the same cell hundreds of times. But a layer's
story is the same at every size (same storages, same order), and the size of one storage is one monomial: a
weight is quadratic in the width, an activation linear in the width and in the micro-batch size. How a number
grows from one sample to another tells which monomial it is, so two samples that lie far apart determine all.
Exactness is the point: every number must meet every sample to the byte, and what grows in any other way is
refused (a kernel that takes another path at some size shows up as another story).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.story import LayerProfile

Point = tuple[int, ...]
"""Where in the family a profile stands, e.g. (width, microbatch_size)."""


@dataclass(frozen=True)
class ScaledProfile:
    """All profiles of a family. Number i of a profile is ``sizes[numbers[i]]``: a monomial's index and its
    factor, numerator and denominator.
    """

    pattern: LayerProfile
    exponents: tuple[Point, ...]
    sizes: tuple[tuple[int, int, int], ...]
    numbers: tuple[int, ...]

    def at(self, point: Point) -> LayerProfile:
        """The profile at ``point``. Raises ValueError where the monomials give no whole bytes."""
        terms, values = _monomials(point, self.exponents), []
        for monomial, numerator, denominator in self.sizes:
            value, rest = divmod(numerator * terms[monomial], denominator)
            if rest or value < 0:
                raise ValueError(
                    f"layer {self.pattern.name} cannot be scaled to {point}: not a whole size there"
                )
            values.append(value)
        return _with_numbers(self.pattern, [values[each] for each in self.numbers])


def fit(samples: Mapping[Point, LayerProfile], exponents: Sequence[Point]) -> ScaledProfile:
    """Find the monomial out of ``exponents`` that each number of the profiles follows.

    ``exponents`` of a family over (width, microbatch_size) that is quadratic and affine are (0, 0), (1, 0),
    (2, 0), (0, 1), (1, 1). Raises ValueError with too few samples, samples that do not tell the monomials
    apart, different stories, or a number that is none of the monomials.
    """
    points = list(samples)
    if len(points) < 2:
        raise ValueError(f"{len(points)} profile cannot tell how sizes grow: give two or more")
    pattern = samples[points[0]]
    for point in points[1:]:
        if _structure(samples[point]) != _structure(pattern):
            raise ValueError(f"layer {pattern.name} behaves differently at {points[0]} and {point}")
    terms = [_monomials(point, exponents) for point in points]
    monomials = {_growth(values): index for index, values in enumerate(zip(*terms, strict=True))}
    if len(monomials) < len(exponents):
        raise ValueError("the sampled points do not tell the monomials apart: spread them out")
    sizes: dict[tuple[int, int, int], int] = {}
    numbers: list[int] = []
    for values in zip(*(_numbers(samples[point]) for point in points), strict=True):
        size = (0, 0, 1)
        if any(values):
            monomial = monomials.get(_growth(values)) if values[0] else None
            if monomial is None:
                raise ValueError(
                    f"layer {pattern.name} has a size that is no monomial of the family: "
                    + ", ".join(f"{value} at {point}" for value, point in zip(values, points, strict=True))
                )
            factor = Fraction(values[0], terms[0][monomial])
            size = (monomial, factor.numerator, factor.denominator)
        numbers.append(sizes.setdefault(size, len(sizes)))
    return ScaledProfile(pattern, tuple(exponents), tuple(sizes), tuple(numbers))


def _monomials(point: Point, exponents: Sequence[Point]) -> list[int]:
    return [prod(x**power for x, power in zip(point, powers, strict=True)) for powers in exponents]


def _growth(values: Sequence[int]) -> tuple[Fraction, ...]:
    """How a number changes from the first sample to the others."""
    return tuple(Fraction(value, values[0]) for value in values[1:])


def _structure(profile: LayerProfile) -> tuple[object, ...]:
    return (
        profile.name,
        profile.unused,
        profile.overwritten,
        profile.buffer_roles,
        *(len(part) for part in _parts(profile)),
        *(story.plot for story in (profile.free, profile.first, profile.later)),
        *(
            (
                end.same_as,
                end.is_tuple,
                end.nested,
                [(len(t.shape), replace(t, shape=())) for t in end.tensors],
            )
            for end in (profile.inputs, profile.outputs)
        ),
    )


def _parts(profile: LayerProfile) -> tuple[tuple[int, ...], ...]:
    """Every number of the profile but the shapes at its ends. None is a sum, which would be no monomial."""
    return (
        profile.parameter_counts,
        profile.parameter_sizes,
        profile.trained_sizes,
        profile.buffer_sizes,
        profile.free.sizes,
        profile.first.sizes,
        profile.later.sizes,
    )


def _numbers(profile: LayerProfile) -> list[int]:
    ends = (profile.inputs, profile.outputs)
    lengths = [length for end in ends for spec in end.tensors for length in spec.shape]
    return [*lengths, *(number for part in _parts(profile) for number in part)]


def _with_numbers(pattern: LayerProfile, numbers: Sequence[int]) -> LayerProfile:
    """The inverse of `_numbers`."""
    taken = 0

    def take(count: int) -> tuple[int, ...]:
        nonlocal taken
        taken += count
        return tuple(numbers[taken - count : taken])

    def end(boundary: Boundary) -> Boundary:
        tensors = tuple(replace(spec, shape=take(len(spec.shape))) for spec in boundary.tensors)
        return replace(boundary, tensors=tensors)

    inputs, outputs = end(pattern.inputs), end(pattern.outputs)
    counts, sizes, trained, buffers, free, first, later = (take(len(part)) for part in _parts(pattern))
    return replace(
        pattern,
        inputs=inputs,
        outputs=outputs,
        parameter_counts=counts,
        parameter_sizes=sizes,
        trained_sizes=trained,
        buffer_sizes=buffers,
        free=replace(pattern.free, sizes=free),
        first=replace(pattern.first, sizes=first),
        later=replace(pattern.later, sizes=later),
        halves=None,
    )
