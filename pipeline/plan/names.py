"""Names that a user got nearly right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'table1'?)` for a slip of the finger or another habit of writing; or nothing."""
    by_small = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), list(by_small), n=1)
    return f" (did you mean {by_small[close[0]]!r}?)" if close else ""
