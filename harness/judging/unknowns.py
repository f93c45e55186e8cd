"""What the paper does not state, with the values that are allowed: results/unknowns.toml.

A band that is sized after the residual was seen proves nothing. So the range of each setting that the
paper leaves open is chosen from the texts and kept in a file of its own, which says why, and predictions
take their values from it and from nowhere else.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gpipe_bench.harness.places import PUBLISHED

PATH = PUBLISHED / "unknowns.toml"

Value: TypeAlias = str | int | float | bool

ORIGINS = ("v1 ", "v5 ", "code: ", "maker: ", "general: ")
"""What a source begins with: a version of the paper, the authors' code, a maker's document, or common
knowledge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """A setting that the paper leaves open, for some tables.

    Either `allowed` lists the values, or `low` and `high` are the ends of a range, in `unit`.
    `constraint` says in words which values can go together.
    """

    tables: tuple[str, ...]
    setting: str
    allowed: tuple[Value, ...]
    low: float | None
    high: float | None
    unit: str
    constraint: str
    reason: str
    sources: tuple[str, ...]

    @property
    def ends(self) -> tuple[Value, ...]:
        """What a prediction has to be made with: the values, or both ends of the range."""
        if self.low is None or self.high is None:
            return self.allowed
        return (self.low, self.high)

    def allows(self, value: Value) -> bool:
        """Whether the setting may have this value."""
        if self.low is None or self.high is None:
            return any(type(value) is type(one) and value == one for one in self.allowed)
        return isinstance(value, int | float) and self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """A setting that the paper gives: its value, the place, and the words that give it."""

    tables: tuple[str, ...]
    setting: str
    value: Value
    source: str
    quote: str
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All unknown and all stated settings, in the file's order."""

    unknown: tuple[Unknown, ...]
    stated: tuple[Stated, ...]

    def of(self, table: str) -> dict[str, Unknown]:
        """The unknown settings of a table of paper.csv, by name."""
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


def load_unknowns(path: Path = PATH) -> Settings:
    """The file, checked. Raises ValueError with the file, the entry and what is wrong with it."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ValueError(f"the unknowns can't be read from {path}: {error.strerror or error}") from error
    return _parsed(path, source)


@functools.lru_cache(maxsize=1)
def _parsed(path: Path, source: bytes) -> Settings:
    """Of one content once: every claim asks for it."""
    try:
        content = tomllib.loads(source.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    if set(content) != {"unknown", "stated"} or not all(
        isinstance(part, list) and all(isinstance(entry, dict) for entry in part) for part in content.values()
    ):
        raise ValueError(f"{path}: there must be [[unknown]] and [[stated]] entries and nothing else")
    unknown: list[Unknown] = []
    stated: list[Stated] = []
    seen: dict[tuple[str, str], str] = {}
    for kind, entries in content.items():
        for number, entry in enumerate(entries, start=1):
            place = f"{path}: [[{kind}]] {number}"
            try:
                one = _unknown(entry) if kind == "unknown" else _stated(entry)
                for table in one.tables:
                    first = seen.setdefault((table, one.setting), place)
                    if first != place:
                        raise ValueError(f"{one.setting} of {table} stands in {first} already")
            except ValueError as error:
                raise ValueError(f"{place} ({entry.get('setting', 'no setting')}): {error}") from error
            if isinstance(one, Unknown):
                unknown.append(one)
            else:
                stated.append(one)
    return Settings(unknown=tuple(unknown), stated=tuple(stated))


def _unknown(entry: Mapping[str, Any]) -> Unknown:
    _keys(entry, {"tables", "setting", "reason", "sources"}, {"allowed", "range", "unit", "constraint"})
    if ("allowed" in entry) == ("range" in entry):
        raise ValueError("an unknown has either 'allowed' or 'range'")
    allowed: tuple[Value, ...] = ()
    low = high = None
    if "allowed" in entry:
        allowed = tuple(_list(entry, "allowed"))
        if not all(isinstance(value, str | int | float | bool) for value in allowed):
            raise ValueError(f"allowed values are texts, numbers or booleans, not {list(allowed)}")
        if len(set(map(repr, allowed))) != len(allowed):
            raise ValueError(f"a value is allowed twice: {list(allowed)}")
    else:
        ends = _list(entry, "range")
        numbers = [end for end in ends if isinstance(end, int | float) and not isinstance(end, bool)]
        if len(ends) != 2 or len(numbers) != 2 or not all(map(math.isfinite, numbers)):
            raise ValueError(f"a range is [low, high], two finite numbers, not {ends}")
        low, high = float(numbers[0]), float(numbers[1])
        if not low < high:
            raise ValueError(f"the range {ends} does not rise")
    sources = tuple(_text(source, "a source") for source in _list(entry, "sources"))
    for source in sources:
        if not source.startswith(ORIGINS):
            raise ValueError(f"the source {source!r} begins with none of {', '.join(map(repr, ORIGINS))}")
    return Unknown(
        tables=tuple(_text(table, "a table") for table in _list(entry, "tables")),
        setting=_text(entry["setting"], "setting"),
        allowed=allowed,
        low=low,
        high=high,
        unit=_text(entry["unit"], "unit") if "unit" in entry else "",
        constraint=_text(entry["constraint"], "constraint") if "constraint" in entry else "",
        reason=_text(entry["reason"], "reason"),
        sources=sources,
    )


def _stated(entry: Mapping[str, Any]) -> Stated:
    _keys(entry, {"tables", "setting", "value", "source", "quote"}, {"note"})
    source = _text(entry["source"], "source")
    if not source.startswith(("v1 ", "v5 ")):
        raise ValueError(f"the source {source!r} names no version; what is stated is stated in v1 or v5")
    if not isinstance(entry["value"], str | int | float | bool):
        raise ValueError(f"value is {entry['value']!r}, not a text, a number or a boolean")
    return Stated(
        tables=tuple(_text(table, "a table") for table in _list(entry, "tables")),
        setting=_text(entry["setting"], "setting"),
        value=entry["value"],
        source=source,
        quote=_text(entry["quote"], "quote"),
        note=_text(entry["note"], "note") if "note" in entry else "",
    )


def _keys(entry: Mapping[str, Any], needed: set[str], optional: set[str]) -> None:
    if missing := needed - set(entry):
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    if unknown := set(entry) - needed - optional:
        raise ValueError(f"it has unknown keys: {', '.join(sorted(unknown))}")


def _list(entry: Mapping[str, Any], key: str) -> list[Any]:
    value = entry[key]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} is {value!r}, not a list with something in it")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is {value!r}, not a text")
    return value
