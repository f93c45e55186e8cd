"""Two questions, shown apart: counted by evidence, with what would have failed."""

from __future__ import annotations

import csv
import gzip
import io
import re
from base64 import b64decode
from dataclasses import replace

import pandas as pd
import pytest
from records import quantity

from gpipe_bench.experiments import registry
from gpipe_bench.experiments.commands import cli
from gpipe_bench.experiments.commands.output import DONE
from gpipe_bench.experiments.report.build import build
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.paper import PaperTable, load_paper
from gpipe_bench.harness.places import REFERENCE
from gpipe_bench.harness.report.html import html, plot
from gpipe_bench.harness.report.page import COLUMNS, cells_csv, page_of
from gpipe_bench.harness.report.side import side_by_side
from gpipe_bench.harness.report.table import (
    ASKED,
    Counts,
    counts_lines,
    fails_text,
    markdown_table,
    tables_of,
    text_table,
)
from gpipe_bench.harness.store import Store
from gpipe_bench.harness.verdict import Answer, Part, Spread

MACHINE = REFERENCE / "cpu-2-cores"
TABLE, ROW = "figure3-resnet101", "normalized throughput"
PAPER = {
    (c.source, c.column): c for c in load_paper() if c.table == TABLE and c.row == ROW and c.unit == "ratio"
}
TESTED = "with a slower link"


def entry(column, times, question="here", width=0.0, provenance="replayed", **changes):
    """So many times the published number, to within a share of it."""
    value = times * PAPER[changes.get("source", "paper"), column].value
    low, high = value * (1 - width), value * (1 + width)
    parts = (Part(what="share_of_peak", low=low, high=value),)
    return Answer(
        table=TABLE,
        row=ROW,
        column=column,
        question=question,
        quantity=quantity(value, name="x", unit="ratio", provenance=provenance),
        spread=Spread(low=low, high=high, parts=parts, combinations=4) if width else None,
        **changes,
    )


ENTRIES = [
    entry("naive-1", 1.0, "as published", provenance="modelled"),
    entry("pipeline-1", 1.0, "as published", 0.1),
    entry("pipeline-2", 2.0, "as published", 0.1, explained_by=TESTED),
    entry("pipeline-4", 1.2, "as published", 0.4),
    entry("pipeline-4", 0.5, provenance="measured"),
    entry("pipeline-8", 3.0),
    entry("pipeline-1", 9.0, "as published", source="torchgpipe", provenance="modelled"),
]


@pytest.fixture(scope="module")
def cells():
    """Of the table with those entries; nobody answers pipeline-8 as published."""
    return compare(ENTRIES)


@pytest.fixture(scope="module")
def page():
    """The same as a page."""
    paper = load_paper()
    made = {"machine": "m", "profile": "short", "command": "made, by | this"}
    answers = [replace(cell, **made) for cell in compare(ENTRIES, whole=())]
    infos = {cell.table: PaperTable(title=cell.table, short=f"The {cell.table}", about="") for cell in paper}
    return page_of(answers, paper, infos)


def test_identities_are_counted_apart_and_others_numbers_not_at_all(cells):
    assert counts_lines(cells) == [
        "computed from the paper's description: 1 reproduced, 1 undecided, 1 above of 3 judged; 1 identity",
        "run here: 1 above, 1 below of 2 judged",
    ]
    assert any(c.source == "torchgpipe" and c.verdict == "above" for c in cells), "which counts nowhere"


def test_counts_in_words():
    assert str(Counts()) == "nothing counted"
    assert str(Counts([("no number", "not run")])) == "nothing judged; 1 not run"
    several = [("identity", "identity")] * 2 + [("no number", "not comparable")]
    assert str(Counts(several)) == "2 identities; 1 not comparable"
    mixed = Counts([*several, ("identity", "below"), ("measured", "below"), ("replayed", "reproduced")])
    assert str(mixed) == "1 reproduced, 1 below of 2 judged; 2 of 3 identities hold; 1 not comparable"
    assert (mixed.judged, mixed.identities, mixed.with_verdict("below")) == (2, 3, 2)


@pytest.mark.parametrize("show", [text_table, markdown_table])
def test_each_question_has_its_table_and_so_have_others_numbers(cells, show):
    assert [(t.name, t.part) for t in tables_of(cells)] == [
        (TABLE, "as published"), (TABLE, "here"), (TABLE, "others' numbers"),
    ]  # fmt: skip
    text = show(cells)
    parts = (ASKED["as published"], ASKED["here"], "others' numbers")
    starts = [text.index(f"{TABLE}, {part}") for part in parts]
    assert starts == sorted(starts)
    published, here, others = (text[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True))
    assert "2.618" in published, "pipeline-4 as predicted"
    assert "1.091" in here, "and as measured"
    assert "2.618" not in here + others
    assert "not run" not in here, "what was not run stands once"
    assert f"{ROW} (torchgpipe, as published)" in others
    assert "torchgpipe," not in published + here


def test_beside_each_number_stand_its_range_what_it_is_made_of_and_what_would_have_failed(cells):
    text = text_table(cells)
    published = text[: text.index(f"{TABLE}, run here")]
    line = next(line for line in published.splitlines() if "our range" in line)
    assert "2.552 to 3.120" in line
    by_column = {(c.column, c.question): c for c in cells if c.source == "paper"}
    wide = by_column["pipeline-4", "as published"]
    assert fails_text(wide) == f"{wide.fails_below:.4f} / {wide.fails_above:.4f}"
    line = next(line for line in published.splitlines() if "fails below / above" in line)
    assert fails_text(wide) in line
    assert "Our range is over: share of peak" in text


def test_a_side_on_which_nothing_could_have_failed_says_never():
    records = Store(MACHINE).load("consistency").records  # a sentence there only limits its number
    bounds = compare(registry.load("consistency").cells(records))
    found = next(c for c in bounds if c.fails_below is None or c.fails_above is None)
    assert "never" in fails_text(found)


def test_the_small_scale_shows_our_range_in_the_field_where_the_paper_would_not_have_failed(cells):
    by_column = {(c.column, c.question): c for c in cells if c.source == "paper"}
    drawn = {key: plot(c) for key, c in by_column.items()}

    def ends(found):
        band, bar = float(found["band"]), float(found["low"])
        return band, band + float(found["band_width"]), bar, bar + float(found["length"])

    low, high, bar_low, bar_high = ends(drawn["pipeline-4", "as published"])
    assert low <= bar_low < float(drawn["pipeline-4", "as published"]["at"]) < bar_high <= high
    assert low < 50 < high, "the paper's number lies in the field: undecided"
    low, high, *_ = ends(drawn["pipeline-2", "as published"])
    assert 50 < low < high, "and outside where the verdict is that it differs"
    assert drawn["pipeline-4", "here"]["length"] == "0.0", "a number without a range has no bar"


def test_on_the_page_others_numbers_are_answered_rows_of_their_own_and_not_counted(page):
    (view,) = [table for table in page.tables if table.name == TABLE]
    assert [part.part for part in view.parts] == ["as published", "here", "others' numbers"]
    others = view.parts[-1]
    assert [(row.source, row.verdict) for row in others.rows] == [("torchgpipe", "above")]
    assert str(others.scores[0]) == "nothing counted"
    left = {(other.cell.row, other.cell.column) for other in view.others}
    assert (ROW, "pipeline-1") not in left
    assert (ROW, "pipeline-2") in left, "nothing of ours answers it"


def test_the_scorecard_counts_again_at_half_and_twice_the_width(page):
    scores = page.questions[0].scores
    found = [
        (
            counts.judged_as("reproduced"),
            counts.judged_as("undecided"),
            counts.judged_as("above"),
            counts.with_verdict("identity"),
        )
        for counts in (scores[1], scores[0], scores[2])
    ]
    assert found == [(2, 0, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)], (
        "pipeline-4 is narrow enough at half the width"
    )
    row = re.search(r'data-total="all, as published">(.*?)</tr>', html(page))
    assert row is not None
    assert row[1].startswith("<b>1</b> of 3</td>")


def test_the_cells_read_back_as_the_comparisons(tmp_path):
    """Of the whole report, each once; in the page stand the same bytes as beside it."""
    page = build(tmp_path, figures=False)
    rows = list(csv.DictReader(io.StringIO(cells_csv(page.tables), newline="")))
    assert tuple(rows[0]) == COLUMNS
    found = {
        tuple(row[name] for name in ("table", "row", "column", "source", "question")): row for row in rows
    }
    shown = [row for table in page.tables for row in (*table.rows, *table.settings)]
    assert len(found) == len(rows) == len(shown) + sum(len(table.others) for table in page.tables)
    for row in shown:
        read = found[row.key]
        for name in COLUMNS[:-2]:
            value = getattr(row, name)
            same = float(read[name]) == value if isinstance(value, float) else read[name] == str(value or "")
            assert same or (value == 0 and read[name] == "0"), (row.key, name)
        assert (read["machine"], read["command"]) == (row.machine, row.command)
    published = {(*cell.key, cell.source) for cell in load_paper()}
    assert published <= {key[:-1] for key in found}, "every published number is in it"
    assert cli.main(["report", "--no-figures", "--results", str(tmp_path)]) == DONE
    written, text = (tmp_path / "cells.csv").read_bytes(), (tmp_path / "report.html").read_text("utf-8")
    assert written.decode() == cells_csv(page.tables)
    link = re.search(r'<a download="cells.csv.gz" href="data:application/gzip;base64,([^"]+)"', text)
    assert link is not None
    assert gzip.decompress(b64decode(link[1])) == written
    assert len(pd.read_csv(tmp_path / "cells.csv", keep_default_na=False)) == len(rows)


def test_machines_are_set_side_by_side_question_by_question(cells):
    side = side_by_side({"a": cells, "b": compare(ENTRIES[4:5])}, {"a": [], "b": []})
    parts = [(row.part, row.known.column) for row in side.rows]
    assert parts.count(("as published", "pipeline-4")) == parts.count(("here", "pipeline-4")) == 1
    text = side.text()
    assert text.index(f"{TABLE}, computed from") < text.index(f"{TABLE}, run here")
    row = next(row for row in side.rows if (row.part, row.known.column) == ("here", "pipeline-8"))
    assert row.cells[1] is not None
    assert row.cells[1].verdict == "not run", "it stands beside the number, whatever it was asked as"
