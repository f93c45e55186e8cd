"""Settings of the same model against the paper's numbers: one by one, and all of a statement at once.

A footnote that says why a number differs is only worth something if the setting that it names was run and
found to give the paper's number, and if it is said how many others were tried. A *hypothesis* is such a
setting with the numbers that it gives. It accounts for a number if under it alone the verdict would be
`reproduced`: verdicts and reasons have one criterion (`gpipe_bench.harness.compare.accounts`). A reason that
leaves other settings open accounts for it if a tenth of them do, each as wide as the prediction's error: what
a verdict asks of a range.

Cells of a table share what the paper does not state. Judged one by one, each may be met by a setting of its
own; judged together, all must be met by the same one, and in ratios, orders and trends much of what is not
stated cancels:

    claims of results/joint.toml x settings that a prediction went through -> possible (n of N) | impossible

The claims are data; what comes out is never added to counts of cells.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from gpipe_bench.harness import PUBLISHED
from gpipe_bench.harness.compare import accounts, admitted
from gpipe_bench.harness.paper import PaperNumber, of_the_paper
from gpipe_bench.harness.record import Scalar
from gpipe_bench.harness.report.grid import Grid, fill
from gpipe_bench.harness.unknowns import Text
from gpipe_bench.harness.verdict import SLIVER, Answer, Spread

Key = tuple[str, str, str]
"""Table, row and column of paper.csv."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """What the model gives under one choice of settings.

    Args:
        name: the choice in a few words; equal names are one hypothesis
        values: by table, row and column, each in the unit of that number in paper.csv
        settings: by name, as in results/unknowns.toml where it has them
        after_looking: found once the difference had been seen, so not one of those that the ranges cover
        spreads: by the same places, what it gives over all that is allowed of everything else
    """

    name: str
    values: Mapping[Key, float]
    settings: Mapping[str, Scalar]
    after_looking: bool = False
    spreads: Mapping[Key, Spread] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name, and whether it was found after looking."""
        return self.name + (" (found after looking)" if self.after_looking else "")

    def share(self, cell: PaperNumber) -> float:
        """The share of its settings that account for a number of the paper, in the unit of that."""
        spread = self.spreads.get(cell.key)
        if spread is None or not spread.values:
            return float(cell.key in self.values and accounts(self.values[cell.key], cell))
        known = admitted(cell)
        return spread.share_within(known.low, known.high) if cell.comparable else 0.0

    @property
    def tried(self) -> int:
        """How many settings it went through."""
        return max([1, *(len(spread.values) for spread in self.spreads.values())])


def with_reasons(
    entries: Sequence[Answer], hypotheses: Sequence[Hypothesis], paper: Sequence[PaperNumber] | None = None
) -> list[Answer]:
    """Our predictions for the paper's numbers, each with the hypotheses that account for the number.

    The ranges cover all hypotheses but those found after looking, so only these are further settings tried.
    """
    cells = of_the_paper(paper) if hypotheses else {}
    by_place: dict[Key, list[Hypothesis]] = {}
    for each in hypotheses:
        for place in {**each.values, **each.spreads}:
            by_place.setdefault(place, []).append(each)

    def joined(entry: Answer) -> Answer:
        cell, tried = cells.get(entry.place), by_place.get(entry.place)
        if cell is None or not tried or (entry.source, entry.question) != ("paper", "as published"):
            return entry
        # what was not found after looking stands first
        holding = [each for each in tried if each.share(cell) >= SLIVER]
        said = [each.label for each in sorted(holding, key=lambda each: each.after_looking)]
        others = sum(each.tried for each in tried if each.after_looking or not entry.tried)
        return replace(
            entry,
            explained_by=f"{said[0]} and {len(said) - 1:,} more" if said[1:] else "".join(said),
            others_tried=others + entry.others_tried,
            named=tuple(each.name.rpartition(": ")[2] for each in tried if each.after_looking),
        )

    return [joined(entry) for entry in entries]


# Jointly ----------------------------------------------------------------------------------------------------

PATH = PUBLISHED / "joint.toml"
NOTHING = 1e-9
"""What is smaller divides nothing: a share that is zero but for rounding."""
_ULP = 1e-9
Cells = Annotated[tuple[Text, ...], Meta(min_length=1)]


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

    def cells(self, named: Sequence[str]) -> list[Key]:
        """Cells as a condition names them. Raises ValueError for anything but two or three parts."""
        found: list[Key] = []
        for name in named:
            match [part.strip() for part in name.split("|")]:
                case [row, column]:
                    found.append((self.table, row, column))
                case [table, row, column]:
                    found.append((table, row, column))
                case _:
                    raise ValueError(f"{self.name}: {name!r} is no cell; write 'row | column'")
        return found


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
    values: Mapping[Key, Sequence[float | None]]
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
    known = of_the_paper()
    for claim in claims:
        for cell in (cell for each in claim.conditions for cell in claim.cells((*each.over, *each.under))):
            if cell not in known:
                raise ValueError(f"{path}: {claim.name}: the paper has no number {' / '.join(cell)}")
    return claims


def judge_jointly(
    walks: Sequence[Walk],
    claims: Sequence[Claim] | None = None,
    paper: Sequence[PaperNumber] | None = None,
) -> list[Joint]:
    """The claims that these walks can answer, in the order of the claims (those of the file by default)."""
    known, published = {walk.name: walk for walk in walks}, of_the_paper(paper)
    asked = [
        (claim, walk)
        for claim in (load_claims() if claims is None else claims)
        if (walk := known.get(claim.walk or claim.table)) is not None
    ]
    return [found for each in asked if (found := _evaluated(*each, published)) is not None]


def _evaluated(claim: Claim, walk: Walk, published: Mapping[Key, PaperNumber]) -> Joint | None:
    """None where the walk has no setting with all of the numbers."""
    ours = [_quotients(walk, claim.cells(each.over), claim.cells(each.under)) for each in claim.conditions]
    tried = [
        (settings, known)
        for settings, *values in zip(walk.settings, *ours, strict=True)
        if len(known := [value for value in values if value is not None]) == len(ours)
    ]
    if not tried:
        return None
    wanted = [_wanted(claim, each, published) for each in claim.conditions]
    errors = [(1.0, 1.0) if each.is_bound else walk.error for each in claim.conditions]

    def miss(values: Sequence[float], errors: Sequence[tuple[float, float]]) -> float:
        """By what factor the numbers miss the condition that they miss most."""
        return max(
            _apart(value * least, value * most, low, high)
            for value, (least, most), (_, low, high) in zip(values, errors, wanted, strict=True)
        )

    plain = [miss(values, [(1.0, 1.0)] * len(wanted)) for _, values in tried]
    holding = tuple(settings for settings, values in tried if miss(values, errors) <= 1 + _ULP)
    split = {}
    if claim.by:
        having = Counter(str(settings.get(claim.by)) for settings in holding)
        every = Counter(str(settings.get(claim.by)) for settings, _ in tried)
        split = {value: (having[value], count) for value, count in every.items()}
    ends = [(min(column), max(column)) for column in zip(*(values for _, values in tried), strict=True)]
    return Joint(
        table=claim.table, name=claim.name, statement=claim.statement,
        verdict="possible" if holding else "impossible", holding=holding,
        exact=sum(each <= 1 + _ULP for each in plain), tried=len(tried), nearest=min(plain),
        numbers=tuple((paper, *each) for (paper, _, _), each in zip(wanted, ends, strict=True)), split=split,
        error=(1.0, 1.0) if all(each.is_bound for each in claim.conditions) else walk.error,
    )  # fmt: skip


def _wanted(
    claim: Claim, condition: Condition, published: Mapping[Key, PaperNumber]
) -> tuple[float | None, float, float]:
    """The paper's quotient, None for a bound, and the smallest and the largest that meet the condition."""
    if condition.is_bound:
        low = -math.inf if condition.at_least is None else condition.at_least
        return None, low, math.inf if condition.at_most is None else condition.at_most
    over, under = (
        [published[cell] for cell in claim.cells(each)] for each in (condition.over, condition.under)
    )
    paper = math.prod(each.target for each in over) / math.prod(each.target for each in under)
    low = high = 1.0
    for each in over:
        low, high = low * (each.target - each.target_rounding), high * (each.target + each.target_rounding)
    for each in under:
        low, high = low / (each.target + each.target_rounding), high / (each.target - each.target_rounding)
    return paper, low * (1 - condition.within), high * (1 + condition.within)


def _quotients(walk: Walk, over: Sequence[Key], under: Sequence[Key]) -> list[float | None]:
    """Setting by setting; None where a number is missing or would be divided by nothing."""
    nothing: Sequence[float | None] = [None] * len(walk.settings)
    rows = zip(*(walk.values.get(cell, nothing) for cell in (*over, *under)), strict=True)

    def one(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        above, below = known[: len(over)], known[len(over) :]
        if len(known) < len(values) or any(abs(value) < NOTHING for value in below):
            return None
        return math.prod(above) / math.prod(below)

    return [one(row) for row in rows]


def _apart(least: float, most: float, low: float, high: float) -> float:
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

    def wrapped(text: str, width: int) -> str:
        return "\n".join(textwrap.wrap(text, width, break_on_hyphens=False))

    lines = []
    for each in found:
        ours = [
            (f"{low:.4g}" if f"{low:.4g}" == f"{high:.4g}" else f"{low:.4g} to {high:.4g}")
            + ("" if paper is None else f" ({paper:.4g})")
            for paper, low, high in each.numbers
        ]
        parts = ", ".join(f"{value}: {holding} of {count}" for value, (holding, count) in each.split.items())
        answer = "; ".join(filter(None, [each.words, parts]))
        lines.append([wrapped(f"{each.table}: {each.statement}", 44), "\n".join(ours), wrapped(answer, 32)])
    title = fill(
        "Jointly: does one setting give all of it? Found after looking, never added to counts of cells; "
        "--json lists the settings."
    )
    columns = ["statement", "ours, all settings (paper)", "answer"]
    return Grid(title=title, columns=columns, lines=lines).text()
