"""Tables judged as a whole: does one setting give all of a statement?

    claims of results/joint.toml x settings that a prediction went through -> possible (n of N) | impossible

Cells of a table share what the paper does not state. Judged one by one, each may be met by a setting of its
own; judged together, all must be met by the same one, and in ratios, orders and trends much of what is not
stated cancels. The claims are data; one function evaluates them over settings that are on record anyway.
What comes out is never added to counts of cells.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gpipe_bench.harness.paper import PaperNumber, load_paper
from gpipe_bench.harness.places import PUBLISHED
from gpipe_bench.harness.record import Scalar
from gpipe_bench.harness.report.grid import Grid, fill
from gpipe_bench.harness.unknowns import Text

PATH = PUBLISHED / "joint.toml"

Cell = tuple[str, str, str]
"""Table, row and column, as in results/paper.csv."""
Cells = Annotated[tuple[Text, ...], Meta(min_length=1)]

_ULP = 1e-9
NOTHING = 1e-9
"""What is smaller divides nothing: a share that is zero but for rounding."""


class Condition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A quotient of cells, products of `over` over products of `under`: the paper's, as wide as its digits
    leave it and by a share `within` more; or ours alone, at least or at most so much.
    """

    over: Cells
    under: tuple[Text, ...] = ()
    within: Annotated[float, Meta(ge=0)] = 0.0
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_bound(self) -> bool:
        """Whether it is about ours alone."""
        return self.at_least is not None or self.at_most is not None


class Claim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A statement about several cells of a table at once; see results/joint.toml for its fields."""

    name: Text
    table: Text
    statement: Text
    conditions: Annotated[tuple[Condition, ...], Meta(min_length=1)]
    walk: str = ""
    by: str = ""

    def cell(self, named: str) -> Cell:
        """A cell as a condition names it. Raises ValueError for anything but two or three parts."""
        match [part.strip() for part in named.split("|")]:
            case [row, column]:
                return self.table, row, column
            case [table, row, column]:
                return table, row, column
        raise ValueError(f"{self.name}: {named!r} is no cell; write 'row | column'")


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    claim: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """The settings that a prediction went through, and the numbers that each gives.

    Args:
        name: as claims name it
        settings: one mapping for each
        values: of each cell, one number for each setting, in the unit of paper.csv; None where there is none
        error: the smallest and the largest factor by which the prediction may be off
    """

    name: str
    settings: Sequence[Mapping[str, Scalar]]
    values: Mapping[Cell, Sequence[float | None]]
    error: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Joint:
    """What became of a claim.

    Args:
        table, name, statement: the claim's
        verdict: whether some setting gives all of it, the prediction's error counted
        holding: those settings
        exact: how many hold without the prediction's error
        tried: how many settings have all of the numbers
        nearest: the factor by which the nearest setting misses the condition that it misses most; 1 for none
        numbers: of each condition, the paper's quotient (None for a bound) and the ends of ours over all
            settings
        split: of the holding settings and of all, how many have each value of the claim's `by`
        error: the walk's
    """

    table: str
    name: str
    statement: str
    verdict: Literal["possible", "impossible"]
    holding: tuple[Mapping[str, Scalar], ...]
    exact: int
    tried: int
    nearest: float
    numbers: tuple[tuple[float | None, float, float], ...]
    split: Mapping[str, tuple[int, int]]
    error: tuple[float, float]
    found: Literal["after looking"] = "after looking"

    @property
    def words(self) -> str:
        """`possible (26 of 216 settings)`, `impossible (0 of 32 settings; the nearest is off by 1.4 times)`,
        with what is left without the prediction's error.
        """
        near = f"the nearest is off by {self.nearest:.4g} times"
        if self.verdict == "impossible":
            return f"impossible (0 of {self.tried:,} settings; {near})"
        found = f"possible ({len(self.holding):,} of {self.tried:,} settings"
        if self.error == (1, 1):
            return found + ")"
        return f"{found}; {self.exact:,} without the prediction's error{'' if self.exact else f', {near}'})"


@functools.cache
def load_claims(path: Path = PATH) -> tuple[Claim, ...]:
    """The file, checked. Raises ValueError with the file and what is wrong with it."""
    try:
        claims = msgspec.toml.decode(path.read_bytes(), type=_File).claim
    except OSError as error:
        raise ValueError(f"the joint claims can't be read from {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    known = {cell.key for cell in load_paper() if cell.source == "paper"}
    for claim in claims:
        for condition in claim.conditions:
            for cell in map(claim.cell, (*condition.over, *condition.under)):
                if cell not in known:
                    raise ValueError(f"{path}: {claim.name}: the paper has no number {' / '.join(cell)}")
    return claims


def judge_jointly(
    walks: Sequence[Walk],
    claims: Sequence[Claim] | None = None,
    paper: Sequence[PaperNumber] | None = None,
) -> list[Joint]:
    """The claims that these walks can answer, in the order of the claims (those of the file by default)."""
    known = {walk.name: walk for walk in walks}
    published = {cell.key: cell for cell in (paper or load_paper()) if cell.source == "paper"}
    found = []
    for claim in load_claims() if claims is None else claims:
        walk = known.get(claim.walk or claim.table)
        if walk is not None and (joint := _evaluated(claim, walk, published)) is not None:
            found.append(joint)
    return found


def _evaluated(claim: Claim, walk: Walk, published: Mapping[Cell, PaperNumber]) -> Joint | None:
    """None where the walk has no setting with all of the numbers."""
    wanted = [_wanted(claim, condition, published) for condition in claim.conditions]
    nothing: Sequence[float | None] = [None] * len(walk.settings)

    def found(named: Sequence[str]) -> list[Sequence[float | None]]:
        return [walk.values.get(claim.cell(each), nothing) for each in named]

    ours = [_quotients(found(each.over), found(each.under)) for each in claim.conditions]
    places = [n for n in range(len(walk.settings)) if all(values[n] is not None for values in ours)]
    if not places:
        return None
    holding, exact, nearest = [], 0, math.inf
    for n in places:
        misses, plain = [], []
        for condition, (low, high), values in zip(claim.conditions, wanted, ours, strict=True):
            least, most = (1.0, 1.0) if condition.is_bound else walk.error
            value = values[n]
            assert value is not None
            misses.append(_miss(value * least, value * most, low, high))
            plain.append(_miss(value, value, low, high))
        if max(misses) <= 1 + _ULP:
            holding.append(walk.settings[n])
        exact += max(plain) <= 1 + _ULP
        nearest = min(nearest, max(plain))
    split = {}
    if claim.by:
        every = Counter(str(walk.settings[n].get(claim.by)) for n in places)
        having = Counter(str(each.get(claim.by)) for each in holding)
        split = {value: (having[value], count) for value, count in every.items()}
    numbers = tuple(
        (
            None if condition.is_bound else _printed(claim, condition, published),
            min(float(values[n] or 0) for n in places),
            max(float(values[n] or 0) for n in places),
        )
        for condition, values in zip(claim.conditions, ours, strict=True)
    )
    return Joint(
        table=claim.table, name=claim.name, statement=claim.statement,
        verdict="possible" if holding else "impossible",
        holding=tuple(holding), exact=exact, tried=len(places), nearest=nearest, numbers=numbers, split=split,
        error=(1.0, 1.0) if all(each.is_bound for each in claim.conditions) else walk.error,
    )  # fmt: skip


def _wanted(claim: Claim, condition: Condition, published: Mapping[Cell, PaperNumber]) -> tuple[float, float]:
    """The smallest and the largest quotient that meets a condition."""
    if condition.is_bound:
        low = -math.inf if condition.at_least is None else condition.at_least
        return low, math.inf if condition.at_most is None else condition.at_most
    low = high = 1.0
    for named in condition.over:
        cell = published[claim.cell(named)]
        low, high = low * (cell.target - cell.target_rounding), high * (cell.target + cell.target_rounding)
    for named in condition.under:
        cell = published[claim.cell(named)]
        low, high = low / (cell.target + cell.target_rounding), high / (cell.target - cell.target_rounding)
    return low * (1 - condition.within), high * (1 + condition.within)


def _printed(claim: Claim, condition: Condition, published: Mapping[Cell, PaperNumber]) -> float:
    """The paper's quotient of a condition."""
    over, under = (
        math.prod(published[claim.cell(each)].target for each in named)
        for named in (condition.over, condition.under)
    )
    return over / under


def _quotients(
    over: Sequence[Sequence[float | None]], under: Sequence[Sequence[float | None]]
) -> list[float | None]:
    """Setting by setting; None where a number is missing or would be divided by nothing."""

    def one(above: tuple[float | None, ...], below: tuple[float | None, ...]) -> float | None:
        if any(value is None for value in above) or any(abs(value or 0.0) < NOTHING for value in below):
            return None
        return math.prod(value or 0.0 for value in above) / math.prod(value or 1.0 for value in below)

    count = len(over[0])
    belows = list(zip(*under, strict=True)) if under else [()] * count
    return [one(above, below) for above, below in zip(zip(*over, strict=True), belows, strict=True)]


def _miss(least: float, most: float, low: float, high: float) -> float:
    """By what factor two intervals are apart; 1 where they meet."""
    if least > high:
        return least / high if high > 0 else math.inf
    if most < low:
        return low / most if most > 0 else math.inf
    return 1.0


def joint_text(found: Sequence[Joint]) -> str:
    """The joint claims as a table in words; nothing where there are none."""
    if not found:
        return ""
    lines = [
        [
            _wrapped(f"{each.table}: {each.statement}", 44),
            "\n".join(_numbers(each)),
            _wrapped(_answer(each), 32),
        ]
        for each in found
    ]
    title = fill(
        "Jointly: does one setting give all of it? Found after looking, never added to counts of cells; "
        "--json lists the settings."
    )
    columns = ["statement", "ours, all settings (paper)", "answer"]
    return Grid(title=title, columns=columns, lines=lines).text()


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width, break_on_hyphens=False))


def _numbers(joint: Joint) -> Iterator[str]:
    for paper, low, high in joint.numbers:
        ours = f"{low:.4g}" if f"{low:.4g}" == f"{high:.4g}" else f"{low:.4g} to {high:.4g}"
        yield ours if paper is None else f"{ours} ({paper:.4g})"


def _answer(joint: Joint) -> str:
    parts = [f"{value}: {holding} of {count}" for value, (holding, count) in joint.split.items()]
    return "; ".join([joint.words, *([", ".join(parts)] if parts else [])])
