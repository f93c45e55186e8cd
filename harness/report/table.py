"""Numbers of the paper with ours beside them: tables in words, and counts of verdicts.

What was predicted for the paper's accelerators and what was found here are tables of their own and are never
added up, and so is what was held against the numbers of others. What stands in an entry is decided here, and
so is the layout of text and markdown: like the paper's table, the lines of an entry below each other. Where
it stands on a page is the matter of its template.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, cast

from gpipe_bench.harness.report.grid import Grid, fill
from gpipe_bench.harness.units import show, show_interval, show_with_interval
from gpipe_bench.harness.verdict import DIFFERS, JUDGED, QUESTIONS, Comparison, Question, Verdict

Part = Literal["as published", "here", "others' numbers"]
PARTS: tuple[Part, ...] = ("as published", "here", "others' numbers")
"""The tables that one table of the paper is shown as, in order: its two questions, and whatever is held
against somebody else's numbers."""

ASKED: Mapping[str, str] = {"as published": "computed from the paper's description", "here": "run here"}
"""The two questions in words that need no explanation."""

Key = tuple[str, str, str, str, str]
"""Of a comparison."""

_ABSENT = "-"
_FEW = 3
"""Significant digits in the short form."""
_DIGITS = 5
"""Significant digits of where a verdict turns: one more than a number has by itself."""


def part_of(cell: Comparison) -> Part:
    """Where the cell is shown."""
    return cell.question if cell.source == "paper" else "others' numbers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Entries of one table of the paper that answer the same, in its order. `marks` are, for each entry, the
    numbers of its notes, from 1.
    """

    name: str
    part: Part
    rows: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
    marks: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its name and what is asked."""
        return f"{self.name}, {ASKED.get(self.part, self.part)}"

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in order."""
        return list(dict.fromkeys(row.column for row in self.rows))

    @property
    def groups(self) -> list[tuple[str, list[Comparison]]]:
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
        return len(self.columns) == 1 or 2 * len(self.rows) <= len(self.columns) * len(self.groups)

    @property
    def run(self) -> bool:
        """Whether it says more than that nothing of it was run."""
        return any(row.verdict != "not run" for row in self.rows)

    @property
    def scores(self) -> Counts:
        """The counts of its rows, see `scores`."""
        return scores(self.rows)


def numbered(
    cells: Iterable[Comparison], notes_of: Callable[[Comparison], Iterable[str]]
) -> tuple[tuple[str, ...], dict[Key, tuple[int, ...]]]:
    """Each distinct note once, in order of appearance, and for every cell the numbers of its own."""
    each = {cell.key: tuple(notes_of(cell)) for cell in cells}
    number = {note: n for n, note in enumerate(dict.fromkeys(n for notes in each.values() for n in notes), 1)}
    return tuple(number), {key: tuple(sorted(number[n] for n in notes)) for key, notes in each.items()}


def parts_of(
    name: str,
    cells: Sequence[Comparison],
    notes: tuple[str, ...] = (),
    marks: Mapping[Key, tuple[int, ...]] = MappingProxyType({}),
) -> tuple[Table, ...]:
    """The tables that the cells of one table of the paper are shown as."""
    return tuple(
        Table(name=name, part=part, rows=found, notes=notes, marks=marks)
        for part in PARTS
        if (found := tuple(cell for cell in cells if part_of(cell) == part))
    )


def tables_of(comparisons: Sequence[Comparison]) -> list[Table]:
    """The tables that the comparisons touch, part by part; their notes are numbered through all of them."""
    notes, marks = numbered(
        comparisons,
        lambda c: [*c.footnotes, *([f"Our range is over: {parts_text(c)}"] if range_text(c) else [])],
    )
    return [
        table
        for name in dict.fromkeys(comparison.table for comparison in comparisons)
        for table in parts_of(name, [c for c in comparisons if c.table == name], notes, marks)
    ]


_SHORT: Mapping[Verdict, str] = {
    "reproduced": "+", "identity": "=", "undecided": "?", "above": ">", "below": "<", "not judged": ".",
    "not comparable": "#", "not run": "-",
}  # fmt: skip
_WIDEST = 46
"""Columns of what a number is, in the short form: with the rest of the line they make a screen of 100."""


def short_text(comparisons: Sequence[Comparison]) -> str:
    """Every table of the comparisons in a screen: paper, ours and a sign for the verdict, no notes."""

    def wrapped(text: str, width: int) -> str:
        return "\n".join(textwrap.wrap(text, width))

    def signed(cell: Comparison) -> str:
        """`13.9M <`: ours and the sign of the verdict."""
        ours = _ABSENT if cell.ours is None else show(cell.ours, cell.unit, _FEW)
        return f"{ours} {_SHORT[cell.verdict]}"

    parts: list[str] = []
    used: set[Verdict] = set()
    shown: set[str] = set()
    names = dict.fromkeys(comparison.table for comparison in comparisons)
    for table in (t for name in names for t in parts_of(name, [c for c in comparisons if c.table == name])):
        rows = tuple(row for row in table.rows if row.verdict != "not run" and row.printed)
        if table.diagonal:  # sums that follow by arithmetic are counted below
            rows = tuple(row for row in rows if row.verdict != "identity") or rows
        if not rows or (table.part == "others' numbers" and table.name in shown):
            continue
        shown.add(table.name)
        table = replace(table, rows=rows)
        used |= {row.verdict for row in rows}
        columns, lines = ["", "paper", "ours", "range"], []
        if table.diagonal:
            for row in rows:
                what = wrapped(f"{row.label}, {row.column}", _WIDEST)
                paper = wrapped(row.paper_text, 22)
                lines.append([what, paper, signed(row), range_text(row, _FEW) or _ABSENT])
        else:
            columns = ["", "", *table.columns]
            for label, of_label in table.groups:
                at = {row.column: row for row in of_label}
                cells = [at.get(column) for column in table.columns]
                papers = [_ABSENT if c is None else c.paper_text.partition(" (")[0] for c in cells]
                lines += [
                    [wrapped(label, 24), "paper", *(wrapped(text, 16) for text in papers)],
                    ["", "ours", *(_ABSENT if cell is None else signed(cell) for cell in cells)],
                ]
        parts.append(Grid(title=table.title, columns=columns, lines=lines).text())
    signs = ", ".join(f"{sign} {verdict}" for verdict, sign in _SHORT.items() if verdict in used)
    said = [*([signs] if signs else []), *counts_lines(comparisons)]
    counts = "\n".join(textwrap.fill(line, 100, subsequent_indent="  ") for line in said)
    return "\n\n".join([*parts, counts])


def text_table(comparisons: Sequence[Comparison]) -> str:
    """Every table of the comparisons for a terminal, then the footnotes and the totals."""
    return _shown(comparisons, Grid.text, lambda n, note: fill(note, f"[{n}] ", " " * (len(str(n)) + 3)))


def markdown_table(comparisons: Sequence[Comparison]) -> str:
    """The same for a markdown page."""
    return _shown(comparisons, Grid.markdown, lambda n, note: f"{n}. {note}")


def _shown(
    comparisons: Sequence[Comparison], laid_out: Callable[[Grid], str], noted: Callable[[int, str], str]
) -> str:
    tables = tables_of(comparisons)
    notes = [noted(n, note) for n, note in enumerate(tables[0].notes if tables else (), start=1)]
    parts = [*(laid_out(_grid(table)) for table in tables), "\n".join(notes)]
    return "\n\n".join([*filter(None, parts), "\n".join(counts_lines(comparisons))])


def _grid(table: Table) -> Grid:
    """The table as the paper prints it, or a line for each entry where that would be mostly empty."""
    places = dict.fromkeys(row.location for row in table.rows if row.location)
    hardware = dict.fromkeys(row.hardware for row in table.rows if row.hardware)
    known = "; ".join([*places, *(f"paper on {name}" for name in hardware)])
    title = f"{table.title} ({known})" if known else table.title

    def said(cell: Comparison | None, what: str, *, provenance: bool) -> str:
        if cell is None:
            return _ABSENT
        text = LINES[what](cell)
        if what == "verdict" and (marks := table.marks[cell.key]):
            text += f" [{','.join(map(str, marks))}]"
        if what == "ours" and provenance and text:
            text += f" {cell.provenance}"
        return text or _ABSENT

    if table.diagonal:
        shown = _found(table.rows, ("paper", "ours", "verdict"), ("our range", _FAILS))
        lines = [
            [row.label, row.column, *(said(row, what, provenance=True) for what in shown)]
            for row in table.rows
        ]
        return Grid(title=title, columns=["", "", *shown], lines=lines)
    lines = []
    for label, rows in table.groups:
        at = {row.column: row for row in rows}
        provenances = {row.provenance for row in rows} - {""}
        uniform = len(provenances) == 1
        names = {
            "paper": "paper" if table.part != "others' numbers" else "theirs",
            "ours": f"ours ({', '.join(provenances)})" if uniform else "ours",
        }
        lines += [
            [
                label if what == "paper" else "",
                names.get(what, what),
                *(said(at.get(column), what, provenance=not uniform) for column in table.columns),
            ]
            for what in _found(rows, ("paper", "verdict"), ("torchgpipe", "ours", "our range", _FAILS))
        ]
    return Grid(title=title, columns=["", "", *table.columns], lines=lines)


def _found(rows: Sequence[Comparison], always: Sequence[str], other: Sequence[str]) -> list[str]:
    """The lines of an entry, in order: those that there always are, and others that any of the rows has."""
    having = [what for what in other if any(map(LINES[what], rows))]
    return [what for what in LINES if what in (*always, *having)]


# What stands in an entry; nothing where there is nothing to say -------------------------------------------


def paper_text(entry: Comparison) -> str:
    """As printed, with the corrected value where an erratum gives one."""
    return entry.paper_text if entry.printed else ""


def ours_text(entry: Comparison) -> str:
    """`3.819 GB`."""
    return "" if entry.ours is None else show(entry.ours, entry.unit)


def ours_with_interval(entry: Comparison) -> str:
    """`0.752 [0.739, 0.765]`."""
    return "" if entry.ours is None else show_with_interval(entry.ours, entry.low, entry.high, entry.unit)


def interval_text(entry: Comparison) -> str:
    """`[3.6, 3.7]`, in the number's unit."""
    if entry.low is None or entry.high is None:
        return ""
    return show_interval(entry.low, entry.high, entry.unit)


def range_text(entry: Comparison, digits: int = 4) -> str:
    """`3.1 to 4.2 GB`: over everything that is not known; nothing where the interval says it all."""
    if not entry.parts or entry.range_low is None or entry.range_high is None:
        return ""
    return _pair(entry.range_low, entry.range_high, entry.unit, " to ", digits)


def parts_text(entry: Comparison) -> str:
    """`share of the peak, error of the replay`: what our range is made of."""
    return ", ".join(part.replace("_", " ") for part in entry.parts)


def fails_text(entry: Comparison) -> str:
    """`3.1 / 4.2 GB`: a paper that printed less than the first, or more than the second, fails."""
    ends = (entry.fails_below, entry.fails_above)
    if entry.verdict not in JUDGED or ends == (None, None):
        return ""
    if None not in ends:
        return _pair(*cast("tuple[float, float]", ends), entry.unit, " / ", _DIGITS)
    return " / ".join("never" if end is None else show(end, entry.unit, _DIGITS) for end in ends)


def _pair(low: float, high: float, unit: str, between: str, digits: int) -> str:
    """The unit once, behind both, unless it scales them (`81.3M`)."""
    return f"{show(low, unit, digits).removesuffix(f' {unit}')}{between}{show(high, unit, digits)}"


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


_FAILS = "fails below / above"
LINES: Mapping[str, Callable[[Comparison], str]] = {
    "paper": paper_text, "torchgpipe": lambda entry: entry.peer_printed, "ours": ours_with_interval,
    "our range": range_text, "verdict": verdict_text, _FAILS: fails_text,
}  # fmt: skip
"""The lines of an entry in a table of text, in order."""


# Counts -----------------------------------------------------------------------------------------------------

Evidence = Literal["measured", "replayed", "modelled", "identity", "no number"]
"""What a verdict rests on: how our number was made, or that it follows by arithmetic from others."""
EVIDENCE: tuple[Evidence, ...] = ("measured", "replayed", "modelled", "identity", "no number")


def evidence(cell: Comparison) -> Evidence:
    """What the verdict on the cell rests on; "no number" also where memory ran out."""
    if cell.kind == "identity" and cell.verdict in JUDGED:
        return "identity"
    return cast("Evidence", cell.provenance) if cell.provenance else "no number"


class Counts(Counter[tuple[Evidence, Verdict]]):
    """How many of the paper's numbers there are of each evidence and verdict.

    A total that mixes what was measured with what follows by arithmetic says neither, so identities are
    counted apart from what was judged.
    """

    def with_verdict(self, verdict: Verdict) -> int:
        """Those with that verdict, whatever it rests on."""
        return sum(self[rests_on, verdict] for rests_on in EVIDENCE)

    def judged_as(self, *verdicts: Verdict) -> int:
        """Those with one of these verdicts that are no identities."""
        return sum(self.with_verdict(verdict) - self["identity", verdict] for verdict in verdicts)

    @property
    def judged(self) -> int:
        """Those held against the paper that could have come out otherwise: no identities."""
        return self.judged_as(*JUDGED)

    @property
    def identities(self) -> int:
        """Those that follow by arithmetic, whether it comes out or not."""
        return sum(count for (rests_on, _), count in self.items() if rests_on == "identity")

    def __str__(self) -> str:
        """`3 reproduced, 8 undecided of 11 judged; 14 identities; 2 not comparable; 30 not run`."""
        if not self.total():
            return "nothing counted"
        found = [f"{n} {verdict}" for verdict in JUDGED if (n := self.judged_as(verdict))]
        held, identities = self.with_verdict("identity"), self.identities
        parts = [f"{', '.join(found)} of {self.judged} judged"] if found else []
        if identities:
            name = "identity" if identities == 1 else "identities"
            parts.append(f"{held} {name}" if held == identities else f"{held} of {identities} {name} hold")
        apart: tuple[Verdict, ...] = ("not comparable", "not run")
        others = [f"{n} {verdict}" for verdict in apart if (n := self.with_verdict(verdict))]
        return "; ".join([*(parts or ["nothing judged"]), *others])


def scores(cells: Iterable[Comparison]) -> Counts:
    """The counts of those cells that count among the paper's numbers."""
    return Counts((evidence(cell), cell.verdict) for cell in cells if cell.counted)


def counts_of(cells: Iterable[Comparison]) -> dict[Question, Counts]:
    """The counts of each question that any of the cells answers or leaves open, in order."""
    found = list(cells)
    each = {q: scores(cell for cell in found if cell.question == q) for q in QUESTIONS}
    return {question: counts for question, counts in each.items() if counts}


def counts_lines(cells: Iterable[Comparison]) -> list[str]:
    """A line for each question: `run here: 3 reproduced of 3 judged; 14 identities`."""
    found = [f"{ASKED[question]}: {counts}" for question, counts in counts_of(cells).items()]
    return found or ["nothing counted"]
