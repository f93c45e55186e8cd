"""Records that are whole and yet make no sense to their experiment: they cost themselves and nothing else.

A line may have come from a version that was never released, or from somebody's own program. The store accepts
it, because only the experiment knows what it needs; so the experiment is asked, one record at a time, once
it has stumbled over all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from gpipe_bench.harness.records.record import Record

T = TypeVar("T")

UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
)
"""What an experiment may stumble over in records that something else wrote."""

MOST_LINES = 5


def readable(
    name: str, records: Sequence[Record], show: Callable[[Sequence[Record]], T]
) -> tuple[T | None, list[str]]:
    """What `show` makes of the records that it can make something of, and lines about the others.

    None where it stumbles over all: the mistake may then be the experiment's own. `name` is the experiment's.
    """
    shown, error = _tried(show, records)
    if error is None:
        return shown, []
    kept: list[Record] = []
    lines: list[str] = []
    for record in records:
        _, alone = _tried(show, [record])
        if alone is None:
            kept.append(record)
        else:
            lines.append(f"{name} can't read its record of {record.label} ({_cause(alone)}); left out")
    shown, rest = _tried(show, kept)
    if not kept or rest is not None:
        return None, [f"{name} can't be shown: {_cause(error)}"]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"{name}: {len(lines) - MOST_LINES} more records are left out"]
    return shown, lines


def _tried(
    show: Callable[[Sequence[Record]], T], records: Sequence[Record]
) -> tuple[T | None, Exception | None]:
    try:
        return show(records), None
    except UNREADABLE as error:
        return None, error


def _cause(error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"
