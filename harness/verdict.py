"""Our results for numbers of the paper, their ranges, and the verdicts of comparisons.

A range so wide that it meets anything is no success and has a verdict of its own. Each verdict says which
numbers in the paper it would have rejected. Ranges name their parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .record import Metric, Record, Status

Verdict = Literal[
    "reproduced", "identity", "undecided", "above", "below", "not judged", "not comparable", "not run"
]  # fmt: skip
JUDGED: tuple[Verdict, ...] = ("reproduced", "identity", "undecided", "above", "below")
DIFFERS: tuple[Verdict, ...] = ("above", "below")

Answer = Literal["agrees", "follows", "differs", "no test", "not judged", "not run"]
"""The word that readers see for a verdict."""
ANSWERS: tuple[Answer, ...] = get_args(Answer)
"""Answers in the order in which counts list them."""
WORDS: Mapping[Verdict, Answer] = {
    "reproduced": "agrees", "identity": "follows", "undecided": "no test", "above": "differs",
    "below": "differs", "not judged": "not judged", "not comparable": "no test", "not run": "not run",
}  # fmt: skip

Question = Literal["as published", "here"]
"""What is asked of a number: whether our prediction for the paper's accelerators, at the paper's size, gives
the printed number, or whether the paper's claim holds on this machine."""
QUESTIONS: tuple[Question, ...] = get_args(Question)

NARROW = (1.25**2 - 1) / (1.25**2 + 1)
"""Largest half-width of an informative range, as a share of its middle: that of a number known to a factor of
1.25."""

NO_RECORD = "there is no record of this case"

ULP = 1e-12
"""Relative slack at a range's ends, for decimal fractions that are not exact in binary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A place in a table of paper.csv: the number's source, and the question asked."""

    table: str
    row: str
    column: str
    source: str = "paper"
    question: Question = "here"

    @property
    def place(self) -> tuple[str, str, str]:
        """Table, row and column."""
        return (self.table, self.row, self.column)

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """Table, row, column, source and question, which identify a result."""
        return (*self.place, self.source, self.question)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result(Place):
    """Our number for one number of the paper, and what its verdict needs.

    Args:
        metric: our number, with its 95 % interval
        spread: its range, where that is more than the metric's interval
        error: of a computed number, as a factor minus 1; 0 for one that ran here
        record: the record of the number; None if it is computed from several
        not_comparable: why the two numbers can't be compared; empty if they can
        context: why our number is shown but not judged; empty if it is judged
        note: a footnote on what our number is, not on why it differs
        status: of a result without a number; by default the record's
        reason: why there is no number; by default the record's
    """

    metric: Metric | None = None
    spread: Spread | None = None
    error: float = 0.0
    record: Record | None = None
    not_comparable: str = ""
    context: str = ""
    note: str = ""
    status: Status = "done"
    reason: str = ""

    def __post_init__(self) -> None:
        if self.record is not None and (self.status, self.reason) == ("done", ""):
            object.__setattr__(self, "status", self.record.status)
            object.__setattr__(self, "reason", self.record.reason)

    @property
    def range(self) -> tuple[float, float] | None:
        """The range of our number, in its unit: the spread, else the interval, else the number."""
        if self.metric is None or self.metric.value is None:
            return None
        if self.spread is not None:
            return self.spread.low, self.spread.high
        low, high = self.metric.low, self.metric.high
        value = float(self.metric.value)
        return value if low is None else low, value if high is None else high


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Place):
    """The paper's number, ours, and the verdict.

    All numbers are in `unit`, the paper's. `paper` is the published value, `corrected` the value judged
    instead if there is an erratum. `low` and `high` are our 95 % interval, `range_low` and `range_high` our
    range over all unknowns, named in `parts`. The verdict would reject published numbers below `fails_below`
    and above `fails_above`; None: no such number. `ratio` is ours over the judged value, `factor` the
    distance between the nearest ends of the two ranges if they don't meet. `counted`: it is one of the
    paper's counted numbers. `peer` is the same number as others published it.

    `entry` is our result; `machine`, `profile` and `command` are those of its record. The page uses these;
    `to_data` leaves them out.
    """

    kind: str = "ours"
    counted: bool = False
    paper: float | None = None
    printed: str = ""
    corrected: float | None = None
    corrected_printed: str = ""
    ours: float | int | None
    unit: str
    provenance: str
    low: float | None
    high: float | None
    range_low: float | None = None
    range_high: float | None = None
    parts: tuple[str, ...]
    fails_below: float | None = None
    fails_above: float | None = None
    ratio: float | None
    factor: float | None = None
    peer: float | None
    peer_printed: str
    verdict: Verdict
    reason: str
    footnotes: tuple[str, ...]
    hardware: str = ""
    location: str = ""
    entry: Result | None = None
    machine: str = ""
    profile: str = ""
    command: str = ""

    def to_data(self) -> dict[str, Any]:
        """The comparison's fields and its answer as data for other programs."""
        data = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _OF_THE_PAGE}
        return {**data, "answer": self.answer}

    @property
    def answer(self) -> Answer:
        """The word for its verdict."""
        return WORDS[self.verdict]

    @property
    def label(self) -> str:
        """The name of its row, for others' numbers with source and question."""
        return self.row if self.source == "paper" else f"{self.row} ({self.source}, {self.question})"

    @property
    def is_computed(self) -> bool:
        """Whether it is computed under the declared configuration, which has a table of its own."""
        record = None if self.entry is None else self.entry.record
        return record is not None and record.is_computed

    @property
    def target(self) -> float | None:
        """The paper's number to judge by; None if it prints none."""
        return self.paper if self.corrected is None else self.corrected

    @property
    def paper_text(self) -> str:
        """The number as printed, with the erratum's value if any; empty if nothing is printed."""
        return self.printed if self.corrected is None else f"{self.printed} (means {self.corrected_printed})"


_OF_THE_PAGE = frozenset({"entry", "machine", "profile", "command"})


# Ranges of our numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The range of our number over all unknowns: its interval, the measured error of predictor or replay, and
    settings that the paper leaves open.

    Args:
        low: its lower end, in the unit of the metric
        high: its upper end
        parts: names of the unknowns

    Raises ValueError for ends that are not finite or not in order.
    """

    low: float
    high: float
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, what: str, values: Iterable[float]) -> Spread | None:
        """The range of the values, for one unknown; None for fewer than two values."""
        low, *others = sorted(map(float, values)) or [0.0]
        return cls(low=low, high=others[-1], parts=(what,)) if others else None

    def __post_init__(self) -> None:
        if not -math.inf < self.low <= self.high < math.inf:
            raise ValueError(f"{self.low} to {self.high} is no range; give two finite numbers in order")


# Numbers that agree with a published number or sentence


@dataclass(frozen=True, slots=True)
class Allowed:
    """What agrees with a published number, in its unit: `low` to `high` in every reading, `possible_low` to
    `possible_high` in some. One end may be infinite. `words` say why.
    """

    low: float
    high: float
    possible_low: float
    possible_high: float
    words: str

    def __post_init__(self) -> None:
        if not self.possible_low <= self.low <= self.high <= self.possible_high:
            raise ValueError(f"{self}: what agrees for sure lies within what may agree")

    @property
    def open(self) -> bool:
        """Whether it is a limit on one side."""
        return math.isinf(self.possible_low) or math.isinf(self.possible_high)
