"""Settings that the paper does not state, and our declared configuration for each of its tables.

results/unknowns.toml lists allowed values for each setting that the paper leaves open, from texts alone: a
range chosen after seeing results proves nothing. results/reproduction.toml sets each once, by rules that
ignore results. A number computed under it has one error, the predictor's, measured on numbers that others
published and that the predictor was not fitted to:

    paper | ours +- error | ours / paper | agrees, differs, no test
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from . import PUBLISHED

PATH, UNKNOWNS = PUBLISHED / "reproduction.toml", PUBLISHED / "unknowns.toml"

T = TypeVar("T")
Value: TypeAlias = str | int | float | bool
Rule: TypeAlias = Literal["paper", "authors' code", "published reproduction", "custom of 2018", "plainest"]
"""Rules for a choice that the paper leaves open, in the order in which they apply."""
Kind: TypeAlias = Literal["ratios of speeds", "speeds", "bytes"]
"""Kinds of numbers; the error is measured for each."""
Text: TypeAlias = Annotated[str, Meta(pattern=r"\S")]
Origin: TypeAlias = Annotated[str, Meta(pattern="^(v1|v5|code:|maker:|general:) ")]
"""The source of a setting: a version of the paper, the authors' code, a maker's document or common knowledge,
with the place."""
Way: TypeAlias = Literal["at most", "at least", "within a factor", "about"]
"""How a word of a sentence limits its number."""
Tables: TypeAlias = Annotated[tuple[Text, ...], Meta(min_length=1)]


class _Setting(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting of some tables of paper.csv."""

    tables: Tables
    setting: Text


class Unknown(_Setting, frozen=True, kw_only=True):
    """A setting that the paper leaves open.

    Either `allowed` lists values, or `range` has the lowest and the highest, in `unit`. `constraint` says
    which values can go together. `later` values, added after our numbers were known, are in no range. If the
    setting is how far a word may reach, `sentences` are the rows that use the word, and how it limits their
    numbers.
    """

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
        if self.range is not None and not -math.inf < self.range[0] < self.range[1] < math.inf:
            raise ValueError(f"{self.setting}: range is {list(self.range)}, not two finite numbers that rise")


class Stated(_Setting, frozen=True, kw_only=True):
    """A setting that the paper states: value, place in v1 or v5, and quotation."""

    value: Value
    source: Annotated[str, Meta(pattern="^v[15] ")]
    quote: Text
    note: str = ""


class Choice(_Setting, frozen=True, kw_only=True):
    """The declared value of a setting that the paper leaves open.

    Args:
        value: the value; of several, the first under which the paper's own runs fit
        rule: the first rule that applies
        source: where the rule finds the value
        reason: an explanation, where needed
        known: whether earlier predictions showed that it moves our numbers "towards" the paper's or "away"
        declared: "afterwards" if its result was known; its numbers then decide nothing
    """

    value: Value | tuple[Value, ...]
    rule: Rule
    source: Text
    known: Literal["", "towards", "away"]
    reason: str = ""
    declared: Literal["", "afterwards"] = ""


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """All unknown and stated settings, in the file's order, each once per table."""

    unknown: tuple[Unknown, ...]
    stated: tuple[Stated, ...]

    def __post_init__(self) -> None:
        _check_once((*self.unknown, *self.stated))

    def of(self, table: str) -> dict[str, Unknown]:
        """The unknown settings of a table, by name."""
        return {one.setting: one for one in self.unknown if table in one.tables}


class ErrorRule(Struct, frozen=True):
    """The rule for the predictor's error; the file explains it."""

    no_test_above: float
    """Numbers with a larger error are no test."""


class Reproduction(Struct, frozen=True):
    """The declared configuration. Raises ValueError if a table has a setting twice."""

    choice: tuple[Choice, ...]
    error: ErrorRule

    def __post_init__(self) -> None:
        _check_once(self.choice)

    def of(self, table: str) -> dict[str, Choice]:
        """The choices of a table, by setting."""
        return {each.setting: each for each in self.choice if table in each.tables}

    def declared_afterwards(self, tables: Collection[str]) -> str:
        """Why numbers of these tables decide nothing; empty if no choice was declared afterwards."""
        late = dict.fromkeys(
            each.setting for each in self.choice if each.declared and not set(tables).isdisjoint(each.tables)
        )
        return f"{' and '.join(late)} declared when what that leads to was known" if late else ""


def _check_once(settings: Sequence[_Setting]) -> None:
    for (table, setting), times in Counter((t, one.setting) for one in settings for t in one.tables).items():
        if times > 1:
            raise ValueError(f"{table} has two choices of {setting}; keep one")


@functools.cache
def load_unknowns() -> Settings:
    """results/unknowns.toml, checked. Raises ValueError that names it and what is wrong there."""
    return _loaded(UNKNOWNS, Settings)


@functools.cache
def load_reproduction(path: Path = PATH) -> Reproduction:
    """The declared configuration's file, checked. Raises ValueError as `load_unknowns`."""
    return _loaded(path, Reproduction)


def _loaded(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.toml.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def points(unknown: Unknown) -> tuple[Value, ...]:
    """The values to compute with; of a range its low end, geometric middle and high end."""
    if unknown.range is None:
        return unknown.allowed
    low, high = unknown.range
    return (low, math.sqrt(low * high), high)


@functools.cache
def words() -> dict[str, tuple[Way, Unknown]]:
    """By row of a sentence: how its word limits its number, and how far the word may reach."""
    return {row: (way, one) for one in load_unknowns().unknown for row, way in one.sentences.items()}


# The error of the predictor


class Published(NamedTuple):
    """Another's published number for a model, of one kind, and the predictor's."""

    model: str
    kind: Kind
    ours: float
    published: float


class PredictorError(NamedTuple):
    """The predictor's error for one kind of numbers, as a factor minus 1.

    Args:
        error: e to the root mean square of the models' errors, minus 1
        numbers: number of published numbers
        num_models: number of their models
        without: the error with each model left out; empty for a single model
    """

    error: float
    numbers: int
    num_models: int
    without: Mapping[str, float]

    def __str__(self) -> str:
        found = f"{100 * self.error:.1f} % ({self.numbers} numbers of {self.num_models} models"
        if not self.without:
            return f"{found}, so nothing says how it would be of another)"
        low, high = min(self.without.values()), max(self.without.values())
        return f"{found}; {100 * low:.1f} to {100 * high:.1f} % with one of them left out)"


def predictor_errors(numbers: Iterable[Published]) -> dict[Kind, PredictorError]:
    """The error of each kind, by the file's rule. Raises ValueError for numbers that are not positive."""
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
        error, numbers_of = math.expm1(_root_mean_square([*models.values()])), of_models.values()
        found[kind] = PredictorError(error, sum(map(len, numbers_of)), len(models), left)
    return found


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(fmean(value * value for value in values))


def of_quotient(error: float, numbers: int = 2) -> float:
    """The error of a quotient of so many numbers with this error, if errors are independent."""
    return math.expm1(math.sqrt(numbers) * math.log1p(error))


def of_increase(error: float, increase: float) -> float:
    """The error of an increase: a quotient with this error, minus 1."""
    return error * (1 + increase) / abs(increase) if increase else math.inf
