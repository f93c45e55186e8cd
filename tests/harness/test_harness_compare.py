"""Comparisons and tables: every cell once, footnotes, intervals and frames."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import metric, record
from scipy.stats import bootstrap

from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.paper import load_paper, show
from gpipe_bench.harness.record import (
    BEFORE,
    BEHIND,
    Metric,
    frame,
    from_samples,
    interval_name,
    median_interval,
)  # fmt: skip
from gpipe_bench.harness.report.grid import Grid, fill, within
from gpipe_bench.harness.report.table import ratio_text, tables_of, text_table
from gpipe_bench.harness.verdict import Result

TABLE = "table1-transformer"


def cell(column, row, value, unit="bytes", table=TABLE, **changes):
    metric = Metric(row, value, unit, "modelled")
    return Result(table=table, row=row, column=column, metric=metric, **changes)


MEMORY = [
    cell("naive-1", "parameter memory", 282_178_816 * 12),
    cell("pipeline-1", "parameter memory", 785_761_536 * 12),
    cell("pipeline-8", "parameter memory", 5_318_006_016 * 12),
    cell("naive-1", "peak activation memory", 11 * 2**30, note="all that autograd keeps"),
]


@pytest.fixture(scope="module")
def comparisons():
    return compare(MEMORY)


def at(comparisons, column, row):
    return next(c for c in comparisons if (c.column, c.row) == (column, row))


def test_every_published_cell_of_the_table_is_there_once(comparisons):
    published = [c.key for c in load_paper() if c.table == TABLE and c.source == "paper" and c.counted]
    assert sorted(c.place for c in comparisons) == sorted(published)


def test_the_interchanged_pair_is_judged_corrected_and_says_so(comparisons):
    memory = at(comparisons, "naive-1", "parameter memory")
    assert (memory.printed, memory.paper, memory.corrected) == ("11.7G", 11.7, 3.15)
    assert memory.verdict == "identity"
    assert memory.ours == pytest.approx(3.1536, abs=1e-4)
    assert "interchanged" in memory.footnotes[0]
    activation = at(comparisons, "naive-1", "peak activation memory")
    assert (activation.corrected, activation.verdict) == (11.7, "below")


def test_a_cell_of_ours_that_the_paper_lacks_comes_after_its_table_rows():
    rows = compare([cell("pipeline-4", "parameter memory", 5.0, "GiB"), *MEMORY])
    extra = at(rows, "pipeline-4", "parameter memory")
    assert (extra.paper, extra.verdict, extra.unit, extra.ours) == (None, "not comparable", "GiB", 5.0)
    assert rows[-1] == extra


def test_the_two_questions_are_rows_of_their_own():
    place = {"table": "table2-transformer", "row": "M=32", "column": "K=8"}
    metric = Metric(name="x", value=6.3, unit="ratio", provenance="modelled")
    ours = [Result(question=question, metric=metric, **place) for question in ("here", "as published")]
    with pytest.raises(ValueError, match=r"M=32 / K=8 .*is given twice"):
        compare([*ours, ours[0]])
    rows = compare(ours)
    found = [c.question for c in rows if c.row == "M=32" and c.column == "K=8"]
    assert found == ["as published", "here"]
    assert len({c.key for c in rows}) == len(rows)
    assert sum(c.question == "here" for c in rows) == 1, "what is not answered is asked once"


def test_a_number_of_others_is_held_against_theirs():
    metric = Metric(name="x", value=4.3, unit="ratio", provenance="modelled")
    place = {"table": "figure3-resnet101", "row": "normalized throughput", "column": "pipeline-8"}
    rows = compare([Result(source="torchgpipe", metric=metric, **place)])
    theirs = next(c for c in rows if c.source == "torchgpipe")
    assert (theirs.kind, theirs.paper) == ("external", 4.294)
    papers = next(c for c in rows if c.source == "paper" and c.place == theirs.place)
    assert (papers.verdict, papers.peer, theirs.peer) == ("not run", 4.294, None)


def test_an_explanation_shared_by_cells_is_one_footnote_and_the_verdicts_show_by_how_much():
    rows = compare(
        [
            cell("pipeline-1", "peak activation memory", 3.2, "GiB", note="other tensors are kept"),
            cell("pipeline-8", "peak activation memory", 101.8, "GiB", note="other tensors are kept"),
        ]
    )
    assert [note for row in rows for note in row.footnotes].count("other tensors are kept") == 2
    assert tables_of(rows)[0].notes.count("other tensors are kept") == 1
    assert "lies" not in " ".join(note for row in rows for note in row.footnotes)
    table = text_table(rows)
    assert "| differs [" in table.replace("  ", "| ")
    assert [f"{row.ratio:.1f}" for row in rows if row.ratio] == ["0.5", "2.0"]
    assert "ours / paper" in table


def test_numbers_have_four_digits_or_those_before_the_point_or_an_exponent():
    assert [show(value, "s") for value in (1234.56, 1.2e7)] == ["1235 s", "1.200e+07 s"]
    rows = compare([cell("pipeline-1", "peak activation memory", 6.4 * 1234.4, "GiB")])
    assert [ratio_text(row) for row in rows if row.ratio] == ["1234"]


COLUMNS = ["", "ours|theirs"]
GRID = Grid(title="A title", columns=COLUMNS, lines=[["K=2", 1.5], ["a|b\nc", 12]], notes=["a note"])


def test_markdown_keeps_each_line_on_one_and_escapes_pipes():
    assert GRID.markdown().splitlines() == [
        "**A title**",
        "",
        r"|        | ours\|theirs   |",
        "|--------|----------------|",
        "| K=2    | 1.5            |",
        r"| a\|b c | 12             |",
        "a note",
    ]


def test_a_wide_table_is_wrapped_and_then_goes_below_itself() -> None:
    """Within so many columns; outside of the block it is as wide as it is."""
    words = "what is asked of them all, and how it came out in the end"
    wide = Grid(columns=["", "asked", "number"], lines=[["first", words, "12 ms"]], right=frozenset({2}))
    narrow = Grid(columns=["", *"abc"], lines=[["row", *["12345678901234"] * 3]], title="named once")
    whole = wide.text()
    with within(40):
        lines = wide.text().splitlines()
        assert max(map(len, lines)) <= 40
        assert " ".join(" ".join(line[7:31] for line in lines[2:]).split()) == words
        assert fill(words).count("\n") == 1
        parts = narrow.text().split("\n\n")
        empty = Grid(columns=["", "asked", ""], lines=[["first", words, ""]]).text()
    assert [part.split()[0] for part in parts] == ["named", "a", "c"]
    assert all("row" in part for part in parts[1:])
    assert "first" in empty, "a column with nothing in it"
    assert wide.text() == whole


STEPS = (
    metric(2.0, name="step", key={"M": 4, "remat": "always"}, low=1.5, high=2.5),
    metric(3, name="step", key={"M": 8, "K": 4}),
)
RECORDS = [
    record(1, case={"K": 2, "model": "resnet101"}, metrics=STEPS),
    record(2, case={"K": 8, "model": "unet"}, metrics=(), status="skipped", reason="needs 8 devices"),
]


def test_a_row_for_each_quantity_and_one_for_a_record_without() -> None:
    found = frame(RECORDS)
    assert list(found.columns) == [*BEFORE, "K", "model", "M", "remat", *BEHIND]
    values = zip(found.record, found.K, found.metric.fillna(""), found.value.fillna(0), strict=True)
    assert list(values) == [(0, 2, "step", 2.0), (0, 4, "step", 3.0), (1, 8, "", 0.0)]
    assert [f"M={each}" for each in found.M[:2]] == ["M=4", "M=8"], "although the third has none"
    assert list(found.reason) == ["", "", "needs 8 devices"]
    table = found.query("metric == 'step'").pivot(index="K", columns="M", values="unit").fillna("-")
    grid = Grid(columns=["K", *table.columns], lines=list(table.itertuples()))
    assert [line.split() for line in grid.text().splitlines()[2:]] == [["2", "s", "-"], ["4", "-", "s"]]
    assert frame([]).empty


def test_a_key_named_like_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match="metric is a column's name; choose"):
        frame([record(case={"value": 1})])


samples = st.lists(st.floats(0.001, 1000), min_size=2, max_size=20)


@settings(max_examples=40)
@given(samples)
def test_the_interval_holds_the_median_lies_within_the_samples_and_repeats(values):
    metric = from_samples("time", values, "s")
    assert min(values) <= metric.low <= metric.value <= metric.high <= max(values)
    assert metric.value == numpy.median(values)
    assert metric.samples == tuple(values)
    assert from_samples("time", values, "s") == metric


def test_the_interval_is_that_of_scipys_bootstrap():
    values = numpy.random.default_rng(2).lognormal(size=14)
    theirs = bootstrap(
        (values,), numpy.median, confidence_level=0.95, n_resamples=2000, method="percentile",
        random_state=numpy.random.default_rng(181106965),
    ).confidence_interval  # fmt: skip
    assert median_interval(values) == pytest.approx(theirs, rel=1e-12)


def test_an_interval_has_a_per_cent_from_six_samples_on():
    """A bootstrap of fewer gives the smallest and the largest, which hold it less often than it says."""
    few, enough = (from_samples("time", [float(n) for n in range(count)], "s") for count in (5, 6))
    assert (few.low, few.high, interval_name(5)) == (0.0, 4.0, "smallest to largest of 5")
    assert interval_name(6) == "95 % interval"
    assert (enough.low, enough.high) == median_interval(enough.samples)
    assert from_samples("time", [1.0], "s").low is None
