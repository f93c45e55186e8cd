"""A table of the paper with our numbers in it: one object, shown as text, as markdown and as HTML.

What was predicted for the paper's accelerators and what was found here are tables of their own, and so is
what was held against the numbers of others. What stands in an entry is decided here, in words, and so is the
layout of text and markdown: like the paper's table, the lines of an entry below each other. Where it stands
on a page is the matter of its template.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from gpipe_bench.harness.report.counts import counts_lines
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.report.width import fill
from gpipe_bench.harness.units import show, show_interval, show_with_interval
from gpipe_bench.harness.verdict import DIFFERS, JUDGED, Comparison

_ABSENT = "-"
_DIGITS = 5
"""Significant digits of where a verdict turns: one more than a number has by itself."""
_FAILS = "fails below / above"

Part = Literal["as published", "here", "others' numbers"]
PARTS: tuple[Part, ...] = ("as published", "here", "others' numbers")
"""The tables that one table of the paper is shown as, in order: its two questions, and whatever is held
against somebody else's numbers."""


def part_of(cell: Comparison) -> Part:
    """Where the cell is shown."""
    return cell.question if cell.source == "paper" else "others' numbers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One entry: the paper's number, ours and the verdict. `marks` count the table's notes from 1."""

    comparison: Comparison
    marks: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """The name of the row; beside others' numbers also whose it is and what is asked."""
        cell = self.comparison
        return cell.row if cell.source == "paper" else f"{cell.row} ({cell.source}, {cell.question})"


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table(Generic[R]):
    """Entries of one table of the paper that answer the same, in its order. `notes` are what marks count."""

    name: str
    part: Part
    rows: tuple[R, ...]
    notes: tuple[str, ...]

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in order."""
        return list(dict.fromkeys(row.comparison.column for row in self.rows))

    @property
    def groups(self) -> list[tuple[str, list[R]]]:
        """The rows by their label, in order."""
        labels = dict.fromkeys(row.label for row in self.rows)
        return [(label, [row for row in self.rows if row.label == label]) for label in labels]

    @property
    def flat(self) -> bool:
        """Whether each label has one row, so that a heading above every row would only take room."""
        return len(self.groups) == len(self.rows)

    @property
    def diagonal(self) -> bool:
        """Whether it is one column or mostly empty, such as a diagonal, so that a list takes less room."""
        places = len(self.columns) * len(self.groups)
        return len(self.columns) == 1 or 2 * len(self.rows) <= places


def numbered(notes_of: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """Each distinct note once, in order of appearance, and for every row the numbers of its own."""
    each = [tuple(notes) for notes in notes_of]
    number = {note: place for place, note in enumerate(dict.fromkeys(n for notes in each for n in notes), 1)}
    return tuple(number), [tuple(sorted(number[note] for note in notes)) for notes in each]


def tables_of(comparisons: Sequence[Comparison]) -> list[Table[Row]]:
    """The tables that the comparisons touch, part by part; their notes are numbered through all of them."""
    notes, marks = numbered([*c.footnotes, *_made_of(c)] for c in comparisons)
    rows = [Row(comparison=c, marks=of_row) for c, of_row in zip(comparisons, marks, strict=True)]
    return [
        Table(name=name, part=part, rows=found, notes=notes)
        for name in dict.fromkeys(comparison.table for comparison in comparisons)
        for part in PARTS
        if (found := tuple(r for r in rows if r.comparison.table == name and part_of(r.comparison) == part))
    ]


def paper_text(entry: Comparison | None, none: str = "–") -> str:
    """As printed, with the corrected value where an erratum gives one; `none` where nothing is printed."""
    return none if entry is None or not entry.printed else entry.paper_text


def ours_text(entry: Comparison | None, none: str = "–") -> str:
    """`3.819 GB`, or `none`."""
    return none if entry is None or entry.ours is None else show(entry.ours, entry.unit)


def ours_with_interval(entry: Comparison | None, none: str = "–") -> str:
    """`0.752 [0.739, 0.765]`, or `none`."""
    if entry is None or entry.ours is None:
        return none
    return show_with_interval(entry.ours, entry.low, entry.high, entry.unit)


def interval_text(entry: Comparison) -> str:
    """`[3.6, 3.7]`, in the number's unit, or nothing where the number is exact."""
    if entry.low is None or entry.high is None:
        return ""
    return show_interval(entry.low, entry.high, entry.unit)


def range_text(entry: Comparison) -> str:
    """`3.1 to 4.2 GB`: over everything that is not known; nothing where the interval says it all."""
    if not entry.parts or entry.range_low is None or entry.range_high is None:
        return ""
    return _pair(entry.range_low, entry.range_high, entry.unit, " to ", 4)


def parts_text(entry: Comparison) -> str:
    """`share of the peak, error of the replay`: what our range is made of, or nothing."""
    return ", ".join(part.replace("_", " ") for part in entry.parts)


def fails_text(entry: Comparison, none: str = "–", between: str = " / ") -> str:
    """`3.1 / 4.2 GB`: a paper that printed less than the first, or more than the second, fails."""
    if entry.verdict not in JUDGED or (entry.fails_below is None and entry.fails_above is None):
        return none
    if entry.fails_below is not None and entry.fails_above is not None:
        return _pair(entry.fails_below, entry.fails_above, entry.unit, between)
    ends = (entry.fails_below, entry.fails_above)
    return between.join("never" if end is None else show(end, entry.unit, _DIGITS) for end in ends)


def _pair(low: float, high: float, unit: str, between: str, digits: int = _DIGITS) -> str:
    """The unit once, behind both, unless it scales them (`81.3M`)."""
    first, second = show(low, unit, digits), show(high, unit, digits)
    return f"{first.removesuffix(f' {unit}')}{between}{second}"


def verdict_text(entry: Comparison, times: str = " x") -> str:
    """`below x0.78`: the verdict, and ours over the paper's where the two differ."""
    if entry.verdict in DIFFERS and entry.ratio is not None:
        return f"{entry.verdict}{times}{times_text(entry.ratio)}"
    return entry.verdict


def times_text(ratio: float) -> str:
    """`0.78`, `2060`: to three digits, or to as many as tell it from 1, up to five."""
    if ratio >= 1000:
        return f"{ratio:.0f}" if ratio < 1e6 else f"{ratio:.1e}"
    return next((text for digits in (3, 4, 5) if (text := f"{ratio:.{digits}g}") != "1"), "1")


def text_table(comparisons: Sequence[Comparison]) -> str:
    """Every table of the comparisons for a terminal, then the footnotes and the totals."""
    tables = tables_of(comparisons)
    notes = [
        fill(note, f"[{number}] ", " " * (len(str(number)) + 3))
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


def _made_of(cell: Comparison) -> list[str]:
    """A note on a range that is more than an interval."""
    return [f"Our range is over: {parts_text(cell)}"] if range_text(cell) else []


def _joined(parts: Sequence[str], notes: Sequence[str], comparisons: Sequence[Comparison]) -> str:
    lines = "\n".join(counts_lines(comparisons))
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else []), lines])


def _grid(table: Table[Row]) -> Grid:
    """The table as the paper prints it, or a line for each entry where that would be mostly empty."""
    ranged = any(range_text(row.comparison) for row in table.rows)
    judged = any(fails_text(row.comparison, "") for row in table.rows)
    if table.diagonal:
        columns = ["", "", "paper", "ours", *(["our range"] if ranged else []), "verdict"]
        lines = [
            [row.label, row.comparison.column, _paper(row), _ours(row, True),
             *([_range(row)] if ranged else []), _verdict(row), *([_fails(row)] if judged else [])]
            for row in table.rows
        ]  # fmt: skip
        return Grid(title=_title(table), columns=columns + [_FAILS] * judged, lines=lines)
    columns = table.columns
    lines = []
    for label, rows in table.groups:
        at = {row.comparison.column: row for row in rows}
        entries = [at.get(column) for column in columns]
        provenances = {row.comparison.provenance for row in rows if row.comparison.provenance}
        uniform = provenances.pop() if len(provenances) == 1 else ""
        lines.append([label, "paper" if table.part != "others' numbers" else "theirs", *map(_paper, entries)])
        if any(row.comparison.peer_printed for row in rows):
            lines.append(["", "torchgpipe", *map(_peer, entries)])
        ours = f"ours ({uniform})" if uniform else "ours"
        if provenances or uniform:
            lines.append(["", ours, *(_ours(entry, not uniform) for entry in entries)])
        if any(range_text(row.comparison) for row in rows):
            lines.append(["", "our range", *map(_range, entries)])
        lines.append(["", "verdict", *map(_verdict, entries)])
        if any(fails_text(row.comparison, "") for row in rows):
            lines.append(["", _FAILS, *map(_fails, entries)])
    return Grid(title=_title(table), columns=["", "", *columns], lines=lines)


def _title(table: Table[Row]) -> str:
    places = dict.fromkeys(row.comparison.location for row in table.rows if row.comparison.location)
    hardware = dict.fromkeys(row.comparison.hardware for row in table.rows if row.comparison.hardware)
    known = "; ".join([*places, *(f"paper on {name}" for name in hardware)])
    name = f"{table.name}, {table.part}"
    return f"{name} ({known})" if known else name


def _paper(row: Row | None) -> str:
    return paper_text(row.comparison if row else None, _ABSENT)


def _peer(row: Row | None) -> str:
    return _ABSENT if row is None or not row.comparison.peer_printed else row.comparison.peer_printed


def _ours(row: Row | None, with_provenance: bool) -> str:
    if row is None or row.comparison.ours is None:
        return _ABSENT
    number = ours_with_interval(row.comparison)
    return f"{number} {row.comparison.provenance}" if with_provenance else number


def _range(row: Row | None) -> str:
    return _ABSENT if row is None else range_text(row.comparison) or _ABSENT


def _fails(row: Row | None) -> str:
    return _ABSENT if row is None else fails_text(row.comparison, _ABSENT)


def _verdict(row: Row | None) -> str:
    if row is None:
        return _ABSENT
    marks = ",".join(map(str, row.marks))
    return f"{verdict_text(row.comparison)} [{marks}]" if marks else verdict_text(row.comparison)
