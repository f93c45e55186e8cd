"""Shows the paper's numbers with ours beside them as text tables, and counts of answers.

Numbers computed at the paper's size, numbers found here, and others' numbers are counted separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Literal, TypeVar

from ..compare import compare
from ..experiment import Experiment
from ..paper import SENTENCES, percent, show, show_interval, show_with_interval
from ..record import Record
from ..verdict import ANSWERS, QUESTIONS, Answer, Comparison, Result
from .grid import SCREEN, Grid, fill, within

MEANINGS: Mapping[Answer, str] = {
    "agrees": "the printed number, with its rounding, meets ours with its error",
    "follows": "it follows by arithmetic, could not have come out otherwise, and is counted apart",
    "differs": "all of ours, with its error, lies beside the printed number, or memory ran out",
    "no test": "our error is so large that ours would meet much else (computed: above 25 %; run here: above "
    "20 % to either side), what it stands over does not fit, or it was declared afterwards",
    "not judged": "a cell of a table that small models ran here; the paper's sentences about it are judged",
    "not run": "none of ours is on record, as in smaller profiles; a note may say why",
}


Part = Literal["as published", "here", "others' numbers"]
PARTS: tuple[Part, ...] = ("as published", "here", "others' numbers")
"""The tables that one table of the paper is shown as, in order: its two questions, and whatever is held
against somebody else's numbers."""

ASKED: Mapping[str, str] = {"as published": "computed from the paper's description", "here": "run here"}
"""The two questions in plain words."""

Key = tuple[str, str, str, str, str]
"""Identifies a comparison."""

_ABSENT = "-"
_FEW = 3
"""Significant digits in the short text."""


def part_of(cell: Comparison) -> Part:
    """The part of the report that shows the cell."""
    return cell.question if cell.source == "paper" else "others' numbers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Comparisons of one part of a table of the paper, in its order. `marks` are the numbers of each one's
    notes, from 1.
    """

    name: str
    part: Part
    rows: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
    marks: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The table's name and the question that it answers."""
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
    def diagonal(self) -> bool:
        """Whether the table has one column or is mostly empty, such as a diagonal: a list is shorter."""
        return len(self.columns) == 1 or 2 * len(self.rows) <= len(self.columns) * len(self.groups)


def numbered(
    cells: Iterable[Comparison], notes_of: Callable[[Comparison], Iterable[str]]
) -> tuple[tuple[str, ...], dict[Key, tuple[int, ...]]]:
    """Each distinct note once, in order of appearance, and for every cell the numbers of its notes."""
    each = {cell.key: tuple(notes_of(cell)) for cell in cells}
    number = {note: n for n, note in enumerate(dict.fromkeys(n for notes in each.values() for n in notes), 1)}
    return tuple(number), {key: tuple(sorted(number[n] for n in notes)) for key, notes in each.items()}


def parts_of(
    comparisons: Sequence[Comparison],
    notes: tuple[str, ...] = (),
    marks: Mapping[Key, tuple[int, ...]] = MappingProxyType({}),
) -> tuple[Table, ...]:
    """The tables of the comparisons, part by part."""
    return tuple(
        Table(name=name, part=part, rows=found, notes=notes, marks=marks)
        for name in dict.fromkeys(cell.table for cell in comparisons)
        for part in PARTS
        if (found := tuple(c for c in comparisons if c.table == name and part_of(c) == part))
    )


def tables_of(comparisons: Sequence[Comparison]) -> tuple[Table, ...]:
    """The tables of the comparisons with their notes, numbered through all tables."""

    def notes_of(cell: Comparison) -> list[str]:
        over = f"Our range is over: {', '.join(cell.parts)}"
        return [*cell.footnotes, *([over] if range_text(cell) else [])]

    return parts_of(comparisons, *numbered(comparisons, notes_of))


_BRIEF = ("paper", "ours", "answer")


def short_text(comparisons: Sequence[Comparison]) -> str:
    """Every table of the comparisons in short: paper, ours and the answer, without notes."""
    parts: list[str] = []
    shown: set[str] = set()
    for table in parts_of(comparisons):
        rows = tuple(row for row in table.rows if row.verdict != "not run" and row.printed)
        if table.diagonal:  # sums that follow by arithmetic are counted below
            rows = tuple(row for row in rows if row.verdict != "identity") or rows
        if rows and not (table.part == "others' numbers" and table.name in shown):
            shown.add(table.name)
            parts.append(replace(_grid(replace(table, rows=rows), _BRIEF), title=table.title).text())
    return "\n\n".join([*parts, "\n".join(counts_lines(comparisons))])


def text_table(comparisons: Sequence[Comparison]) -> str:
    """Every table of the comparisons for a terminal, then the footnotes and the totals."""
    tables = tables_of(comparisons)
    notes = [
        fill(note, f"[{n}] ", " " * (len(str(n)) + 3))
        for n, note in enumerate(tables[0].notes if tables else (), start=1)
    ]
    parts = [*(_grid(table).text() for table in tables), "\n".join(notes)]
    return "\n\n".join([*filter(None, parts), "\n".join(counts_lines(comparisons))])


def computed_markdown(comparisons: Sequence[Comparison]) -> str:
    """The tables computed at the paper's size, without notes, in markdown."""
    tables = [table for table in parts_of(comparisons) if table.part == "as published"]
    return "\n\n".join(replace(_grid(table), title="").markdown() for table in tables)


def _grid(table: Table, only: Sequence[str] = ()) -> Grid:
    """The table as the paper prints it, or as a list if that is shorter; of each entry's lines `only` these,
    by default all that any entry has.
    """
    places = dict.fromkeys(row.location for row in table.rows if row.location)
    hardware = dict.fromkeys(row.hardware for row in table.rows if row.hardware)
    known = "; ".join([*places, *(f"paper on {name}" for name in hardware)])
    title = f"{table.title} ({known})" if known else table.title

    def said(cell: Comparison | None, what: str, *, provenance: bool) -> str:
        if cell is None:
            return _ABSENT
        text = LINES[what](cell)
        if what == "answer" and (marks := table.marks.get(cell.key)):
            text += f" [{','.join(map(str, marks))}]"
        if what == "ours" and provenance and text:
            text += f" {cell.provenance}"
        return text or _ABSENT

    if table.diagonal:
        shown = only or _found(table.rows, ("paper", "ours", "answer"), ("our range", "ours / paper"))
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
            for what in only
            or _found(rows, ("paper", "answer"), ("torchgpipe", "ours", "our range", "ours / paper"))
        ]
    return Grid(title=title, columns=["", "", *table.columns], lines=lines)


def _found(rows: Sequence[Comparison], always: Sequence[str], other: Sequence[str]) -> list[str]:
    """The lines of an entry, in order: the obligatory ones, and others that any of the rows has."""
    having = [what for what in other if any(map(LINES[what], rows))]
    return [what for what in LINES if what in (*always, *having)]


# Texts of a comparison; empty where there is no number


def ours_with_error(entry: Comparison) -> str:
    """`2.46 GB +- 55 %` of what was computed, else `0.752 [0.739, 0.765]`."""
    if entry.ours is None:
        return ""
    metric = None if entry.entry is None else entry.entry.metric
    over = None if metric is None else metric.key.get("over")  # what K the number is over
    said = f" ({over})" if over else ""
    if entry.entry is not None and entry.entry.error:
        return f"{show(entry.ours, entry.unit, _FEW)} {spread_text(entry)}{said}"
    return show_with_interval(entry.ours, entry.low, entry.high, entry.unit) + said


def range_text(entry: Comparison, digits: int = 4) -> str:
    """`3.1 to 4.2 GB`: our range over all unknowns; empty if there is only the interval."""
    low, high, unit = entry.range_low, entry.range_high, entry.unit
    if not entry.parts or low is None or high is None:
        return ""
    # the unit once, behind both, unless it scales them (`81.3M`)
    return f"{show(low, unit, digits).removesuffix(f' {unit}')} to {show(high, unit, digits)}"


def spread_text(entry: Comparison) -> str:
    """How far our number may be off: `+- 55 %` if computed, `3.1 to 4.2 GB`, or the interval."""
    if entry.entry is not None and entry.entry.error:
        return f"+- {percent(entry.entry.error)}"
    if (over := range_text(entry)) or entry.low is None or entry.high is None:
        return over
    return show_interval(entry.low, entry.high, entry.unit)


def ratio_text(entry: Comparison) -> str:
    """`0.78`, `2060`: ours over the paper's, if comparable, to three digits, or to as many (at most five) as
    distinguish it from 1.
    """
    ratio = entry.ratio
    if ratio is None or not entry.printed or entry.answer == "follows":
        return ""
    if ratio >= 1000:
        return f"{ratio:.0f}" if ratio < 1e6 else f"{ratio:.1e}"
    return next((text for digits in (3, 4, 5) if (text := f"{ratio:.{digits}g}") != "1"), "1")


LINES: Mapping[str, Callable[[Comparison], str]] = {
    "paper": attrgetter("paper_text"), "torchgpipe": attrgetter("peer_printed"), "ours": ours_with_error,
    "our range": lambda entry: "" if entry.entry and entry.entry.error else range_text(entry),
    "ours / paper": ratio_text, "answer": attrgetter("answer"),
}  # fmt: skip
"""The lines of a comparison in a text table, in order."""


# Counts


def counts_text(cells: Iterable[Comparison]) -> str:
    """`3 agree, 8 no test; 14 follow; 30 not run`, over cells that count among the paper's numbers.

    Answers that follow by arithmetic, are not judged or were not run stand apart.
    """
    counts = Counter(cell.answer for cell in cells if cell.counted)
    many = {"agrees": "agree", "follows": "follow", "differs": "differ"}
    said = {word: f"{n} {many.get(word, word) if n > 1 else word}" for word in ANSWERS if (n := counts[word])}
    held = ", ".join(said[word] for word in ("agrees", "differs", "no test") if word in said)
    apart = [said[word] for word in ("follows", "not judged", "not run") if word in said]
    return "; ".join([*filter(None, [held]), *apart]) or "nothing counted"


def counts_lines(cells: Iterable[Comparison]) -> list[str]:
    """A line for each question: `run here: 3 agree; 14 follow`."""
    counted = [cell for cell in cells if cell.counted]
    lines = [
        f"{ASKED[question]}: {counts_text(of)}"
        for question in QUESTIONS
        if (of := [cell for cell in counted if cell.question == question])
    ]
    return lines or ["nothing counted"]


# Results of some records of an experiment

T = TypeVar("T")

UNREADABLE = (
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, AssertionError,
    OSError,
)  # fmt: skip
"""Errors of an experiment that reads or draws another program's records."""
MOST_SCREEN = 100
"""Most lines of a screen; half as many for a text without numbers of the paper."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Results of some records of one experiment. `comparisons` has one for every result, and one for every
    unanswered number of the same tables.
    """

    records: tuple[Record, ...]
    comparisons: tuple[Comparison, ...]
    text: str = ""
    reproduction: str = ""

    @property
    def has_numbers(self) -> bool:
        """Whether any of our numbers stands beside one of the paper."""
        return any(cell.ours is not None for cell in self.comparisons)


def is_shown_computed(cell: Comparison) -> bool:
    """Whether `reproduced.text` shows the number: it is computed, or ran here and is not judged. Computed
    sentences are not shown there.
    """
    if cell.is_computed:
        return cell.table != SENTENCES or not cell.counted
    return is_beside(cell)


def is_beside(cell: Comparison) -> bool:
    """Whether it ran here at another size than the paper's, so that it is shown but not judged."""
    is_cell = cell.table != SENTENCES and cell.source == "paper" and cell.question == "here"
    return is_cell and cell.entry is not None and bool(cell.entry.context)


def shown_of(experiment: Experiment, records: Sequence[Record], *, brief: bool = False) -> Shown:
    """The experiment's results beside the paper's numbers, and its text, which a `brief` one lacks if there
    are numbers. Raises RuntimeError if results contradict each other.
    """
    _, comparisons = judged(experiment, records)
    computed = (
        "" if experiment.reproduction is None else experiment.reproduction(comparisons, notes=not brief)
    )
    shown = Shown(tuple(records), tuple(comparisons), reproduction=computed)
    if brief and shown.has_numbers:
        return shown
    tables = experiment.tables
    others = [cell for cell in comparisons if not (computed and is_shown_computed(cell))]
    judged_text = text_table(others) if others or tables is None else ""
    parts = [computed, judged_text, "" if tables is None else tables(records)]
    return replace(shown, text="\n\n".join(filter(None, parts)))


def judged(experiment: Experiment, records: Sequence[Record]) -> tuple[list[Result], list[Comparison]]:
    """The experiment's results and their comparisons; see `shown_of`."""
    entries = experiment.cells(records)
    try:
        return entries, compare(entries, whole=experiment.paper_tables)
    except ValueError as error:  # no usage error
        raise RuntimeError(f"the cells of {experiment.name} can't be compared") from error


def screen(shown: Shown, whole: str) -> str:
    """A screen of results; `whole` is the command that shows all. Without numbers of the paper, the first
    tables of the text.
    """
    if shown.has_numbers:
        others = [cell for cell in shown.comparisons if not (shown.reproduction and is_shown_computed(cell))]
        with within(SCREEN):
            *tables, counts = short_text(others).split("\n\n") if others else [""]
        parts = (shown.reproduction, _cut(tables, MOST_SCREEN), counts, f"ranges and footnotes: {whole}")
        return "\n\n".join(filter(None, parts))
    with within(SCREEN):
        lines = shown.text.splitlines()
        tables = "\n".join(line if "  " in line else fill(line) for line in lines).split("\n\n")
    text = _cut(tables, MOST_SCREEN // 2)
    return text if text.endswith(tables[-1]) else f"{text}\n\nall of it: {whole}"


def _cut(tables: Sequence[str], most: int) -> str:
    """As many tables as fit into `most` lines, and a line that says how many lines are left out."""
    kept = list(tables[:1])
    for table in tables[1:]:
        if "\n\n".join([*kept, table]).count("\n") > most:
            left = "\n\n".join(tables[len(kept) :]).count("\n") + 1
            return "\n\n".join([*kept, f"... {left} more lines"])
        kept.append(table)
    return "\n\n".join(kept)


def readable(name: str, show: Callable[[], T]) -> tuple[T | None, str]:
    """Result of `show`, or why the experiment can't read its records, which another program or an unreleased
    version may have written.
    """
    try:
        return show(), ""
    except UNREADABLE as error:
        cause = error.__cause__ or error
        return None, f"{name} can't be shown: {type(cause).__name__}: {cause}"
