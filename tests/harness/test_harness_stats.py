"""Medians and their intervals."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap

from gpipe_bench.harness.record import from_samples, interval_name, median_interval

samples = st.lists(st.floats(0.001, 1000), min_size=2, max_size=20)


@settings(max_examples=40)
@given(samples)
def test_the_interval_holds_the_median_lies_within_the_samples_and_repeats(values):
    metric = from_samples("time", values, "s")
    assert min(values) <= metric.low <= metric.value <= metric.high <= max(values)
    assert metric.value == numpy.median(values)
    assert metric.samples == tuple(values)
    assert from_samples("time", values, "s") == metric


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_the_interval_is_that_of_scipys_bootstrap(confidence):
    values = numpy.random.default_rng(2).lognormal(size=14)
    theirs = bootstrap(
        (values,), numpy.median, confidence_level=confidence, n_resamples=2000, method="percentile",
        random_state=numpy.random.default_rng(181106965),
    ).confidence_interval  # fmt: skip
    assert median_interval(values, confidence) == pytest.approx(theirs, rel=1e-12)


def test_an_interval_has_a_per_cent_from_six_samples_on():
    """A bootstrap of fewer gives the smallest and the largest, which hold it less often than it says."""
    few, enough = (from_samples("time", [float(n) for n in range(count)], "s") for count in (5, 6))
    assert (few.low, few.high, interval_name(5)) == (0.0, 4.0, "smallest to largest of 5")
    assert interval_name(6) == "95 % interval"
    assert (enough.low, enough.high) == median_interval(enough.samples)
    assert from_samples("time", [1.0], "s").low is None
