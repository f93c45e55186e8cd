"""The programs of `growth_cases`, in small."""

from __future__ import annotations

import growth_cases
import pytest
from case_runner import watched

pytestmark = pytest.mark.processes  # two at a time


def test_what_a_process_holds_does_not_grow() -> None:
    outcomes = watched(growth_cases.run, growth_cases.NUM_PROCESSES, 16, 64)
    assert not [text for of_rank in outcomes for text in of_rank]
