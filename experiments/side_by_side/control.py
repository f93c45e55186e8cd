"""What identical code makes of the machine, and what is judged under it: one rule for all that takes turns.

A case's control is one arm against itself, its first sample of each round over its second. Where the interval
excludes 1 the machine did not hold still, and whatever else the case found is void. It is measured once more
with more rounds; void again, it is contaminated, and nothing of it is judged. The control's reach is the
noise floor: a ratio that is no further from its bound than identical code was from 1 is within the noise,
whatever its own interval says, because an interval of rounds does not see what differs between arms for as
long as they live. (The guard keeps the same rule, `harness/guard/judge.py`.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Quantity, Record, Scalar
from gpipe_bench.harness.rounds import Times, Usage, against_itself, used_by_others
from gpipe_bench.harness.stats import from_samples
from gpipe_bench.harness.units import show

MORE_ROUNDS = 2
"""Times the rounds when a case is measured again."""


class Target(NamedTuple):
    """What a quantity of a case should be: at least or at most `bound`, in the quantity's unit."""

    what: str
    case: dict[str, Scalar]
    quantity: str
    at_least: bool
    bound: float

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def conditions_of(usages: Sequence[Usage], times: Times) -> list[Quantity]:
    """What the numbers of a case can be trusted for: our arm against itself, and what else ran meanwhile."""
    return [
        from_samples(
            "control", against_itself(times, "ours"), "ratio", note="our first sample of a round / second"
        ),
        Quantity(
            name="used by others", value=used_by_others(usages), unit="ratio", provenance="measured",
            higher_is_better=False,
            note="share of the machine's cores that other programs used meanwhile",
        ),
    ]  # fmt: skip


def void_by(control: Quantity | None) -> str:
    """Why a case's numbers can't be judged, or nothing: the interval of the control excludes 1."""
    if control is None or control.low is None or control.high is None or control.low <= 1 <= control.high:
        return ""
    return f"the control is {measured(control)}, not 1"


def void_of(quantities: Sequence[Quantity]) -> dict[str, str]:
    """For a record's details: `void`, why none of its numbers may be judged, where the control says so."""
    control = next(quantity for quantity in quantities if quantity.name == "control")
    void = void_by(control)
    return {"void": void} if void else {}


def held_still(take: Callable[[int], Outcome], rounds: int) -> Outcome:
    """A case measured in that many rounds, and once more in twice as many where its control voids it.

    The second outcome stands, whatever its control says; `details["before"]` says what voided the first.
    """
    first = take(rounds)
    if first.status != "done" or "void" not in first.details:
        return first
    second = take(MORE_ROUNDS * rounds)
    return replace(second, details={**second.details, "before": first.details["void"]})


def state_of(record: Record) -> tuple[Literal["", "void", "contaminated"], str]:
    """Whether a case's numbers may be judged, in a word, and a sentence about it; both empty where all was
    well at once.
    """
    void, before = void_by(record.quantity("control")), str(record.details.get("before", ""))
    if void and before:
        return "contaminated", f"contaminated: {void}, and before, in half the rounds: {before}"
    if void:
        return "void", f"void: {void}: the machine changed while it measured; measure again"
    if before:
        return "", f"measured again with {MORE_ROUNDS} times the rounds, because at first {before}"
    return "", ""


def floor_of(control: Quantity | None) -> float:
    """How far identical code seemed to differ from 1, as a logarithm: the control's interval at its further
    end; 0 without one.
    """
    if control is None or not control.low or not control.high:
        return 0.0
    return max(abs(math.log(control.low)), abs(math.log(control.high)))


def verdict(target: Target, quantity: Quantity, control: Quantity | None = None) -> str:
    """Whether the median meets the target, and whether it is certain: the whole interval says so and, of a
    ratio, the median lies beyond the noise floor.
    """
    assert quantity.value is not None, "measured quantities have a value"
    holds = target.holds(quantity.value)
    low, high = quantity.low, quantity.high
    sure = low is not None and high is not None and target.holds(low) == target.holds(high) == holds
    if quantity.unit == "ratio" and sure:
        sure = abs(math.log(quantity.value / target.bound)) >= floor_of(control)
    return ("yes" if holds else "NO") + ("" if sure else ", within the noise")


def measured(quantity: Quantity) -> str:
    """`0.951 [0.947, 0.956]`."""
    assert quantity.value is not None, "measured quantities have a value"
    text = _show(quantity.value, quantity.unit)
    if quantity.low is None or quantity.high is None:
        return text
    return f"{text} [{_show(quantity.low, quantity.unit)}, {_show(quantity.high, quantity.unit)}]"


def _show(value: float, unit: str) -> str:
    return f"{value:.3f}" if unit == "ratio" else show(value, unit, 3)
