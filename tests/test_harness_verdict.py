"""Verdicts: the band is what the printed digit, our interval and the declared gap span, on both sides."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.judging.paper import PaperCell
from gpipe_bench.harness.judging.units import parse_printed, show_with_interval
from gpipe_bench.harness.judging.verdict import VERDICTS, band, judge
from gpipe_bench.harness.records.record import Quantity


def paper(printed="3.5x", unit="ratio", **changes):
    value, rounding = parse_printed(printed, unit)
    fields = {
        "table": "t", "row": "r", "column": "c", "value": value, "printed": printed, "unit": unit,
        "exact": False, "kind": "result", "hardware": "TPU", "source": "paper", "location": "Table 9",
        "bound": "", "comparable": True, "erratum": "", "note": "", "rounding": rounding,
    }  # fmt: skip
    return PaperCell(**{**fields, **changes})


def ours(value, unit="ratio", low=None, high=None, better=True, **changes):
    quantity = Quantity(
        name="x", value=value, unit=unit, provenance="measured", low=low, high=high, higher_is_better=better
    )
    return Entry(table="t", row="r", column="c", quantity=quantity, **changes)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 4))
def test_a_printed_number_is_what_it_rounds_to(digits, places):
    printed = str(Decimal(digits).scaleb(-places))
    value, rounding = parse_printed(printed, "ratio")
    assert value == float(printed)
    assert rounding == pytest.approx(0.5 * 10.0**-places)


@settings(deadline=None)
@given(st.integers(1, 9999), st.integers(0, 2), st.sampled_from(["", "K", "M", "B"]))
def test_counts_carry_their_suffix_into_value_and_rounding(digits, places, suffix):
    scale = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[suffix]
    value, rounding = parse_printed(f"{digits / 10**places:.{places}f}{suffix}", "parameters")
    assert value == pytest.approx(digits / 10**places * scale)
    assert rounding == pytest.approx(0.5 * 10.0**-places * scale)


@settings(deadline=None)
@given(st.integers(1, 10**5), st.integers(0, 3), st.floats(-1, 1))
def test_whatever_rounds_to_the_printed_digits_is_reproduced(digits, places, share):
    printed = f"{digits / 10**places:.{places}f}"
    value = digits / 10**places + share * 0.5 * 10.0**-places
    assert judge(paper(printed), ours(value)).verdict == "reproduced"


@settings(deadline=None)
@given(
    st.integers(1, 10**5),
    st.integers(0, 3),
    st.floats(1.001, 100),
    st.booleans(),
    st.sampled_from([True, False, None]),
)
def test_whatever_rounds_elsewhere_is_not_reproduced_on_either_side(digits, places, share, above, better):
    printed = f"{digits / 10**places:.{places}f}"
    value = digits / 10**places + (share if above else -share) * 0.5 * 10.0**-places
    judgement = judge(paper(printed), ours(value, better=better))
    assert judgement.verdict == ("exceeds" if better is not None and better == above else "deviates")


@settings(deadline=None)
@given(st.floats(-50, 50), st.floats(0, 5), st.floats(0, 5), st.floats(0, 0.5))
def test_the_band_asks_whether_our_interval_meets_the_papers(value, below, above, gap):
    cell = paper("10")
    mine = ours(value, low=value - below, high=value + above, gap=gap, gap_reason="a model" if gap else "")
    paper_low, paper_high = 9.5 - 10 * gap, 10.5 + 10 * gap
    distance = max(paper_low - (value + above), (value - below) - paper_high)
    if abs(distance) > 1e-6:  # at the very edge the last bit decides
        assert (judge(cell, mine).verdict == "reproduced") == (distance < 0)
    low, high = band(cell, mine.quantity, gap)
    assert low <= paper_low + 1e-9
    assert high >= paper_high - 1e-9


@settings(deadline=None)
@given(
    st.none() | st.floats(-1e3, 1e3),
    st.sampled_from([True, False, None]),
    st.sampled_from(["", "other hardware"]),
    st.sampled_from(["done", "skipped", "out_of_memory", "failed"]),
    st.booleans(),
)
def test_every_verdict_has_a_reason(value, better, not_comparable, status, known):
    mine = ours(value, better=better, not_comparable=not_comparable, status=status)
    judgement = judge(paper() if known else None, mine)
    assert judgement.verdict in VERDICTS
    assert judgement.reason


def test_every_verdict_can_be_reached():
    reached = {
        judge(paper("3.5"), ours(3.52)).verdict,
        judge(paper("3.5"), ours(4.0)).verdict,
        judge(paper("3.5"), ours(3.0)).verdict,
        judge(paper("3.5"), ours(3.5, not_comparable="other hardware")).verdict,
        judge(paper("3.5"), Entry(table="t", row="r", column="c")).verdict,
    }
    assert reached == set(VERDICTS)


def test_the_interval_counts_on_the_side_it_reaches_out_to():
    assert judge(paper("3.5"), ours(3.3, low=3.2, high=3.46)).verdict == "reproduced"
    assert judge(paper("3.5"), ours(3.3, low=2.0, high=3.44)).verdict == "deviates"


def test_lower_may_be_better():
    assert judge(paper("6.26GB", "GB"), ours(5.0, "GB", better=False)).verdict == "exceeds"
    assert judge(paper("6.26GB", "GB"), ours(7.0, "GB", better=False)).verdict == "deviates"


@pytest.mark.parametrize(
    ("value", "low", "high", "unit", "text"),
    [
        (0.752, 0.739, 0.7652, "ratio", "0.752 [0.739, 0.765]"),
        (2.5, 0.0, 4.825, "standard deviations", "2.500 [0, 4.825] standard deviations"),
        (34.51, 34.2, 34.8, "GB", "34.51 [34.20, 34.80] GB"),
        (81.79e6, 81e6, 1.2e9, "parameters", "81.79M [81M, 1.200B]"),
        (3.5, None, None, "ms", "3.500 ms"),
    ],
)
def test_an_interval_names_the_unit_once(value, low, high, unit, text):
    assert show_with_interval(value, low, high, unit) == text


def test_units_are_converted_and_different_kinds_refused():
    gib = ours(3_386_145_792, "bytes")
    assert judge(paper("3.15G", "GiB"), gib).verdict == "reproduced"
    assert judge(paper("3.15GB", "GB"), gib).verdict == "exceeds"
    with pytest.raises(ValueError, match="'s' measures time and 'GB' measures memory"):
        judge(paper("3.15GB", "GB"), ours(3.15, "s"))
    with pytest.raises(ValueError, match="unknown unit 'parsecs'"):
        judge(paper("3.15GB", "GB"), ours(3.15, "parsecs"))


def test_a_gap_needs_its_reason_and_gives_it_to_the_verdict():
    with pytest.raises(ValueError, match="gap of 0.01 is declared without gap_reason"):
        ours(3.5, gap=0.01)
    with pytest.raises(ValueError, match="gap is -1"):
        ours(3.5, gap=-1.0, gap_reason="why")
    judgement = judge(
        paper("542M", "parameters"), ours(540_986_433, "parameters", gap=0.005, gap_reason="no variant")
    )
    assert judgement.verdict == "reproduced"
    assert "declared gap of 0.5 %: no variant" in judgement.reason


def test_an_exact_number_has_no_rounding():
    exact = paper("18", "layers", exact=True, rounding=0.0)
    assert judge(exact, ours(18, "layers")).verdict == "reproduced"
    assert judge(exact, ours(19, "layers")).verdict == "exceeds"
    assert judge(exact, ours(18.4, "layers", better=None)).verdict == "deviates"


def test_a_bound_has_one_side():
    limit = paper("23%", "%", bound="at most")
    assert judge(limit, ours(15, "%")).verdict == "reproduced"
    assert judge(limit, ours(23.4, "%")).verdict == "reproduced"
    judgement = judge(limit, ours(30, "%", better=False))
    assert judgement.verdict == "deviates"
    assert "above the band, at most 23.500 %" in judgement.reason
    floor = paper("4", "ratio", bound="at least", exact=True, rounding=0.0)
    assert judge(floor, ours(9.0)).verdict == "reproduced"
    assert "below the band, at least 4 " in judge(floor, ours(3.9)).reason


def test_an_erratum_with_a_correction_is_judged_by_it_and_says_so():
    cell = paper("11.7G", "GiB", erratum="interchanged", corrected_value=3.15, corrected_rounding=0.005,
                 corrected_printed="3.15")  # fmt: skip
    judgement = judge(cell, ours(3.154, "GiB"))
    assert judgement.verdict == "reproduced"
    assert "judged by the corrected 3.15, not the printed 11.7G" in judgement.reason
    assert judge(cell, ours(11.7, "GiB", better=False)).verdict == "deviates"


def test_an_erratum_without_a_correction_may_leave_nothing_to_compare():
    cell = paper("1.05GB", "GB", comparable=False, erratum="contradicts its own definition")
    judgement = judge(cell, ours(1.05, "GB"))
    assert (judgement.verdict, judgement.reason) == ("not comparable", "contradicts its own definition")


@pytest.mark.parametrize(
    ("status", "reason", "verdict", "words"),
    [
        ("out_of_memory", "needs 9 GiB", "deviates", "ran out of memory here: needs 9 GiB"),
        ("skipped", "needs 8 devices", "not run", "skipped: needs 8 devices"),
        ("failed", "ValueError: x", "not run", "failed: ValueError: x"),
        ("done", "only in the full profile", "not run", "only in the full profile"),
        ("done", "", "not run", "there is no record of this case"),
    ],
)
def test_a_case_without_a_number_says_what_became_of_it(status, reason, verdict, words):
    judgement = judge(paper(), Entry(table="t", row="r", column="c", status=status, reason=reason))
    assert (judgement.verdict, judgement.reason) == (verdict, words)


def test_a_cell_the_paper_does_not_have_is_not_comparable():
    assert judge(None, ours(1.0)).verdict == "not comparable"


@pytest.mark.parametrize("printed", ["", "about 3", "GB", "nan", "inf", "3.4T"])
def test_a_printed_form_that_is_no_number_is_refused(printed):
    with pytest.raises(ValueError, match="printed form"):
        parse_printed(printed, "parameters")


def test_the_tolerance_scales_the_whole_band():
    cell, number = paper("3.5x"), ours(3.62, low=3.6, high=3.65)
    low, high = band(cell, number.quantity, gap=0.02)
    for tolerance in (0.5, 2.0):
        narrow, wide = band(cell, number.quantity, gap=0.02, tolerance=tolerance)
        assert (3.5 - narrow, wide - 3.5) == pytest.approx(
            (tolerance * (3.5 - low), tolerance * (high - 3.5))
        )
    gap = {"gap": 0.02, "gap_reason": "read off a figure"}
    verdicts = [judge(cell, ours(3.65, better=None, **gap), scale).verdict for scale in (0.5, 1, 2)]
    assert verdicts == ["deviates", "deviates", "reproduced"]


@pytest.mark.parametrize("tolerance", [0, -1, float("nan"), float("inf")])
def test_a_tolerance_without_a_width_is_refused(tolerance):
    with pytest.raises(ValueError, match="multiplies the width of a band"):
        judge(paper("3.5x"), ours(3.5), tolerance)
