"""Both questions answered in short: how many numbers came out how, on what evidence, what differs most.

As published and here stand one after the other and are never added up. Which differences are named is a rule
and no choice: those whose ranges are furthest apart.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpipe_bench.harness.report.counts import ASKED, Counts, counts_of, evidence
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.report.table import ours_text, range_text, times_text
from gpipe_bench.harness.report.width import fill, indented
from gpipe_bench.harness.verdict import Comparison, Question, Verdict

MOST = 3
RULE = (
    "The strongest differences are the judged numbers above or below whose range lies furthest from what the "
    "paper admits, by the factor between the nearest ends: a wide range makes no difference look strong. "
    "Where there is no number of ours there is no factor, and no place in this list."
)
"""How the differences that are named were chosen."""

_COLUMNS: tuple[Verdict, ...] = ("reproduced", "undecided", "above", "below", "identity")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What the counted numbers say to one question.

    `reproduced` are the tables in which anything judged is, each with how many of how many; `strongest` are
    the differences named, largest first.
    """

    question: Question
    counts: Counts
    reproduced: tuple[tuple[str, int, int], ...]
    strongest: tuple[Comparison, ...]

    @property
    def asked(self) -> str:
        """The question in words."""
        return ASKED[self.question]

    @property
    def columns(self) -> tuple[Verdict, ...]:
        """The verdicts that its table by evidence shows: those of what is judged, and identities if any."""
        return _COLUMNS if self.counts["identity"] else _COLUMNS[:-1]


def replies_to(cells: Iterable[Comparison]) -> tuple[Reply, ...]:
    """The replies to the questions that any counted cell is about, in order."""
    found = list(cells)
    replies = []
    for question, counts in counts_of(found).items():
        mine = [cell for cell in found if cell.question == question]
        tables = {
            name: Counts.of_counted(cell for cell in mine if cell.table == name)
            for name in dict.fromkeys(cell.table for cell in mine)
        }
        replies.append(
            Reply(
                question=question,
                counts=counts,
                reproduced=tuple(
                    (name, held, each.judged)
                    for name, each in tables.items()
                    if (held := each.judged_as("reproduced"))
                ),
                strongest=strongest(mine),
            )
        )
    return tuple(replies)


def strongest(cells: Iterable[Comparison], most: int = MOST) -> tuple[Comparison, ...]:
    """The judged cells that differ by the largest factors, see RULE; of equals the first."""
    judged = [cell for cell in cells if cell.counted and evidence(cell) != "identity"]
    differing = [(abs(math.log(cell.factor)), cell) for cell in judged if cell.factor]
    return tuple(cell for _, cell in sorted(differing, key=lambda pair: -pair[0])[:most])


def apart_text(cell: Comparison) -> str:
    """`above by at least a factor of 5.4`; only the verdict where there is no factor."""
    if not cell.factor:
        return cell.verdict
    return f"{cell.verdict} by at least a factor of {times_text(max(cell.factor, 1 / cell.factor))}"


def difference_text(cell: Comparison) -> str:
    """`34.51 GB where the paper has 6.26GB: above by at least a factor of 5.5; nothing was tried ...`."""
    ours = f"{ours_text(cell)} ({range_text(cell)})" if range_text(cell) else ours_text(cell)
    return f"{ours} where the paper has {cell.paper_text}: {apart_text(cell)}; {cell.why}"


def replies_text(cells: Sequence[Comparison]) -> str:
    """Both replies for a terminal; empty where no number of the paper is asked for."""
    parts = []
    for reply in replies_to(cells):
        lines = [f"{reply.question.upper()}: {reply.asked}", f"  {reply.counts}"]
        if reply.counts.present:
            with indented(2):
                lines += ["", textwrap.indent(_evidence(reply).text(), "  ")]
        if reply.reproduced:
            lines += ["", fill(f"reproduced: {_reproduced(reply, {})}", "  ", "    ")]
        if reply.strongest:
            lines += ["", "  strongest differences:"]
            lines += [
                fill(text, f"  {n}. ", "     ") for n, text in enumerate(_differences(reply, {}), start=1)
            ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def replies_markdown(cells: Sequence[Comparison], names: Mapping[str, str] | None = None) -> str:
    """The same for a markdown page. `names` are those of the tables in words, by the name of paper.csv."""
    parts = []
    for reply in replies_to(cells):
        parts += [f"**{reply.question.capitalize()}**: {reply.asked}", f"{str(reply.counts).capitalize()}."]
        if reply.counts.present:
            parts.append(_evidence(reply).markdown())
        if reply.reproduced:
            parts.append(f"Reproduced: {_reproduced(reply, names or {})}.")
        if reply.strongest:
            lines = [f"{n}. {text}" for n, text in enumerate(_differences(reply, names or {}), start=1)]
            parts += ["The strongest differences:", "\n".join(lines)]
    return "\n\n".join(parts)


def _evidence(reply: Reply) -> Grid:
    """A line for each evidence there is, a column for each verdict."""
    lines = [
        [name, *(reply.counts.at(name, verdict) or "-" for verdict in reply.columns)]
        for name in reply.counts.present
    ]
    right = frozenset(range(1, len(reply.columns) + 1))
    return Grid(columns=["", *reply.columns], lines=lines, right=right)


def _reproduced(reply: Reply, names: Mapping[str, str]) -> str:
    return "; ".join(f"{names.get(table, table)} {held} of {of}" for table, held, of in reply.reproduced)


def _differences(reply: Reply, names: Mapping[str, str]) -> list[str]:
    return [
        f"{names.get(cell.table, cell.table)}, {cell.row}, {cell.column}: {difference_text(cell)}"
        for cell in reply.strongest
    ]
