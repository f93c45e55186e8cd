"""Parameters divided over processes: the cases of `sharding_cases`."""

from __future__ import annotations

import pytest
import sharding_cases

from gpipe_bench.pipeline.ranks.launch import launch

pytestmark = pytest.mark.alone  # four processes at a time


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, tuple[str | None, float]]]:
    """What each of four ranks says of the selected cases."""
    chosen = [
        item.callspec.params["case"] for item in request.session.items if item.name.startswith("test_case[")
    ]
    return launch(sharding_cases.run_all, 4, chosen, device="cpu")


@pytest.mark.parametrize("case", sharding_cases.CASES)
def test_case(case: str, outcomes: list[dict[str, tuple[str | None, float]]]) -> None:
    traces = [f"rank {rank}: {of_rank[case][0]}" for rank, of_rank in enumerate(outcomes) if of_rank[case][0]]
    assert not traces, "\n".join(traces)


@pytest.mark.parametrize("case", sharding_cases.OF_EIGHT)
def test_case_of_eight(case: str) -> None:
    found = launch(sharding_cases.run_all, 8, [case], device="cpu")
    traces = [f"rank {rank}: {of_rank[case][0]}" for rank, of_rank in enumerate(found) if of_rank[case][0]]
    assert not traces, "\n".join(traces)
