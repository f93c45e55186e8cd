"""Two questions, shown apart: counted by evidence, with what differs most and what would have failed."""

from __future__ import annotations

import csv
import io
import json
import re
import urllib.parse
from base64 import b64decode
from html import unescape

import pandas as pd
import pytest
from records import quantity

from gpipe_bench.experiments import registry
from gpipe_bench.experiments.commands import cli, exits
from gpipe_bench.experiments.report.build import build
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.places import REFERENCE
from gpipe_bench.harness.report.cells import COLUMNS, cells_csv
from gpipe_bench.harness.report.counts import Counts, counts_lines, counts_of
from gpipe_bench.harness.report.page import Answer, TableInfo, table_views
from gpipe_bench.harness.report.render import Page, html, markdown, plot
from gpipe_bench.harness.report.replies import replies_markdown, replies_text, replies_to
from gpipe_bench.harness.report.side import side_by_side, side_text
from gpipe_bench.harness.report.summary import summary
from gpipe_bench.harness.report.table import fails_text, markdown_table, tables_of, text_table
from gpipe_bench.harness.verdict import JUDGED, Entry, Part, Spread

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
    return Entry(
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
    answers = [
        Answer(entry=e, comparison=c, machine="m", profile="short", command="made, by | this")
        for e in ENTRIES
        for c in compare(ENTRIES)
        if c.key == e.key
    ]
    infos = {cell.table: TableInfo(title=cell.table, short=f"The {cell.table}", about="") for cell in paper}
    tables = table_views(answers, paper, infos)
    return Page(
        tables=tables, summary=summary(tables, paper), experiments=(), machines=(), side=None, warnings=(),
        command="report",
    )  # fmt: skip


@pytest.fixture(scope="module")
def reference():
    """The report of the reference records."""
    return build(MACHINE, figures=False)


def test_identities_are_counted_apart_and_others_numbers_not_at_all(cells):
    assert counts_lines(cells) == [
        "as published: 1 reproduced, 1 undecided, 1 above of 3 judged; 1 identity",
        "here: 1 above, 1 below of 2 judged",
    ]
    assert any(c.source == "torchgpipe" and c.verdict == "above" for c in cells), "which counts nowhere"


def test_counts_in_words():
    assert str(Counts.of([])) == "nothing counted"
    assert str(Counts.of([("no number", "not run")])) == "nothing judged; 1 not run"
    several = [("identity", "identity")] * 2 + [("no number", "not comparable")]
    assert str(Counts.of(several)) == "2 identities; 1 not comparable"
    mixed = Counts.of([*several, ("identity", "below"), ("measured", "below"), ("replayed", "reproduced")])
    assert str(mixed) == "1 reproduced, 1 below of 2 judged; 2 of 3 identities hold; 1 not comparable"
    assert (mixed.judged, mixed.identities, mixed.total, mixed["below"]) == (2, 3, 6, 2)


def test_counts_by_evidence_add_up_to_what_is_judged(reference):
    cells = [row.comparison for table in reference.tables for row in table.rows]
    found = counts_of(cells)
    assert list(found) == ["as published", "here"]
    for question, counts in found.items():
        counted = [c for c in cells if c.counted and c.question == question]
        assert counts.total == len(counted)
        assert (
            sum(counts.at(e, v) for e in counts.present for v in JUDGED) == counts.judged + counts.identities
        )
        for rests_on in ("measured", "replayed", "modelled"):
            mine = [c for c in counted if c.provenance == rests_on and c.kind != "identity"]
            for verdict in JUDGED:
                assert counts.at(rests_on, verdict) == sum(c.verdict == verdict for c in mine)
    assert found["here"].at("measured", "reproduced") > 0


def test_the_strongest_differences_are_those_whose_ranges_are_furthest_apart(cells):
    published, here = replies_to(cells)
    assert [c.column for c in published.strongest] == ["pipeline-2"], "undecided is no difference"
    assert [c.column for c in here.strongest] == ["pipeline-8", "pipeline-4"], "times 3, then half"
    assert here.strongest[0].factor == pytest.approx(3 * 2.891 / 2.921)
    assert here.strongest[1].factor == pytest.approx(0.5 * 2.182 / 2.152)
    narrow, wide = (compare([entry("pipeline-2", 2, width=w)], whole=()) for w in (0.01, 0.3))
    assert narrow[0].ratio == wide[0].ratio
    assert narrow[0].factor > 1.3 * wide[0].factor, "a wide range makes no difference look strong"
    cells = compare(
        [entry("pipeline-8", 3), entry("pipeline-2", 2), entry("pipeline-4", 0.6), entry("pipeline-1", 4)]
    )
    (reply,) = [each for each in replies_to(cells) if each.question == "here"]
    assert [c.column for c in reply.strongest] == ["pipeline-1", "pipeline-8", "pipeline-2"], (
        "the first three"
    )


@pytest.mark.parametrize("show", [replies_text, replies_markdown])
def test_both_answers_are_said_in_order_with_their_reasons(cells, show):
    text = " ".join(show(cells).split())
    first, second = text.lower().index("as published"), re.search(r"\bhere\b\W*: ", text.lower()).start()
    counts = [str(counts) for counts in counts_of(cells).values()]
    assert first < text.lower().index(counts[0]) < second < text.lower().index(counts[1])
    assert (
        "pipeline-2: 2.836 (2.552 to 3.120) where the paper has 1.418: above by at least a factor of 1.76"
        in text
    )
    assert f"accounted for by {TESTED}, of 4 settings tried" in text[:second]
    assert f"eproduced: {TABLE} 1 of 3" in text[:second]
    assert "eproduced: " not in text[second:], "nothing is, here"
    assert "nothing was tried that might account for it" in text[second:]
    assert "accounted for by" not in text[second:]


@pytest.mark.parametrize("show", [text_table, markdown_table])
def test_each_question_has_its_table_and_so_have_others_numbers(cells, show):
    assert [(t.name, t.part) for t in tables_of(cells)] == [
        (TABLE, "as published"), (TABLE, "here"), (TABLE, "others' numbers"),
    ]  # fmt: skip
    text = show(cells)
    starts = [text.index(f"{TABLE}, {part}") for part in ("as published", "here", "others' numbers")]
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
    published = text[: text.index(f"{TABLE}, here")]
    line = next(line for line in published.splitlines() if "our range" in line)
    assert "2.552 to 3.120" in line
    by_column = {(c.column, c.question): c for c in cells if c.source == "paper"}
    wide = by_column["pipeline-4", "as published"]
    assert fails_text(wide) == f"{wide.fails_below:.4f} / {wide.fails_above:.4f}"
    line = next(line for line in published.splitlines() if "fails below / above" in line)
    assert fails_text(wide) in line
    assert "Our range is over: share of peak" in text


def test_a_side_on_which_nothing_could_have_failed_says_never(cells):
    found = next(c for c in build_bounds() if c.fails_below is None or c.fails_above is None)
    assert "never" in fails_text(found)


def build_bounds():
    """Cells of a sentence that only limits its number."""
    experiment = registry.load("consistency")
    from gpipe_bench.harness.store import Store

    return compare(experiment.cells(Store(MACHINE).load("consistency").records))


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


def test_the_page_shows_both_answers_before_anything_else(page):
    text = unescape(re.sub(r"<[^>]+>", " ", html(page)))
    text = " ".join(text[text.index("Does GPipe do what its paper says?") :].split())
    first_screen = text[: text.index("What holds, table by table")]
    published, here = first_screen.index("As published"), first_screen.index(" Here ")
    assert published < here
    for view in page.summary.questions:
        assert f"{view.reply.counts}." in first_screen
    for words in (
        "1 of 3 judged reproduced",
        f"Accounted for by {TESTED}, of 4 settings tried",
        "above by at least a factor of 1.76",
    ):
        assert published < first_screen.index(words) < here
    assert "The strongest differences are the judged numbers" in first_screen, "the rule is stated"


def test_on_the_page_others_numbers_are_answered_rows_of_their_own_and_not_counted(page):
    (view,) = [table for table in page.tables if table.name == TABLE]
    assert [part.part for part in view.parts] == ["as published", "here", "others' numbers"]
    others = view.parts[-1]
    assert [(row.comparison.source, row.comparison.verdict) for row in others.rows] == [
        ("torchgpipe", "above")
    ]
    assert str(others.scores.counts) == "nothing counted"
    left = {(other.cell.row, other.cell.column) for other in view.others}
    assert (ROW, "pipeline-1") not in left
    assert (ROW, "pipeline-2") in left, "nothing of ours answers it"


def test_the_scorecard_counts_again_at_half_and_twice_the_width(page):
    scores = page.summary.questions[0].scores
    found = [
        (
            counts.judged_as("reproduced"),
            counts.judged_as("undecided"),
            counts.judged_as("above"),
            counts["identity"],
        )
        for counts in (scores.narrow, scores.counts, scores.wide)
    ]
    assert found == [(2, 0, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)], (
        "pipeline-4 is narrow enough at half the width"
    )
    row = re.search(r'data-total="all, as published">(.*?)</tr>', html(page))
    assert row is not None
    assert row[1].startswith("<b>1</b> of 3</td>")


def read_back(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_the_cells_read_back_as_the_comparisons(page, reference):
    for each in (page, reference):
        rows = read_back(cells_csv(each.tables))
        assert tuple(rows[0]) == COLUMNS
        shown = [
            (row.comparison, row.machine or "")
            for table in each.tables
            for row in (*table.rows, *table.settings)
        ]
        found = {
            tuple(row[name] for name in ("table", "row", "column", "source", "question")): row for row in rows
        }
        assert len(found) == len(rows), "no cell twice"
        assert len(rows) == len(shown) + sum(len(table.others) for table in each.tables)
        for comparison, machine in shown:
            row = found[comparison.key]
            for name in ("printed", "unit", "kind", "provenance", "verdict", "explained_by", "reason"):
                assert row[name] == getattr(comparison, name), comparison.key
            for name in (
                "paper",
                "ours",
                "low",
                "high",
                "range_low",
                "range_high",
                "fails_below",
                "fails_above",
                "ratio",
                "tried",
            ):
                value = getattr(comparison, name)
                assert (row[name] == "") if value is None else float(row[name]) == value, comparison.key
            assert row["machine"] == machine
            assert bool(row["command"]) == bool(machine)
        published = {(*cell.key, cell.source) for cell in load_paper()}
        assert published <= {key[:-1] for key in found}, "every published number is in it"
    assert read_back(cells_csv(page.tables))[0]["table"]


def test_the_cells_are_the_same_bytes_beside_the_page_and_in_it(tmp_path, reference):
    assert cli.main(["report", "--no-figures", "--results", str(tmp_path)]) == exits.DONE
    written = (tmp_path / "cells.csv").read_bytes()
    assert written.decode() == cells_csv(build(tmp_path, figures=False).tables)
    link = re.search(
        r'<a download="cells.csv" href="(data:[^"]+)"', (tmp_path / "report.html").read_text("utf-8")
    )
    assert link is not None
    kind, _, content = urllib.parse.unquote(link[1]).partition(",")
    assert kind == "data:text/csv;charset=utf-8;base64"
    assert b64decode(content) == written
    frame = pd.read_csv(tmp_path / "cells.csv", keep_default_na=False)
    assert list(frame.columns) == list(COLUMNS)
    assert len(frame) == len(read_back(written.decode()))


@pytest.mark.parametrize("name", registry.EXPERIMENTS)
def test_compare_and_the_report_give_the_same_verdict(name, reference, capsys):
    if not (MACHINE / f"{name}.jsonl").exists():
        pytest.skip(f"{name} has no reference records")
    assert cli.main(["compare", name, "--json", "--results", str(MACHINE)]) == exits.DONE
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    if name in ("plan", "engine", "peers"):
        assert lines
        assert not any("verdict" in line for line in lines), "it sets its numbers beside no published ones"
        return
    compared = {
        (line["table"], line["row"], line["column"], line["source"], line["question"]): line for line in lines
    }
    shown = {
        row.comparison.key: row.comparison
        for table in reference.tables
        for row in (*table.rows, *table.settings)
    }
    numbers = 0
    for key, line in compared.items():
        if line["ours"] is None and key not in shown:
            continue  # another experiment has the number
        cell = shown[key]
        assert (line["verdict"], line["ours"]) == (cell.verdict, cell.ours), key
        numbers += line["ours"] is not None
    assert numbers > 0
    assert cli.main(["compare", name, "--results", str(MACHINE)]) == exits.DONE
    text = capsys.readouterr().out
    counted = {q: Counts.of_counted(c for c in map(shown.get, compared) if c and c.question == q) for q in
               ("as published", "here")}  # fmt: skip
    for question, counts in counted.items():
        if counts.judged:
            assert f"{question}: {counts}" in text, "the totals of its own text are the report's"


def test_machines_are_set_side_by_side_question_by_question(cells):
    side = side_by_side({"a": cells, "b": compare(ENTRIES[4:5])}, {"a": [], "b": []})
    parts = [(row.part, row.column) for row in side.rows]
    assert parts.count(("as published", "pipeline-4")) == parts.count(("here", "pipeline-4")) == 1
    text = side_text(side)
    assert text.index(f"{TABLE}, as published") < text.index(f"{TABLE}, here")
    row = next(row for row in side.rows if (row.part, row.column) == ("here", "pipeline-8"))
    assert row.cells[1] is not None
    assert row.cells[1].verdict == "not run", "it stands beside the number, whatever it was asked as"


def test_markdown_has_the_parts_with_their_counts(page):
    text = markdown(page)
    section = text[text.index(f"### {TABLE}") :]
    assert section.index("**As published**: 1 reproduced") < section.index("**Here**: 1 above")
    assert section.index("**Here**") < section.index("**Others' numbers**")
    assert not re.search(r"\{\{|\{%", text)
