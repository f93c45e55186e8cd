"""What a process holds of a stage, or of a weight, that another one holds too: the model beside real steps,
counted.
"""

from __future__ import annotations

from typing import Any

import pytest
from grid_memory_cases import count_all, data, model, tied_model, words
from torch import nn

from gpipe_bench.pipeline import (
    Boundary,
    Profiler,
    bytes_of_stages,
    grid_peak_bytes,
    launch,
    named,
    peak_bytes,
    pipeline_memory,
)
from gpipe_bench.pipeline.memory.grids import Sharing, held_stage
from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
from gpipe_bench.pipeline.memory.trace import LayerProfile
from gpipe_bench.pipeline.memory.workers import shared_weights
from gpipe_bench.pipeline.stage.trees import split


def case(dimension: str, schedule: str, remat: str, microbatches: int, **others: Any) -> dict[str, Any]:
    return {
        "dimension": dimension, "schedule": schedule, "remat": remat, "microbatches": microbatches,
        "examples": 24, "level": 2, "bucket_bytes": 30_000, "optimizer": "adam",
    } | others  # fmt: skip


CASES = [
    case("dp", "gpipe", "always", 4),
    case("dp", "gpipe", "never", 4, optimizer="sgd"),
    case("dp", "gpipe", "never", 2, bucket_bytes=2**20, optimizer="sgd", examples=2),
    case("dp", "1f1b", "never", 1, optimizer="sgd"),
    case("dp", "zb-h1", "never", 4, optimizer="sgd", examples=2),
    case("fsdp", "gpipe", "always", 4),
    case("fsdp", "gpipe", "never", 2, optimizer="sgd", examples=2),
    case("fsdp", "1f1b", "never", 1, optimizer="sgd", examples=2),
    case("fsdp", "zb-h1", "never", 3, optimizer="sgd", examples=2),
    case("fsdp", "gpipe", "always", 4, level=3, optimizer="sgd"),
    case("fsdp", "gpipe", "never", 2, level=3, examples=2),
    case("fsdp", "1f1b", "never", 1, level=3, optimizer="sgd", examples=2),
]


TIED = [
    {"schedule": schedule, "remat": remat, "optimizer": optimizer, "microbatches": microbatches}
    for schedule, remat, optimizer, microbatches in (
        ("gpipe", "always", "sgd", 2), ("gpipe", "never", "sgd", 1), ("1f1b", "never", "adam", 2),
    )
]  # fmt: skip


def label(given: dict[str, Any]) -> str:
    return " ".join(str(value) for value in given.values())


@pytest.fixture(scope="module")
def found() -> list[list[int]]:
    """Bytes of each case, on each of two processes."""
    return launch(count_all, 2, [*CASES, *TIED], device="cpu")


def profiled(
    microbatches: int, examples: int = 24, *, split_backward: bool = False
) -> tuple[tuple[LayerProfile, ...], LayerProfile]:
    batch, target = data(examples * microbatches)
    inputs, part = split(batch, microbatches)[0], split(target, microbatches)[0]
    return Profiler(split_backward=split_backward).model(
        model(), nn.functional.mse_loss, Boundary.of(inputs), Boundary.of(part)
    )


def modelled(given: dict[str, Any]) -> int:
    shared = {"replicas": 2} if given["dimension"] == "dp" else {"shards": 2}
    sharing = Sharing(**shared, level=given["level"], bucket_bytes=given["bucket_bytes"])
    schedule = named(given["schedule"], 1, given["microbatches"], remat=given["remat"])
    layers, loss = profiled(
        given["microbatches"], given["examples"], split_backward=given["schedule"].startswith("zb")
    )
    return grid_peak_bytes([held_stage(layers, loss, sharing)], schedule, given["optimizer"])[0]


@pytest.mark.processes
@pytest.mark.parametrize("number", range(len(CASES)), ids=[label(each) for each in CASES])
def test_modelled_peaks_are_those_of_real_steps(number: int, found: list[list[int]]) -> None:
    expected = modelled(CASES[number])
    for rank in found:
        assert rank[number] == pytest.approx(expected, rel=0.005)


@pytest.mark.processes
@pytest.mark.parametrize("number", range(len(TIED)))
def test_a_tie_between_processes(number: int, found: list[list[int]]) -> None:
    """Each owner has the weight, its state and its gradient, and for a moment another owner's gradient."""
    case, layers = TIED[number], tied_model()
    inputs, target = (Boundary.of(split(each, case["microbatches"])[0]) for each in words())
    profiles, loss = Profiler(ties_apart=True).model(layers, nn.functional.cross_entropy, inputs, target)
    expected = pipeline_memory(
        profiles, loss, [range(2), range(2, 4)],
        named(case["schedule"], 2, case["microbatches"], remat=case["remat"]), case["optimizer"],
        receive_ahead=1, ties=shared_weights(list(layers)),
    )  # fmt: skip
    for of_rank, each in zip(found, expected, strict=True):
        assert each.peak == pytest.approx(of_rank[len(CASES) + number], rel=0.01)


def test_after_its_passes_a_stage_holds_graphs_and_gradients() -> None:
    layers, loss = profiled(4)
    for parts, last in ((layers, loss), (layers[:5], None), (layers[3:], loss)):
        whole = stage_bytes(parts, last)
        assert whole.trace is not None
        assert whole.trace.with_graph[-1].after == whole.saved_bytes
        assert whole.trace.first[0].after >= whole.gradient_bytes


def test_alone_it_is_the_same_model() -> None:
    """Two workers with two stages each."""
    layers, loss = profiled(4)
    spans = [range(0, 2), range(2, 4), range(4, 7), range(7, len(layers))]
    schedule = named("interleaved", 2, 4)
    alone = [held_stage(layers[s.start : s.stop], loss if s is spans[-1] else None, Sharing()) for s in spans]
    assert grid_peak_bytes(alone, schedule, "adam") == peak_bytes(
        bytes_of_stages(layers, loss, spans), schedule, "adam", receive_ahead=1
    )
