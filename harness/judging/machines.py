"""Several machines in one table: the same cells, a column for each machine, and what the machines differ in.

Two numbers from different machines invite a comparison that their environments may not allow, so the fields
that differ are always listed beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_bench.harness.judging.compare import Comparison
from gpipe_bench.harness.judging.units import show_with_interval
from gpipe_bench.harness.records.environment import COMPARABLE_FIELDS

_ABSENT = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class SideRow:
    """One cell on every machine, in the order of the machines; None where a machine has no such cell."""

    table: str
    row: str
    column: str
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
    by_machine = {name: {(c.table, c.row, c.column): c for c in comparisons[name]} for name in machines}
    keys = dict.fromkeys(key for cells in by_machine.values() for key in cells)
    rows = []
    for key in keys:
        cells = tuple(by_machine[name].get(key) for name in machines)
        known = next((cell for cell in cells if cell is not None and cell.ours is not None), None)
        if known is not None:
            rows.append(
                SideRow(table=key[0], row=key[1], column=key[2], unit=known.unit, printed=_printed(known),
                        cells=cells)
            )  # fmt: skip
    return SideBySide(machines=machines, rows=tuple(rows), differences=_differences(machines, environments))


def side_table(side: SideBySide, style: str = "simple") -> str:
    """The table as text (`simple`) or markdown (`github`), then the fields that differ."""
    from tabulate import tabulate

    parts = []
    for table in dict.fromkeys(row.table for row in side.rows):
        lines = []
        for row in (row for row in side.rows if row.table == table):
            last = row.ratios[-1]
            lines.append(
                [row.row, row.column, row.printed or _ABSENT,
                 *(cell_text(cell) for cell in row.cells), _ABSENT if last is None else f"x{last:.3g}"]
            )  # fmt: skip
        headers = ["", "", "paper", *side.machines, f"{side.machines[-1]} / {side.machines[0]}"]
        title = f"**{table}**" if style == "github" else table
        grid = tabulate(_escaped(lines, style), _escaped([headers], style)[0], style, disable_numparse=True)
        parts.append(f"{title}\n\n{grid}")
    return "\n\n".join([*parts, difference_text(side, style)])


def difference_text(side: SideBySide, style: str = "simple") -> str:
    """The fields that numbers depend on and in which the machines differ."""
    from tabulate import tabulate

    if not side.differences:
        return "The environments are equal in every field that numbers depend on."
    lines = [[name, *values] for name, values in side.differences.items()]
    grid = tabulate(_escaped(lines, style), ["the machines differ in", *side.machines], style,
                    disable_numparse=True)  # fmt: skip
    return str(grid)


def cell_text(cell: Comparison | None) -> str:
    """`3.819 GB reproduced`, or the verdict of a cell without a number."""
    if cell is None:
        return _ABSENT
    if cell.ours is None:
        return cell.verdict
    number = show_with_interval(cell.ours, cell.low, cell.high, cell.unit)
    return f"{number} {cell.provenance}" + (f", {cell.verdict}" if cell.printed else "")


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


def _printed(cell: Comparison) -> str:
    return cell.printed if cell.corrected is None else f"{cell.printed} -> {cell.corrected_printed}"


def _escaped(lines: list[list[str]], style: str) -> list[list[str]]:
    return [[c.replace("|", "\\|") for c in line] for line in lines] if style == "github" else lines
