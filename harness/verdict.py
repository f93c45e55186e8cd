"""A number of the paper, our answer to it, and what to make of the two.

    PaperCell x Entry -> Comparison

        published       |----|                        what rounds to the printed digits
        reproduced         |---|                      ours meets it and is narrow
        undecided    |--------------------|           ours meets it and says little
        above                        |---|            ours lies beyond it
        below     |--|

A wide range that meets anything is no success, so it is not called one; and each verdict says which numbers
in the paper it would have rejected. What the paper says in words ("almost linear") names a threshold that it
does not give: some values satisfy the sentence however it is meant and some under one reading only. Our range
names its parts: a range that is only a number can be made as wide as it has to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpipe_bench.harness.paper import PaperCell
from gpipe_bench.harness.record import Quantity, Record, Status
from gpipe_bench.harness.units import convert, show
from gpipe_bench.harness.unknowns import Unknown

Verdict = Literal["reproduced", "identity", "undecided", "above", "below", "not comparable", "not run"]
VERDICTS: tuple[Verdict, ...] = (
    "reproduced", "identity", "undecided", "above", "below", "not comparable", "not run",
)  # fmt: skip
JUDGED: tuple[Verdict, ...] = ("reproduced", "identity", "undecided", "above", "below")
HOLDS: tuple[Verdict, ...] = ("reproduced", "identity")
DIFFERS: tuple[Verdict, ...] = ("above", "below")

NARROW = 0.2
"""How far a range may reach to either side of its middle, as a share of it, to say something."""

NO_RECORD = "there is no record of this case"

_ULP = 1e-12
"""Relative slack at the edges, for decimal fractions that binary numbers only approach."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, always with its reason.

    `low` and `high` are our range in the cell's unit. A paper that printed less than `fails_below`, or more
    than `fails_above`, would have been contradicted; None where it could not have been on that side.
    """

    verdict: Verdict
    reason: str
    low: float | None = None
    high: float | None = None
    fails_below: float | None = None
    fails_above: float | None = None
    factor: float | None = None


def judge(cell: PaperCell | None, ours: Entry, tolerance: float = 1.0) -> Judgement:
    """The verdict on one cell. Raises ValueError where the two numbers have units of different kinds.

    `tolerance` widens or narrows our range and what the printed number admits, to see what a verdict owes
    to their width.
    """
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise ValueError(f"tolerance is {tolerance}; it multiplies the width of a range, such as 0.5 or 2")
    quantity, found = ours.quantity, ours.range
    if quantity is None or quantity.value is None or found is None:
        return _without_number(ours)
    if cell is None:
        return Judgement("not comparable", ours.not_comparable or "the paper prints no such number")
    value, low, high = (convert(number, quantity.unit, cell.unit) for number in (quantity.value, *found))
    low, high = (value + tolerance * (end - value) for end in (low, high))
    if not cell.comparable:
        return Judgement("not comparable", cell.erratum, low, high)
    if ours.not_comparable:
        return Judgement("not comparable", ours.not_comparable, low, high)
    allowed = (ours.allowed or printed(cell)).scaled(tolerance, cell.target)
    verdict = _verdict(cell.kind, allowed, low, high)
    factor = _factor(verdict, allowed, low, high)
    return Judgement(
        verdict,
        _reason(verdict, cell, ours, allowed, (value, low, high), factor),
        low,
        high,
        _finite(low - (allowed.possible_high - cell.target)),
        _finite(high + (cell.target - allowed.possible_low)),
        factor,
    )


def _verdict(kind: str, allowed: Allowed, low: float, high: float) -> Verdict:
    slack = _ULP * max(abs(edge) for edge in (low, high, allowed.possible_low, allowed.possible_high)
                       if math.isfinite(edge))  # fmt: skip
    if low > allowed.possible_high + slack:
        return "above"
    if high < allowed.possible_low - slack:
        return "below"
    if kind == "identity":
        return "identity"
    if allowed.open:  # a bound holds where all of the range keeps to it, however wide that is
        inside = allowed.low - slack <= low and high <= allowed.high + slack
        return "reproduced" if inside else "undecided"
    meets = low <= allowed.high + slack and high >= allowed.low - slack
    return "reproduced" if meets and narrow(low, high) else "undecided"


def accounts(value: float, cell: PaperCell, allowed: Allowed | None = None) -> bool:
    """Whether a setting that gives `value`, in the cell's unit, accounts for the paper's number.

    That is so where the verdict on this value alone would be `reproduced`: there is one criterion.
    """
    return cell.comparable and _verdict(cell.kind, allowed or printed(cell), value, value) in HOLDS


def why(explained_by: str, tried: int) -> str:
    """What is known of the reason of a difference: what accounts for it, and of how many that were tried."""
    if explained_by:
        return f"accounted for by {explained_by}, of {tried:,} settings tried"
    if not tried:
        return "nothing was tried that might account for it"
    return f"no setting accounts for it, of {tried:,} tried"


def narrow(low: float, high: float) -> bool:
    """Whether a range says something: it reaches at most a fifth to either side of its middle."""
    return (high - low) / 2 <= NARROW * abs(low + high) / 2 * (1 + _ULP)


def _without_number(ours: Entry) -> Judgement:
    if ours.status == "out_of_memory":
        return Judgement("below", f"ran out of memory here: {ours.reason or 'no reason was recorded'}")
    if ours.not_comparable:
        return Judgement("not comparable", ours.not_comparable)
    if ours.reason:
        return Judgement("not run", f"{ours.status}: {ours.reason}" if ours.status != "done" else ours.reason)
    note = ours.quantity.note if ours.quantity is not None else ""
    return Judgement("not run", note or NO_RECORD)


def _reason(
    verdict: Verdict,
    cell: PaperCell,
    ours: Entry,
    allowed: Allowed,
    found: tuple[float, float, float],
    factor: float | None,
) -> str:
    value, low, high = found
    parts = []
    if cell.corrected_value is not None:
        parts.append(f"judged by the corrected {cell.corrected_printed}, not the printed {cell.printed}")
    mine = show(value, cell.unit) if low == high else f"{pair(low, high, cell.unit)}{_made_of(ours)}"
    theirs = f"{pair(allowed.low, allowed.high, cell.unit)} ({allowed.words})"
    match verdict:
        case "reproduced" | "identity":
            how = (
                "keeps to"
                if allowed.open
                else "follows from the arithmetic:"
                if verdict == "identity"
                else "meets"
            )
            parts.append(f"{mine} {how} {theirs}")
        case "undecided" if allowed.open:
            parts.append(f"{mine} lies on both sides of what {theirs} may mean")
        case "undecided" if narrow(low, high):
            parts.append(f"{mine} agrees with some readings of {theirs} only")
        case "undecided":
            parts.append(f"{mine} meets {theirs}, and would meet much else")
        case _:
            parts.append(f"{mine} lies {verdict} {theirs}{_apart(factor)}")
            parts.append(why(ours.explained_by, ours.tried))
    return "; ".join(parts)


def _factor(verdict: Verdict, allowed: Allowed, low: float, high: float) -> float | None:
    """How far the nearest ends are apart."""
    if verdict not in DIFFERS:
        return None
    near, edge = (low, allowed.possible_high) if verdict == "above" else (high, allowed.possible_low)
    return near / edge if edge > 0 and near > 0 else None


def _apart(factor: float | None) -> str:
    if not factor:  # nothing, or too small for a number of its own
        return ""
    times = max(factor, 1 / factor)
    return f", at least a factor of {times:.{3 if times >= 1.005 else 5}g} away"


def _made_of(ours: Entry) -> str:
    if ours.spread is not None and ours.spread.parts:
        return f" ({', '.join(part.what.replace('_', ' ') for part in ours.spread.parts)})"
    return " (our 95 % interval)" if ours.spread is None else ""


def pair(low: float, high: float, unit: str) -> str:
    """`3.45 to 3.55`, `at most 5 %`: an interval in words, with a digit more than a number has by itself."""
    if math.isinf(low):
        return f"at most {show(high, unit, 5)}"
    if math.isinf(high):
        return f"at least {show(low, unit, 5)}"
    return show(low, unit, 5) if low == high else f"{show(low, unit, 5)} to {show(high, unit, 5)}"


def _finite(edge: float) -> float | None:
    return edge if math.isfinite(edge) else None


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One reason why our number is a range.

    Args:
        what: an unknown's name in results/unknowns.toml, "95 % interval" or "error of the replay"
        low: the smallest number that this alone gives, all else in the middle, in the number's unit
        high: the largest
    """

    what: str
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The range of a number of ours over everything that is not known.

    Args:
        low: the smallest number that any admitted combination gives, in the unit of the quantity
        high: the largest
        parts: what the range is made of; they need not add up to it
        combinations: of the unknown settings, how many the range covers; 0 where it is not about settings

    Raises ValueError for ends that are not finite or are the wrong way round.
    """

    low: float
    high: float
    parts: tuple[Part, ...] = ()
    combinations: int = 0

    def __post_init__(self) -> None:
        for low, high, what in (
            (self.low, self.high, "range"),
            *((p.low, p.high, p.what) for p in self.parts),
        ):
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise ValueError(f"{what}: {low} to {high} is no range; give two finite numbers in order")

    def to_data(self) -> dict[str, Any]:
        """As a record keeps it."""
        return {
            "low": self.low,
            "high": self.high,
            "combinations": self.combinations,
            "parts": {part.what: [part.low, part.high] for part in self.parts},
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Spread:
        """What `to_data` made."""
        parts = tuple(
            Part(what=what, low=float(low), high=float(high)) for what, (low, high) in data["parts"].items()
        )
        return cls(
            low=float(data["low"]), high=float(data["high"]), parts=parts, combinations=data["combinations"]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
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

    def shifted(self, by: float) -> Allowed:
        """The same around another number."""
        return Allowed(
            low=self.low + by,
            high=self.high + by,
            possible_low=self.possible_low + by,
            possible_high=self.possible_high + by,
            words=self.words,
        )

    def scaled(self, tolerance: float, target: float) -> Allowed:
        """Its distances to the paper's number times `tolerance`."""
        edges = (
            target + tolerance * (edge - target) if math.isfinite(edge) else edge
            for edge in (self.low, self.high, self.possible_low, self.possible_high)
        )
        low, high, possible_low, possible_high = edges
        return Allowed(
            low=low, high=high, possible_low=possible_low, possible_high=possible_high, words=self.words
        )


def printed(cell: PaperCell) -> Allowed:
    """What rounds to the printed number, or lies on the right side of it where the paper only limits it."""
    low, high = cell.target - cell.target_rounding, cell.target + cell.target_rounding
    words = {
        "at most": "the paper says at most so much",
        "at least": "the paper says at least so much",
    }.get(cell.bound, _rounding(cell))
    low = -math.inf if cell.bound == "at most" else low
    high = math.inf if cell.bound == "at least" else high
    return Allowed(low=low, high=high, possible_low=low, possible_high=high, words=words)


def _rounding(cell: PaperCell) -> str:
    if cell.exact and not cell.target_rounding:
        return "an exact number"
    if cell.form in ("read off", "derived"):
        return "the error of what is " + cell.form
    return "half a unit of the printed digit"


def at_most(limit: Unknown) -> Allowed:
    """A sentence that something is small, of a limit that it does not give."""
    low, high = _ends(limit)
    return Allowed(
        low=-math.inf, high=low, possible_low=-math.inf, possible_high=high, words=_words("at most", limit)
    )


def at_least(limit: Unknown) -> Allowed:
    """A sentence that something is large enough, of a limit that it does not give."""
    low, high = _ends(limit)
    return Allowed(
        low=high, high=math.inf, possible_low=low, possible_high=math.inf, words=_words("at least", limit)
    )


def within_factor(limit: Unknown) -> Allowed:
    """A sentence that a ratio is near one: by at most a factor that it does not give, either way."""
    low, high = _ends(limit)
    return Allowed(
        low=1 / low,
        high=low,
        possible_low=1 / high,
        possible_high=high,
        words=_words("within a factor", limit),
    )


def about(cell: PaperCell, limit: Unknown) -> Allowed:
    """ "About 25 %": the printed number, as near as the word may mean, a share of it."""
    low, high = _ends(limit)
    near, far = (max(cell.target_rounding, share * abs(cell.target)) for share in (low, high))
    return Allowed(
        low=cell.target - near,
        high=cell.target + near,
        possible_low=cell.target - far,
        possible_high=cell.target + far,
        words=_words("about, as near as", limit),
    )


def _ends(limit: Unknown) -> tuple[float, float]:
    if limit.low is None or limit.high is None:
        raise ValueError(f"{limit.setting} has no range, so it can't be a limit")
    return limit.low, limit.high


def _words(what: str, limit: Unknown) -> str:
    return f"{what} {limit.low:g} to {limit.high:g}: {limit.setting} of the unknowns"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One cell: the paper's number, ours, and what to make of the two.

    All numbers are in `unit`, the paper's. `source` says whose number it is held against; `paper` is that
    value as published, `corrected` the one judged instead where an erratum gives it. `low` and `high` are our
    95 % interval, `range_low` and `range_high` how far our number may lie over everything that is not known.
    The verdict would have been against a published number below `fails_below` or above `fails_above`.
    `ratio` is ours over the value judged, `factor` how far the nearest ends of the two ranges are apart where
    they don't meet. `counted` says whether it counts among the paper's numbers: no context, no repetition,
    nobody else's. `peer` is the same number as published for torchgpipe.
    `explained_by` names the settings that account for a difference, of the `tried` ones.
    """

    table: str
    row: str
    column: str
    source: str
    question: Question
    kind: str
    counted: bool
    paper: float | None
    printed: str
    corrected: float | None
    corrected_printed: str
    ours: float | int | None
    unit: str
    provenance: str
    low: float | None
    high: float | None
    range_low: float | None
    range_high: float | None
    parts: tuple[str, ...]
    fails_below: float | None
    fails_above: float | None
    ratio: float | None
    factor: float | None
    peer: float | None
    peer_printed: str
    verdict: Verdict
    reason: str
    explained_by: str
    tried: int
    footnotes: tuple[str, ...]
    hardware: str
    location: str

    @property
    def place(self) -> tuple[str, str, str]:
        """Table, row and column."""
        return (self.table, self.row, self.column)

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """Table, row, column, whose number and which question."""
        return (*self.place, self.source, self.question)

    @property
    def why(self) -> str:
        """What is known of the reason of a difference; empty where there is none."""
        return why(self.explained_by, self.tried) if self.verdict in DIFFERS else ""

    @property
    def paper_text(self) -> str:
        """As printed, with the corrected value where an erratum gives one; empty where nothing is printed."""
        return self.printed if self.corrected is None else f"{self.printed} (means {self.corrected_printed})"
