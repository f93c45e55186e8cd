"""The published numbers (results/paper.csv, checked), and numbers and units as they are printed.

The paper prints decimal GB in one half of a table and GiB in the other; both are units here. "82M" stands for
81.5 to 82.5 million: the interval follows from the digits. The file also says whether a number follows from
others by arithmetic, and where it is printed twice.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import re
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import msgspec

from . import PUBLISHED

_GIB = 2**30

_COUNTED = (
    "parameters", "layers", "filters", "stages", "micro-batches", "examples", "tokens", "pixels", "epochs",
    "runs", "heads", "standard deviations", "classes", "languages", "steps", "BLEU", "nats", "perplexity",
    "updates", "versions",
)  # fmt: skip
"""Units that count things and convert into no other unit."""

# unit -> (what it measures, its size in base units)
UNITS: dict[str, tuple[str, float]] = {
    "bytes": ("memory", 1),
    "MB": ("memory", 1e6),
    "MiB": ("memory", 2**20),
    "GB": ("memory", 1e9),
    "GiB": ("memory", _GIB),
    "bytes/parameter": ("bytes per parameter", 1),
    "s": ("time", 1),
    "ms": ("time", 1e-3),
    "us": ("time", 1e-6),
    "ratio": ("ratio", 1),  # a normalized throughput, a speed-up, a growth factor
    "%": ("ratio", 1e-2),
    **{name: (name, 1) for name in _COUNTED},
    "samples/s": ("throughput", 1),
    "GB/s": ("bandwidth", 1e9),
    "number": ("number", 1),  # a setting without a unit, such as a learning rate
}

COUNTS = ("parameters", "tokens", "examples")
"""Units whose printed numbers may have a suffix such as M."""

_SUFFIXES = {"": 0, "K": 3, "k": 3, "M": 6, "B": 9, "million": 6, "billion": 9}
_POWER = re.compile(r"10\^(\d{1,2})")
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")

_LETTERED = ("parameters", "tokens")  # shown with a suffix: `81.79M`
_SCALES = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


def convert(value: float, unit: str, to: str) -> float:
    """The value in another unit of the same kind. Raises ValueError for a unit of another kind."""
    if unit == to:
        return value
    for name in (unit, to):
        if name not in UNITS:
            raise ValueError(f"unknown unit {name!r}; known: {', '.join(UNITS)}")
    (kind, scale), (wanted_kind, wanted_scale) = UNITS[unit], UNITS[to]
    if kind != wanted_kind:
        raise ValueError(
            f"{unit!r} measures {kind} and {to!r} measures {wanted_kind}; they can't be compared"
        )
    return value * (scale / wanted_scale)


def show(value: float, unit: str, digits: int = 4) -> str:
    """A number for readers, with so many significant digits: `81.79M`, `3.819 GB`, `65.60 %`."""
    if unit in _LETTERED:
        for scale, suffix in _SCALES:
            if abs(value) >= scale:
                return _digits(value / scale, digits) + suffix
        return _digits(value, digits)
    number = _digits(value, digits)
    if unit in ("ratio", "number"):
        return number
    return f"{number} {unit}"


def show_with_interval(value: float, low: float | None, high: float | None, unit: str) -> str:
    """`0.752 [0.739, 0.765]`, `34.51 [34.2, 34.8] GB`: a number with its interval, if any, and unit."""
    if low is None or high is None:
        return show(value, unit)
    end = f" {unit}" if show(value, unit).endswith(f" {unit}") else ""
    return f"{show(value, unit).removesuffix(end)} {show_interval(low, high, unit)}{end}"


def show_interval(low: float, high: float, unit: str) -> str:
    """`[34.2, 34.8]`, beside a number with its unit; scaled counts keep their suffix."""
    end = f" {unit}"
    return f"[{show(low, unit).removesuffix(end)}, {show(high, unit).removesuffix(end)}]"


def percent(error: float) -> str:
    """`55 %`, `7.6 %`: with enough digits to check an answer."""
    return f"{100 * error:.{0 if error >= 0.1 else 1}f} %"


def _digits(value: float, digits: int) -> str:
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{value:.0f}"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    before_point = len(str(int(abs(value)))) if abs(value) >= 1 else 1
    return f"{value:.{max(0, digits - before_point)}f}"


@functools.cache
def parse_printed(printed: str, unit: str) -> tuple[float, float]:
    """The value and half a unit of the last printed digit, in `unit`.

    `("82M", "parameters")` is `(82e6, 0.5e6)`, `("3.8GB", "GB")` is `(3.8, 0.05)`; `("1.0e-5", ...)`,
    `("25 billion", "examples")`, `("1,281,167", ...)` and `("10^4", ...)` work too. The zeros at the end of a
    whole count with a suffix are no digits: "400M" is `(400e6, 50e6)`. Raises ValueError where the text is no
    number with at most a suffix.
    """
    if power := _POWER.fullmatch(printed.strip()):
        value = 10.0 ** int(power[1])
        return value, value / 2
    found = _NUMBER.match(_THOUSANDS.sub("", printed.strip()))
    if found is None:
        raise ValueError(f"printed form {printed!r} does not begin with a number")
    number, suffix = found[1], found[2]
    decimal = Decimal(number)
    if unit in COUNTS:
        if suffix.lstrip("-") not in _SUFFIXES:
            raise ValueError(f"printed form {printed!r} ends in {suffix!r}; known: {', '.join(_SUFFIXES)}")
        decimal = decimal.scaleb(_SUFFIXES[suffix.lstrip("-")])
    scaled = unit in COUNTS and suffix and "." not in number
    exponent = (decimal.normalize() if scaled else decimal).as_tuple().exponent
    assert isinstance(exponent, int)  # finite, see above
    return float(decimal), float(Decimal(5).scaleb(exponent - 1))


# The published numbers

PATH = PUBLISHED / "paper.csv"
TABLES = PUBLISHED / "tables.toml"
OURS = ("paper", "theory")
"""Sources of numbers that count; all others are of kind `external`."""
TO_ANSWER = ("result", "claim", "identity")
"""Kinds of numbers that a result should answer; others are context."""
SENTENCES = "claims-text"
"""The table for sentences of the paper."""
SETTING = "a setting of the paper, not a result"


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperNumber:
    """One published number, a row of paper.csv, with its rounding.

    Args:
        table, row, column: the place, unique within a source
        value: in `unit` (counts in ones: "82M" parameters are 82e6)
        printed: as the paper prints it
        exact: whether it is a count or a definition, without rounding
        kind: what a result is compared with, or context
        hardware: the hardware it was measured on
        source: the paper, a formula ("theory"), or another publication
        location: where it is printed
        form: how it is given: printed, in words, read off a figure, derived from other numbers of the paper,
            or a formula that is evaluated here
        error: its error if its digits do not give it: read off, or derived from rounded numbers
        same_as: the place of the number that this one repeats
        needs: what a result would need
        bound: set if the paper only gives a limit
        corrected_printed: the value of the paper's own erratum, in the file's column `corrected_value`
        erratum: why it is corrected, or what in the paper contradicts it
        note: a footnote
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
        """The error of `value`: half a unit of the last printed digit, or the file's error."""
        if self.exact or self.form == "words":
            return 0.0
        by_digits = self.error is None or self.corrected_printed
        return parse_printed(self.printed, self.unit)[1] if by_digits else self.error or 0.0

    @property
    def corrected_value(self) -> float | None:
        """The erratum's value; None without one."""
        return parse_printed(self.corrected_printed, self.unit)[0] if self.corrected_printed else None

    @property
    def target(self) -> float:
        """The value to compare with: the erratum's if there is one."""
        return self.value if self.corrected_value is None else self.corrected_value

    @property
    def target_rounding(self) -> float:
        """The error of `target`."""
        if not self.corrected_printed:
            return self.rounding
        return parse_printed(self.corrected_printed, self.unit)[1] if self.error is None else self.error

    @property
    def counted(self) -> bool:
        """Whether it counts among the paper's numbers: neither context nor a repetition."""
        return self.kind in TO_ANSWER and self.same_as is None

    @property
    def unanswered(self) -> str:
        """Why there is no result, or what one would need; empty if the file says nothing."""
        if self.kind == "setting":
            return SETTING
        if self.same_as is not None:
            return f"the paper prints this number twice; it is judged at {' / '.join(self.same_as)}"
        return f"needs {self.needs}" if self.needs else ""


class PaperTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts for a table of the file: title, short name, a sentence about it, the experiment that answers it,
    and why a number has no result.
    """

    title: str
    short: str
    about: str
    experiment: str = ""
    missing: str = ""


@functools.cache
def load_tables(path: Path = TABLES) -> dict[str, PaperTable]:
    """The texts of all tables, in the order of the report."""
    return msgspec.toml.decode(path.read_bytes(), type=dict[str, PaperTable])


COLUMNS = tuple(field.name.replace("corrected_printed", "corrected_value") for field in fields(PaperNumber))
"""Columns of results/paper.csv."""


@functools.cache
def load_paper(path: Path = PATH) -> tuple[PaperNumber, ...]:
    """All published numbers in file order. Raises ValueError with file, line and what is wrong there."""
    rows = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline=""), strict=True)
    if tuple(rows.fieldnames or ()) != COLUMNS:
        raise ValueError(f"{path}: the columns must be {','.join(COLUMNS)}")
    found: list[PaperNumber] = []
    lines: dict[tuple[str, ...], int] = {}
    try:
        for row in rows:
            if None in row or None in row.values():
                raise ValueError(f"a row has {len(COLUMNS)} fields")
            given: dict[str, Any] = {name: text for name, text in row.items() if text}  # else defaults
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
    """The paper's own numbers, by table, row and column."""
    return {cell.key: cell for cell in load_paper() if cell.source == "paper"}
