"""What is computed before a step: schedules, replays, cuts. All of it on a laptop, at the paper's sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gpipe_bench.pipeline import LINKS, SLOTS, gpipe, partition, replay
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.schedule import transfers

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
