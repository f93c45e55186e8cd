"""The first screen: each question with its reply, and a line for each table on what holds and differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpipe_bench.harness.paper import PaperCell
from gpipe_bench.harness.report.page import PageRow, Scores, TableView, totals
from gpipe_bench.harness.report.replies import Reply, replies_to
from gpipe_bench.harness.verdict import DIFFERS, Question, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A line of the summary: rows of one table that share a fate. `all_not_run`: nothing of it was run."""

    table: str
    short: str
    text: str
    all_not_run: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionView:
    """The reply to a question, and what holds, what differs and what is open, from the tables alone."""

    reply: Reply
    scores: Scores
    holds: tuple[Finding, ...] = ()
    differs: tuple[Finding, ...] = ()
    undecided: tuple[Finding, ...] = ()

    @property
    def question(self) -> Question:
        return self.reply.question


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Both questions in their order, and the errata of the paper."""

    questions: tuple[QuestionView, ...] = ()
    errata: tuple[tuple[str, str, str, str], ...] = ()  # table, its short name, cells, erratum


def summary(tables: Sequence[TableView], paper: Sequence[PaperCell]) -> Summary:
    """The findings of the first screen and the errata of the paper, each once."""
    scores = totals(tables)
    replies = replies_to(row.comparison for table in tables for row in table.rows)
    errata: dict[tuple[str, str], list[str]] = {}
    for cell in paper:
        if cell.erratum and cell.kind != "external":
            errata.setdefault((cell.table, cell.erratum), []).append(f"{cell.row}, {cell.column}")
    short = {table.name: table.info.short for table in tables}
    return Summary(
        questions=tuple(_question(reply, scores[reply.question], tables) for reply in replies),
        errata=tuple((table, short[table], _places(cells), text) for (table, text), cells in errata.items()),
    )


_SORTS: dict[str, tuple[Verdict, ...]] = {
    "holds": ("reproduced", "identity"),
    "differs": DIFFERS,
    "undecided": ("undecided", "not comparable", "not run"),
}
_MOST_PHRASES = 3


def _question(reply: Reply, scores: Scores, tables: Sequence[TableView]) -> QuestionView:
    found: dict[str, list[Finding]] = {sort: [] for sort in _SORTS}
    for table in tables:
        for part in table.parts:
            if part.part == reply.question:
                for sort, finding in _findings(table, part.groups):
                    found[sort].append(finding)
    return QuestionView(
        reply=reply,
        scores=scores,
        holds=tuple(found["holds"]),
        differs=tuple(found["differs"]),
        undecided=tuple(found["undecided"]),
    )


def _findings(
    table: TableView, groups: Sequence[tuple[str, Sequence[PageRow]]]
) -> Iterable[tuple[str, Finding]]:
    counted = [(label, [row for row in rows if row.comparison.counted]) for label, rows in groups]
    every = [row for _, rows in counted for row in rows]
    for sort, verdicts in _SORTS.items():
        chosen = [
            (label, rows, [r for r in rows if r.comparison.verdict in verdicts]) for label, rows in counted
        ]
        phrases = [_phrase(label, these, len(rows)) for label, rows, these in chosen if these]
        if phrases:
            places = [row for _, _, these in chosen for row in these]
            yield (
                sort,
                Finding(
                    table=table.name,
                    short=table.info.short,
                    text=_joined(phrases, places, len(every)),
                    all_not_run=all(row.comparison.verdict == "not run" for row in every),
                ),
            )


def _phrase(label: str, rows: Sequence[PageRow], of: int) -> str:
    """`peak activation memory ×0.78 to ×5.5 (3 above, 2 below)`."""
    counts = Counter(row.comparison.verdict for row in rows)
    if set(counts) == {"reproduced"}:
        return f"{label} ({len(rows)} of {of})"
    return f"{label}{_span(rows)} ({_each(counts)})"


def _each(counts: Counter[Verdict]) -> str:
    words = {"identity": ("identity", "identities")}
    return ", ".join(f"{n} {words.get(v, (v, v))[n > 1]}" for v, n in counts.items())


def _span(rows: Sequence[PageRow]) -> str:
    ratios = sorted(
        row.comparison.ratio
        for row in rows
        if row.comparison.ratio is not None and row.comparison.verdict in DIFFERS
    )
    if not ratios:
        return ""
    low, high = f"×{ratios[0]:.2g}", f"×{ratios[-1]:.2g}"
    return f" {low}" if low == high else f" {low} to {high}"


def _joined(phrases: Sequence[str], rows: Sequence[PageRow], of: int) -> str:
    counts = Counter(row.comparison.verdict for row in rows)
    if len(rows) == of and len(counts) == 1 and (len(phrases) > 1 or "not run" in counts):
        (verdict,) = counts
        return f"all {of}" if verdict == "reproduced" else f"all {of} {verdict}{_span(rows)}"
    if len(phrases) <= _MOST_PHRASES:
        return "; ".join(phrases)
    return f"{_each(counts)} of {of}{_span(rows)}"


def _places(cells: Sequence[str]) -> str:
    return "; ".join(cells) if len(cells) <= _MOST_PHRASES else f"{cells[0]} and {len(cells) - 1} more"
