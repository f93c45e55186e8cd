"""What a published number or sentence admits.

A printed number admits what rounds to it. A sentence such as "almost linear" names a threshold that it does
not give; how far that may lie is one of the unknowns, so some values satisfy the sentence however it is meant
and some satisfy it under one reading only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpipe_bench.harness.judging.paper import PaperCell
from gpipe_bench.harness.judging.unknowns import Unknown


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
