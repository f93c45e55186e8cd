"""Parameters divided over processes: the cases of `sharding_cases`."""

from __future__ import annotations

import pytest
import sharding_cases
from case_runner import Outcomes, assert_passed, outcomes_of

pytestmark = pytest.mark.alone  # four processes at a time
CASES = sharding_cases.CASES


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, case)


@pytest.mark.parametrize("case", sharding_cases.OF_EIGHT)
def test_case_of_eight(case: str) -> None:
    assert_passed(outcomes_of({case: sharding_cases.OF_EIGHT[case]}, num_ranks=8), case)
