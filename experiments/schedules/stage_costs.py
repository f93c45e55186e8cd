"""What the stages of a model take, each kind of action by itself: F, R, B, and I and W instead of B.

For each number of stages there are two pipelines, one with whole backwards and one that splits them, and all
of them take turns on one core, so all know the same machine. All stages run in one process and each with
everything that belongs to its actions, the price of a split included; what workers cost each other is not in
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.measuring.speed_models import SUBJECTS
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Kind

if TYPE_CHECKING:
    from gpipe_bench.pipeline import Pipeline
    from gpipe_bench.pipeline.memory.story import LayerProfile

SPLIT, WHOLE = "zb-h1", "gpipe"
MOST_MICROBATCHES = 8
SEED = 1811


@dataclass(frozen=True)
class StageCosts:
    """Seconds by (stage, kind) for one micro-batch, and how the layers are cut."""

    partition: Partition
    seconds: Mapping[tuple[int, Kind], float]

    def total(self, kind: Kind) -> float:
        """Of all stages."""
        return sum(seconds for (_, other), seconds in self.seconds.items() if other is kind)

    def price_of_split(self) -> float:
        """(I + W) / B of the whole model."""
        return (self.total(Kind.I) + self.total(Kind.W)) / self.total(Kind.B)

    def to_data(self) -> dict[str, Any]:
        """As a record keeps it, in milliseconds."""
        return {
            "partition": [[span.start, span.stop] for span in self.partition],
            "ms": {f"{stage}{kind.value}": 1e3 * s for (stage, kind), s in sorted(self.seconds.items())},
        }


def measure(
    name: str, profile: str, size: int, numbers_of_stages: Sequence[int], rounds: int
) -> dict[int, StageCosts]:
    """Of a model of Table 2 with micro-batches of `size` examples, by number of stages; in this process,
    which uses one core. Numbers beyond that of the layers are left out.
    """
    from functools import partial

    import torch

    from gpipe_bench.experiments.measuring.layer_seconds import layer_seconds
    from gpipe_bench.experiments.measuring.timed_actions import samples_of
    from gpipe_bench.harness.rounds import turns
    from gpipe_bench.models import MODELS, example_batch, loss_fn
    from gpipe_bench.pipeline.plan.timeline import Timeline
    from gpipe_bench.planner.timing import settle, time_step

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    subject = SUBJECTS[name]
    options = subject.sizes[profile].options
    layers = list(MODELS[subject.model](**options))
    number = max(1, MOST_MICROBATCHES // size)
    batch, target = example_batch(subject.model, size * number, **options)
    loss = loss_fn(subject.model, **options)
    by_layer = layer_seconds(layers, number, loss, batch, target, "never")
    arms = {
        (num_stages, schedule): _pipeline(layers, partition(by_layer, num_stages), number, schedule)
        for num_stages in numbers_of_stages
        if num_stages <= len(layers)
        for schedule in (WHOLE, SPLIT)
    }
    steps = {arm: partial(pipeline.step, batch, target, loss) for arm, pipeline in arms.items()}
    for step in steps.values():
        time_step(step, layers)
    settle()
    found: dict[int, list[Timeline]] = {num_stages: [] for num_stages, _ in arms}
    for arm in turns(list(arms), rounds, SEED):
        time_step(steps[arm], layers)
        found[arm[0]].append(arms[arm].timeline)
    return {
        num_stages: StageCosts(
            arms[num_stages, WHOLE].partition,
            {key: median(samples) for key, samples in samples_of(timelines).items()},
        )
        for num_stages, timelines in found.items()
    }


def _pipeline(layers: list[Any], cut: Partition, number: int, schedule: str) -> Pipeline:
    from gpipe_bench.pipeline import Pipeline

    found = Pipeline(
        layers,
        num_stages=len(cut),
        num_microbatches=number,
        schedule=schedule,
        remat="always",
        cost=[1 / len(span) for span in cut for _ in span],
    )
    assert found.partition == cut, "the costs given are those of this cut"
    return found


def profiles_of(name: str, profile: str, size: int) -> tuple[tuple[LayerProfile, ...], LayerProfile]:
    """What the memory model needs to know of the layers and of the loss, for a micro-batch of `size`."""
    import torch

    from gpipe_bench.models import MODELS, example_batch, loss_fn
    from gpipe_bench.pipeline.memory.boundary import Boundary
    from gpipe_bench.pipeline.memory.profile import Profiler

    subject = SUBJECTS[name]
    options = subject.sizes[profile].options
    with torch.device("meta"):
        model = MODELS[subject.model](**options)
    inputs, target = example_batch(subject.model, size, device="meta", **options)
    return Profiler(split_backward=True).model(
        model, loss_fn(subject.model, **options), Boundary.of(inputs), Boundary.of(target)
    )
