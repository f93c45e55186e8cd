"""How wide text for people may be, and how text, tables and drawings get into that width.

A terminal cuts long lines anywhere, and a table whose lines are cut cannot be read. So whoever prints says
once how wide it may be (`within`), and whatever is laid out below that keeps to it: tables become cards,
prose is wrapped between words, drawings are folded. Without a width, as in a file or a pipe, everything is as
wide as it is. Words, code and commands that are to be copied stay in one piece.

    width 24          plan  step  peak GiB      becomes      plan: pp 2, 1f1b
                      ----  ----  --------                   step: 1.2 s
"""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from itertools import groupby
from typing import IO, Any

LEAST, PROSE = 20, 110
"""Columns: narrower ones are taken as this many; and of prose where there is no width."""

_WIDTH: ContextVar[int | None] = ContextVar("width", default=None)
_MARKER = re.compile(r"\s*(?:\[\d+\] |\d+\. |- |-> )?")
_DRAWN = re.compile(r"\s*\w+ +\d+ \| ")


def width() -> int | None:
    """Columns that text may take; None where it may be as wide as it is."""
    return _WIDTH.get()


def width_of(stream: IO[Any]) -> int | None:
    """What COLUMNS says, else the terminal that the stream is; None for a file or a pipe."""
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError, AttributeError):
        return None


@contextlib.contextmanager
def within(columns: int | None) -> Iterator[None]:
    """Everything that is laid out inside takes at most that many columns."""
    token = _WIDTH.set(None if columns is None else max(columns, LEAST))
    try:
        yield
    finally:
        _WIDTH.reset(token)


def indented(columns: int) -> contextlib.AbstractContextManager[None]:
    """Inside, so many columns fewer, for text that is indented afterwards."""
    now = width()
    return within(None if now is None else now - columns)


def fill(text: str, first: str = "", rest: str = "") -> str:
    """One paragraph, wrapped between words; `first` and `rest` are what its lines begin with."""
    return textwrap.fill(
        text, min(width() or PROSE, PROSE), initial_indent=first, subsequent_indent=rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def labelled(label: str, text: str) -> str:
    """A label with its text beside it, wrapped there, or below it where that leaves too little room."""
    now = width()
    if now is None or len(label) + len(text) <= now:
        return f"{label}{text}"
    text = text.strip()
    if 2 * len(label) > now:
        indent = " " * (len(label) - len(label.lstrip()) + 2)
        below = _wrapped(text, now, indent, indent)
        return below if not label.strip() else f"{fitted(label.rstrip())}\n{below}"
    return _wrapped(text, now, label, " " * len(label))


def fitted(text: str) -> str:
    """Lines that are too long wrapped under their own beginning, drawings folded; the others as they are."""
    now = width()
    if now is None:
        return text
    found: list[str] = []
    for is_drawn, alike in groupby(text.split("\n"), lambda line: _DRAWN.match(line) is not None):
        lines = list(alike)
        found += _folded(lines, now) if is_drawn else [_line(line, now) for line in lines]
    return "\n".join(found)


def cards(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A table as a block for each line: cells without a heading first, then each with the column's name."""
    blocks = []
    for line in lines:
        cells = [(name, " ".join(str(cell).split())) for name, cell in zip(columns, line, strict=False)]
        heads = [cell for name, cell in cells if not name and cell]
        block = [labelled("", " ".join(heads))] if heads else []
        block += [labelled(f"{'  ' * bool(heads)}{name}: ", cell) for name, cell in cells if name and cell]
        blocks.append("\n".join(block))
    return "\n\n".join(blocks)


def _line(line: str, now: int) -> str:
    if len(line) <= now:
        return line
    marker = _MARKER.match(line)
    indent = " " * (len(marker[0]) if marker and marker[0].strip() else len(line) - len(line.lstrip()) + 2)
    return _wrapped(line.strip(), now, line[: len(line) - len(line.lstrip())], indent)


def _wrapped(text: str, now: int, first: str, rest: str) -> str:
    return textwrap.fill(
        text, now, initial_indent=first, subsequent_indent=rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _folded(lines: Sequence[str], now: int) -> list[str]:
    """Rows of equal slots behind their labels, in pieces of as many slots as there is room for."""
    if all(len(line) <= now for line in lines):
        return list(lines)
    labels = [_DRAWN.match(line)[0] for line in lines]  # type: ignore[index]
    slots = [line[len(label) :].split() for line, label in zip(lines, labels, strict=True)]
    wide = 1 + max((len(slot) for row in slots for slot in row), default=1)
    count = max(1, (now - max(map(len, labels)) + 1) // wide)
    longest = max(map(len, slots))
    found: list[str] = []
    for start in range(0, longest, count):
        found += [""] * bool(start)
        for label, row in zip(labels, slots, strict=True):
            piece = " ".join(slot.ljust(wide - 1) for slot in row[start : start + count])
            found.append(f"{label}{piece}".rstrip())
    return found
