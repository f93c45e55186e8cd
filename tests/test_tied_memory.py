"""The memory model of weights that several layers share, beside real steps, counted storage by storage."""

from __future__ import annotations

import pytest
from tied_memory_cases import count_all, data, model
from torch import nn

from gpipe_bench.pipeline import Boundary, Profiler, launch, named, pipeline_memory
from gpipe_bench.pipeline.memory.workers import shared_weights
from gpipe_bench.pipeline.stage.trees import split

CASES = [
    {"schedule": schedule, "remat": remat, "optimizer": optimizer, "microbatches": microbatches}
    for schedule, remat, optimizer, microbatches in (
        ("gpipe", "always", "sgd", 2), ("gpipe", "never", "sgd", 1), ("1f1b", "never", "adam", 2),
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def over_processes() -> list[list[int]]:
    """Bytes of each case, on each of two processes that share a weight."""
    return launch(count_all, 2, CASES, device="cpu")


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_tie_between_processes(number: int, over_processes: list[list[int]]) -> None:
    """Each owner has the weight, its state and its gradient, and for a moment another owner's gradient."""
    case, layers = CASES[number], model()
    inputs, target = (Boundary.of(split(each, case["microbatches"])[0]) for each in data())
    profiles, loss = Profiler(ties_apart=True).model(layers, nn.functional.cross_entropy, inputs, target)
    modelled = pipeline_memory(
        profiles, loss, [range(2), range(2, 4)],
        named(case["schedule"], 2, case["microbatches"], remat=case["remat"]), case["optimizer"],
        receive_ahead=1, ties=shared_weights(list(layers)),
    )  # fmt: skip
    for rank, found in enumerate(modelled):
        assert found.peak == pytest.approx(over_processes[rank][number], rel=0.01)
