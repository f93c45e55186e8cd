"""Few rows of a large grid in which each two values of different axes still meet.

A mistake that shows in one cell nearly always needs one value or two of its own, and shows in each cell that
has them. What needs three or more is what random examples of all options together are for (`test_joined`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

Row = tuple[Any, ...]


def pairwise(*axes: Sequence[Any], keep: Sequence[Row] = ()) -> list[Row]:
    """Rows with a value of each axis, so that any two values of two axes stand together in one; `keep` first.

    Greedy: each further row is one that has the most new pairs. The same rows each time.
    """
    rows, grid = list(keep), list(itertools.product(*axes))
    random.Random(0).shuffle(grid)  # whoever is first of equals in a sorted grid repeats what is beside it
    missing = {pair for row in grid for pair in _pairs(row)}
    missing -= {pair for row in rows for pair in _pairs(row)}
    while missing:
        rows.append(max(grid, key=lambda row: sum(pair in missing for pair in _pairs(row))))
        missing -= set(_pairs(rows[-1]))
    return rows


def _pairs(row: Row) -> Iterator[tuple[Any, ...]]:
    return itertools.combinations(enumerate(row), 2)
