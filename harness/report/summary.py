"""The first screen: what holds, what differs and what was not decided, in a line for each table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_bench.harness.judging.paper import PaperCell
from gpipe_bench.harness.judging.verdict import DIFFERS, Verdict
from gpipe_bench.harness.report.page import PageRow, TableView


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A line of the summary: rows of one table that share a fate. `all_not_run`: nothing of it was run."""

    table: str
    short: str
    text: str
    all_not_run: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What holds, what doesn't, and what was not decided, from the tables alone."""

    holds: tuple[Finding, ...] = ()
    differs: tuple[Finding, ...] = ()
    undecided: tuple[Finding, ...] = ()
    errata: tuple[tuple[str, str, str, str], ...] = ()  # table, its short name, cells, erratum


def summary(tables: Sequence[TableView], paper: Sequence[PaperCell]) -> Summary:
    """The findings of the first screen and the errata of the paper, each once."""
    found: dict[str, list[Finding]] = {"holds": [], "differs": [], "undecided": []}
    for table in tables:
        sorts: dict[str, list[str]] = {"holds": [], "differs": [], "undecided": []}
        places: dict[str, list[PageRow]] = {"holds": [], "differs": [], "undecided": []}
        for label, rows in table.groups:
            counted = [row for row in rows if row.counted]
            for sort, verdicts in _SORTS.items():
                these = [row for row in counted if row.comparison.verdict in verdicts]
                if these:
                    sorts[sort].append(_phrase(label, these, len(counted)))
                    places[sort] += these
        for sort, phrases in sorts.items():
            if phrases:
                text = _joined(phrases, places[sort], sum(row.counted for row in table.rows))
                found[sort].append(
                    Finding(
                        table=table.name,
                        short=table.info.short,
                        text=text,
                        all_not_run=table.counts["not run"] == table.counts.total,
                    )
                )
    errata: dict[tuple[str, str], list[str]] = {}
    for cell in paper:
        if cell.erratum and cell.kind != "external":
            errata.setdefault((cell.table, cell.erratum), []).append(f"{cell.row}, {cell.column}")
    short = {table.name: table.info.short for table in tables}
    listed = tuple((table, short[table], _places(cells), text) for (table, text), cells in errata.items())
    return Summary(
        holds=tuple(found["holds"]),
        differs=tuple(found["differs"]),
        undecided=tuple(found["undecided"]),
        errata=listed,
    )


_SORTS: dict[str, tuple[Verdict, ...]] = {
    "holds": ("reproduced", "identity"),
    "differs": DIFFERS,
    "undecided": ("undecided", "not comparable", "not run"),
}
_MOST_PHRASES = 3


def _phrase(label: str, rows: Sequence[PageRow], of: int) -> str:
    """`peak activation memory ×0.78 to ×5.5 (5 of 5 deviate)`."""
    counts = Counter(row.comparison.verdict for row in rows)
    if set(counts) == {"reproduced"}:
        return f"{label} ({len(rows)} of {of})"
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{label}{_span(rows)} ({words})"


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
    each = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{each} of {of}{_span(rows)}"


def _places(cells: Sequence[str]) -> str:
    return "; ".join(cells) if len(cells) <= _MOST_PHRASES else f"{cells[0]} and {len(cells) - 1} more"
