"""What the report says, before it says how: every published number beside ours, counted and explained.

A pure function of answers and published numbers, so that the HTML page, the markdown file and the table of
cells can't disagree and a test can hold each against the records.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from gpipe_bench.harness.compare import absent, peers_of
from gpipe_bench.harness.paper import PaperNumber
from gpipe_bench.harness.report.first_screen import FirstScreen, first_screen
from gpipe_bench.harness.report.side import SideBySide
from gpipe_bench.harness.report.table import (
    Counts,
    Row,
    Table,
    counts_of,
    evidence,
    numbered,
    parts_of,
    scores,
)
from gpipe_bench.harness.verdict import DIFFERS, QUESTIONS, Comparison, Question, Verdict, judge

NARROW, WIDE = 0.5, 2.0
"""Factors on the width of every range under which the verdicts are counted again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableInfo:
    """A table of the paper in words. `experiment` would produce it; `missing` is why nothing does."""

    title: str
    short: str
    about: str
    experiment: str = ""
    missing: str = ""


class Published(NamedTuple):
    """A number of others that nothing of ours answers. `ours` is our number at the same place, if any."""

    cell: PaperNumber
    comparison: Comparison
    ours: Comparison | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TableView:
    """One table of the page, part by part. `commands` made its rows; `settings` and `others` stand below."""

    name: str
    info: TableInfo
    location: str
    hardware: str
    parts: tuple[Table, ...]
    settings: tuple[Row, ...]
    others: tuple[Published, ...]
    notes: tuple[str, ...]
    commands: tuple[tuple[str, str, str], ...]  # command, machine, profile

    @property
    def rows(self) -> tuple[Row, ...]:
        """Those of all parts."""
        return tuple(row for part in self.parts for row in part.rows)


class Finding(NamedTuple):
    """A line of the summary: rows of one table that share a fate. `all_not_run`: nothing of it was run."""

    table: str
    short: str
    text: str
    all_not_run: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionView:
    """A question, its scores over all tables, and what holds, differs and is open in each."""

    question: Question
    scores: tuple[Counts, Counts, Counts]
    holds: tuple[Finding, ...]
    differs: tuple[Finding, ...]
    undecided: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where numbers come from. `facts` are (label, text) of its environment."""

    name: str
    own: bool
    place: str
    records: int
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentView:
    """An experiment's own words, pictures and charts. `runs`: machine, profile, what it does, its records."""

    name: str
    title: str
    source: str
    describe: str
    runs: tuple[tuple[str, str, str, str], ...]
    text: str
    pictures: tuple[Any, ...] = ()
    charts: tuple[Any, ...] = ()
    traces: tuple[Any, ...] = ()

    @property
    def drawn(self) -> str:
        """What there is to look at: `2 figures, 1 timeline`."""
        counts = (("figure", len(self.pictures)), ("timeline", len(self.charts) + len(self.traces)))
        return ", ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts if count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """All of the report. `errata` are (table, cells, erratum)."""

    tables: tuple[TableView, ...]
    first: FirstScreen
    questions: tuple[QuestionView, ...]
    errata: tuple[tuple[str, str, str], ...]
    experiments: tuple[ExperimentView, ...] = ()
    machines: tuple[Machine, ...] = ()
    side: SideBySide | None = None
    warnings: tuple[str, ...] = ()
    command: str = ""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Those of all tables, without settings and numbers of others."""
        return tuple(row for table in self.tables for row in table.rows)

    @property
    def cells(self) -> tuple[Comparison, ...]:
        """Their comparisons."""
        return tuple(row.comparison for row in self.rows)

    @property
    def names(self) -> dict[str, str]:
        """The tables in short words."""
        return {table.name: table.info.short for table in self.tables}

    @property
    def shown(self) -> Mapping[str, int]:
        """How many rows there are of each verdict, whether they count or not."""
        return Counter(cell.verdict for cell in self.cells)

    @property
    def origins(self) -> Mapping[str, int]:
        """How many rows there are of each evidence."""
        return Counter(map(evidence, self.cells))

    @property
    def smoke(self) -> int:
        """How many numbers are of a smoke run, which only shows that everything runs."""
        return sum(row.profile == "smoke" for row in self.rows)


def page_of(
    answers: Sequence[Row],
    paper: Sequence[PaperNumber],
    infos: Mapping[str, TableInfo],
    facts: Mapping[str, str] = MappingProxyType({}),
    headline: Sequence[Row] | None = None,
) -> Page:
    """The page of our answers: every table with a published number or one of ours, in the order of `infos`,
    then of the paper's file, and the errata of the paper, each once.

    The first screen is of `headline`, by default of all answers, and of `facts`.

    Raises ValueError where two answers are for one cell.
    """
    if len({row.comparison.key for row in answers}) != len(answers):
        raise ValueError("two answers are for one cell; choose one before")
    names = dict.fromkeys([cell.table for cell in paper] + [row.comparison.table for row in answers])
    tables = tuple(
        _table(
            name,
            [row for row in answers if row.comparison.table == name],
            [cell for cell in paper if cell.table == name],
            infos.get(name) or TableInfo(title=name, short=name, about=""),
        )
        for name in dict.fromkeys([*(name for name in infos if name in names), *names])
    )
    cells = [row.comparison for table in tables for row in table.rows]
    errata: dict[tuple[str, str], list[str]] = {}
    for cell in paper:
        if cell.erratum and cell.kind != "external":
            errata.setdefault((cell.table, cell.erratum), []).append(f"{cell.row}, {cell.column}")
    return Page(
        tables=tables,
        first=first_screen(cells, facts)
        if headline is None
        else page_of(headline, paper, infos, facts).first,
        questions=tuple(_question(question, tables) for question in counts_of(cells)),
        errata=tuple((table, _places(cells), text) for (table, text), cells in errata.items()),
    )


def _table(name: str, answers: Sequence[Row], paper: Sequence[PaperNumber], info: TableInfo) -> TableView:
    published = {(*cell.key, cell.source): cell for cell in paper}
    answered = {row.comparison.key[:-1] for row in answers if row.comparison.verdict != "not judged"}
    peers, unanswered = peers_of(paper), []
    for place, cell in published.items():
        if cell.source == "paper" and place not in answered:
            entry = absent(cell, info.missing)
            unanswered.append(Row(comparison=judge(cell, entry, peer=peers.get(cell.key)), entry=entry))
    first = {place: number for number, place in enumerate(published)}

    def order(row: Row) -> tuple[int, bool, int]:
        place = row.comparison.key[:-1]
        return QUESTIONS.index(row.comparison.question), place not in first, first.get(place, 0)

    listed = sorted([*answers, *unanswered], key=order)
    # a reason that stands in the row anyway is no note
    notes, marks = numbered(
        [note for note in row.comparison.footnotes if note != row.comparison.reason] for row in listed
    )
    rows = [
        dataclasses.replace(
            row,
            marks=of_row,
            narrow=_verdict(published.get(row.comparison.key[:-1]), row, NARROW),
            wide=_verdict(published.get(row.comparison.key[:-1]), row, WIDE),
        )
        for row, of_row in zip(listed, marks, strict=True)
    ]
    ours = {row.comparison.place: row.comparison for row in rows if row.comparison.ours is not None}
    others = [cell for place, cell in published.items() if cell.source != "paper" and place not in answered]
    papers = [cell for cell in paper if cell.source == "paper"]
    located = [cell for cell in papers if cell.counted] or others
    return TableView(
        name=name,
        info=info,
        location="; ".join(dict.fromkeys(cell.location for cell in located if cell.location)),
        hardware="; ".join(dict.fromkeys(cell.hardware for cell in papers or others if cell.hardware)),
        parts=parts_of(name, [row for row in rows if not _is_setting(row.comparison)], notes),
        settings=tuple(row for row in rows if _is_setting(row.comparison)),
        others=tuple(Published(cell, judge(cell, absent(cell)), ours.get(cell.key)) for cell in others),
        notes=notes,
        commands=tuple(dict.fromkeys((r.command, r.machine, r.profile) for r in rows if r.machine)),
    )


def _verdict(cell: PaperNumber | None, row: Row, tolerance: float) -> Verdict:
    return "not run" if row.entry is None else judge(cell, row.entry, tolerance).verdict


def _is_setting(cell: Comparison) -> bool:
    """Whether it is only context: a setting or a repetition that nothing of ours answers."""
    return cell.source == "paper" and cell.kind != "ours" and not cell.counted and cell.ours is None


# A line for each table on what holds and differs ------------------------------------------------------------

_SORTS: dict[str, tuple[Verdict, ...]] = {
    "holds": ("reproduced", "identity"),
    "differs": DIFFERS,
    "undecided": ("undecided", "not comparable", "not run"),
}
_MOST_PHRASES = 3


def _question(question: Question, tables: Sequence[TableView]) -> QuestionView:
    mine = [(t, part) for t in tables for part in t.parts if part.part == question]
    return QuestionView(
        question=question,
        scores=scores(row for _, part in mine for row in part.rows),
        **{sort: tuple(_findings(mine, verdicts)) for sort, verdicts in _SORTS.items()},
    )


def _findings(mine: Iterable[tuple[TableView, Table]], verdicts: Sequence[Verdict]) -> Iterable[Finding]:
    for table, part in mine:
        phrases, chosen, every = [], [], 0
        for label, rows in part.groups:
            counted = [row.comparison for row in rows if row.comparison.counted]
            these = [cell for cell in counted if cell.verdict in verdicts]
            every += len(counted)
            chosen += these
            if these:
                phrases.append(_phrase(label, these, len(counted)))
        if phrases:
            not_run = len(chosen) == every and {cell.verdict for cell in chosen} == {"not run"}
            yield Finding(table.name, table.info.short, _joined(phrases, chosen, every), not_run)


def _phrase(label: str, cells: Sequence[Comparison], of: int) -> str:
    """`peak activation memory ×0.78 to ×5.5 (3 above, 2 below)`."""
    if {cell.verdict for cell in cells} == {"reproduced"}:
        return f"{label} ({len(cells)} of {of})"
    return f"{label}{_span(cells)} ({_each(cells)})"


def _each(cells: Sequence[Comparison]) -> str:
    words = {"identity": ("identity", "identities")}
    counts = Counter(cell.verdict for cell in cells)
    return ", ".join(f"{n} {words.get(v, (v, v))[n > 1]}" for v, n in counts.items())


def _span(cells: Sequence[Comparison]) -> str:
    ratios = [cell.ratio for cell in cells if cell.ratio is not None and cell.verdict in DIFFERS]
    if not ratios:
        return ""
    low, high = f"×{min(ratios):.2g}", f"×{max(ratios):.2g}"
    return f" {low}" if low == high else f" {low} to {high}"


def _joined(phrases: Sequence[str], cells: Sequence[Comparison], of: int) -> str:
    verdicts = {cell.verdict for cell in cells}
    if len(cells) == of and len(verdicts) == 1 and (len(phrases) > 1 or "not run" in verdicts):
        (verdict,) = verdicts
        return f"all {of}" if verdict == "reproduced" else f"all {of} {verdict}{_span(cells)}"
    if len(phrases) <= _MOST_PHRASES:
        return "; ".join(phrases)
    return f"{_each(cells)} of {of}{_span(cells)}"


def _places(cells: Sequence[str]) -> str:
    return "; ".join(cells) if len(cells) <= _MOST_PHRASES else f"{cells[0]} and {len(cells) - 1} more"


# All of it for other programs -------------------------------------------------------------------------------

COLUMNS = (
    "table", "row", "column", "source", "question", "kind", "printed", "paper", "unit", "ours", "low", "high",
    "range_low", "range_high", "fails_below", "fails_above", "provenance", "verdict", "ratio", "explained_by",
    "tried", "reason", "machine", "command",
)  # fmt: skip


def cells_csv(tables: Sequence[TableView]) -> str:
    """All cells in the order of the page, settings and numbers of others at the end of each table.

    Numbers stand as Python writes them, so reading them back gives the same; nothing is rounded and the same
    records always give the same bytes. An empty field is a number that there is not.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for table in tables:
        rows = [(row.comparison, row.machine, row.command) for row in (*table.rows, *table.settings)]
        rows += [(other.comparison, "", "") for other in table.others]
        for cell, machine, command in rows:
            writer.writerow([*(getattr(cell, name) for name in COLUMNS[:-2]), machine, command])
    return text.getvalue()
