"""The programs of `growth_cases`, in small."""

from __future__ import annotations

import growth_cases
import pytest

from gpipe_bench.pipeline.ranks.launch import launch

pytestmark = pytest.mark.processes  # two at a time


def test_what_a_process_holds_does_not_grow() -> None:
    outcomes = launch(growth_cases.run, growth_cases.NUM_PROCESSES, 16, 64, device="cpu")
    assert not [text for of_rank in outcomes for text in of_rank]
