"""The error of the replay becomes a range: its sign shifts it, its spread widens it, too few give none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import record
from scipy.stats import t

from gpipe_bench.experiments.measuring.tables.replay_error import (
    next_error,
    prediction_interval,
    replayed_spread,
)
from gpipe_bench.harness.record import Quantity


def errors(model, *values):
    """A record whose replays erred by these shares."""
    quantities = tuple(
        Quantity(name="replay error", key={"M": m}, value=value, unit="ratio", provenance="measured")
        for m, value in enumerate(values)
    )
    return record(case={"model": model}, quantities=quantities)


def replayed(value, low=None, high=None):
    return Quantity(name="step", value=value, unit="ratio", provenance="replayed", low=low, high=high)


@given(st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=12, unique=True))
def test_the_interval_is_that_of_one_more_draw(found):
    low, high = prediction_interval(found)
    middle, n = sum(found) / len(found), len(found)
    deviation = math.sqrt(sum((each - middle) ** 2 for each in found) / (n - 1))
    reach = t.ppf(0.975, n - 1) * deviation * math.sqrt(1 + 1 / n)
    assert (low, high) == pytest.approx((middle - reach, middle + reach))


def test_one_error_has_no_spread():
    with pytest.raises(ValueError, match=r"1 error\(s\) have no spread"):
        prediction_interval([0.1])
    assert next_error([errors("a", 0.1)], "a") is None
    assert replayed_spread(replayed(2.0), None, "either way") is None
    assert replayed_spread(None, (0.0, 0.1), "either way") is None


def test_few_errors_of_a_model_are_joined_by_those_of_the_others():
    few, many = errors("few", 0.01, -0.01), errors("many", 0.1, 0.1, 0.1)
    assert next_error([few, many], "many") == pytest.approx(prediction_interval([-math.log(1.1)] * 3))
    joined = [-math.log(1.01), -math.log(0.99), *[-math.log(1.1)] * 3]
    assert next_error([few, many], "few") == pytest.approx(prediction_interval(joined))


def test_a_replay_that_is_too_fast_lowers_the_throughput_and_not_the_other_way():
    """measured steps take 10 to 21 % longer than laid out

    throughput  |--x---|     |x|  as it was replayed
    """
    slower = (math.log(1.10), math.log(1.21))
    found = replayed_spread(replayed(2.0, 1.9, 2.1), slower, "as the step grows")
    assert (found.low, found.high) == pytest.approx((1.9 / 1.21, 2.1 / 1.10))
    assert [part.what for part in found.parts] == ["95 % interval", "error of the replay"]
    assert (found.parts[1].low, found.parts[1].high) == pytest.approx((2.0 / 1.21, 2.0 / 1.10))
    seconds = replayed_spread(replayed(2.0), slower, "with the step")
    assert (seconds.low, seconds.high) == pytest.approx((2.2, 2.42))
    share = replayed_spread(replayed(2.0), slower, "either way")
    assert (share.low, share.high) == pytest.approx((2.0 / 1.21, 2.42))


def test_a_difference_below_zero_has_a_range_in_order():
    """A noisy machine's pipeline may gain less than nothing; that ended the comparison."""
    below = replayed_spread(replayed(-2.0, -2.2, -1.8), (math.log(0.5), math.log(4.0)), "with the step")
    assert [(part.low, part.high) for part in below.parts] == [(-2.2, -1.8), (-8.0, -1.0)]
    assert (below.low, below.high) == pytest.approx((-8.8, -0.9))
    across = replayed_spread(replayed(1.0, -1.0, 2.0), (math.log(0.5), math.log(4.0)), "with the step")
    assert (across.low, across.high) == pytest.approx((-4.0, 8.0))


def test_what_else_moves_a_number_is_a_part_of_its_range():
    found = replayed_spread(replayed(2.0), (0.0, 0.0), "with the step", [("share_of_peak", 0.5, 1.5)])
    assert (found.low, found.high) == pytest.approx((1.0, 3.0))
    assert found.parts[-1].what == "share_of_peak"
