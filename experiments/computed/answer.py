"""A computed answer to one row of paper.csv, and how records keep it.

What follows by arithmetic, by counting or by a replay has no repeats and no interval; it may have a range,
over what is not stated or over what printed digits leave open, and that is kept with what it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_bench.harness.record import Provenance, Quantity, Record
from gpipe_bench.harness.verdict import Part, Spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Our number for a row.

    Args:
        row: of paper.csv
        column: likewise
        value: our number
        unit: its unit
        what: what the number is, in a few words
        provenance: "modelled", or "replayed" where a schedule was laid out
        spread: its range, None where it is one number
    """

    row: str
    column: str
    value: float
    unit: str
    what: str
    provenance: Provenance = "modelled"
    spread: Spread | None = None


def over(what: str, values: Sequence[float]) -> Spread:
    """The range over several numbers that only one thing tells apart, such as the size of a model."""
    low, high = min(values), max(values)
    return Spread(low=low, high=high, parts=(Part(what=what, low=low, high=high),))


def to_quantities(answers: Sequence[Answer]) -> tuple[Quantity, ...]:
    """As a record has them."""
    return tuple(
        Quantity(
            name=answer.row, key={"column": answer.column}, value=answer.value, unit=answer.unit,
            provenance=answer.provenance, note=answer.what,
        )
        for answer in answers
    )  # fmt: skip


def to_details(answers: Sequence[Answer]) -> dict[str, Any]:
    """What a record keeps of the ranges."""
    return {
        "spreads": [
            {"row": answer.row, "column": answer.column, **answer.spread.to_data()}
            for answer in answers
            if answer.spread is not None
        ]
    }


def spread_of(record: Record, row: str, column: str) -> Spread | None:
    """The range that `to_details` kept."""
    for kept in record.details["spreads"]:
        if (kept["row"], kept["column"]) == (row, column):
            return Spread.from_data(kept)
    return None
