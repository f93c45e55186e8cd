"""Several machines side by side, as text, as markdown, and in the words that the HTML page uses too."""

from __future__ import annotations

from gpipe_bench.harness.judging.compare import Comparison
from gpipe_bench.harness.judging.machines import SideBySide
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.report.table import ours_with_interval

_ABSENT = "-"
_EQUAL = "The environments are equal in every field that numbers depend on."


def side_text(side: SideBySide) -> str:
    """The tables and the fields that differ, for a terminal."""
    return "\n\n".join([*(grid.text() for grid in _grids(side)), *([] if side.differences else [_EQUAL])])


def side_markdown(side: SideBySide) -> str:
    """The same for a markdown page."""
    return "\n\n".join([*(grid.markdown() for grid in _grids(side)), *([] if side.differences else [_EQUAL])])


def entry_text(entry: Comparison | None) -> str:
    """`3.819 GB modelled, reproduced`, or the verdict of an entry without a number."""
    if entry is None:
        return _ABSENT
    if entry.ours is None:
        return entry.verdict
    return f"{ours_with_interval(entry)} {entry.provenance}" + (f", {entry.verdict}" if entry.printed else "")


def _grids(side: SideBySide) -> list[Grid]:
    """One for each table, and one for what the machines differ in."""
    columns = ["", "", "paper", *side.machines, f"{side.machines[-1]} / {side.machines[0]}"]
    grids = []
    for table in dict.fromkeys(row.table for row in side.rows):
        lines = []
        for row in (row for row in side.rows if row.table == table):
            last = row.ratios[-1]
            ratio = _ABSENT if last is None else f"x{last:.3g}"
            entries = [entry_text(cell) for cell in row.cells]
            lines.append([row.row, row.column, row.printed or _ABSENT, *entries, ratio])
        grids.append(Grid(title=table, columns=columns, lines=lines))
    if side.differences:
        fields = [[name, *values] for name, values in side.differences.items()]
        grids.append(Grid(columns=["the machines differ in", *side.machines], lines=fields))
    return grids
