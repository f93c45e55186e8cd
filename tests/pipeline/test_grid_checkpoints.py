"""Checkpoints between grids: the cases of `grid_checkpoint_cases`, in four processes."""

from __future__ import annotations

import grid_checkpoint_cases
import pytest
from case_runner import Outcomes, assert_passed, named

pytestmark = pytest.mark.processes  # four at a time
CASES = named(*grid_checkpoint_cases.CASES)


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, case)
