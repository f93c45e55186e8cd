"""The published numbers, as printed: results/paper.csv, checked.

The file keeps each number as text, so that the interval it stands for follows from its digits. It also says
what kind of number each is: one that follows by arithmetic from others confirms nothing but the arithmetic, and
one that is printed twice is still one number.
"""

from __future__ import annotations

import csv
import functools
import io
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import msgspec

from gpipe_bench.harness import PUBLISHED
from gpipe_bench.harness.units import UNITS, parse_printed

PATH = PUBLISHED / "paper.csv"
TABLES = PUBLISHED / "tables.toml"
OURS = ("paper", "theory")
"""Sources of numbers that count; all other numbers are somebody else's, of the kind `external`."""
TO_ANSWER = ("result", "claim", "identity")
"""Kinds of which a missing number of ours is worth a line; the others are context."""
SENTENCES = "claims-text"
"""The table of the paper's sentences."""
SETTING = "a setting of the paper, not a result"


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperNumber:
    """One published number: a row of the file, with its acceptance interval.

    Args:
        table, row, column: the place, unique within a source
        value: in `unit` (counts in ones: "82M" parameters are 82e6)
        printed: as the paper prints it
        exact: a count or a definition, which has no rounding
        kind: what a number of ours would be held against, or context
        hardware: on what it was obtained
        source: whose number it is: the paper's, of a formula ("theory"), or somebody else's by name
        location: where it is printed
        form: how it is given: printed, in words only, in a figure without a label, by what other numbers of
            the paper leave, or as a formula that is evaluated here
        error: how far a number may be off whose digits do not say it: one read off, or made of rounded ones
        same_as: the place of the number that this one repeats
        needs: what an answer would take
        bound: where the paper only limits the number
        corrected_printed: the value that the paper's own erratum gives, column `corrected_value`
        erratum: why it is corrected, or what the paper contradicts there
        note: for a footnote
    """

    table: str
    row: str
    column: str
    value: float
    printed: str = ""
    unit: str
    exact: bool = False
    kind: Literal["result", "claim", "identity", "setting", "external"]
    hardware: str = ""
    source: str
    location: str = ""
    form: Literal["", "words", "read off", "derived", "evaluated"] = ""
    error: float | None = None
    same_as: tuple[str, str, str] | None = None
    needs: str = ""
    bound: Literal["", "at most", "at least"] = ""
    corrected_printed: str = ""
    erratum: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unit is {self.unit!r}, allowed: {', '.join(UNITS)}")
        if (self.kind == "external") == (self.source in OURS):
            raise ValueError(
                f"kind {self.kind!r} with source {self.source!r}: external are all numbers but those of "
                f"{' and '.join(OURS)}"
            )
        if self.corrected_printed and not self.erratum:
            raise ValueError("a number that is corrected needs the erratum that says why")
        if self.form == "evaluated" and self.kind != "identity":
            raise ValueError(f"a formula that is evaluated is an identity, not a {self.kind}")
        if self.error is None and self.form in ("read off", "derived"):
            raise ValueError(f"a number that is {self.form} needs its error; its digits do not give it")
        by_digits = self.exact or (self.form in ("", "words") and not self.corrected_printed)
        if self.error is not None and by_digits:
            raise ValueError("an error is for what is read off, derived, evaluated or corrected")
        if self.error is not None and not 0 < self.error < math.inf:
            raise ValueError(f"error is {self.error}, not a positive number in {self.unit}")
        if self.form == "words":
            if not (math.isfinite(self.value) and self.printed):
                raise ValueError("a number in words needs the words as printed and the value they stand for")
        elif self.value != parse_printed(self.printed, self.unit)[0]:
            raise ValueError(f"value {self.value:.15g} is not what is printed, {self.printed!r}")

    @property
    def key(self) -> tuple[str, str, str]:
        """Table, row and column."""
        return (self.table, self.row, self.column)

    @property
    def rounding(self) -> float:
        """How far `value` may be off: half a unit of the last printed digit, or the error of the file."""
        if self.exact or self.form == "words":
            return 0.0
        by_digits = self.error is None or self.corrected_printed
        return parse_printed(self.printed, self.unit)[1] if by_digits else self.error or 0.0

    @property
    def corrected_value(self) -> float | None:
        """The value that the erratum gives instead of the printed one."""
        return parse_printed(self.corrected_printed, self.unit)[0] if self.corrected_printed else None

    @property
    def target(self) -> float:
        """The value to be held to: the corrected one where the paper's own erratum gives it."""
        return self.value if self.corrected_value is None else self.corrected_value

    @property
    def target_rounding(self) -> float:
        """How far `target` may be off."""
        if not self.corrected_printed:
            return self.rounding
        return parse_printed(self.corrected_printed, self.unit)[1] if self.error is None else self.error

    @property
    def counted(self) -> bool:
        """Whether it counts among the paper's numbers: no context, and no repetition."""
        return self.kind in TO_ANSWER and self.same_as is None

    @property
    def unanswered(self) -> str:
        """Why there need be no number of ours, or what one would take; empty where the file says nothing."""
        if self.kind == "setting":
            return SETTING
        if self.same_as is not None:
            return f"the paper prints this number twice; it is judged at {' / '.join(self.same_as)}"
        return f"needs {self.needs}" if self.needs else ""


class PaperTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file in words: its heading, a name for where room is scarce, a sentence about it, the
    experiment that answers it, and why a number of it is missing.
    """

    title: str
    short: str
    about: str
    experiment: str = ""
    missing: str = ""


@functools.cache
def load_tables(path: Path = TABLES) -> dict[str, PaperTable]:
    """The tables in words, in the order of the report. Those that no experiment answers say why."""
    return msgspec.toml.decode(path.read_bytes(), type=dict[str, PaperTable])


COLUMNS = tuple(field.name.replace("corrected_printed", "corrected_value") for field in fields(PaperNumber))
"""Columns of results/paper.csv."""


@functools.cache
def load_paper(path: Path = PATH) -> tuple[PaperNumber, ...]:
    """All published numbers in file order. Raises ValueError with file, line and what is wrong there."""
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"the paper's numbers can't be read from {path}: {error.strerror or error}"
        ) from error
    rows = csv.DictReader(io.StringIO(content, newline=""), strict=True)
    if tuple(rows.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{path}: the columns must be {','.join(COLUMNS)}")
    found: list[PaperNumber] = []
    lines: dict[tuple[str, ...], int] = {}
    try:
        for row in rows:
            if None in row or None in row.values():
                raise ValueError(f"a row has {len(COLUMNS)} fields")
            given: dict[str, Any] = {name: text for name, text in row.items() if text}  # the others: defaults
            given["corrected_printed"] = given.pop("corrected_value", "")
            if "exact" in given:
                given["exact"] = given["exact"] == "yes" or given["exact"]
            if "same_as" in given:
                given["same_as"] = given["same_as"].split("|")
            found.append(msgspec.convert(given, PaperNumber, strict=False))
            place = (found[-1].source, *found[-1].key)
            if lines.setdefault(place, rows.line_num) != rows.line_num:
                raise ValueError(f"{' / '.join(place)} stands on line {lines[place]} already")
    except ValueError as error:
        raise ValueError(f"{path}:{rows.line_num}: {error}") from error
    return tuple(found)


def of_the_paper() -> dict[tuple[str, str, str], PaperNumber]:
    """The paper's own numbers, nobody else's, by table, row and column."""
    return {cell.key: cell for cell in load_paper() if cell.source == "paper"}
