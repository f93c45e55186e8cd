"""Divides the tests into two tiers.

`nox -s tests` runs the first tier: the whole public behaviour once, within two minutes. The second tier,
listed in `second_tier.txt` and marked `deep`, tests the same behaviour with more sizes and processes, and
with signals and kills; `nox -s tests -- --all` and continuous integration run both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

SECOND = Path(__file__).with_name("second_tier.txt")


@cache
def patterns() -> tuple[str, ...]:
    """The patterns in `second_tier.txt`, without comments and empty lines."""
    lines = SECOND.read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def is_deep(name: str, patterns: Sequence[str]) -> bool:
    """Whether a test or a file is in the second tier; `name` is a pytest node id without `tests/`. The last
    pattern that matches decides; one that begins with `!` takes out, as in `.gitignore`.
    """
    found = False
    for pattern in patterns:
        inside = pattern.removeprefix("!")
        if name.startswith(inside) and name[len(inside) : len(inside) + 1] in ("", ":", "[", "/"):
            found = not pattern.startswith("!")
    return found


def is_all_deep(file: str) -> bool:
    """Whether all tests of a file are in the second tier."""
    lines = patterns()
    return is_deep(file, lines) and not any(line.startswith(f"!{file}::") for line in lines)
