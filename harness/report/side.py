"""Several machines side by side: the same cells, a column for each machine, and what the machines differ in.

Two numbers from different machines invite a comparison that their environments may not allow, so the fields
that differ are always listed beside them: as text, as markdown, and in the words that the HTML page uses too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_bench.harness.environment import COMPARABLE_FIELDS
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.report.table import Part, ours_with_interval, part_of
from gpipe_bench.harness.verdict import Comparison

_ABSENT = "-"
_EQUAL = "The environments are equal in every field that numbers depend on."


@dataclass(frozen=True, kw_only=True, slots=True)
class SideRow:
    """One cell on every machine, in the order of the machines; None where a machine has no such cell.

    `part` is the question it answers, or that it is held against the number of `source`.
    """

    table: str
    part: Part
    row: str
    column: str
    source: str
    unit: str
    printed: str
    cells: tuple[Comparison | None, ...]

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Each machine's number over the first one's that is there."""
        values = [None if cell is None else cell.ours for cell in self.cells]
        first = next((value for value in values if value is not None), None)
        return tuple(value / first if value is not None and first else None for value in values)


@dataclass(frozen=True, kw_only=True, slots=True)
class SideBySide:
    """The table of several machines. `differences`: field -> what each machine has there."""

    machines: tuple[str, ...]
    rows: tuple[SideRow, ...]
    differences: Mapping[str, tuple[str, ...]]


def side_by_side(
    comparisons: Mapping[str, Sequence[Comparison]], environments: Mapping[str, Sequence[Mapping[str, Any]]]
) -> SideBySide:
    """One row for every cell that any of the machines has a number for, in the order of the first.

    Both mappings have the machines as keys. Raises ValueError for fewer than two machines.
    """
    machines = tuple(comparisons)
    if len(machines) < 2:
        raise ValueError(f"side by side takes at least two machines, got {', '.join(machines) or 'none'}")
    by_machine = {name: {c.key: c for c in comparisons[name]} for name in machines}
    not_run = {
        name: {c.key[:-1]: c for c in comparisons[name] if c.verdict == "not run"} for name in machines
    }
    keys = dict.fromkeys(key for cells in by_machine.values() for key in cells)
    rows = []
    for key in keys:
        # a number that a machine did not run stands under the question of the file
        cells = tuple(by_machine[name].get(key) or not_run[name].get(key[:-1]) for name in machines)
        known = next((cell for cell in cells if cell is not None and cell.ours is not None), None)
        if known is not None:
            rows.append(
                SideRow(table=known.table, part=part_of(known), row=known.row, column=known.column,
                        source=known.source, unit=known.unit, printed=known.paper_text, cells=cells)
            )  # fmt: skip
    return SideBySide(machines=machines, rows=tuple(rows), differences=_differences(machines, environments))


def value_text(value: Any) -> str:
    """A field of an environment in words: lists joined, dictionaries as name=value, nothing as `unknown`."""
    if value is None:
        return "unknown"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={value_text(each)}" for key, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(value_text(each) for each in value) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def _differences(
    machines: Sequence[str], environments: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name in COMPARABLE_FIELDS:
        texts = tuple(
            " | ".join(dict.fromkeys(value_text(each.get(name)) for each in environments.get(machine, ())))
            for machine in machines
        )
        if len(set(texts)) > 1:
            found[name] = texts
    return found


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
    for table, part in dict.fromkeys((row.table, row.part) for row in side.rows):
        lines = []
        for row in (row for row in side.rows if (row.table, row.part) == (table, part)):
            last = row.ratios[-1]
            ratio = _ABSENT if last is None else f"x{last:.3g}"
            entries = [entry_text(cell) for cell in row.cells]
            lines.append([row.row, row.column, row.printed or _ABSENT, *entries, ratio])
        grids.append(Grid(title=f"{table}, {part}", columns=columns, lines=lines))
    if side.differences:
        fields = [[name, *values] for name, values in side.differences.items()]
        grids.append(Grid(columns=["the machines differ in", *side.machines], lines=fields))
    return grids
