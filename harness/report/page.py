"""What the report says, before it says how: every published number beside ours, counted and explained.

A pure function of answers and published numbers, so that the HTML page, the markdown file and the table of
cells can't disagree and a test can hold each against the records.

The first screen has the question, an answer in plain words, the paper's claims, and the kinds of evidence.
Its words are data (`results/answer.toml`) with places for numbers, and every number comes from a comparison
or from a fact of the records. A sentence names the verdicts under which it is true; where these have changed
it is left out, so nothing untrue is printed, and `stale` says which need new words. README, the page and the
terminal show one object.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from gpipe_bench.harness import PUBLISHED
from gpipe_bench.harness.compare import absent, judge, peers_of
from gpipe_bench.harness.paper import PaperNumber, PaperTable
from gpipe_bench.harness.report.grid import Grid, fill, without_html
from gpipe_bench.harness.report.side import SideBySide
from gpipe_bench.harness.report.table import (
    Counts,
    Key,
    Table,
    counts_of,
    evidence,
    numbered,
    parts_of,
    range_text,
    scores,
)
from gpipe_bench.harness.units import show
from gpipe_bench.harness.verdict import DIFFERS, QUESTIONS, Comparison, Question, Verdict


class Published(NamedTuple):
    """A number of others that nothing of ours answers. `ours` is our number at the same place, if any."""

    cell: PaperNumber
    comparison: Comparison
    ours: Comparison | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TableView:
    """One table of the page, part by part. `commands` made its rows; `settings` and `others` stand below."""

    name: str
    info: PaperTable
    location: str
    hardware: str
    parts: tuple[Table, ...]
    settings: tuple[Comparison, ...]
    others: tuple[Published, ...]
    notes: tuple[str, ...]
    marks: Mapping[Key, tuple[int, ...]]
    commands: tuple[tuple[str, str, str], ...]  # command, machine, profile

    @property
    def rows(self) -> tuple[Comparison, ...]:
        """Those of all parts."""
        return tuple(row for part in self.parts for row in part.rows)


class Finding(NamedTuple):
    """A line of the summary: rows of one table that share a fate. `all_not_run`: nothing of it was run."""

    table: str
    short: str
    text: str
    all_not_run: bool


class QuestionView(NamedTuple):
    """A question, its scores over all tables, and what holds, differs and is open in each."""

    question: Question
    scores: Counts
    holds: tuple[Finding, ...]
    differs: tuple[Finding, ...]
    undecided: tuple[Finding, ...]


class Machine(NamedTuple):
    """Where numbers come from. `facts` are (label, text) of its environment."""

    name: str
    own: bool
    place: str
    records: int
    facts: tuple[tuple[str, str], ...]


class ExperimentView(NamedTuple):
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
    def cells(self) -> tuple[Comparison, ...]:
        """Those of all tables, without settings and numbers of others."""
        return tuple(row for table in self.tables for row in table.rows)

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
        return sum(cell.profile == "smoke" for cell in self.cells)


def page_of(
    answers: Sequence[Comparison],
    paper: Sequence[PaperNumber],
    infos: Mapping[str, PaperTable],
    facts: Mapping[str, str] = MappingProxyType({}),
    headline: Sequence[Comparison] | None = None,
    summaries: Sequence[tuple[str, ...]] = (),
) -> Page:
    """The page of our answers: every table with a published number or one of ours, in the order of `infos`,
    then of the paper's file, and the errata of the paper, each once.

    The first screen is of `headline`, by default of all answers, of `facts`, and of the `summaries` of the
    tables that were computed at the paper's size.

    Raises ValueError where two answers are for one cell.
    """
    if len({cell.key for cell in answers}) != len(answers):
        raise ValueError("two answers are for one cell; choose one before")
    names = dict.fromkeys([cell.table for cell in paper] + [cell.table for cell in answers])
    tables = tuple(
        _table(
            name,
            [cell for cell in answers if cell.table == name],
            [cell for cell in paper if cell.table == name],
            infos.get(name) or PaperTable(title=name, short=name, about=""),
        )
        for name in dict.fromkeys([*(name for name in infos if name in names), *names])
    )
    cells = [row for table in tables for row in table.rows]
    errata: dict[tuple[str, str], list[str]] = {}
    for cell in paper:
        if cell.erratum and cell.kind != "external":
            errata.setdefault((cell.table, cell.erratum), []).append(f"{cell.row}, {cell.column}")
    return Page(
        tables=tables,
        first=first_screen(cells, facts, summaries)
        if headline is None
        else page_of(headline, paper, infos, facts, summaries=summaries).first,
        questions=tuple(_question(question, tables) for question in counts_of(cells)),
        errata=tuple(
            (table, "; ".join(at) if len(at) <= _MOST_PHRASES else f"{at[0]} and {len(at) - 1} more", text)
            for (table, text), at in errata.items()
        ),
    )


def _table(
    name: str, answers: Sequence[Comparison], paper: Sequence[PaperNumber], info: PaperTable
) -> TableView:
    published = {(*cell.key, cell.source): cell for cell in paper}
    answered = {cell.key[:-1] for cell in answers if cell.verdict != "not judged"}
    peers, listed = peers_of(paper), [*answers]
    for place, cell in published.items():
        if cell.source == "paper" and place not in answered:
            listed.append(judge(cell, absent(cell, info.missing), peer=peers.get(cell.key)))
    first = {place: number for number, place in enumerate(published)}

    def order(cell: Comparison) -> tuple[int, bool, int]:
        place = cell.key[:-1]
        return QUESTIONS.index(cell.question), place not in first, first.get(place, 0)

    rows = sorted(listed, key=order)
    # a reason that stands in the row anyway is no note
    notes, marks = numbered(rows, lambda cell: [note for note in cell.footnotes if note != cell.reason])
    # a setting or a repetition that nothing of ours answers is only context
    is_setting = [c.source == "paper" and c.kind != "ours" and not c.counted and c.ours is None for c in rows]
    ours = {cell.place: cell for cell in rows if cell.ours is not None}
    others = [cell for place, cell in published.items() if cell.source != "paper" and place not in answered]
    papers = [cell for cell in paper if cell.source == "paper"]
    located = [cell for cell in papers if cell.counted] or others
    shown = [cell for cell, context in zip(rows, is_setting, strict=True) if not context]
    return TableView(
        name=name,
        info=info,
        location="; ".join(dict.fromkeys(cell.location for cell in located if cell.location)),
        hardware="; ".join(dict.fromkeys(cell.hardware for cell in papers or others if cell.hardware)),
        parts=parts_of(name, shown, notes, marks),
        settings=tuple(cell for cell, context in zip(rows, is_setting, strict=True) if context),
        others=tuple(Published(cell, judge(cell, absent(cell)), ours.get(cell.key)) for cell in others),
        notes=notes,
        marks=marks,
        commands=tuple(dict.fromkeys((c.command, c.machine, c.profile) for c in rows if c.machine)),
    )


# A line for each table on what holds and differs ------------------------------------------------------------

_MOST_PHRASES = 3


def _question(question: Question, tables: Sequence[TableView]) -> QuestionView:
    mine = [(t, part) for t in tables for part in t.parts if part.part == question]
    return QuestionView(
        question,
        scores(row for _, part in mine for row in part.rows),
        holds=tuple(_findings(mine, ("reproduced", "identity"))),
        differs=tuple(_findings(mine, DIFFERS)),
        undecided=tuple(_findings(mine, ("undecided", "not comparable", "not run"))),
    )


def _findings(mine: Iterable[tuple[TableView, Table]], verdicts: Sequence[Verdict]) -> Iterator[Finding]:
    for table, part in mine:
        phrases, chosen, every = [], [], 0
        for label, rows in part.groups:
            counted = [row for row in rows if row.counted]
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


# The first screen -------------------------------------------------------------------------------------------

PATH = PUBLISHED / "answer.toml"
WORDS: Mapping[Verdict, str] = {
    "reproduced": "agrees", "identity": "agrees", "undecided": "no test", "above": "differs",
    "below": "differs", "not judged": "not judged", "not comparable": "no test", "not run": "not tried",
}  # fmt: skip
"""A claim's answer, by the verdicts on its numbers, one after the other."""
DIGITS = 3


class _Number(msgspec.Struct, forbid_unknown_fields=True):
    place: tuple[str, str, str]
    question: Question = "here"
    source: str = "paper"


class _Sentence(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    true_while: dict[str, tuple[Verdict, ...]] = msgspec.field(default_factory=dict, name="while")


class _Claim(msgspec.Struct, forbid_unknown_fields=True):
    says: str
    paper: str
    answers: tuple[str, ...]
    ours: str
    how: str


class _Words(msgspec.Struct, forbid_unknown_fields=True):
    question: str
    numbers: dict[str, _Number]
    paragraph: tuple[_Sentence, ...]
    claim: tuple[_Claim, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstScreen:
    """What is shown first. `claims` are (claim, paper, ours, how, answer); `stale` needs new words."""

    question: str
    sentences: tuple[str, ...]
    claims: tuple[tuple[str, str, str, str, str], ...]
    evidence: tuple[tuple[str, ...], ...]
    stale: tuple[str, ...] = ()

    CLAIMS = ("claim", "paper", "ours", "how", "answer")
    COUNTS = ("computed", "agree", "differ", "no test", "median off", "rank", "directions")

    @property
    def evidence_grid(self) -> Grid:
        """The four numbers of each table that was computed at the paper's size."""
        return Grid(columns=self.COUNTS, lines=self.evidence, right=frozenset(range(1, len(self.COUNTS))))

    def markdown(self) -> str:
        """For README and the markdown page."""
        claims = Grid(columns=self.CLAIMS, lines=self.claims).markdown()
        said = f"**{self.question}** {' '.join(self.sentences)}"
        return "\n\n".join([said, claims, self.evidence_grid.markdown()])

    def text(self) -> str:
        """For a terminal."""
        lines = []
        for says, paper, ours, how, answer in self.claims:
            lines.append(fill(f"{answer.upper()}: {says} (paper: {paper})", "  ", "  "))
            lines.append(fill(f"{ours}; {how}", "      ", "      "))
        plain = fill(" ".join((self.question, *self.sentences)).replace("*", ""))
        return "\n\n".join([plain, "\n".join(lines), self.evidence_grid.text()])


def first_screen(
    cells: Sequence[Comparison],
    facts: Mapping[str, str],
    summaries: Sequence[tuple[str, ...]] = (),
    path: Path = PATH,
) -> FirstScreen:
    """The words with the numbers of the comparisons and facts.

    What lacks a number is left out, and `stale` names it. Raises ValueError where the file can't be read.
    """
    try:
        words = msgspec.toml.decode(path.read_bytes(), type=_Words)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    at = {cell.key: cell for cell in cells}
    places = {name: (*each.place, each.source, each.question) for name, each in words.numbers.items()}
    found = {name: at[key] for name, key in places.items() if key in at}
    given = dict(facts)
    for name, cell in found.items():
        given |= _said(name, cell)
    stale: list[str] = []

    def filled(text: str) -> str:
        missing = [name for name in re.findall(r"\{([\w. ]+)\}", text) if name not in given]
        if missing:
            stale.append(f"{', '.join(missing)} of {text!r}")
            return ""
        return re.sub(r"\{([\w. ]+)\}", lambda match: given[match[1]], text)

    sentences = []
    for sentence in words.paragraph:
        now = {name: found[name].verdict if name in found else "no number" for name in sentence.true_while}
        other = {name: verdict for name, verdict in now.items() if verdict not in sentence.true_while[name]}
        if other:
            stale.append(f"{other} of {sentence.text!r}")
        elif text := filled(sentence.text):
            sentences.append(text)
    claims = []
    for claim in words.claim:
        answers = [WORDS[found[name].verdict] for name in claim.answers if name in found]
        answer = ", ".join(dict.fromkeys(answers) if len(set(answers)) == 1 else answers) or "not tried"
        said = (filled(text) or "-" for text in (claim.says, claim.paper, claim.ours, claim.how))
        says, paper, ours, how = said
        claims.append((says, paper, ours, how, answer))
    return FirstScreen(
        question=words.question, sentences=tuple(sentences), claims=tuple(claims),
        evidence=tuple(summaries), stale=tuple(stale),
    )  # fmt: skip


def _said(name: str, cell: Comparison) -> dict[str, str]:
    """The ways in which a text may name a number."""
    ours = "-" if cell.ours is None else show(cell.ours, cell.unit, DIGITS)
    said = {name: ours, f"{name}.paper": cell.printed, f"{name}.verdict": cell.verdict}
    if range_text(cell):
        said[f"{name}.range"] = range_text(cell, DIGITS)
    if cell.ours is not None and cell.unit == "ratio":
        said[f"{name}.percent"] = f"{100 * cell.ours:.0f} %"
        said[f"{name}.lost"] = f"{100 * (1 - cell.ours):.0f} %"
        if cell.range_low is not None and cell.range_high is not None:
            said[f"{name}.range_percent"] = f"{100 * cell.range_low:.0f} to {100 * cell.range_high:.0f} %"
    return said


# All of it for other programs -------------------------------------------------------------------------------

COLUMNS = (
    "table", "row", "column", "source", "question", "kind", "printed", "paper", "unit", "ours", "low", "high",
    "range_low", "range_high", "fails_below", "fails_above", "provenance", "verdict", "ratio",
    "reason", "machine", "command",
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
        for cell in (*table.rows, *table.settings, *(other.comparison for other in table.others)):
            writer.writerow([without_html(getattr(cell, name)) for name in COLUMNS])
    return text.getvalue()
