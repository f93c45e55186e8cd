"""Our answer to a number of the paper, the range that it may lie in, and what a comparison of the two says.

A wide range that meets anything is no success, so it is not called one; and each verdict says which numbers
in the paper it would have rejected. Our range names its parts: a range that is only a number can be made as
wide as it has to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from gpipe_bench.harness.record import Quantity, Record, Status

Verdict = Literal[
    "reproduced", "identity", "undecided", "above", "below", "not judged", "not comparable", "not run"
]  # fmt: skip
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
JUDGED: tuple[Verdict, ...] = ("reproduced", "identity", "undecided", "above", "below")
HOLDS: tuple[Verdict, ...] = ("reproduced", "identity")
DIFFERS: tuple[Verdict, ...] = ("above", "below")

Question = Literal["as published", "here"]
"""What a number answers: whether our prediction for the paper's accelerators, at the paper's size, gives the
printed number, or whether the paper's claim holds on this machine."""
QUESTIONS: tuple[Question, ...] = get_args(Question)

NARROW = 0.2
"""How far a range may reach to either side of its middle, as a share of it, to say something."""
SLIVER = 0.1
"""The share of the settings of a range that must meet a number for the range to reproduce it."""

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
class Answer(Place):
    """Our number for one number of the paper, and all that its verdict needs to know.

    Args:
        quantity: our number, with its 95 % interval
        spread: how far it may be off, where that is more than the quantity's own interval
        allowed: what the paper allows, where that is not what its digits or words admit (`admitted`)
        record: the one that the number comes from, None where it is computed from several
        not_comparable: why the two numbers can't be held against each other; empty where they can
        context: why our number stands beside the paper's and is not judged; empty where it is judged
        note: what our number is, for a footnote; never why it differs
        explained_by: the tested settings that account for a difference, named as the table of hypotheses
            names them
        others_tried: how many settings were tried that the spread does not cover
        named: the reasons by name that were tried
        status: for an answer without a number; by default the record's
        reason: likewise
    """

    quantity: Quantity | None = None
    spread: Spread | None = None
    allowed: Allowed | None = None
    record: Record | None = None
    not_comparable: str = ""
    context: str = ""
    note: str = ""
    explained_by: str = ""
    others_tried: int = 0
    named: tuple[str, ...] = ()
    status: Status = "done"
    reason: str = ""

    def __post_init__(self) -> None:
        if self.record is not None and (self.status, self.reason) == ("done", ""):
            object.__setattr__(self, "status", self.record.status)
            object.__setattr__(self, "reason", self.record.reason)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Place):
    """The paper's number, ours, and what to make of the two.

    All numbers are in `unit`, the paper's. `paper` is the value as published, `corrected` the one judged
    instead where an erratum gives it. `low` and `high` are our 95 % interval, `range_low` and `range_high`
    how far our number may lie over everything that is not known, which `parts` name. The verdict would have
    been against a published number below `fails_below` or above `fails_above`; None where it could not have
    been on that side. `met` is the share of the settings that meet the number, where ours is a range over
    settings. `ratio` is ours over the value judged, `factor` how far the nearest ends of the two ranges are
    apart where they don't meet. `counted` says whether it counts among the paper's numbers: no
    context, no repetition, nobody else's. `peer` is the same number as somebody else published it.
    `explained_by` names the settings that account for a difference, of the `tried` ones, among which are the
    reasons `named`.

    `entry` is our answer. Where our number was found say `machine`, `profile` and `command`, empty where
    there is none; `narrow` and `wide` are the verdicts with every range half and twice as wide. These are
    for the page, and not among what `to_data` has.
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
    met: float | None = None
    ratio: float | None
    factor: float | None = None
    peer: float | None
    peer_printed: str
    verdict: Verdict
    reason: str
    explained_by: str
    tried: int
    named: tuple[str, ...] = ()
    footnotes: tuple[str, ...]
    hardware: str = ""
    location: str = ""
    entry: Answer | None = None
    machine: str = ""
    profile: str = ""
    command: str = ""
    narrow: Verdict = "not run"
    wide: Verdict = "not run"

    def to_data(self) -> dict[str, Any]:
        """For other programs: all that the two numbers come to."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _OF_THE_PAGE}

    @property
    def label(self) -> str:
        """The name of its row; beside others' numbers also whose it is and what is asked."""
        return self.row if self.source == "paper" else f"{self.row} ({self.source}, {self.question})"

    @property
    def why(self) -> str:
        """What is known of the reason of a difference; empty where there is none."""
        return why(self.explained_by, self.tried, self.named) if self.verdict in DIFFERS else ""

    @property
    def paper_text(self) -> str:
        """As printed, with the corrected value where an erratum gives one; empty where nothing is printed."""
        return self.printed if self.corrected is None else f"{self.printed} (means {self.corrected_printed})"


_OF_THE_PAGE = frozenset({"entry", "machine", "profile", "command", "narrow", "wide"})


def why(explained_by: str, tried: int, named: Sequence[str] = ()) -> str:
    """What is known of the reason of a difference: what accounts for it, and of how many that were tried."""
    if explained_by:
        return f"accounted for by {explained_by}, of {tried:,} settings tried"
    if not tried:
        return "nothing was tried that might account for it"
    among = f", among them that {', that '.join(named)}" if named else ""
    return f"no setting accounts for it, of {tried:,} tried{among}"


# How far our number may lie off


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One reason why our number is a range.

    Args:
        what: an unknown's name in results/unknowns.toml, "95 % interval", "error of the replay" or "error of
            the prediction"
        low: the smallest number that this alone gives, all else in the middle, in the number's unit
        high: the largest
    """

    what: str
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The range of a number of ours over everything that is not known: our own interval, the error of the
    replay as it was measured, and each setting that the paper leaves open.

    Args:
        low: the smallest number that any admitted combination gives, in the unit of the quantity
        high: the largest
        parts: what the range is made of; they need not add up to it
        combinations: of the unknown settings, how many the range covers; 0 where it is not about settings
        values: what each setting gives, of all of them or of a part that stands for all; they tell how many
            settings meet a number, and a record does not keep them
        error: the smallest and the largest factor by which each of the values may be off

    Raises ValueError for ends that are not finite or are the wrong way round.
    """

    low: float
    high: float
    parts: tuple[Part, ...] = ()
    combinations: int = 0
    values: tuple[float, ...] = ()
    error: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        for part in (Part(what="range", low=self.low, high=self.high), *self.parts):
            if not -math.inf < part.low <= part.high < math.inf:
                raise ValueError(
                    f"{part.what}: {part.low} to {part.high} is no range; give two finite numbers in order"
                )

    def share_within(self, low: float, high: float, tolerance: float = 1.0) -> float:
        """The share of the values that meet an interval, each as wide as its error, times `tolerance`."""
        least, most = (1 + tolerance * (factor - 1) for factor in self.error)
        slack = ULP * max((abs(edge) for edge in (low, high) if math.isfinite(edge)), default=0.0)
        met = sum(value * most >= low - slack and value * least <= high + slack for value in self.values)
        return met / len(self.values)

    def to_data(self) -> dict[str, Any]:
        """As a record keeps it."""
        parts = {part.what: [part.low, part.high] for part in self.parts}
        return {"low": self.low, "high": self.high, "combinations": self.combinations, "parts": parts}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Spread:
        """What `to_data` made."""
        parts = tuple(Part(what=what, low=float(a), high=float(b)) for what, (a, b) in data["parts"].items())
        low, high = float(data["low"]), float(data["high"])
        return cls(low=low, high=high, parts=parts, combinations=data["combinations"])


# What a published number or sentence admits


@dataclass(frozen=True, slots=True)
class Allowed:
    """Two intervals in the unit of the paper's number, either of which may be open at one end.

    Args:
        low: the smallest value that agrees with what is published, however it is meant
        high: the largest
        possible_low: the smallest that agrees with it under any reading
        possible_high: the largest
        words: what this is, for the reason of a verdict
    """

    low: float
    high: float
    possible_low: float
    possible_high: float
    words: str

    def __post_init__(self) -> None:
        if not self.possible_low <= self.low <= self.high <= self.possible_high:
            raise ValueError(
                f"{self.possible_low}, {self.low}, {self.high}, {self.possible_high} are not in order: what "
                "agrees for sure lies within what may agree"
            )

    @property
    def open(self) -> bool:
        """Whether it only limits a number on one side."""
        return math.isinf(self.possible_low) or math.isinf(self.possible_high)

    def scaled(self, tolerance: float, target: float) -> Allowed:
        """Its distances to the paper's number times `tolerance`."""
        low, high, possible_low, possible_high = (
            target + tolerance * (edge - target) if math.isfinite(edge) else edge
            for edge in (self.low, self.high, self.possible_low, self.possible_high)
        )
        return Allowed(low, high, possible_low, possible_high, self.words)
