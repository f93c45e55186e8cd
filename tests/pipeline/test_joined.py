"""A few random examples of layers, schedules, sizes and options; EXAMPLES=1000 asks for more."""

from __future__ import annotations

import os

import pytest
from case_runner import watched
from random_examples import KINDS, NUM_PROCESSES, over_processes, wrong

EXAMPLES = os.environ.get("EXAMPLES")


@pytest.mark.parametrize("kind", KINDS)
def test_over_processes_every_number_is_the_plain_models(kind: str) -> None:
    number = int(EXAMPLES or 12)
    outcomes = watched(over_processes, NUM_PROCESSES, kind, 0, 0, number)
    assert not [text for of_rank in outcomes for text in of_rank]


@pytest.mark.parametrize("kind", KINDS)
def test_in_one_process_too(kind: str) -> None:
    assert not [text for index in range(int(EXAMPLES or 12)) for text in wrong(kind, 1, index)]
