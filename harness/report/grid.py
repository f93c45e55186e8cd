"""Lays out tables and paragraphs as plain text, for terminals, logs, pipes and pages. Every printed table is
a `Grid`, so that only this module computes columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from operator import gt

PROSE = 110
"""Width of a paragraph. Tables, code and commands to copy keep their own width."""
SCREEN = 100
"""Width of what `compare` and `run` print by default."""
HEADING = 2  # columns that tabulate adds to a heading
NARROWEST = 14
"""Least width to which a table's column is wrapped."""
_width: ContextVar[int | None] = ContextVar("width", default=None)


@contextmanager
def within(width: int | None) -> Iterator[None]:
    """Limits text that is laid out in this block to `width` columns, as far as its words allow."""
    token = _width.set(width)
    try:
        yield
    finally:
        _width.reset(token)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A table: title, columns, lines with a cell for each column, and notes below.

    `right` are the indices of right-aligned columns, such as numbers.
    """

    title: str = ""
    columns: Sequence[str]
    lines: Sequence[Sequence[object]]
    notes: Sequence[str] = ()
    right: frozenset[int] = frozenset()

    def text(self) -> str:
        """The table as text for a terminal."""
        title = [self.title, ""] if self.title else []
        parts = [part._laid_out("simple", part.columns, part.lines) for part in self._fitted(_width.get())]
        return "\n".join([*title, "\n\n".join(parts), *self.notes])

    def _fitted(self, width: int | None) -> list[Grid]:
        """The table with its widest columns wrapped; if still too wide, as several tables that all begin with
        the columns without a heading, or with the first column.
        """
        rows = [[str(cell) for cell in row] for row in (self.columns, *self.lines)]
        spare = [HEADING] + [0] * len(self.lines)
        widths = [
            max(
                len(line) + more
                for cell, more in zip(column, spare, strict=True)
                for line in cell.split("\n")
            )
            for column in zip(*rows, strict=True)
        ]
        if width is None or sum(widths) + 2 * len(widths) - 2 <= width:
            return [self]
        first = max(1, next((i for i, name in enumerate(rows[0]) if name), 1))
        least = [NARROWEST + 10 * (place < first) for place in range(len(widths))]
        while sum(widths) + 2 * len(widths) - 2 > width and any(map(gt, widths, least)):
            widest = max(range(len(widths)), key=lambda place: (widths[place] > least[place], widths[place]))
            widths[widest] -= 1
        columns, *lines = [
            ["\n".join(_wrapped(cell, max(1, most - more))) for cell, most in zip(row, widths, strict=True)]
            for row, more in zip(rows, spare, strict=True)
        ]
        room = width - sum(widths[:first]) - 2 * first + 2
        groups: list[list[int]] = [[]]
        for place in range(first, len(widths)):
            if groups[-1] and sum(widths[i] + 2 for i in (*groups[-1], place)) > room:
                groups.append([])
            groups[-1].append(place)
        return [
            replace(
                self, columns=[columns[i] for i in kept], lines=[[line[i] for i in kept] for line in lines],
                right=frozenset(place for place, i in enumerate(kept) if i in self.right),
            )
            for kept in ([*range(first), *group] for group in groups)
        ]  # fmt: skip

    def markdown(self) -> str:
        """The table in markdown: the title in bold, pipes escaped."""
        title = [f"**{self.title}**", ""] if self.title else []
        columns, *lines = [
            [str(cell).replace("|", "\\|").replace("\n", " ") for cell in line]
            for line in (self.columns, *self.lines)
        ]
        return "\n".join([*title, self._laid_out("github", columns, lines), *self.notes])

    def _laid_out(self, style: str, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
        from tabulate import tabulate

        align = ["right" if place in self.right else "left" for place in range(len(self.columns))]
        aligned = align if self.right else None
        return str(tabulate(lines, columns, tablefmt=style, colalign=aligned, disable_numparse=True))


def numbers(columns: Sequence[str]) -> frozenset[int]:
    """The indices of all columns but the first, which labels the numbers."""
    return frozenset(range(1, len(columns)))


def numbers_text(title: str, columns: Sequence[str], lines: Sequence[Sequence[object]], *notes: str) -> str:
    """A table of numbers for a terminal; empty text without lines."""
    found = Grid(title=title, columns=columns, lines=lines, notes=notes, right=numbers(columns))
    return found.text() if lines else ""


def fill(text: str, first: str = "", rest: str = "") -> str:
    """One paragraph, wrapped between words; its first line begins with `first`, the others with `rest`."""
    return textwrap.fill(
        text, _width.get() or PROSE, initial_indent=first, subsequent_indent=rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _wrapped(cell: str, width: int) -> list[str]:
    """The cell's lines, wrapped at spaces to `width`."""
    return [
        part
        for line in cell.split("\n")
        for part in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
    ]
