"""A table of words: one object for every table that is printed, and the only place that lays columns out.

Plain ASCII rules, no colours and no terminal control, so the same text serves a terminal, a log, a pipe and a
page, where it stands between two markers: what is between them is made anew, the rest stays.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

PROSE = 110
"""Columns of a paragraph. Tables, code and commands that are to be copied are as wide as they are."""


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
        title = [self.title, ""] if self.title else []
        return "\n".join([*title, self._laid_out("simple", self.columns, self.lines), *self.notes])

    def markdown(self) -> str:
        """For a markdown page: the title in bold, pipes escaped."""
        title = [f"**{self.title}**", ""] if self.title else []
        columns, *lines = [[escaped(str(cell)) for cell in line] for line in (self.columns, *self.lines)]
        return "\n".join([*title, self._laid_out("github", columns, lines), *self.notes])

    def _laid_out(self, style: str, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
        from tabulate import tabulate

        align = ["right" if place in self.right else "left" for place in range(len(self.columns))]
        aligned = align if self.right else None
        return str(tabulate(lines, columns, tablefmt=style, colalign=aligned, disable_numparse=True))


def numbers(columns: Sequence[str]) -> frozenset[int]:
    """The places of all columns but the first, which says what the numbers behind it are."""
    return frozenset(range(1, len(columns)))


def fill(text: str, first: str = "", rest: str = "") -> str:
    """One paragraph, wrapped between words; `first` and `rest` are what its lines begin with."""
    return textwrap.fill(
        text, PROSE, initial_indent=first, subsequent_indent=rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


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
