"""Every number of the page as a table for other programs: one line for each cell, source and question.

Numbers stand as Python writes them, so reading them back gives the same; nothing is rounded and the same
records always give the same bytes. An empty field is a number that there is not.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from gpipe_bench.harness.report.page import TableView
from gpipe_bench.harness.verdict import Comparison

COLUMNS = (
    "table", "row", "column", "source", "question", "kind", "printed", "paper", "unit", "ours", "low", "high",
    "range_low", "range_high", "fails_below", "fails_above", "provenance", "verdict", "ratio", "explained_by",
    "tried", "reason", "machine", "command",
)  # fmt: skip


def cells_csv(tables: Sequence[TableView]) -> str:
    """All cells of the tables in the order of the page, settings and numbers of others at the end of each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for cell, machine, command in _cells(tables):
        found = {
            **{name: getattr(cell, name, None) for name in COLUMNS},
            "machine": machine,
            "command": command,
        }
        writer.writerow("" if found[name] is None else found[name] for name in COLUMNS)
    return text.getvalue()


def _cells(tables: Sequence[TableView]) -> Iterator[tuple[Comparison, str | None, str | None]]:
    for table in tables:
        for row in (*table.rows, *table.settings):
            command = row.answer.command if row.answer is not None and row.machine is not None else None
            yield row.comparison, row.machine, command
        for other in table.others:
            yield other.comparison, None, None
