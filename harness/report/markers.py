"""Pages of which a part is generated: what stands between two markers is made anew, the rest stays."""

from __future__ import annotations


def between(text: str, begin: str, end: str, new: str, page: str) -> str:
    """The text with `new` between the markers. Raises ValueError naming the page where one is lost."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{page} has lost its markers: it needs {begin.strip()!r} and {end!r}")
    return f"{before}{begin}{new}{end}{after}"
