"""What was made lately: rows of long schedules are used by many ways in turn, and all of them are too many to
keep.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MOST = 32

T = TypeVar("T")


class Lately(Generic[T]):
    """The last `most` things that were asked for, by their keys."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self._known = most, dict[Hashable, T]()

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        """The one of that key, made anew where it was not asked for lately."""
        found = self._known.pop(key) if key in self._known else make()
        self._known[key] = found
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        return found
