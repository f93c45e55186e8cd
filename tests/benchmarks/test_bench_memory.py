"""Profiles and the memory model, which the search for the largest model calls thousands of times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Boundary, Profiler, StagePeaks, gpipe, pipeline_memory
from gpipe_bench.pipeline.memory.trace import LayerProfile

OPTIONS: dict[str, Any] = {
    "num_layers": 12, "vocab_size": 1000, "d_model": 64, "ffn_dim": 256, "num_heads": 4, "seq_len": 32,
}  # fmt: skip
NUM_STAGES, NUM_MICROBATCHES = 4, 8


def profiles() -> tuple[tuple[LayerProfile, ...], LayerProfile]:
    """A fresh profiler, so that nothing is known yet."""
    with torch.device("meta"):
        model: nn.Sequential = MODELS["transformer-lm"](**OPTIONS)
    inputs, target = example_batch("transformer-lm", 2, device="meta", **OPTIONS)
    loss = loss_fn("transformer-lm", **OPTIONS)
    return Profiler().model(model, loss, Boundary.of(inputs), Boundary.of(target))


@pytest.fixture(scope="module")
def known() -> tuple[tuple[LayerProfile, ...], LayerProfile]:
    return profiles()


def test_profile_model(benchmark: Any) -> None:
    layers, _ = benchmark.pedantic(profiles, rounds=5, iterations=1)
    assert len(layers) == OPTIONS["num_layers"] + 2


def test_memory_of_a_pipeline(benchmark: Any, known: tuple[tuple[LayerProfile, ...], LayerProfile]) -> None:
    layers, loss = known
    stages = (range(4), range(4, 7), range(7, 10), range(10, 14))
    schedule = gpipe(NUM_STAGES, NUM_MICROBATCHES, "always")
    found = benchmark(pipeline_memory, layers, loss, stages, schedule)
    assert len(found) == NUM_STAGES
    assert all(stage.peak > 0 for stage in found)


def test_cut_under_a_cap(benchmark: Any, known: tuple[tuple[LayerProfile, ...], LayerProfile]) -> None:
    layers, loss = known
    schedule = gpipe(NUM_STAGES, NUM_MICROBATCHES, "always")

    def cut() -> Any:
        return StagePeaks(layers, loss, schedule).partition(2**40)

    stages = benchmark(cut)
    assert len(stages) == NUM_STAGES


def test_whether_a_deep_model_fits(
    benchmark: Any, known: tuple[tuple[LayerProfile, ...], LayerProfile]
) -> None:
    """What the search for the largest model asks of each: equal layers, as deep as the paper's deepest."""
    (first, layer, *_, last), loss = known
    layers = (first, *[layer] * 1663, last)
    schedule = gpipe(128, 32, "always")
    cap_bytes = StagePeaks(layers, loss, schedule).peak(1, 15)

    def ask() -> bool:
        return StagePeaks(layers, loss, schedule).fits(cap_bytes)

    assert benchmark(ask)
