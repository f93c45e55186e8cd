"""Chooses few rows of a large grid that contain every pair of values of different axes.

A mistake in one cell nearly always depends on one or two values, and shows in each cell with them. For
mistakes that need three or more there are random examples of all options (`test_joined`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

Row = tuple[Any, ...]


def pairwise(*axes: Sequence[Any], keep: Sequence[Row] = ()) -> list[Row]:
    """Rows that contain every pair of values of two axes; `keep` come first.

    Greedy: each further row has the most new pairs. The result is always the same.
    """
    rows, grid = list(keep), list(itertools.product(*axes))
    random.Random(0).shuffle(grid)  # in a sorted grid the first of equals resembles its neighbours
    missing = {pair for row in grid for pair in _pairs(row)}
    missing -= {pair for row in rows for pair in _pairs(row)}
    while missing:
        rows.append(max(grid, key=lambda row: sum(pair in missing for pair in _pairs(row))))
        missing -= set(_pairs(rows[-1]))
    return rows


def _pairs(row: Row) -> Iterator[tuple[Any, ...]]:
    return itertools.combinations(enumerate(row), 2)
