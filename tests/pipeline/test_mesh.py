"""Pipelines beside each other: what is computed and how it is summed, on grids of four processes."""

from __future__ import annotations

import mesh_cases
import pytest
import reduction_cases
from case_runner import Outcomes, assert_passed, named

pytestmark = pytest.mark.processes  # four at a time
CASES = named(*mesh_cases.CASES, *reduction_cases.CASES)


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, case)
