"""The published numbers, as printed.

A printed digit stands for a whole interval: "82M" is anything from 81.5 to 82.5 million. The interval
follows from the printed form and not from a tolerance somebody chose, so the file keeps each number as
text.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

from gpipe_bench.harness.judging.units import UNITS
from gpipe_bench.harness.places import PUBLISHED

PATH = PUBLISHED / "paper.csv"

COLUMNS = (
    "table", "row", "column", "value", "printed", "unit", "exact", "kind", "hardware", "source", "location",
    "bound", "comparable", "corrected_value", "erratum", "note",
)  # fmt: skip
SOURCES = ("paper", "torchgpipe", "theory")
BOUNDS = ("", "at most", "at least")
KINDS = ("result", "claim", "setting", "formula")

_SUFFIXES = {"": 0, "K": 3, "M": 6, "B": 9}


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperCell:
    """One published number.

    `value` and `corrected_value` are in `unit` (counts in ones: "82M" parameters are 82e6); `rounding`
    and `corrected_rounding` are half a unit of their last printed digit, 0 where `exact` says that the
    number is a count or a definition. `bound` is "at most" or "at least" where the paper
    only limits the number. `comparable` is False where the erratum leaves nothing to compare with.
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
        """Half a unit of the last digit of `target`."""
        return self.rounding if self.corrected_value is None else self.corrected_rounding


def parse_printed(printed: str, unit: str) -> tuple[float, float]:
    """Value and half a unit of the last printed digit, in `unit`.

    `("82M", "parameters")` is `(82e6, 0.5e6)`, `("3.8GB", "GB")` is `(3.8, 0.05)`, `("1.0e-5", ...)`
    works too. Raises ValueError where the text is no number with at most a suffix.
    """
    body = printed.strip()
    number, suffix = body, ""
    for cut in range(len(body), 0, -1):
        head = body[:cut].rstrip()
        try:
            Decimal(head)
        except InvalidOperation:
            continue
        number, suffix = head, body[cut:].strip()
        break
    else:
        raise ValueError(f"printed form {printed!r} does not begin with a number")
    decimal = Decimal(number)
    if not decimal.is_finite():
        raise ValueError(f"printed form {printed!r} is not a finite number")
    if unit in ("parameters", "tokens"):
        if suffix not in _SUFFIXES:
            raise ValueError(f"printed form {printed!r} ends in {suffix!r}; known: K, M, B")
        decimal = decimal.scaleb(_SUFFIXES[suffix])
    exponent = decimal.as_tuple().exponent
    assert isinstance(exponent, int)  # finite, see above
    return float(decimal), float(Decimal(5).scaleb(exponent - 1))


def load_paper(path: Path = PATH) -> list[PaperCell]:
    """All published numbers in file order. Raises ValueError with file, line and what is wrong there."""
    try:
        file = path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise ValueError(
            f"the paper's numbers can't be read from {path}: {error.strerror or error}"
        ) from error
    cells: list[PaperCell] = []
    seen: dict[tuple[str, ...], int] = {}
    with file:
        rows = csv.DictReader(file, strict=True)
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
            cells.append(cell)
    return cells


def _cell(row: dict[str, str]) -> PaperCell:
    for column, allowed in (
        ("unit", tuple(UNITS)),
        ("source", SOURCES),
        ("kind", KINDS),
        ("exact", ("", "yes")),
        ("comparable", ("", "no")),
        ("bound", BOUNDS),
    ):
        if row[column] not in allowed:
            raise ValueError(f"{column} is {row[column]!r}, allowed: {', '.join(map(repr, allowed))}")
    if row["comparable"] == "no" and not row["erratum"]:
        raise ValueError("a number that is not comparable needs the erratum that says why")
    if row["corrected_value"] and not row["erratum"]:
        raise ValueError("a corrected value needs the erratum that says why")
    exact = row["exact"] == "yes"
    value, rounding = parse_printed(row["printed"], row["unit"])
    if float(row["value"]) != value:
        raise ValueError(
            f"value {row['value']} is not what is printed, {row['printed']!r} = {value:g} {row['unit']}"
        )
    corrected: float | None = None
    corrected_rounding = 0.0
    if row["corrected_value"]:
        corrected, corrected_rounding = parse_printed(row["corrected_value"], row["unit"])
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
    )
