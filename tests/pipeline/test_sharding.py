"""Parameters divided over processes: whole layers in parts, and parts of layers."""

from __future__ import annotations

import pytest
import sharding_cases
import tensor_parallel_cases
from case_runner import Outcomes, assert_passed, named, outcomes_of

pytestmark = pytest.mark.processes  # four at a time
CASES = named(*sharding_cases.CASES, *tensor_parallel_cases.CASES)
OF_EIGHT = named(*tensor_parallel_cases.OF_EIGHT)


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, case)


@pytest.mark.parametrize("case", OF_EIGHT)
def test_case_of_eight(case: str) -> None:
    assert_passed(outcomes_of({case: OF_EIGHT[case]}, num_ranks=8), case)
