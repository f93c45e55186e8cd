"""The published numbers, as printed: results/paper.csv, checked.

The file keeps each number as text, so that the interval it stands for follows from its digits. It also says
what kind of number each is, because a number that follows by arithmetic from others confirms nothing but
the arithmetic, and one that is printed twice is still one number.
"""

from __future__ import annotations

import csv
import functools
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpipe_bench.harness.judging.units import UNITS, parse_printed
from gpipe_bench.harness.places import PUBLISHED

PATH = PUBLISHED / "paper.csv"

COLUMNS = (
    "table", "row", "column", "value", "printed", "unit", "exact", "kind", "hardware", "source", "location",
    "form", "error", "same_as", "needs", "bound", "comparable", "corrected_value", "erratum", "note",
)  # fmt: skip
EXTERNAL = ("torchgpipe", "lingvo", "others")
SOURCES = ("paper", "theory", *EXTERNAL)
BOUNDS = ("", "at most", "at least")
KINDS = ("result", "claim", "identity", "setting", "external")
TO_ANSWER = ("result", "claim", "identity")
"""Kinds of which a missing number of ours is worth a line; the others are context."""

FORMS = ("", "words", "read off", "derived", "evaluated")
"""How the paper gives a number: printed, in words only, in a figure without a label, by what its other
numbers leave, or as a formula that is evaluated here."""

SETTING = "a setting under which the paper's results were obtained, not a result"

_SEPARATOR = "|"


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperCell:
    """One published number.

    `value` and `corrected_value` are in `unit` (counts in ones: "82M" parameters are 82e6); `rounding`
    and `corrected_rounding` are how far the number may be off: half a unit of the last printed digit, or
    the error that the file gives where the number was read off a figure or follows from rounded ones; 0
    where `exact` says that the number is a count or a definition. `bound` is "at most" or "at least" where
    the paper only limits the number. `comparable` is False where the erratum leaves nothing to compare
    with. `same_as` is the key of the number that this one repeats, `needs` what an answer would take.
    """

    table: str
    row: str
    column: str
    value: float
    printed: str
    unit: str
    exact: bool
    bound: str
    kind: str
    hardware: str
    source: str
    location: str
    comparable: bool
    erratum: str
    note: str
    rounding: float
    corrected_value: float | None = None
    corrected_rounding: float = 0.0
    corrected_printed: str = ""
    form: str = ""
    same_as: tuple[str, str, str] | None = None
    needs: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Table, row and column; unique within a source."""
        return (self.table, self.row, self.column)

    @property
    def target(self) -> float:
        """The value to be held to: the corrected one where the paper's own erratum gives it."""
        return self.value if self.corrected_value is None else self.corrected_value

    @property
    def target_rounding(self) -> float:
        """How far `target` may be off."""
        return self.rounding if self.corrected_value is None else self.corrected_rounding

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


def load_paper(path: Path = PATH) -> tuple[PaperCell, ...]:
    """All published numbers in file order. Raises ValueError with file, line and what is wrong there."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"the paper's numbers can't be read from {path}: {error.strerror or error}"
        ) from error
    return _parsed(path, content)


@functools.lru_cache(maxsize=1)
def _parsed(path: Path, content: bytes) -> tuple[PaperCell, ...]:
    """Of one content once: every table of a report asks for it."""
    cells: dict[int, PaperCell] = {}
    seen: dict[tuple[str, ...], int] = {}
    rows = csv.DictReader(io.StringIO(content.decode(), newline=""), strict=True)
    if tuple(rows.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{path}: the columns must be {','.join(COLUMNS)}")
    for row in rows:
        place = f"{path}:{rows.line_num}"
        try:
            if None in row or None in row.values():
                raise ValueError(f"a row has {len(COLUMNS)} fields")
            cell = _cell(row)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        first = seen.setdefault((cell.source, *cell.key), rows.line_num)
        if first != rows.line_num:
            raise ValueError(f"{place}: {cell.key} of {cell.source} stands on line {first} already")
        cells[rows.line_num] = cell
    by_key = {cell.key: cell for cell in cells.values() if cell.source == "paper"}
    for line, cell in cells.items():
        try:
            _check_repetition(cell, by_key)
        except ValueError as error:
            raise ValueError(f"{path}:{line}: {error}") from error
    return tuple(cells.values())


def _cell(row: dict[str, str]) -> PaperCell:
    for column, allowed in (
        ("unit", tuple(UNITS)),
        ("source", SOURCES),
        ("kind", KINDS),
        ("form", FORMS),
        ("exact", ("", "yes")),
        ("comparable", ("", "no")),
        ("bound", BOUNDS),
    ):
        if row[column] not in allowed:
            raise ValueError(f"{column} is {row[column]!r}, allowed: {', '.join(map(repr, allowed))}")
    if (row["kind"] == "external") != (row["source"] in EXTERNAL):
        raise ValueError(
            f"kind {row['kind']!r} with source {row['source']!r}: external are the numbers of "
            f"{', '.join(EXTERNAL)} and no others"
        )
    if row["comparable"] == "no" and not row["erratum"]:
        raise ValueError("a number that is not comparable needs the erratum that says why")
    if row["corrected_value"] and not row["erratum"]:
        raise ValueError("a corrected value needs the erratum that says why")
    if row["form"] == "evaluated" and row["kind"] != "identity":
        raise ValueError(f"a formula that is evaluated is an identity, not a {row['kind']}")
    exact = row["exact"] == "yes"
    error = _error(row)
    value, rounding = _value(row)
    corrected: float | None = None
    corrected_rounding = 0.0
    if row["corrected_value"]:
        corrected, corrected_rounding = parse_printed(row["corrected_value"], row["unit"])
        corrected_rounding = corrected_rounding if error is None else error
    elif error is not None:
        rounding = error
    return PaperCell(
        table=row["table"],
        row=row["row"],
        column=row["column"],
        value=value,
        printed=row["printed"],
        unit=row["unit"],
        exact=exact,
        bound=row["bound"],
        kind=row["kind"],
        hardware=row["hardware"],
        source=row["source"],
        location=row["location"],
        comparable=row["comparable"] != "no",
        erratum=row["erratum"],
        note=row["note"],
        rounding=0.0 if exact else rounding,
        corrected_value=corrected,
        corrected_rounding=corrected_rounding,
        corrected_printed=row["corrected_value"],
        form=row["form"],
        same_as=_key(row["same_as"]) if row["same_as"] else None,
        needs=row["needs"],
    )


def _value(row: Mapping[str, str]) -> tuple[float, float]:
    """Value and rounding; of words the value that they stand for."""
    if row["form"] == "words":
        try:
            value = float(row["value"])
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not row["printed"]:
            raise ValueError("a number in words needs the words as printed and the value that they stand for")
        return value, 0.0
    value, rounding = parse_printed(row["printed"], row["unit"])
    if float(row["value"]) != value:
        raise ValueError(
            f"value {row['value']} is not what is printed, {row['printed']!r} = {value:g} {row['unit']}"
        )
    return value, rounding


def _error(row: Mapping[str, str]) -> float | None:
    """What the file gives instead of half a unit of the last digit."""
    if not row["error"]:
        if row["form"] in ("read off", "derived"):
            raise ValueError(f"a number that is {row['form']} needs its error; its digits do not give it")
        return None
    if row["exact"] == "yes" or (row["form"] in ("", "words") and not row["corrected_value"]):
        raise ValueError(
            "an error is for numbers read off, derived, evaluated or corrected from rounded ones"
        )
    try:
        error = float(row["error"])
    except ValueError:
        error = math.nan
    if not (math.isfinite(error) and error > 0):
        raise ValueError(f"error is {row['error']!r}, not a positive number in {row['unit']}")
    return error


def _key(text: str) -> tuple[str, str, str]:
    parts = text.split(_SEPARATOR)
    if len(parts) != 3:
        raise ValueError(f"same_as is {text!r}, not table{_SEPARATOR}row{_SEPARATOR}column")
    return (parts[0], parts[1], parts[2])


def _check_repetition(cell: PaperCell, by_key: Mapping[tuple[str, str, str], PaperCell]) -> None:
    if cell.same_as is None:
        return
    first = by_key.get(cell.same_as)
    if first is None or first is cell or cell.source != "paper":
        raise ValueError(f"same_as {cell.same_as} is no other number of the paper")
    if first.same_as is not None:
        raise ValueError(f"same_as {cell.same_as} is itself the same as {first.same_as}; name that one")
    if first.unit != cell.unit:
        raise ValueError(f"same_as {cell.same_as} is in {first.unit}, this number in {cell.unit}")
    apart = abs(cell.value - first.value) - cell.rounding - first.rounding
    if apart > 1e-9 * max(abs(cell.value), abs(first.value)):
        raise ValueError(f"{cell.printed!r} and {first.printed!r} of {cell.same_as} are not one number")
