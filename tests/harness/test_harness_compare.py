"""Comparisons: every cell of a touched table is there once, and each footnote stands once with one number."""

from __future__ import annotations

import pytest

from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Metric
from gpipe_bench.harness.report.table import tables_of, text_table
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
    rows = compare(
        [
            Result(question="here", metric=metric, **place),
            Result(question="as published", metric=metric, **place),
        ]
    )
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
    assert next(c for c in rows if c.source == "paper" and c.place == theirs.place).verdict == "not run"


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
