"""What the paper does not state, and our reproduction: one declared configuration per table of the paper.

results/unknowns.toml has the values that are allowed for each setting that the paper leaves open, chosen from
the texts: a band that is sized after the residual was seen proves nothing. Predictions take their values from
it and from nowhere else.

results/reproduction.toml sets once whatever the paper leaves open, by rules that look at no outcome, and was
committed before anything was computed from it. A number computed under it has one error, the predictor's,
measured on numbers that others published and that it was not made for:

    paper | ours +- error | ours / paper | agrees, differs, no test

A table is summed up by four numbers that were fixed with the choices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct

from gpipe_bench.harness import PUBLISHED

PATH, UNKNOWNS = PUBLISHED / "reproduction.toml", PUBLISHED / "unknowns.toml"

Value: TypeAlias = str | int | float | bool
Rule: TypeAlias = Literal["paper", "authors' code", "published reproduction", "custom of 2018", "plainest"]
"""Rules for a choice that the paper leaves open, in the order in which they apply."""
Kind: TypeAlias = Literal["ratios of speeds", "speeds", "bytes"]
"""Numbers whose error is measured apart."""
Answer: TypeAlias = Literal["agrees", "differs", "no test"]
Text: TypeAlias = Annotated[str, Meta(pattern=r"\S")]
Origin: TypeAlias = Annotated[str, Meta(pattern="^(v1|v5|code:|maker:|general:) ")]
"""A version of the paper, the authors' code, a maker's document or common knowledge, and the place there."""
Way: TypeAlias = Literal["at most", "at least", "within a factor", "about"]
"""How a word limits the number of a sentence."""
Tables: TypeAlias = Annotated[tuple[Text, ...], Meta(min_length=1)]


# What is not stated


class Unknown(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting that the paper leaves open, for some tables.

    Either `allowed` lists the values, or `range` has the lowest and the highest, in `unit`. `constraint` says
    in words which values can go together. `later` has further values, thought of after our numbers had been
    seen: which no range covers. Where it is how far a word of the text may reach,
    `sentences` are the rows of those that it is a word of, and how it limits their numbers.
    """

    tables: Tables
    setting: Text
    reason: Text
    sources: Annotated[tuple[Origin, ...], Meta(min_length=1)]
    allowed: tuple[Value, ...] = ()
    later: tuple[Value, ...] = ()
    range: tuple[float, float] | None = None
    unit: str = ""
    constraint: str = ""
    sentences: dict[Text, Way] = {}

    def __post_init__(self) -> None:
        if bool(self.allowed) == (self.range is not None):
            raise ValueError(f"{self.setting} must have either 'allowed' values or a 'range'")
        every = (*self.allowed, *self.later)
        if len(set(map(repr, every))) != len(every):
            raise ValueError(f"{self.setting}: a value is allowed twice: {list(every)}")
        if self.range is not None and not -math.inf < self.range[0] < self.range[1] < math.inf:
            raise ValueError(f"{self.setting}: range is {list(self.range)}, not two finite numbers that rise")


class Stated(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting that the paper gives: its value, the place in v1 or v5, and the words that give it."""

    tables: Tables
    setting: Text
    value: Value
    source: Annotated[str, Meta(pattern="^v[15] ")]
    quote: Text
    note: str = ""


def points(unknown: Unknown) -> tuple[Value, ...]:
    """The values that are gone through; of a range its low end, its geometric middle and its high end."""
    if unknown.range is None:
        return unknown.allowed
    low, high = unknown.range
    return (low, math.sqrt(low * high), high)


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """All unknown and all stated settings, in the file's order."""

    unknown: tuple[Unknown, ...]
    stated: tuple[Stated, ...]

    def __post_init__(self) -> None:
        seen: set[tuple[str, str]] = set()
        every: list[Unknown | Stated] = [*self.unknown, *self.stated]
        for one in every:
            for table in one.tables:
                if (table, one.setting) in seen:
                    raise ValueError(f"{one.setting} of {table} stands there twice")
                seen.add((table, one.setting))

    def of(self, table: str) -> dict[str, Unknown]:
        """The unknown settings of a table, by name."""
        return {one.setting: one for one in self.unknown if table in one.tables}

    def find(self, table: str, setting: str) -> Unknown:
        """One unknown setting. Raises ValueError where the paper states it, or where the file has none."""
        found = self.of(table)
        if setting in found:
            return found[setting]
        for one in self.stated:
            if table in one.tables and setting == one.setting:
                raise ValueError(
                    f"{setting} of {table} is not an unknown: {one.source} states {one.value} ({one.quote!r})"
                )
        known = ", ".join(found) or "none"
        raise ValueError(f"{table} has no unknown setting {setting!r} in the file; it has: {known}")


@functools.cache
def load_unknowns(path: Path = UNKNOWNS) -> Settings:
    """The file, checked. Raises ValueError with the file, the entry and what is wrong with it."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Settings)
    except OSError as error:
        raise ValueError(f"the unknowns can't be read from {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error


@functools.cache
def words() -> dict[str, tuple[Way, Unknown]]:
    """By the row of a sentence: how its word limits its number, and how far the word may reach."""
    return {row: (way, one) for one in load_unknowns().unknown for row, way in one.sentences.items()}


# What is declared


class Choice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One choice of what the paper leaves open, for some tables.

    Args:
        tables: as in paper.csv
        setting: what is chosen
        value: of the setting; of several the first counts under which the paper's own runs fit
        rule: the first that applies
        source: where the rule finds it
        reason: where that needs a word
        known: whether earlier predictions had shown it to bring our numbers "towards" the paper's or "away"
    """

    tables: Tables
    setting: Text
    value: Value | tuple[Value, ...]
    rule: Rule
    source: Text
    known: Literal["", "towards", "away"]
    reason: str = ""


class ErrorRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the error is measured, and what it decides, in words; above `no_test_above` there is no test."""

    about: Text
    no_test_above: float
    agrees: Text
    differs: Text
    no_test: Text


class Summary(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers that sum up a table, in words."""

    numbers: tuple[Text, ...]


class Reproduction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file. Raises ValueError where a table has a setting twice."""

    choice: tuple[Choice, ...]
    error: ErrorRule
    summary: Summary

    def __post_init__(self) -> None:
        seen: set[tuple[str, str]] = set()
        for each in self.choice:
            for table in each.tables:
                if (table, each.setting) in seen:
                    raise ValueError(f"{table} has two choices of {each.setting}; keep one")
                seen.add((table, each.setting))

    def of(self, table: str) -> dict[str, Choice]:
        """The choices of a table, by setting."""
        return {each.setting: each for each in self.choice if table in each.tables}


@functools.cache
def load_reproduction(path: Path = PATH) -> Reproduction:
    """The file, checked. Raises ValueError that names it and what is wrong there."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Reproduction)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


# The error of the predictor ---------------------------------------------------------------------------------


class Published(NamedTuple):
    """A number that others published, and what the predictor makes of it: of which model, of which kind."""

    model: str
    kind: Kind
    ours: float
    published: float


class PredictorError(NamedTuple):
    """The error of one kind of numbers, as a factor less 1.

    Args:
        error: e to the root mean square of the models' errors, less 1
        numbers: how many were published
        models: by model its error
        without: with each model left out in turn; empty of a single model
    """

    error: float
    numbers: int
    models: Mapping[str, float]
    without: Mapping[str, float]

    def __str__(self) -> str:
        found = f"{100 * self.error:.1f} % ({self.numbers} numbers of {len(self.models)} models"
        if not self.without:
            return f"{found}, so nothing says how it would be of another)"
        low, high = min(self.without.values()), max(self.without.values())
        return f"{found}; {100 * low:.1f} to {100 * high:.1f} % with one of them left out)"


def predictor_errors(numbers: Iterable[Published]) -> dict[Kind, PredictorError]:
    """The error of each kind, by the rule of the file. Raises ValueError for numbers not above zero."""
    residuals: dict[Kind, dict[str, list[float]]] = {}
    for each in numbers:
        if each.ours <= 0 or each.published <= 0:
            raise ValueError(f"{each} has a number that is not positive; its logarithm has no error")
        residuals.setdefault(each.kind, {}).setdefault(each.model, []).append(
            math.log(each.ours / each.published)
        )
    found: dict[Kind, PredictorError] = {}
    for kind, of_models in residuals.items():
        models = {model: _root_mean_square(each) for model, each in of_models.items()}
        left = {
            model: math.expm1(_root_mean_square([models[other] for other in models if other != model]))
            for model in models
            if len(models) > 1
        }
        found[kind] = PredictorError(
            math.expm1(_root_mean_square([*models.values()])),
            sum(map(len, of_models.values())),
            {model: math.expm1(each) for model, each in models.items()},
            left,
        )
    return found


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(fmean(value * value for value in values))


def of_quotient(error: float) -> float:
    """The error of a quotient of two predictions of this error, whose residuals are independent."""
    return math.expm1(math.sqrt(2) * math.log1p(error))


# The verdict ------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """A number of the paper beside ours.

    Args:
        row, column: as in paper.csv
        paper: the number that is judged
        rounding: how far it may be off
        ours: None where there is none
        error: of ours, as a factor less 1
        why: why there is no test, where our number is missing or stands over one that is
    """

    row: str
    column: str
    paper: float
    rounding: float
    ours: float | None
    error: float
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """Our number over the paper's."""
        return None if self.ours is None else self.ours / self.paper

    @property
    def answer(self) -> Answer:
        """The answer by the rule of results/reproduction.toml."""
        if self.ours is None or self.why or self.error > load_reproduction().error.no_test_above:
            return "no test"
        low, high = self.ours / (1 + self.error), self.ours * (1 + self.error)
        meets = low <= self.paper + self.rounding and high >= self.paper - self.rounding
        return "agrees" if meets else "differs"


class Summed(NamedTuple):
    """The four numbers of a table.

    Args:
        counts: of each answer
        off: the median of |ours / paper - 1|; None without a number
        rank: Spearman's correlation; None below three cells, or where all of one side are equal
        directions: how many pairs of neighbours move as the paper's do
        pairs: of how many
    """

    counts: dict[Answer, int]
    off: float | None
    rank: float | None
    directions: int
    pairs: int

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {answer}" for answer, number in self.counts.items())
        return "; ".join(filter(None, [counts, self.numbers]))

    @property
    def numbers(self) -> str:
        """The summary's numbers that need no answer, in words."""
        parts = []
        if self.off is not None:
            parts.append(f"median |ours / paper - 1| {100 * self.off:.0f} %")
        if self.rank is not None:
            parts.append(f"rank correlation {self.rank:.2f}")
        if self.pairs:
            parts.append(f"{self.directions} of {self.pairs} directions are the paper's")
        return "; ".join(parts)


def summed(cells: Sequence[Cell], fixed: Sequence[Cell] = ()) -> Summed:
    """The four numbers of some cells, and of others that are 1 by definition, which have directions alone.

    Neighbours are cells of one row in the order of columns, or of one column in the order of rows.
    """
    counts: dict[Answer, int] = {"agrees": 0, "differs": 0, "no test": 0}
    for cell in cells:
        counts[cell.answer] += 1
    known = [cell for cell in cells if cell.ours is not None]
    ratios = [abs(cell.ratio - 1) for cell in known if cell.ratio is not None]
    right = pairs = 0
    for one, other in _neighbours([*cells, *fixed]):
        if one.paper != other.paper and one.ours is not None and other.ours is not None:
            pairs += 1
            right += (other.paper > one.paper) == (other.ours > one.ours) and other.ours != one.ours
    return Summed(
        counts,
        median(ratios) if ratios else None,
        rank_correlation([cell.paper for cell in known], [cell.ours or 0.0 for cell in known]),
        right,
        pairs,
    )


def _neighbours(cells: Sequence[Cell]) -> Iterable[tuple[Cell, Cell]]:
    for of_line, along in (("row", "column"), ("column", "row")):
        lines: dict[str, list[Cell]] = {}
        for cell in cells:
            lines.setdefault(getattr(cell, of_line), []).append(cell)
        for line in lines.values():
            numbered = [
                (number, cell) for cell in line if (number := _number(getattr(cell, along))) is not None
            ]
            yield from pairwise(cell for _, cell in sorted(numbered, key=lambda each: each[0]))


def _number(label: str) -> float | None:
    """`8` of "K=8" and "pipeline-8"; a naive column comes first. None where a label has no number."""
    digits = "".join(letter for letter in label.partition(" ")[0] if letter.isdigit())
    return float(digits) - 0.5 * label.startswith("naive") if digits else None


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's, with mean ranks of equals; None below three numbers or where a side does not vary."""
    if len(one) < 3 or len(set(one)) < 2 or len(set(other)) < 2:
        return None
    a, b = _ranks(one), _ranks(other)
    middle = fmean(a)
    covariance = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    return covariance / math.sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
