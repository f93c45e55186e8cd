"""What the paper does not state, with the values that are allowed: results/unknowns.toml.

A band that is sized after the residual was seen proves nothing. So the range of each setting that the
paper leaves open is chosen from the texts and kept in a file of its own, which says why, and predictions
take their values from it and from nowhere else.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from gpipe_bench.harness import PUBLISHED

PATH = PUBLISHED / "unknowns.toml"

Value: TypeAlias = str | int | float | bool
Text: TypeAlias = Annotated[str, Meta(pattern=r"\S")]
Origin: TypeAlias = Annotated[str, Meta(pattern="^(v1|v5|code:|maker:|general:) ")]
"""A version of the paper, the authors' code, a maker's document or common knowledge, and the place there."""
Way: TypeAlias = Literal["at most", "at least", "within a factor", "about"]
"""How a word limits the number of a sentence."""
Tables: TypeAlias = Annotated[tuple[Text, ...], Meta(min_length=1)]


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
def load_unknowns(path: Path = PATH) -> Settings:
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
