"""Which tests are of the first tier.

It is what `nox -s tests` runs: the whole public behaviour once, within three minutes. The second, named in
`second_tier.txt` and marked `deep`, holds the same promises on more cells, in more processes, under signals
and kills; continuous integration adds it (`nox -s tests -- --all`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

SECOND = Path(__file__).with_name("second_tier.txt")


@cache
def patterns() -> tuple[str, ...]:
    """The lines of `second_tier.txt` that say something."""
    lines = SECOND.read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def is_deep(name: str, patterns: Sequence[str]) -> bool:
    """Whether a test, or all of a file, is of the second tier; `name` is pytest's, from `tests/` on. The last
    pattern that holds it decides, and one behind `!` takes back, as in `.gitignore`.
    """
    found = False
    for pattern in patterns:
        inside = pattern.removeprefix("!")
        if name.startswith(inside) and name[len(inside) : len(inside) + 1] in ("", ":", "[", "/"):
            found = not pattern.startswith("!")
    return found


def is_all_deep(file: str) -> bool:
    """Whether no test of a file is of the first tier."""
    lines = patterns()
    return is_deep(file, lines) and not any(line.startswith(f"!{file}::") for line in lines)
