"""Covering arrays: every pair of values, in few rows."""

from __future__ import annotations

import itertools

from covering import pairwise

AXES = (range(5), range(5), "abc", "xyz")


def test_every_two_values_of_different_axes_meet_in_a_row() -> None:
    rows = pairwise(*AXES, keep=[(4, 4, "c", "z")])
    assert rows[0] == (4, 4, "c", "z")
    assert rows == pairwise(*AXES, keep=[(4, 4, "c", "z")])
    for (i, first), (j, second) in itertools.combinations(enumerate(AXES), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(first, second))
    assert 25 <= len(rows) <= 30, "of 225"


def test_one_axis_alone_and_a_row_of_each_value() -> None:
    assert sorted(pairwise(range(3), "a")) == [(0, "a"), (1, "a"), (2, "a")]
