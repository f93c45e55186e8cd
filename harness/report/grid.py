"""A table of words: one object for every table that is printed, and the only place that lays columns out.

Plain ASCII rules, no colours and no terminal control, so the same text serves a terminal, a log, a pipe and a
page, where it stands between two markers: what is between them is made anew, the rest stays. Where a width
is given (`width.within`) and the columns do not fit into it, each line is a card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_bench.harness.report.width import cards, fitted, width


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Title, columns, lines of as many cells, and the notes below.

    `right` are the columns that stand at the right, such as numbers.
    """

    title: str = ""
    columns: Sequence[str]
    lines: Sequence[Sequence[object]]
    notes: Sequence[str] = ()
    right: frozenset[int] = frozenset()

    def text(self) -> str:
        """For a terminal."""
        found, widest = self._laid_out("simple"), width()
        if widest is not None and max(map(len, found.split("\n"))) > widest:
            found = cards(self.columns, self.lines)
        title, notes = fitted(self.title), [fitted(note) for note in self.notes]
        return "\n".join([*([title, ""] if title else []), found, *notes])

    def markdown(self) -> str:
        """For a markdown page: the title in bold, pipes escaped."""
        parts = [*([f"**{self.title}**", ""] if self.title else []), self._laid_out("github"), *self.notes]
        return "\n".join(parts)

    def _laid_out(self, style: str) -> str:
        from tabulate import tabulate

        lines: list[Sequence[object]] = [self.columns, *self.lines]
        if style == "github":
            lines = [[escaped(str(cell)) for cell in line] for line in lines]
        align = ["right" if place in self.right else "left" for place in range(len(self.columns))]
        columns, *rest = lines
        return str(
            tabulate(
                rest, columns, tablefmt=style, colalign=align if self.right else None, disable_numparse=True
            )
        )


def numbers(columns: Sequence[str]) -> frozenset[int]:
    """The places of all columns but the first, which says what the numbers behind it are."""
    return frozenset(range(1, len(columns)))


def escaped(text: str) -> str:
    """Text for a cell of a markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def between(text: str, begin: str, end: str, new: str, page: str) -> str:
    """The text with `new` between the markers. Raises ValueError naming the page where one is lost."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{page} has lost its markers: it needs {begin.strip()!r} and {end!r}")
    return f"{before}{begin}{new}{end}{after}"
