"""Profiles of a family of layers from a few of them, exactly.

A search over widths and micro-batch sizes would profile the same cell hundreds of times. But a layer's
story is the same at every size (same storages, same order), and the bytes of each storage are polynomials:
affine in the micro-batch size, quadratic in the width. So a few profiles determine all; further ones check.
Exactness is the point: the fit is done in fractions, must meet every sample to the byte, and refuses
otherwise (a kernel that takes another path at some size shows up as another story).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm, prod

from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.profile import LayerProfile

Point = tuple[int, ...]
"""Where in the family a profile stands, e.g. (width, microbatch_size)."""


@dataclass(frozen=True)
class ScaledProfile:
    """All profiles of a family. ``coefficients[i][j] / denominator`` multiplies monomial j of number i."""

    pattern: LayerProfile
    exponents: tuple[Point, ...]
    coefficients: tuple[tuple[int, ...], ...]
    denominator: int

    def at(self, point: Point) -> LayerProfile:
        """The profile at ``point``. Raises ValueError where the polynomials give no whole bytes."""
        terms = _monomials(point, self.exponents)
        numbers = []
        for row in self.coefficients:
            value, rest = divmod(
                sum(factor * term for factor, term in zip(row, terms, strict=True)), self.denominator
            )
            if rest or value < 0:
                raise ValueError(
                    f"layer {self.pattern.name} cannot be scaled to {point}: not a whole size there"
                )
            numbers.append(value)
        return _with_numbers(self.pattern, numbers)


def fit(samples: Mapping[Point, LayerProfile], exponents: Sequence[Point]) -> ScaledProfile:
    """Fit one polynomial with the monomials ``exponents`` to every number of the profiles.

    ``exponents`` of a family over (width, microbatch_size) that is quadratic and affine are (0, 0), (1, 0),
    (2, 0), (0, 1), (1, 1), (2, 1). Raises ValueError with too few samples, different stories, or a sample
    the polynomials miss.
    """
    points = list(samples)
    if len(points) < len(exponents):
        raise ValueError(f"{len(points)} profiles cannot determine {len(exponents)} monomials: give more")
    pattern = samples[points[0]]
    for point in points[1:]:
        if _structure(samples[point]) != _structure(pattern):
            raise ValueError(f"layer {pattern.name} behaves differently at {points[0]} and {point}")
    basis = [_monomials(point, exponents) for point in points]
    inverse = _inverse([[Fraction(term) for term in row] for row in basis[: len(exponents)]])
    columns = list(zip(*(_numbers(samples[point]) for point in points), strict=True))
    rows: list[list[Fraction]] = []
    for values in columns:
        known = values[: len(exponents)]
        row = [sum((a * b for a, b in zip(line, known, strict=True)), Fraction(0)) for line in inverse]
        for point, terms, value in zip(points, basis, values, strict=True):
            if sum((a * b for a, b in zip(row, terms, strict=True)), Fraction(0)) != value:
                raise ValueError(f"layer {pattern.name} does not scale as a polynomial: see {point}")
        rows.append(row)
    denominator = lcm(*(factor.denominator for row in rows for factor in row))
    coefficients = tuple(tuple(int(factor * denominator) for factor in row) for row in rows)
    return ScaledProfile(pattern, tuple(exponents), coefficients, denominator)


def _monomials(point: Point, exponents: Sequence[Point]) -> list[int]:
    return [prod(x**power for x, power in zip(point, powers, strict=True)) for powers in exponents]


def _inverse(matrix: list[list[Fraction]]) -> list[list[Fraction]]:
    """Gauss-Jordan elimination in exact arithmetic."""
    size = len(matrix)
    rows = [[*row, *(Fraction(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((r for r in range(column, size) if rows[r][column]), None)
        if pivot is None:
            raise ValueError("the sampled points do not determine the polynomials: spread them out")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = rows[column][column]
        rows[column] = [value / scale for value in rows[column]]
        for other in range(size):
            if other != column and rows[other][column]:
                factor = rows[other][column]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[column], strict=True)]
    return [row[size:] for row in rows]


def _structure(profile: LayerProfile) -> tuple[object, ...]:
    return (
        profile.name,
        profile.unused,
        len(profile.trained_sizes),
        *(story.plot for story in (profile.free, profile.first, profile.later)),
        *(
            (end.same_as, end.is_tuple, [(len(t.shape), replace(t, shape=())) for t in end.tensors])
            for end in (profile.inputs, profile.outputs)
        ),
    )


def _numbers(profile: LayerProfile) -> list[int]:
    return [
        profile.num_parameters,
        profile.parameter_bytes,
        profile.buffer_bytes,
        profile.gradient_bytes,
        *(
            length
            for end in (profile.inputs, profile.outputs)
            for spec in end.tensors
            for length in spec.shape
        ),
        *profile.trained_sizes,
        *profile.free.sizes,
        *profile.first.sizes,
        *profile.later.sizes,
    ]


def _with_numbers(pattern: LayerProfile, numbers: Sequence[int]) -> LayerProfile:
    """The inverse of `_numbers`."""
    values = iter(numbers)

    def take(count: int) -> tuple[int, ...]:
        return tuple(next(values) for _ in range(count))

    def end(boundary: Boundary) -> Boundary:
        tensors = tuple(replace(spec, shape=take(len(spec.shape))) for spec in boundary.tensors)
        return replace(boundary, tensors=tensors)

    num_parameters, parameter_bytes, buffer_bytes, gradient_bytes = take(4)
    return replace(
        pattern,
        num_parameters=num_parameters,
        parameter_bytes=parameter_bytes,
        buffer_bytes=buffer_bytes,
        gradient_bytes=gradient_bytes,
        inputs=end(pattern.inputs),
        outputs=end(pattern.outputs),
        trained_sizes=take(len(pattern.trained_sizes)),
        free=replace(pattern.free, sizes=take(len(pattern.free.sizes))),
        first=replace(pattern.first, sizes=take(len(pattern.first.sizes))),
        later=replace(pattern.later, sizes=take(len(pattern.later.sizes))),
    )
