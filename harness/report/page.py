"""What the report says, before it says how: every published number beside ours, counted and explained.

A pure function of answers and published numbers, so that the HTML page and the markdown file can't disagree
and a test can hold either against the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpipe_bench.harness.compare import absent, by_place, peers_of
from gpipe_bench.harness.paper import PaperCell
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.counts import Counts, evidence
from gpipe_bench.harness.report.table import PARTS, Part, Row, Table, numbered, part_of
from gpipe_bench.harness.verdict import QUESTIONS, Comparison, Entry, Question, Verdict, judge

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
    verdicts with every range half and twice as wide.
    """

    reason: str
    narrow: Verdict
    wide: Verdict
    answer: Answer | None

    @property
    def machine(self) -> str | None:
        """Where its number comes from; None where there is none."""
        return self.answer.machine if self.answer is not None and self.answer.answers else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A number of others that nothing of ours answers. `ours` is our number at the same place, if any."""

    cell: PaperCell
    comparison: Comparison
    ours: Comparison | None


@dataclass(frozen=True, slots=True)
class Scores:
    """Counts of the same numbers as judged, and with every range half and twice as wide."""

    counts: Counts
    narrow: Counts
    wide: Counts

    @classmethod
    def of(cls, rows: Iterable[PageRow]) -> Scores:
        """Of the rows that count."""
        counted = [row for row in rows if row.comparison.counted]
        rests_on = [evidence(row.comparison) for row in counted]

        def of(verdicts: Iterable[Verdict]) -> Counts:
            return Counts.of(zip(rests_on, verdicts, strict=True))

        return cls(
            of(row.comparison.verdict for row in counted),
            of(row.narrow for row in counted),
            of(row.wide for row in counted),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartView(Table[PageRow]):
    """What a table says to one question, or holds against the numbers of others."""

    scores: Scores

    @property
    def run(self) -> bool:
        """Whether it says more than that nothing of it was run."""
        return any(row.comparison.verdict != "not run" for row in self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableView:
    """One table of the page, part by part. `commands` made its rows; `settings` and `others` stand below."""

    name: str
    info: TableInfo
    location: str
    hardware: str
    parts: tuple[PartView, ...]
    settings: tuple[PageRow, ...]
    others: tuple[Published, ...]
    notes: tuple[str, ...]
    commands: tuple[tuple[str, str, str], ...]  # command, machine, profile

    @property
    def rows(self) -> tuple[PageRow, ...]:
        """Those of all parts."""
        return tuple(row for part in self.parts for row in part.rows)

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


def totals(tables: Sequence[TableView]) -> dict[Question, Scores]:
    """The scores of each question over all tables."""
    rows = [row for table in tables for row in table.rows]
    return {q: Scores.of(row for row in rows if row.comparison.question == q) for q in QUESTIONS}


def _unknown(name: str) -> TableInfo:
    return TableInfo(title=name, short=name, about="")


def _table(
    name: str,
    given: Mapping[tuple[str, str, str, str, str], Answer],
    paper: Sequence[PaperCell],
    info: TableInfo,
) -> TableView:
    cells = [cell for cell in paper if cell.table == name]
    published, peers = by_place(cells), peers_of(cells)
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
        else judge(
            published.get((entry.source, *entry.place)),
            entry,
            peer=peers.get(entry.place) if entry.source == "paper" else None,
        )
        for entry in listed
    ]
    notes, marks = numbered(map(_notes, shown))
    rows = [
        PageRow(
            comparison=comparison,
            reason=comparison.reason,
            marks=of_row,
            narrow=judge(published.get((entry.source, *entry.place)), entry, NARROW).verdict,
            wide=judge(published.get((entry.source, *entry.place)), entry, WIDE).verdict,
            answer=mine.get(entry.key),
        )
        for entry, comparison, of_row in zip(listed, shown, marks, strict=True)
    ]
    used = [row.answer for row in rows if row.answer is not None and row.answer.answers]
    others = [cell for place, cell in published.items() if cell.source != "paper" and place not in answered]
    ours = {row.comparison.place: row.comparison for row in rows if row.comparison.ours is not None}
    papers = [cell for cell in published.values() if cell.source == "paper"]
    locations = dict.fromkeys(
        cell.location for cell in [each for each in papers if each.counted] or others if cell.location
    )
    hardware = dict.fromkeys(cell.hardware for cell in papers or others if cell.hardware)
    settings = [row for row in rows if _is_setting(row.comparison)]
    return TableView(
        name=name,
        info=info,
        location="; ".join(locations),
        hardware="; ".join(hardware),
        parts=tuple(
            PartView(name=name, part=part, rows=tuple(found), notes=notes, scores=Scores.of(found))
            for part in PARTS
            if (found := [r for r in rows if _shown_in(part, r.comparison)])
        ),
        settings=tuple(settings),
        others=tuple(
            Published(cell=cell, comparison=judge(cell, absent(cell)), ours=ours.get(cell.key))
            for cell in others
        ),
        notes=notes,
        commands=tuple(dict.fromkeys((a.command, a.machine, a.profile) for a in used)),
    )


def _shown_in(part: Part, cell: Comparison) -> bool:
    return part_of(cell) == part and not _is_setting(cell)


def _is_setting(cell: Comparison) -> bool:
    """Whether it is only context: a setting or a repetition that nothing of ours answers."""
    return cell.source == "paper" and cell.kind != "ours" and not cell.counted and cell.ours is None


def _notes(comparison: Comparison) -> list[str]:
    """The footnotes, without a reason that stands in the row anyway."""
    return [note for note in comparison.footnotes if note != comparison.reason]
