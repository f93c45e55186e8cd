"""What is computed before a step, at the paper's sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import (
    LINKS,
    SLOTS,
    Boundary,
    Profiler,
    StagePeaks,
    gpipe,
    partition,
    pipeline_memory,
    replay,
)
from gpipe_bench.pipeline.memory.trace import LayerProfile
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.walk import transfers

NUM_STAGES, NUM_MICROBATCHES = 8, 32
NUM_LAYERS = 1665  # the paper's deepest Transformer


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_make_schedule(benchmark: Any, name: str) -> None:
    schedule = benchmark(SCHEDULES[name], NUM_STAGES, NUM_MICROBATCHES, "always")
    assert sum(1 for _ in schedule) == 3 * NUM_STAGES * NUM_MICROBATCHES


def test_derive_transfers(benchmark: Any) -> None:
    found = benchmark(transfers, gpipe(NUM_STAGES, NUM_MICROBATCHES, "always"))
    assert len(found) == 2 * (NUM_STAGES - 1) * NUM_MICROBATCHES


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(NUM_STAGES, NUM_MICROBATCHES), (128, 512)], ids=["8x32", "128x512"]
)
def test_replay(benchmark: Any, num_stages: int, num_microbatches: int) -> None:
    schedule = gpipe(num_stages, num_microbatches, "never")
    timeline = benchmark(replay, schedule, SLOTS)
    assert timeline.makespan_s == 3 * (num_microbatches + num_stages - 1)


def test_replay_over_a_link_with_queues(benchmark: Any) -> None:
    """The paper's largest pipeline."""
    schedule, link = gpipe(128, 512), LINKS["pcie3-host"]
    timeline = benchmark(replay, schedule, SLOTS, link, activation_bytes=[1e6] * 127)
    assert len(timeline.events) == 128 * 512 * 3


@pytest.mark.parametrize("rule", ["bottleneck", "cumulative"])
def test_partition(benchmark: Any, rule: str) -> None:
    generator = random.Random(1811)
    costs = [generator.uniform(1, 2) for _ in range(NUM_LAYERS)]
    stages = benchmark(partition, costs, 128, rule)
    assert [layer for stage in stages for layer in stage] == list(range(NUM_LAYERS))


def test_partition_of_the_deepest_model_by_variance(benchmark: Any) -> None:
    costs = [65.5e6, *[50358272.0 + 3 * (layer % 7) for layer in range(NUM_LAYERS - 2)], 131e6]
    assert len(benchmark(partition, costs, 128, "variance")) == 128


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
