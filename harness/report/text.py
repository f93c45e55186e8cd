"""Comparisons as text: laid out like the paper's table, the three lines of an entry below each other."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from gpipe_bench.harness.judging.compare import Comparison
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.report.table import (
    Counts,
    Row,
    Table,
    ours_with_interval,
    paper_text,
    tables_of,
    verdict_text,
)

_WIDTH = 110
_ABSENT = "-"


def text_table(comparisons: Sequence[Comparison]) -> str:
    """Every table of the comparisons for a terminal, then the footnotes and the totals."""
    tables = tables_of(comparisons)
    notes = [
        textwrap.fill(
            note, _WIDTH, initial_indent=f"[{number}] ", subsequent_indent=" " * (len(str(number)) + 3)
        )
        for number, note in enumerate(_notes(tables), start=1)
    ]
    return _joined([_grid(table).text() for table in tables], notes, comparisons)


def markdown_table(comparisons: Sequence[Comparison]) -> str:
    """The same for a markdown page."""
    tables = tables_of(comparisons)
    notes = [f"{number}. {note}" for number, note in enumerate(_notes(tables), start=1)]
    return _joined([_grid(table).markdown() for table in tables], notes, comparisons)


def _notes(tables: Sequence[Table[Row]]) -> tuple[str, ...]:
    """The notes, which all the tables share."""
    return tables[0].notes if tables else ()


def _joined(parts: Sequence[str], notes: Sequence[str], comparisons: Sequence[Comparison]) -> str:
    counts = Counts.of([comparison.verdict for comparison in comparisons])
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else []), str(counts)])


def _grid(table: Table[Row]) -> Grid:
    """The table as the paper prints it, or a line for each entry where that would be mostly empty."""
    if table.diagonal:
        lines = [
            [row.comparison.row, row.comparison.column, _paper(row), _ours(row, True), _verdict(row)]
            for row in table.rows
        ]
        return Grid(title=_title(table), columns=["", "", "paper", "ours", "verdict"], lines=lines)
    columns = table.columns
    lines = []
    for label, rows in table.groups:
        at = {row.comparison.column: row for row in rows}
        entries = [at.get(column) for column in columns]
        provenances = {row.comparison.provenance for row in rows if row.comparison.provenance}
        uniform = provenances.pop() if len(provenances) == 1 else ""
        lines.append([label, "paper", *map(_paper, entries)])
        if any(row.comparison.peer_printed for row in rows):
            lines.append(["", "torchgpipe", *map(_peer, entries)])
        ours = f"ours ({uniform})" if uniform else "ours"
        lines.append(["", ours, *(_ours(entry, not uniform) for entry in entries)])
        lines.append(["", "verdict", *map(_verdict, entries)])
    return Grid(title=_title(table), columns=["", "", *columns], lines=lines)


def _title(table: Table[Row]) -> str:
    places = dict.fromkeys(row.comparison.location for row in table.rows if row.comparison.location)
    hardware = dict.fromkeys(row.comparison.hardware for row in table.rows if row.comparison.hardware)
    known = "; ".join([*places, *(f"paper on {name}" for name in hardware)])
    return f"{table.name} ({known})" if known else table.name


def _paper(row: Row | None) -> str:
    return paper_text(row.comparison if row else None, _ABSENT)


def _peer(row: Row | None) -> str:
    return _ABSENT if row is None or not row.comparison.peer_printed else row.comparison.peer_printed


def _ours(row: Row | None, with_provenance: bool) -> str:
    if row is None or row.comparison.ours is None:
        return _ABSENT
    number = ours_with_interval(row.comparison)
    return f"{number} {row.comparison.provenance}" if with_provenance else number


def _verdict(row: Row | None) -> str:
    if row is None:
        return _ABSENT
    marks = ",".join(map(str, row.marks))
    return f"{verdict_text(row.comparison)} [{marks}]" if marks else verdict_text(row.comparison)
