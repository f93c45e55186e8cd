"""Holds one number of ours against one printed number.

The band is what the printed digit can stand for, plus our own 95 % interval, plus a model gap that was
declared with its reason. It has two sides: better than the paper is a difference to explain, not a pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.judging.paper import PaperCell
from gpipe_bench.harness.judging.units import convert, show
from gpipe_bench.harness.records.record import Quantity

Verdict = Literal["reproduced", "exceeds", "deviates", "not comparable", "not run"]
VERDICTS: tuple[Verdict, ...] = ("reproduced", "exceeds", "deviates", "not comparable", "not run")

NO_RECORD = "there is no record of this case"

_ULP = 1e-12
"""Relative slack at the edges of the band, for decimal fractions that binary numbers only approach."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, always with its reason, and the band it was held against, if there was one."""

    verdict: Verdict
    reason: str
    band_low: float | None = None
    band_high: float | None = None


def judge(cell: PaperCell | None, ours: Entry, tolerance: float = 1.0) -> Judgement:
    """The verdict on one cell. Raises ValueError where the two numbers have units of different kinds.

    `tolerance` widens or narrows the whole band, to see what a verdict owes to its width.
    """
    quantity = ours.quantity
    if quantity is None or quantity.value is None:
        return _without_number(ours)
    if cell is None:
        return Judgement("not comparable", ours.not_comparable or "the paper prints no such number")
    value = convert(quantity.value, quantity.unit, cell.unit)  # also refuses units of different kinds
    if not cell.comparable:
        return Judgement("not comparable", cell.erratum)
    if ours.not_comparable:
        return Judgement("not comparable", ours.not_comparable)
    band_low, band_high = band(cell, quantity, ours.gap, tolerance)
    reason, verdict = _place(cell, ours, value, band_low, band_high)
    return Judgement(verdict, reason, band_low, band_high)


def band(cell: PaperCell, quantity: Quantity, gap: float, tolerance: float = 1.0) -> tuple[float, float]:
    """Where our value may lie to count as reproduced, in the cell's unit.

    Rounding and gap surround the paper's number; our interval is added on the side it reaches out to,
    which is the same as asking whether the two intervals meet. `tolerance` times the width is allowed on
    either side; anything but 1 is for showing how much a verdict depends on it. Raises ValueError for a
    tolerance that is not a positive number.
    """
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise ValueError(f"tolerance is {tolerance}; it multiplies the width of a band, such as 0.5 or 2")
    reach = cell.target_rounding + gap * abs(cell.target)
    below = above = 0.0
    if quantity.value is not None and quantity.low is not None and quantity.high is not None:
        value = convert(quantity.value, quantity.unit, cell.unit)
        below = convert(quantity.high, quantity.unit, cell.unit) - value
        above = value - convert(quantity.low, quantity.unit, cell.unit)
    low = -math.inf if cell.bound == "at most" else cell.target - tolerance * (reach + below)
    high = math.inf if cell.bound == "at least" else cell.target + tolerance * (reach + above)
    return low, high


def _without_number(ours: Entry) -> Judgement:
    if ours.status == "out_of_memory":
        return Judgement("deviates", f"ran out of memory here: {ours.reason or 'no reason was recorded'}")
    if ours.not_comparable:
        return Judgement("not comparable", ours.not_comparable)
    if ours.reason:
        return Judgement("not run", f"{ours.status}: {ours.reason}" if ours.status != "done" else ours.reason)
    note = ours.quantity.note if ours.quantity is not None else ""
    return Judgement("not run", note or NO_RECORD)


def _place(cell: PaperCell, ours: Entry, value: float, low: float, high: float) -> tuple[str, Verdict]:
    quantity = ours.quantity
    assert quantity is not None  # judged only with a number
    slack = _ULP * max(abs(edge) for edge in (low, high, value) if math.isfinite(edge))
    parts = (
        []
        if cell.corrected_value is None
        else [f"judged by the corrected {cell.corrected_printed}, not the printed {cell.printed}"]
    )
    within = low - slack <= value <= high + slack
    why = _band_in_words(cell, quantity, ours)
    if within:
        parts.append(f"{show(value, cell.unit)} is within the band, {_pair(low, high, cell.unit)} ({why})")
        return "; ".join(parts), "reproduced"
    edge, side = (low, "below") if value < low else (high, "above")
    share = 100 * abs(value - edge) / abs(edge) if edge else math.inf
    away = f"{share:.2g} % {side}" if share < 99.5 else f"{share:.0f} % {side}" if edge else side
    parts.append(f"{show(value, cell.unit)} is {away} the band, {_pair(low, high, cell.unit)} ({why})")
    better = quantity.higher_is_better is not None and quantity.higher_is_better == (value > high)
    if better:
        parts.append("better than the paper, which needs an explanation too")
    if ours.note:
        parts.append(ours.note)
    return "; ".join(parts), "exceeds" if better else "deviates"


def _band_in_words(cell: PaperCell, quantity: Quantity, ours: Entry) -> str:
    words = [
        "an exact number" if cell.exact and not cell.target_rounding else "half a unit of the printed digit"
    ]
    if quantity.low is not None:
        words.append("our 95 % interval")
    if ours.gap:
        words.append(f"a declared gap of {100 * ours.gap:g} %: {ours.gap_reason}")
    return " + ".join(words)


def _pair(low: float, high: float, unit: str) -> str:
    if low == -math.inf:
        return f"at most {show(high, unit, 5)}"
    if high == math.inf:
        return f"at least {show(low, unit, 5)}"
    # one digit more than the numbers themselves, because half a unit of the printed digit has one more
    return show(low, unit, 5) if low == high else f"{show(low, unit, 5)} to {show(high, unit, 5)}"
