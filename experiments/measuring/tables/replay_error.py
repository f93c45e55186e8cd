"""How far a replayed number may be off, from the steps that also ran for real.

The replay leaves things out, so it errs, and mostly to one side. Some of the steps it lays out run on real
devices in the same rounds. Those errors, with their sign and their spread, say where the next one will be:
the 95 % prediction interval of another draw from the same normal distribution of logarithms. Of few errors it
is wide, as it should be.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from gpipe_bench.harness.record import Quantity, Record
from gpipe_bench.harness.verdict import Part, Spread

FEWEST = 3
"""Errors of one model below which those of the other models of the table are taken as well."""
UNKNOWN = (
    "The replay's error is not known here: no step of this table ran on as many devices as it has stages. "
    "Run it where two processes have a core each."
)

Falls = Literal["with the step", "as the step grows", "either way"]
"""How a number moves when a step takes longer than its replay: seconds grow with it, throughput falls as it
grows, and a share of the step may move either way."""


def next_error(records: Sequence[Record], model: str) -> tuple[float, float] | None:
    """Where the logarithm of measured over replayed seconds of another step of this model will lie.

    None below two errors.
    """
    errors = _errors([r for r in records if r.case.get("model") == model])
    if len(errors) < FEWEST:
        errors = _errors(records)
    return prediction_interval(errors) if len(errors) > 1 else None


def prediction_interval(errors: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Where one more draw lies, of a normal distribution of which these are known.

    Raises ValueError below two errors.
    """
    if len(errors) < 2:
        raise ValueError(f"{len(errors)} error(s) have no spread; a prediction takes at least two")
    from scipy.special import stdtrit

    middle, count = statistics.fmean(errors), len(errors)
    factor = float(stdtrit(count - 1, 0.5 + confidence / 2)) * math.sqrt(1 + 1 / count)
    reach = factor * statistics.stdev(errors)
    return middle - reach, middle + reach


def replayed_spread(
    quantity: Quantity | None,
    error: tuple[float, float] | None,
    falls: Falls,
    more: Sequence[tuple[str, float, float]] = (),
) -> Spread | None:
    """The range of a replayed number: its interval, the error of the replay, and further factors.

    Args:
        quantity: the replayed number
        error: of `next_error`
        falls: how it moves when a step takes longer than it was laid out
        more: what else moves it, each with the smallest and the largest factor

    None where there is no number or where the error is not known.
    """
    if quantity is None or quantity.value is None or error is None:
        return None
    value = float(quantity.value)
    low = value if quantity.low is None else quantity.low
    high = value if quantity.high is None else quantity.high
    least, most = error
    if falls == "as the step grows":
        least, most = -most, -least
    elif falls == "either way":
        most = max(abs(least), abs(most))
        least = -most
    factors = [("error of the replay", math.exp(least), math.exp(most)), *more]
    parts = [Part(what="95 % interval", low=low, high=high)]
    for what, smallest, largest in factors:
        moved = sorted((value * smallest, value * largest))  # a difference may lie below zero
        parts.append(Part(what=what, low=moved[0], high=moved[1]))
        low, high = min(low * smallest, low * largest), max(high * smallest, high * largest)
    return Spread(low=low, high=high, parts=tuple(parts))


def _errors(records: Sequence[Record]) -> list[float]:
    return [
        -math.log1p(error.value)
        for record in records
        if record.status == "done"
        for error in record.quantities
        if error.name == "replay error" and error.value is not None
    ]
