"""Our answer to a number of the paper, the range that it may lie in, and what a comparison of the two says.

A wide range that meets anything is no success, so it is not called one; and each verdict says which numbers
in the paper it would have rejected. Our range names its parts.
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
"""The word that a reader sees for a verdict."""
ANSWERS: tuple[Answer, ...] = get_args(Answer)
"""Answers in the order in which counts list them."""
WORDS: Mapping[Verdict, Answer] = {
    "reproduced": "agrees", "identity": "follows", "undecided": "no test", "above": "differs",
    "below": "differs", "not judged": "not judged", "not comparable": "no test", "not run": "not run",
}  # fmt: skip

Question = Literal["as published", "here"]
"""A number's question: whether our prediction for the paper's accelerators, at the paper's size, gives the
printed number, or whether the paper's claim holds on this machine."""
QUESTIONS: tuple[Question, ...] = get_args(Question)

NARROW = (1.25**2 - 1) / (1.25**2 + 1)
"""Largest half-width of an informative range, as a share of its middle: that of a number that may be off by a
factor of 1.25."""

NO_RECORD = "there is no record of this case"

ULP = 1e-12
"""Relative slack at the edges, for decimal fractions that binary numbers only approach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A place in a table of the paper, whose number stands there, as in paper.csv, and the question asked."""

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
        """Table, row, column, whose number and which question; no two answers are alike in all."""
        return (*self.place, self.source, self.question)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result(Place):
    """Our number for one number of the paper, and all that its verdict needs to know.

    Args:
        metric: our number, with its 95 % interval
        spread: how far it may be off, where that is more than the metric's own interval
        error: of a computed number, as a factor less 1; 0 of one that ran here
        record: the one that the number comes from, None where it is computed from several
        not_comparable: why the two numbers can't be held against each other; empty where they can
        context: why our number stands beside the paper's and is not judged; empty where it is judged
        note: what our number is, for a footnote; never why it differs
        status: for an answer without a number; by default the record's
        reason: likewise
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
        """Interval of where our number may lie, in its unit: the spread, the interval, or the number."""
        if self.metric is None or self.metric.value is None:
            return None
        if self.spread is not None:
            return self.spread.low, self.spread.high
        low, high = self.metric.low, self.metric.high
        value = float(self.metric.value)
        return value if low is None else low, value if high is None else high


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Place):
    """The paper's number, ours, and what to make of the two.

    All numbers are in `unit`, the paper's. `paper` is the value as published, `corrected` the one judged
    instead where an erratum gives it. `low` and `high` are our 95 % interval, `range_low` and `range_high`
    how far our number may lie over everything that is not known, which `parts` name. The verdict would have
    been against a published number below `fails_below` or above `fails_above`; None where it could not have
    been. `ratio` is ours over the value judged, `factor` how far the nearest ends of the two ranges are apart
    where they don't meet. `counted` says whether it counts among the paper's numbers. `peer` is the same
    number as somebody else published it.

    `entry` is our answer; `machine`, `profile` and `command` say where our number was found. These are for
    the page, and not among what `to_data` has.
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
        """The one word for what it says."""
        return WORDS[self.verdict]

    @property
    def label(self) -> str:
        """The name of its row; beside others' numbers also whose it is and what is asked."""
        return self.row if self.source == "paper" else f"{self.row} ({self.source}, {self.question})"

    @property
    def is_computed(self) -> bool:
        """Whether it is a number of the declared configuration, which a table of its own shows."""
        record = None if self.entry is None else self.entry.record
        return record is not None and record.is_computed

    @property
    def target(self) -> float | None:
        """The paper's number that is judged; None where it prints none."""
        return self.paper if self.corrected is None else self.corrected

    @property
    def paper_text(self) -> str:
        """The number as printed, with the erratum's value if there is one; empty where nothing is printed."""
        return self.printed if self.corrected is None else f"{self.printed} (means {self.corrected_printed})"


_OF_THE_PAGE = frozenset({"entry", "machine", "profile", "command"})


# How far our number may lie off


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The range of a number of ours over everything that is not known: our own interval, the error of the
    predictor or of the replay as it was measured, what the paper leaves open.

    Args:
        low: the smallest number, in the unit of the metric
        high: the largest
        parts: what the range is over, in words

    Raises ValueError for ends that are not finite or are the wrong way round.
    """

    low: float
    high: float
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, what: str, values: Iterable[float]) -> Spread | None:
        """The range of all values, for one reason; None of fewer than two."""
        low, *others = sorted(map(float, values)) or [0.0]
        return cls(low=low, high=others[-1], parts=(what,)) if others else None

    def __post_init__(self) -> None:
        if not -math.inf < self.low <= self.high < math.inf:
            raise ValueError(f"{self.low} to {self.high} is no range; give two finite numbers in order")


# Numbers that agree with a published number or sentence


@dataclass(frozen=True, slots=True)
class Allowed:
    """What agrees with a published number, in its unit: `low` to `high` however it is meant, `possible_low`
    to `possible_high` under some reading. Either may be open at one end. `words` say why.
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
        """Whether it only limits a number on one side."""
        return math.isinf(self.possible_low) or math.isinf(self.possible_high)
