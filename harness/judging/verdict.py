"""Holds one range of ours against what one published number admits.

        published       |----|                        what rounds to the printed digits
        reproduced         |---|                      ours meets it and is narrow
        undecided    |--------------------|           ours meets it and says little
        above                        |---|            ours lies beyond it
        below     |--|

A wide range that meets anything is no success, so it is not called one; and each verdict says which numbers
in the paper it would have rejected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gpipe_bench.harness.judging.allowed import Allowed, printed
from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.judging.paper import PaperCell
from gpipe_bench.harness.judging.units import convert, show

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
