"""What the report says, before it says how: every published number beside ours, counted and explained.

A pure function of answers and published numbers, so that the HTML page and the markdown file can't disagree
and a test can hold either against the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpipe_bench.harness.judging.compare import Comparison, absent, compare_entry
from gpipe_bench.harness.judging.entry import QUESTIONS, Entry
from gpipe_bench.harness.judging.paper import PaperCell
from gpipe_bench.harness.judging.verdict import Verdict, judge
from gpipe_bench.harness.records.record import Record
from gpipe_bench.harness.report.table import Counts, Row, Table, numbered

NARROW, WIDE = 0.5, 2.0
"""Factors on the width of every range under which the verdicts are counted again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Our number for an entry, what was made of it, and where it comes from: machine, profile, command."""

    entry: Entry
    comparison: Comparison
    machine: str
    profile: str
    command: str

    @property
    def record(self) -> Record | None:
        """The record that holds the number, None where it is computed from several."""
        return self.entry.record

    @property
    def answers(self) -> bool:
        """Whether it says more than that there is no number."""
        return self.comparison.ours is not None or self.entry.status == "out_of_memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableInfo:
    """A table of the paper in words. `experiment` would produce it; `missing` is why nothing does."""

    title: str
    short: str
    about: str
    experiment: str = ""
    missing: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRow(Row):
    """One published number (or one of ours that the paper doesn't print) and its verdict.

    `reason` is the verdict's without what stands in the notes `marks` refer to; `narrow` and `wide` are the
    verdicts under other tolerances. Settings and numbers the paper doesn't print are not `counted`.
    """

    kind: str
    counted: bool
    reason: str
    narrow: Verdict
    wide: Verdict
    answer: Answer | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A number that others than the paper published: torchgpipe's, or what theory allows."""

    cell: PaperCell
    ours: Comparison | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TableView(Table[PageRow]):
    """One table of the page. `commands` made its rows; `settings` and `others` stand below them."""

    info: TableInfo
    location: str
    hardware: str
    settings: tuple[PageRow, ...]
    others: tuple[Published, ...]
    commands: tuple[tuple[str, str, str], ...]  # command, machine, profile
    counts: Counts
    narrow: Counts
    wide: Counts

    @property
    def machines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(machine for _, machine, _ in self.commands))


def table_views(
    answers: Sequence[Answer], paper: Sequence[PaperCell], infos: Mapping[str, TableInfo]
) -> tuple[TableView, ...]:
    """Every table with a published number or one of ours, in the order of `infos`, then of the paper's file.

    Raises ValueError where two answers are for one cell.
    """
    given = {answer.entry.key: answer for answer in answers}
    if len(given) != len(answers):
        raise ValueError("two answers are for one cell; choose one before")
    names = dict.fromkeys([cell.table for cell in paper] + [answer.entry.table for answer in answers])
    order = [name for name in infos if name in names] + [name for name in names if name not in infos]
    return tuple(_table(name, given, paper, infos.get(name) or _unknown(name)) for name in order)


def totals(tables: Sequence[TableView]) -> tuple[Counts, Counts, Counts]:
    """Counts over all tables under half, the declared and twice the tolerance."""
    rows = [row for table in tables for row in table.rows if row.counted]
    return (
        Counts.of([row.narrow for row in rows]),
        Counts.of([row.comparison.verdict for row in rows]),
        Counts.of([row.wide for row in rows]),
    )


def _unknown(name: str) -> TableInfo:
    return TableInfo(title=name, short=name, about="")


def _table(
    name: str,
    given: Mapping[tuple[str, str, str, str, str], Answer],
    paper: Sequence[PaperCell],
    info: TableInfo,
) -> TableView:
    published = {(cell.source, *cell.key): cell for cell in paper if cell.table == name}
    mine = {key: answer for key, answer in given.items() if key[0] == name}
    answered = {(answer.entry.source, *answer.entry.place) for answer in mine.values()}
    entries = {key: answer.entry for key, answer in mine.items()}
    for place, cell in published.items():
        if cell.source == "paper" and place not in answered:
            entry = absent(cell, info.missing)
            entries[entry.key] = entry
    first = {place: number for number, place in enumerate(published)}

    def order(entry: Entry) -> tuple[int, bool, int]:
        place = (entry.source, *entry.place)
        return QUESTIONS.index(entry.question), place not in first, first.get(place, 0)

    listed = sorted(entries.values(), key=order)
    shown = [
        mine[entry.key].comparison
        if entry.key in mine
        else compare_entry(
            entry,
            published.get((entry.source, *entry.place)),
            published.get(("torchgpipe", *entry.place)) if entry.source == "paper" else None,
        )
        for entry in listed
    ]
    notes, marks = numbered(map(_notes, shown))
    rows = []
    for entry, comparison, of_row in zip(listed, shown, marks, strict=True):
        cell_of_row = published.get((entry.source, *entry.place))
        rows.append(
            PageRow(
                comparison=comparison,
                kind="ours" if cell_of_row is None else cell_of_row.kind,
                counted=cell_of_row is not None and cell_of_row.counted,
                reason=comparison.reason,
                marks=of_row,
                narrow=judge(cell_of_row, entry, NARROW).verdict,
                wide=judge(cell_of_row, entry, WIDE).verdict,
                answer=mine.get(entry.key),
            )
        )
    used = [row.answer for row in rows if row.answer is not None and row.answer.answers]
    counted = [row for row in rows if row.counted]
    others = [cell for place, cell in published.items() if cell.source != "paper" and place not in answered]
    ours = {row.comparison.place: row.comparison for row in rows if row.comparison.ours is not None}
    main = [published[row.comparison.source, *row.comparison.place] for row in counted] or others
    locations = dict.fromkeys(cell.location for cell in main if cell.location)
    hardware = dict.fromkeys(cell.hardware for cell in published.values() if cell.hardware)
    is_setting = [row.kind != "ours" and not row.counted and row.comparison.ours is None for row in rows]
    return TableView(
        name=name,
        info=info,
        location="; ".join(locations),
        hardware="; ".join(hardware),
        rows=tuple(row for row, setting in zip(rows, is_setting, strict=True) if not setting),
        settings=tuple(row for row, setting in zip(rows, is_setting, strict=True) if setting),
        others=tuple(Published(cell=cell, ours=ours.get(cell.key)) for cell in others),
        notes=notes,
        commands=tuple(dict.fromkeys((a.command, a.machine, a.profile) for a in used)),
        counts=Counts.of([row.comparison.verdict for row in counted]),
        narrow=Counts.of([row.narrow for row in counted]),
        wide=Counts.of([row.wide for row in counted]),
    )


def _notes(comparison: Comparison) -> list[str]:
    """The footnotes, without a reason that stands in the row anyway."""
    return [note for note in comparison.footnotes if note != comparison.reason]
