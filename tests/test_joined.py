"""The random examples of `joined_cases`, a few of them; JOINED_EXAMPLES=1000 asks for more."""

from __future__ import annotations

import os

import joined_cases
from case_runner import watched

EXAMPLES = int(os.environ.get("JOINED_EXAMPLES", "12"))


def test_over_processes_all_options_together_give_the_plain_models_numbers() -> None:
    outcomes = watched(joined_cases.run_all, joined_cases.NUM_PROCESSES, 0, 0, EXAMPLES)
    assert not [text for of_rank in outcomes for text in of_rank]


def test_in_one_process_too() -> None:
    for number in range(EXAMPLES):
        example = joined_cases.Example(1, number)
        assert not example.problems(None), f"example {number}: {example}"
