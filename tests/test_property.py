"""The random examples of `property_cases`, a few of them; PROPERTY_EXAMPLES=1000 asks for more."""

from __future__ import annotations

import os

import property_cases
import pytest
from case_runner import watched

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "30"))


def test_over_processes_every_gradient_is_the_plain_models() -> None:
    outcomes = watched(property_cases.run, property_cases.NUM_PROCESSES, 0, 0, EXAMPLES)
    assert not [text for of_rank in outcomes for text in of_rank]


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_in_one_process_too(first: int) -> None:
    for number in range(first, first + 10):
        example = property_cases.Example(1, number)
        assert not example.problems(None), f"example {number}: {example}"
