"""The paper's numbers are the paper's, and verdicts on them: whether our range meets its digits.

The literals below were copied from the paper once more, by hand and not from the file.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_bench.harness.compare import judge, worded
from gpipe_bench.harness.paper import SENTENCES, PaperNumber, load_paper, of_the_paper, parse_printed
from gpipe_bench.harness.record import Metric
from gpipe_bench.harness.report.table import counts_text
from gpipe_bench.harness.reproduction import Unknown, load_unknowns, words
from gpipe_bench.harness.verdict import Result


@pytest.fixture(scope="module")
def cells():
    return load_paper()


@pytest.fixture(scope="module")
def find(cells):
    found = {(c.source, *c.key): c for c in cells}
    return lambda table, row, column, source="paper": found[source, table, row, column]


AMOEBA = ("naive-1", "pipeline-1", "pipeline-2", "pipeline-4", "pipeline-8")
TRANSFORMER = ("naive-1", "pipeline-1", "pipeline-8", "pipeline-32", "pipeline-128")
STAGES = ("K=2", "K=4", "K=8")
FIGURE = ("naive-1", "pipeline-1", "pipeline-2", "pipeline-4", "pipeline-8")

PUBLISHED = [
    ("table1-amoebanet", "num_layers", AMOEBA, (18, 18, 18, 36, 72)),
    ("table1-amoebanet", "num_filters", AMOEBA, (208, 416, 544, 544, 512)),
    ("table1-amoebanet", "parameters", AMOEBA, (82e6, 318e6, 542e6, 1.05e9, 1.8e9)),
    ("table1-amoebanet", "parameter memory", AMOEBA, (1.05, 3.8, 6.45, 12.53, 24.62)),
    ("table1-amoebanet", "peak activation memory", AMOEBA, (6.26, 3.46, 8.11, 15.21, 26.24)),
    ("table1-transformer", "num_layers", TRANSFORMER, (3, 13, 103, 415, 1663)),
    ("table1-transformer", "parameters", TRANSFORMER, (282.2e6, 785.8e6, 5.3e9, 21.0e9, 83.9e9)),
    ("table1-transformer", "parameter memory", TRANSFORMER, (11.7, 8.8, 59.5, 235.1, 937.9)),
    ("table1-transformer", "peak activation memory", TRANSFORMER, (3.15, 6.4, 50.9, 199.9, 796.1)),
    ("table2-amoebanet", "M=1", STAGES, (1, 1.13, 1.38)),
    ("table2-amoebanet", "M=4", STAGES, (1.07, 1.26, 1.72)),
    ("table2-amoebanet", "M=32", STAGES, (1.21, 1.84, 3.48)),
    ("table2-transformer", "M=1", STAGES, (1, 1.07, 1.3)),
    ("table2-transformer", "M=4", STAGES, (1.7, 3.2, 4.8)),
    ("table2-transformer", "M=32", STAGES, (1.8, 3.4, 6.3)),
    ("table3-amoebanet", "M=32", STAGES, (1, 1.7, 2.7)),
    ("table3-transformer", "M=32", STAGES, (1, 1.8, 3.3)),
    ("figure3-amoebanet", "normalized throughput", ("naive-2", *FIGURE[2:]), (1, 1.156, 2.483, 3.442)),
    ("figure3-resnet101", "normalized throughput", FIGURE, (1, 0.80, 1.418, 2.182, 2.891)),
    ("nmt-batch", "260K tokens", ("BLEU", "NLL"), (30.92, 2.58)),
    ("nmt-batch", "1M tokens", ("BLEU", "NLL"), (31.86, 2.51)),
    ("nmt-batch", "4M tokens", ("BLEU", "NLL"), (32.71, 2.46)),
    ("amoebanet-b", "ImageNet top-1", ("v1", "v5"), (84.3, 84.4)),
    ("amoebanet-b", "ImageNet top-5", ("v5",), (97.0,)),
    ("control-stride", "ImageNet top-1", ("original strides", "moved stride"), (78.1, 82.7)),
    ("breakdown-v1", "load imbalance", ("K=2", "K=4"), (3.2, 10.9)),
]


@pytest.mark.parametrize(("table", "row", "columns", "values"), PUBLISHED)
def test_the_tables_are_the_papers(find, table, row, columns, values):
    assert tuple(find(table, row, column).value for column in columns) == values


CLAIMS = {"25x": ("table1-amoebanet", "pipeline-8", "naive-1"),
          "298x": ("table1-transformer", "pipeline-128", "naive-1"),
          "2.7x": ("table1-transformer", "pipeline-1", "naive-1"),
          "3.8": ("table1-amoebanet", "pipeline-1", "naive-1"),
          "5.6": ("table1-amoebanet", "pipeline-8", "pipeline-1")}  # fmt: skip


def test_the_claims_are_corrected_by_the_papers_printed_counts_and_by_nothing_else(cells, find):
    """Neither by our counts nor more sharply than the rounding of the printed ones allows."""
    claims = {c.printed: c for c in cells if c.table == "claims" and c.kind == "claim"}
    assert claims.keys() == CLAIMS.keys()
    for printed, (table, over, under) in CLAIMS.items():
        claim = claims[printed]
        above, below = find(table, "parameters", over), find(table, "parameters", under)
        low = (above.value - above.rounding) / (below.value + below.rounding)
        high = (above.value + above.rounding) / (below.value - below.rounding)
        quotient = find("claims", f"quotient of the printed counts, {claim.row}", claim.column)
        for value, error in (
            (claim.target, claim.target_rounding),
            (quotient.value, quotient.rounding),
        ):
            assert value == pytest.approx(above.value / below.value, rel=1e-3)
            assert (value - error, value + error) == pytest.approx((low, high), rel=2e-3)
        assert (quotient.kind, quotient.form) == ("identity", "evaluated")


def test_formulas_are_evaluated_right(cells):
    bubbles = [c for c in cells if c.row.startswith("bubble (K-1)/(M+K-1)")]
    assert len(bubbles) == 9
    for c in bubbles:
        stages, micro = int(c.column.removeprefix("K=")), int(c.row.rpartition("M=")[2])
        assert abs(100 * (stages - 1) / (micro + stages - 1) - c.value) <= c.rounding


def test_what_repeats_a_number_is_that_number_within_the_rounding_of_both(cells):
    """In other words, such as an increase for a ratio, it may be another value."""
    for cell in cells:
        if cell.same_as is not None:
            first = of_the_paper()[cell.same_as]
            assert (cell.source, first.same_as) == ("paper", None)
            assert first is not cell
            if cell.form not in ("derived", "words"):
                assert first.unit == cell.unit
                apart = abs(cell.value - first.value)
                assert apart <= cell.rounding + first.rounding + 1e-9 * abs(first.value)


def test_every_sentence_of_a_word_is_a_row_of_the_paper_and_has_one_word():
    rows = [row for one in load_unknowns().unknown for row in one.sentences]
    assert len(rows) == len(set(rows)) == len(words()) > 0
    assert set(rows) <= {
        cell.row for cell in load_paper() if cell.source == "paper" and cell.kind != "setting"
    }
    assert all(limit.range is not None and "claims" in limit.tables for _, limit in words().values())


# What is not stated


@pytest.fixture(scope="module")
def settings():
    return load_unknowns()


def test_stated_values_are_those_of_the_papers_numbers(settings):
    table = "table1-amoebanet"
    stated = {one.setting: one.value for one in settings.stated if table in one.tables}
    published = {
        cell.row: cell.value for cell in load_paper() if (cell.table, cell.column) == (table, "setting")
    }
    for row, setting in (("batch size", "batch_size"), ("micro-batches", "num_microbatches"),
                         ("image size", "image_size")):  # fmt: skip
        assert stated[setting] == published[row]


# Verdicts


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
    for low, high, verdict, answer in (
        (9.9, 10.2, "reproduced", "agrees"),
        (10.4, 15.4, "reproduced", "agrees"),
        (8.0, 14.0, "undecided", "no test"),
        (10.6, 10.7, "above", "differs"),
        (9.0, 9.4, "below", "differs"),
    ):
        judgement = judge(cell, ours((low + high) / 2, low=low, high=high))
        assert (judgement.verdict, judgement.to_data()["answer"]) == (verdict, answer)


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
    sure = paper("1", "ratio", form="words", kind="identity", bound="at most")
    assert judge(sure, ours(0.9, low=0.8, high=1.0)).verdict == "identity"
    assert judge(sure, ours(0.94, low=0.8, high=1.04)).verdict == "undecided", "it could have been otherwise"
    floor = paper("4", "ratio", bound="at least", exact=True)
    assert judge(floor, ours(9.0, low=5.0, high=20.0)).verdict == "reproduced"
    assert judge(floor, ours(3.9)).verdict == "below"


def test_what_differs_is_counted_so_even_of_a_sentence_that_follows_by_arithmetic():
    cell = paper("5", "%", kind="identity", bound="at most")
    found = [replace(judge(cell, ours(value, "%")), table=SENTENCES) for value in (4, 12)]
    assert counts_text(found) == "1 differs; 1 follows"


def unknown(low, high):
    return Unknown(
        tables=("claims",), setting="how near", range=(low, high), unit="ratio",
        reason="the text does not say", sources=("v5 3",),
    )  # fmt: skip


def test_words_admit_for_sure_what_every_reading_of_them_admits(monkeypatch):
    """almost linear     |  some readings  |   all readings
    0.675              0.875
    """
    cell = paper("1", "ratio", form="words", kind="claim")
    near = worded(cell, "at least", unknown(0.675, 0.875))
    assert (near.low, near.possible_low, near.open) == (0.875, 0.675, True)
    monkeypatch.setattr("gpipe_bench.harness.compare.admitted", lambda cell: near)
    for low, high, verdict in (
        (0.88, 0.95, "reproduced"),
        (0.7, 0.8, "undecided"),
        (0.8, 0.9, "undecided"),
        (0.5, 0.6, "below"),
    ):
        mine = ours((low + high) / 2, low=low, high=high)
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
