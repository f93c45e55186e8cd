"""A table of the paper with our numbers in it: one object, shown as text, as markdown and as HTML.

What stands in an entry is decided here, in words, and so is the layout of text and markdown: like the paper's
table, the three lines of an entry below each other. Where it stands on a page is the matter of its template.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpipe_bench.harness.judging.compare import Comparison
from gpipe_bench.harness.judging.units import show, show_interval, show_with_interval
from gpipe_bench.harness.judging.verdict import DIFFERS, VERDICTS, Verdict
from gpipe_bench.harness.report.grid import Grid

_WIDTH = 110
_ABSENT = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One entry: the paper's number, ours and the verdict. `marks` count the table's notes from 1."""

    comparison: Comparison
    marks: tuple[int, ...] = ()


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table(Generic[R]):
    """All entries of one table of the paper, in its order. `notes` are what the rows' marks count."""

    name: str
    rows: tuple[R, ...]
    notes: tuple[str, ...]

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in order."""
        return list(dict.fromkeys(row.comparison.column for row in self.rows))

    @property
    def groups(self) -> list[tuple[str, list[R]]]:
        """The rows by their label, in order."""
        labels = dict.fromkeys(row.comparison.row for row in self.rows)
        return [(label, [row for row in self.rows if row.comparison.row == label]) for label in labels]

    @property
    def flat(self) -> bool:
        """Whether each label has one row, so that a heading above every row would only take room."""
        return len(self.groups) == len(self.rows)

    @property
    def diagonal(self) -> bool:
        """Whether hardly more than a diagonal is filled, so that a list takes less room."""
        return len(self.rows) < len(self.columns) + len(self.groups)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many entries have each verdict."""

    by_verdict: Mapping[Verdict, int]

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> Counts:
        counted = Counter(verdicts)
        return cls({verdict: counted[verdict] for verdict in VERDICTS})

    @property
    def total(self) -> int:
        return sum(self.by_verdict.values())

    def __getitem__(self, verdict: Verdict) -> int:
        return self.by_verdict[verdict]

    def __str__(self) -> str:
        """`7 of 10 reproduced, 2 above, 1 not run`."""
        others = [f"{self[verdict]} {verdict}" for verdict in VERDICTS[1:] if self[verdict]]
        return ", ".join([f"{self['reproduced']} of {self.total} reproduced", *others])


def numbered(notes_of: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """Each distinct note once, in order of appearance, and for every row the numbers of its own."""
    each = [tuple(notes) for notes in notes_of]
    number = {note: place for place, note in enumerate(dict.fromkeys(n for notes in each for n in notes), 1)}
    return tuple(number), [tuple(sorted(number[note] for note in notes)) for notes in each]


def tables_of(comparisons: Sequence[Comparison]) -> list[Table[Row]]:
    """A table for each that the comparisons touch; their notes are numbered through all of them."""
    notes, marks = numbered(comparison.footnotes for comparison in comparisons)
    rows = [Row(comparison=c, marks=of_row) for c, of_row in zip(comparisons, marks, strict=True)]
    names = dict.fromkeys(comparison.table for comparison in comparisons)
    return [
        Table(name=name, rows=tuple(row for row in rows if row.comparison.table == name), notes=notes)
        for name in names
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


def verdict_text(entry: Comparison, times: str = " x") -> str:
    """`below x0.78`: the verdict, and ours over the paper's where the two differ."""
    if entry.verdict in DIFFERS and entry.ratio is not None:
        return f"{entry.verdict}{times}{entry.ratio:.3g}"
    return entry.verdict


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
