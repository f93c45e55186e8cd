"""Several machines side by side: the same cells, a column for each machine, and what the machines differ in.

Two numbers from different machines invite a comparison that their environments may not allow, so the fields
that differ are always listed beside them: as text, as markdown, and in the words that the HTML page uses too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_bench.harness.compare import COMPARABLE_FIELDS
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.report.table import ASKED, Part, answer, ours_with_interval, part_of
from gpipe_bench.harness.verdict import Comparison

_EQUAL = "The environments are equal in every field that numbers depend on."
_FIELDS = (
    ("cpu_model", "processor"), ("cores_logical", "cores"), ("memory_total_gib", "memory, GiB"),
    ("gpus", "GPUs"), ("system", "system"), ("container", "container"), ("python", "Python"),
    ("versions", "packages"), ("torch_threads", "threads of torch"), ("cuda", "CUDA"),
    ("gpu_numerics", "arithmetic of the GPUs"), ("gpu_driver", "driver of the GPUs"),
    ("variables", "variables"), ("git_commit", "commit"), ("git_dirty", "uncommitted changes"),
    ("code_sha256", "digest of the code"),
)  # fmt: skip
"""The fields of an environment that a machine is described by, with their labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideRow:
    """One cell on every machine, in the order of the machines; None where a machine has no such cell.

    `known` is the first that has a number.
    """

    known: Comparison
    cells: tuple[Comparison | None, ...]

    @property
    def part(self) -> Part:
        """The question it answers, or that it is held against the number of others."""
        return part_of(self.known)

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Each machine's number over the first one's that is there."""
        first = self.known.ours
        values = [None if cell is None else cell.ours for cell in self.cells]
        return tuple(value / first if value is not None and first else None for value in values)


@dataclass(frozen=True, kw_only=True, slots=True)
class SideBySide:
    """The table of several machines. `differences`: field -> what each machine has there."""

    machines: tuple[str, ...]
    rows: tuple[SideRow, ...]
    differences: Mapping[str, tuple[str, ...]]

    def grids(self) -> list[Grid]:
        """One grid per table of the paper, and one of the differences between the machines."""
        columns = ["", "", "paper", *self.machines, f"{self.machines[-1]} / {self.machines[0]}"]
        lines: dict[str, list[list[str]]] = {}
        for row in self.rows:
            known, last = row.known, row.ratios[-1]
            ratio = "-" if last is None else f"x{last:.3g}"
            lines.setdefault(f"{known.table}, {ASKED.get(row.part, row.part)}", []).append(
                [known.row, known.column, known.paper_text or "-", *map(entry_text, row.cells), ratio]
            )
        grids = [Grid(title=title, columns=columns, lines=found) for title, found in lines.items()]
        if self.differences:
            fields = [[name, *values] for name, values in self.differences.items()]
            grids.append(Grid(columns=["the machines differ in", *self.machines], lines=fields))
        return grids

    def text(self) -> str:
        """The tables and the fields that differ, for a terminal."""
        return "\n\n".join([*(grid.text() for grid in self.grids()), *[_EQUAL] * (not self.differences)])

    def markdown(self) -> str:
        """The same for a markdown page."""
        return "\n\n".join([*(grid.markdown() for grid in self.grids()), *[_EQUAL] * (not self.differences)])


def side_by_side(
    comparisons: Mapping[str, Sequence[Comparison]], environments: Mapping[str, Sequence[Mapping[str, Any]]]
) -> SideBySide:
    """One row for every cell that any of the machines has a number for, in the order of the first.

    Both mappings have the machines as keys. Raises ValueError for fewer than two machines.
    """
    machines = tuple(comparisons)
    if len(machines) < 2:
        raise ValueError(f"side by side takes at least two machines, got {', '.join(machines) or 'none'}")
    found = {name: {cell.key: cell for cell in comparisons[name]} for name in machines}
    # a number that a machine did not run stands under the question of the file
    not_run = {
        name: {cell.key[:-1]: cell for cell in comparisons[name] if cell.verdict == "not run"}
        for name in machines
    }
    rows = []
    for key in dict.fromkeys(key for cells in found.values() for key in cells):
        cells = tuple(found[name].get(key) or not_run[name].get(key[:-1]) for name in machines)
        known = next((cell for cell in cells if cell is not None and cell.ours is not None), None)
        if known is not None:
            rows.append(SideRow(known=known, cells=cells))
    differences = {
        field: texts
        for field in COMPARABLE_FIELDS
        if len(set(texts := tuple(_values(environments.get(name, ()), field) for name in machines))) > 1
    }
    return SideBySide(machines=machines, rows=tuple(rows), differences=differences)


def environment_facts(environments: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Label and text of every known field; where records differ, all values."""
    known = ([each for each in environments if each.get(name) not in (None, [], {})] for name, _ in _FIELDS)
    return tuple(
        (label, _values(having, name)) for (name, label), having in zip(_FIELDS, known, strict=True) if having
    )


def _values(environments: Sequence[Mapping[str, Any]], field: str) -> str:
    """All that a field is in them, in words: lists joined, name=value of mappings, nothing as `unknown`."""

    def text(value: Any) -> str:
        if value is None:
            return "unknown"
        if isinstance(value, Mapping):
            return ", ".join(f"{key}={text(each)}" for key, each in value.items()) or "none"
        if isinstance(value, list | tuple):
            return ", ".join(map(text, value)) or "none"
        return value if isinstance(value, str) else json.dumps(value)

    return " | ".join(dict.fromkeys(text(each.get(field)) for each in environments))


def entry_text(entry: Comparison | None) -> str:
    """`3.819 GB modelled, agrees`, or the answer of an entry without a number."""
    if entry is None:
        return "-"
    if entry.ours is None:
        return answer(entry)
    return f"{ours_with_interval(entry)} {entry.provenance}" + (f", {answer(entry)}" if entry.printed else "")
