"""The report: one self-contained HTML page, and all its numbers as CSV.

The same records always give the same bytes. The texts of the first screen are data (`results/answer.toml`)
with placeholders for numbers of the records; a missing number is shown as a dash.
"""

from __future__ import annotations

import base64
import csv
import gzip
import io
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import PUBLISHED
from ..compare import absent, judge, peers_of
from ..experiment import Experiment
from ..paper import PaperNumber, PaperTable, percent, show
from ..verdict import ANSWERS, QUESTIONS, Answer, Comparison
from . import table as tables_of_words
from .grid import Grid, fill
from .table import MEANINGS, Table, numbered, parts_of, range_text, spread_text

if TYPE_CHECKING:
    from markupsafe import Markup

# The first screen

PATH = PUBLISHED / "answer.toml"
DIGITS = 3
_PLACE = re.compile(r"\{([\w. ]+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstScreen:
    """The first screen. `claims` are rows with the columns `CLAIMS`."""

    question: str
    paragraphs: tuple[str, ...]
    claims: tuple[tuple[str, ...], ...]

    CLAIMS = ("claim", "paper", "ours", "how", "answer")

    def markdown(self) -> str:
        """Text for README."""
        claims = Grid(columns=self.CLAIMS, lines=self.claims).markdown()
        return "\n\n".join([*self.paragraphs, claims])

    def text(self) -> str:
        """Text for a terminal."""
        lines = []
        for says, paper, ours, how, said in self.claims:
            lines.append(fill(f"{said.upper()}: {says} (paper: {paper})", "  ", "  "))
            lines.append(fill(f"{ours}; {how}", "      ", "      "))
        plain = [fill(text.replace("*", "")) for text in self.paragraphs]
        return "\n\n".join([self.question, *plain, "\n".join(lines)])


def first_screen(cells: Sequence[Comparison], facts: Mapping[str, str], path: Path = PATH) -> FirstScreen:
    """The first screen: the file's texts with the numbers of the comparisons and facts."""
    words = tomllib.loads(path.read_text(encoding="utf-8"))
    at = {cell.key: cell for cell in reversed(cells)}
    found = {}
    for name, each in words["numbers"].items():
        if (key := (*each["place"], "paper", each.get("question", "here"))) in at:
            found[name] = at[key]
    given = dict(facts)
    for name, cell in found.items():
        given[name] = "-" if cell.ours is None else show(cell.ours, cell.unit, DIGITS)
        given[f"{name}.paper"] = cell.printed
        given[f"{name}.range"] = range_text(cell, DIGITS) or spread_text(cell) or "-"
        given[f"{name}.error"] = percent(cell.entry.error) if cell.entry and cell.entry.error else "-"

    def filled(text: str) -> str:
        return _PLACE.sub(lambda match: given.get(match[1], "-"), text)

    claims = []
    for claim in words["claim"]:
        said = [found[name].answer if name in found else "not run" for name in claim["answers"]]
        word = ", ".join(dict.fromkeys(said) if len(set(said)) == 1 else said)
        claims.append((*(filled(claim[name]) for name in ("says", "paper", "ours", "how")), word))
    paragraphs = tuple(map(filled, words["answer"]))
    return FirstScreen(question=words["question"], paragraphs=paragraphs, claims=tuple(claims))


# The page


@dataclass(frozen=True, kw_only=True, slots=True)
class TableView:
    """One table of the page. `commands` are the command, machine and profile of its records."""

    name: str
    info: PaperTable
    location: str
    hardware: str
    parts: tuple[Table, ...]
    notes: tuple[str, ...]
    commands: tuple[tuple[str, str, str], ...]

    @property
    def rows(self) -> tuple[Comparison, ...]:
        """The comparisons of all parts."""
        return tuple(row for part in self.parts for row in part.rows)


class Machine(NamedTuple):
    """A source of records. `facts` describe its environment: (label, text)."""

    name: str
    own: bool
    place: str
    records: int
    facts: tuple[tuple[str, str], ...]


class ExperimentView(NamedTuple):
    """An experiment with its text and pictures. `runs` are (machine, profile, description, records)."""

    experiment: Experiment
    runs: tuple[tuple[str, str, str, str], ...]
    text: str
    pictures: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The whole report; `figure` is the first screen's."""

    tables: tuple[TableView, ...]
    first: FirstScreen
    summaries: Grid
    figure: Any
    experiments: tuple[ExperimentView, ...]
    machines: tuple[Machine, ...]
    warnings: tuple[str, ...]

    @property
    def cells(self) -> tuple[Comparison, ...]:
        """The comparisons of all tables."""
        return tuple(row for table in self.tables for row in table.rows)

    @property
    def smoke(self) -> int:
        """Number of comparisons from smoke runs, which only show that everything runs."""
        return sum(cell.profile == "smoke" for cell in self.cells)


def table_views(
    answers: Sequence[Comparison], paper: Sequence[PaperNumber], infos: Mapping[str, PaperTable]
) -> tuple[TableView, ...]:
    """Every table that has a number of the paper or of ours, in the order of `infos`, then of paper.csv."""
    names = dict.fromkeys([cell.table for cell in paper] + [cell.table for cell in answers])
    views = [
        _table(
            name,
            [cell for cell in answers if cell.table == name],
            [cell for cell in paper if cell.table == name],
            infos.get(name) or PaperTable(title=name, short=name, about=""),
        )
        for name in dict.fromkeys([*(name for name in infos if name in names), *names])
    ]
    return tuple(view for view in views if view.rows)


def _table(
    name: str, answers: Sequence[Comparison], paper: Sequence[PaperNumber], info: PaperTable
) -> TableView:
    """The table with its answers, and a "not run" row for every number of the paper that has none."""
    published = [(*cell.key, cell.source) for cell in paper]
    order, peers = {place: number for number, place in enumerate(published)}, peers_of(paper)
    answered = {cell.key[:-1] for cell in answers if cell.verdict != "not judged"}
    unanswered = [
        judge(cell, absent(cell, info.missing), peer=peers.get(cell.key))
        for place, cell in zip(published, paper, strict=True)
        if place not in answered and cell.source == "paper" and cell.counted
    ]
    told = [cell for cell in answers if cell.counted or cell.ours is not None or cell.source != "paper"]
    rows = sorted(
        [*told, *unanswered],
        key=lambda cell: (QUESTIONS.index(cell.question), order.get(cell.key[:-1], len(order))),
    )
    # the row shows its reason already
    notes, marks = numbered(rows, lambda cell: [note for note in cell.footnotes if note != cell.reason])
    papers = [cell for cell in paper if cell.source == "paper"] or paper
    located = [cell for cell in papers if cell.counted or cell.source != "paper"]
    return TableView(
        name=name,
        info=info,
        location="; ".join(dict.fromkeys(cell.location for cell in located if cell.location)),
        hardware="; ".join(dict.fromkeys(cell.hardware for cell in papers if cell.hardware)),
        parts=parts_of(rows, notes, marks),
        notes=notes,
        commands=tuple(dict.fromkeys((c.command, c.machine, c.profile) for c in rows if c.machine)),
    )


# CSV for other programs

COLUMNS = (
    "table", "row", "column", "source", "question", "kind", "printed", "paper", "unit", "ours", "low", "high",
    "range_low", "range_high", "fails_below", "fails_above", "provenance", "verdict", "answer", "ratio",
    "reason", "machine", "command",
)  # fmt: skip


def cells_csv(tables: Sequence[TableView]) -> str:
    """All cells in the order of the page; a missing number is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for cell in (row for table in tables for row in table.rows):
        writer.writerow([getattr(cell, name) for name in COLUMNS])
    return text.getvalue()


# HTML

TEMPLATES = Path(__file__).resolve().parent / "templates"
MARKS: dict[Answer, str] = {
    "agrees": "✓", "follows": "=", "differs": "≠", "no test": "?", "not judged": "·", "not run": "○",
}  # fmt: skip
"""A symbol for each answer, because not every reader or printer sees colours."""


def html(page: Page) -> str:
    """The page as one file with styles and figures in it; it has no script and loads nothing."""
    import jinja2

    environment: jinja2.Environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    words = tables_of_words
    environment.filters.update(
        ours=lambda cell: show(cell.ours, cell.unit), spread=words.spread_text, ratio=words.ratio_text,
        counts=words.counts_text, key=lambda cell: "|".join(cell.key),
        capital=lambda text: text[:1].upper() + text[1:], slug=lambda text: re.sub(r"[^a-z]+", "-", text),
        marked=_marked, breakable=_breakable,
    )  # fmt: skip
    style, bibtex = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.css", "cite.bib"))
    packed = gzip.compress(cells_csv(page.tables).encode(), mtime=0)  # without a time of day
    return environment.get_template("report.html.j2").render(
        page=page, answers=ANSWERS,
        marks=MARKS, meanings=MEANINGS, asked=words.ASKED, style=style, bibtex=bibtex,
        cells_url=data_url(packed, "application/gzip"),
    )  # fmt: skip


def data_url(content: bytes, kind: str) -> str:
    """The bytes as a data URL, which needs no network."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _marked(text: str) -> Markup:
    """Text as HTML: backticks become code, double asterisks bold, all else is escaped."""
    from markupsafe import Markup, escape

    code = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", code))


def _breakable(text: str) -> Markup:
    """Text as HTML that may be wrapped after `/`, `_` and `=`; copied, it is unchanged."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(escape(piece) for piece in re.split(r"(?<=[/_=])", text))
