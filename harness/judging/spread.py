"""How far our number may lie off, and what that is made of.

A range that is only a number can be made as wide as it has to be. So a range names its parts: our own
interval, the error of the replay as it was measured, and each setting that the paper leaves open, with
what each does alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
