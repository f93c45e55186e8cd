"""A place in a table of the paper, with our number for it.

An experiment reports its numbers as entries; the judge and the tables know no other form of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpipe_bench.harness.judging.allowed import Allowed
from gpipe_bench.harness.judging.spread import Spread
from gpipe_bench.harness.records.record import Quantity, Record, Status

Question = Literal["as published", "here"]
"""What a number answers: whether our prediction for the paper's accelerators, at the paper's size, gives the
printed number, or whether the paper's claim holds on this machine."""
QUESTIONS: tuple[Question, ...] = ("as published", "here")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Our number for one entry of the paper, and all that its verdict needs to know.

    Args:
        table: of paper.csv
        row: likewise
        column: likewise
        source: whose number it is held against, as in paper.csv: "paper", "torchgpipe", "others" ...
        question: which of the two it answers; one number of the paper may have an entry for each
        quantity: our number, with its 95 % interval
        spread: how far it may be off, where that is more than the quantity's own interval
        allowed: what the paper's words allow, where they stand for a number that they do not give
        record: the one that the number comes from, None where it is computed from several
        not_comparable: why the two numbers can't be held against each other; empty where they can
        note: what our number is, for a footnote; never why it differs
        explained_by: the tested settings that account for a difference, named as the table of hypotheses
            names them
        others_tried: how many settings were tried that the spread does not cover
        status: of the record, for an entry without a number
        reason: of the record, likewise
    """

    table: str
    row: str
    column: str
    source: str = "paper"
    question: Question = "here"
    quantity: Quantity | None = None
    spread: Spread | None = None
    allowed: Allowed | None = None
    record: Record | None = None
    not_comparable: str = ""
    note: str = ""
    explained_by: str = ""
    others_tried: int = 0
    status: Status = "done"
    reason: str = ""

    @property
    def place(self) -> tuple[str, str, str]:
        """Table, row and column."""
        return (self.table, self.row, self.column)

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """Table, row, column, whose number and which question; no two entries are alike in all."""
        return (*self.place, self.source, self.question)

    @property
    def tried(self) -> int:
        """How many settings were tried: the combinations that its range covers, and any others."""
        return (0 if self.spread is None else self.spread.combinations) + self.others_tried

    @property
    def range(self) -> tuple[float, float] | None:
        """Where our number may lie, in its unit: the spread, else the interval, else the number."""
        if self.quantity is None or self.quantity.value is None:
            return None
        if self.spread is not None:
            return self.spread.low, self.spread.high
        low, high = self.quantity.low, self.quantity.high
        value = float(self.quantity.value)
        return value if low is None else low, value if high is None else high
