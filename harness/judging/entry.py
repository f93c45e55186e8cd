"""A place in a table of the paper, with our number for it.

An experiment reports its numbers as entries; the judge and the tables know no other form of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gpipe_bench.harness.judging.spread import Spread
from gpipe_bench.harness.records.record import Quantity, Record, Status

Question = Literal["as published", "here"]
"""What a number answers: whether our prediction for the paper's accelerators, at the paper's size, gives the
printed number, or whether the paper's claim holds on this machine."""
QUESTIONS: tuple[Question, ...] = ("as published", "here")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Our number for one entry of the paper, and all that its verdict needs to know.

    `gap` is a declared model gap relative to the paper's value (0.01 is 1 %) and needs `gap_reason`. A
    non-empty `not_comparable` says why the two numbers can't be held against each other. `note` explains
    a difference that remains. `question` is which of the two it answers. `spread` is how far our number
    may be off, where that is more than the quantity's own interval. `whole` says that the whole range must
    lie inside the paper's interval, however wide it is, not just meet it: of a test of equivalence, which
    may not call equal what it could not tell apart. `record` is the one that the number
    comes from, None where it is computed from several; `status` and `reason` are those of the record, for
    an entry without a number.
    """

    table: str
    row: str
    column: str
    question: Question = "here"
    quantity: Quantity | None = None
    spread: Spread | None = None
    whole: bool = False
    record: Record | None = None
    gap: float = 0.0
    gap_reason: str = ""
    not_comparable: str = ""
    note: str = ""
    status: Status = "done"
    reason: str = ""

    def __post_init__(self) -> None:
        place = f"cell {self.table} / {self.row} / {self.column}"
        if not (math.isfinite(self.gap) and self.gap >= 0):
            raise ValueError(f"{place}: gap is {self.gap}; it is a share of the paper's value, such as 0.01")
        if self.gap and not self.gap_reason:
            raise ValueError(
                f"{place}: a gap of {self.gap:g} is declared without gap_reason; say why it is there"
            )

    @property
    def key(self) -> tuple[str, str, str]:
        """Table, row and column."""
        return (self.table, self.row, self.column)
