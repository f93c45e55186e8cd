"""Median and interval of repeated measurements.

The median, because one disturbed repeat must not move the result; the interval by bootstrap, because
timings are skewed and no normal law holds for a handful of them. Raw samples stay with the result.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from gpipe_bench.harness.record import Provenance, Quantity, Scalar

_RESAMPLES = 2000
_SEED = 1811_06965  # the interval of the same samples must be the same number every time


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the median, in the samples' unit; None below two samples."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; it is a share between 0 and 1, such as 0.95")
    if len(samples) < 2:
        return None
    if min(samples) == max(samples):
        return float(samples[0]), float(samples[0])
    import numpy  # what `scipy.stats.bootstrap` does; importing that takes half as long again as a `compare`

    values = numpy.asarray(samples, dtype=float)
    drawn = numpy.random.default_rng(_SEED).integers(0, len(values), (_RESAMPLES, len(values)))
    medians = numpy.sort(numpy.median(values[drawn], axis=-1))
    outside = (1 - confidence) / 2
    ends = []
    for share in (outside, 1 - outside):
        between, place = math.modf(share * _RESAMPLES + (1 - share))
        below, above = medians[int(place) - 1 : int(place) + 1]
        ends.append(float((1 - between) * below + between * above))
    middle = statistics.median(samples)  # interpolation may leave the samples' range by the last bit
    low = max(ends[0], min(samples))
    high = min(ends[1], max(samples))
    return min(low, middle), max(high, middle)


def from_samples(
    name: str,
    samples: Sequence[float],
    unit: str,
    *,
    key: Mapping[str, Scalar] | None = None,
    provenance: Provenance = "measured",
    note: str = "",
) -> Quantity:
    """Median of the samples with its 95 % interval. Raises ValueError without samples."""
    if not samples:
        raise ValueError(f"quantity {name!r} has no samples")
    interval = median_interval(samples)
    return Quantity(
        name,
        float(statistics.median(samples)),
        unit,
        provenance,
        key=dict(key or {}),
        low=None if interval is None else interval[0],
        high=None if interval is None else interval[1],
        samples=tuple(float(sample) for sample in samples),
        note=note,
    )
