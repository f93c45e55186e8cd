"""Verdicts: whether our range meets what the printed digits stand for, and whether it says anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_bench.harness.compare import judge, worded
from gpipe_bench.harness.paper import PaperNumber
from gpipe_bench.harness.record import Metric
from gpipe_bench.harness.units import parse_printed
from gpipe_bench.harness.unknowns import Unknown
from gpipe_bench.harness.verdict import Result


def paper(printed="3.5x", unit="ratio", **changes):
    fields = {"table": "t", "row": "r", "column": "c", "kind": "result", "source": "paper", **changes}
    value = {} if "value" in fields else {"value": parse_printed(printed, unit)[0]}
    return PaperNumber(printed=printed, unit=unit, **fields, **value)


def ours(value, unit="ratio", low=None, high=None, **changes):
    metric = Metric("x", value, unit, "measured", low=low, high=high)
    return Result(table="t", row="r", column="c", metric=metric, **changes)


@given(st.integers(1, 9999), st.integers(0, 2), st.sampled_from(["", "K", "M", "B"]))
def test_counts_carry_their_suffix_into_value_and_rounding(digits, places, suffix):
    scale = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[suffix]
    value, rounding = parse_printed(f"{digits / 10**places:.{places}f}{suffix}", "parameters")
    zeros = len(str(digits)) - len(str(digits).rstrip("0")) if suffix and not places else 0
    assert value == pytest.approx(digits / 10**places * scale)
    assert rounding == pytest.approx(0.5 * 10.0 ** (zeros - places) * scale), "400M has one digit"


@given(st.integers(1, 10**5), st.integers(0, 3), st.floats(-1, 1))
def test_whatever_rounds_to_the_printed_digits_is_reproduced(digits, places, share):
    printed = f"{digits / 10**places:.{places}f}"
    value = digits / 10**places + share * 0.5 * 10.0**-places
    assert judge(paper(printed), ours(value)).verdict == "reproduced"


@given(
    st.integers(1, 10**5),
    st.integers(0, 3),
    st.floats(1.001, 100),
    st.booleans(),
)
def test_whatever_rounds_elsewhere_is_above_or_below(digits, places, share, above):
    printed = f"{digits / 10**places:.{places}f}"
    value = digits / 10**places + (share if above else -share) * 0.5 * 10.0**-places
    judgement = judge(paper(printed), ours(value))
    assert judgement.verdict == ("above" if above else "below")


def test_a_range_that_meets_the_printed_interval_has_to_be_narrow_to_reproduce_it():
    """9.5 |----| 10.5
    reproduced    |--|
    reproduced      |---------|        at most a fifth to either side of its middle
    undecided  |---------------------|
    above                |--|
    """
    cell = paper("10")
    for low, high, verdict in (
        (9.9, 10.2, "reproduced"),
        (10.4, 15.4, "reproduced"),
        (8.0, 14.0, "undecided"),
        (10.6, 10.7, "above"),
        (9.0, 9.4, "below"),
    ):
        assert judge(cell, ours((low + high) / 2, low=low, high=high)).verdict == verdict


@given(
    st.sampled_from(["result", "claim", "identity"]),
    st.sampled_from(["", "at most", "at least"]),
    st.floats(0.1, 50),
    st.floats(0, 3),
    st.floats(0, 3),
)
def test_a_verdict_says_which_printed_numbers_it_would_have_rejected(kind, bound, value, below, above):

    def limit(value):
        form = "evaluated" if kind == "identity" else "read off"
        return paper(repr(value), form=form, error=0.5, kind=kind, bound=bound)

    cell = limit(10.0)
    mine = ours(value, low=value - below, high=value + above)
    judgement = judge(cell, mine)
    assert (judgement.fails_below is None) == (bound == "at least")
    assert (judgement.fails_above is None) == (bound == "at most")
    for edge, side, sign in ((judgement.fails_below, "above", -1), (judgement.fails_above, "below", 1)):
        if edge is not None:
            assert judge(limit(edge + sign * 1e-6), mine).verdict == side
            assert judge(limit(edge - sign * 1e-6), mine).verdict != side


def test_a_bound_holds_where_all_of_our_range_keeps_to_it_however_wide():
    """at most 23.5 |
    reproduced  |----|
    undecided          |----|
    above                  |--|
    """
    limit = paper("23%", "%", bound="at most")
    assert judge(limit, ours(15, "%", low=2, high=23)).verdict == "reproduced"
    assert judge(limit, ours(23.4, "%", low=23.0, high=23.8)).verdict == "undecided"
    judgement = judge(limit, ours(30, "%"))
    assert judgement.verdict == "above"
    assert "lies above at most 23.500 %" in judgement.reason
    floor = paper("4", "ratio", bound="at least", exact=True)
    assert judge(floor, ours(9.0, low=5.0, high=20.0)).verdict == "reproduced"
    assert judge(floor, ours(3.9)).verdict == "below"


def unknown(low, high):
    return Unknown(
        tables=("claims",), setting="how near", range=(low, high), unit="ratio",
        reason="the text does not say", sources=("v5 3",),
    )  # fmt: skip


def test_words_admit_for_sure_what_every_reading_of_them_admits():
    """almost linear     |  some readings  |   all readings
    0.675              0.875
    """
    cell = paper("1", "ratio", form="words", kind="claim")
    near = worded(cell, "at least", unknown(0.675, 0.875))
    assert (near.low, near.possible_low, near.open) == (0.875, 0.675, True)
    for low, high, verdict in (
        (0.88, 0.95, "reproduced"),
        (0.7, 0.8, "undecided"),
        (0.8, 0.9, "undecided"),
        (0.5, 0.6, "below"),
    ):
        mine = ours((low + high) / 2, low=low, high=high, allowed=near)
        assert judge(cell, mine).verdict == verdict
    small = worded(cell, "at most", unknown(0.032, 0.05))
    assert (small.high, small.possible_high) == (0.032, 0.05)
    constant = worded(cell, "within a factor", unknown(1.1, 1.38))
    assert (constant.low, constant.possible_low) == (1 / 1.1, 1 / 1.38)
    assert (constant.high, constant.possible_high, constant.open) == (1.1, 1.38, False)


def test_an_erratum_with_a_correction_is_judged_by_it_and_says_so():
    cell = paper("11.7G", "GiB", erratum="interchanged", corrected_printed="3.15")
    judgement = judge(cell, ours(3.154, "GiB"))
    assert judgement.verdict == "reproduced"
    assert "judged by the corrected 3.15, not the printed 11.7G" in judgement.reason
    assert judge(cell, ours(11.7, "GiB")).verdict == "above"


@pytest.mark.parametrize(
    ("status", "reason", "verdict", "words"),
    [
        ("out_of_memory", "needs 9 GiB", "below", "ran out of memory here: needs 9 GiB"),
        ("skipped", "needs 8 devices", "not run", "skipped: needs 8 devices"),
        ("failed", "ValueError: x", "not run", "failed: ValueError: x"),
        ("done", "only in the full profile", "not run", "only in the full profile"),
        ("done", "", "not run", "there is no record of this case"),
    ],
)
def test_a_case_without_a_number_says_what_became_of_it(status, reason, verdict, words):
    judgement = judge(paper(), Result(table="t", row="r", column="c", status=status, reason=reason))
    assert (judgement.verdict, judgement.reason) == (verdict, words)
