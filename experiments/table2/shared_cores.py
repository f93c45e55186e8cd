"""K = 4 for real on fewer cores: whether the order of actions and the memory of a stage are what is claimed.

Table 2 lays its steps out on K devices and runs only as many stages for real as there are cores. Four
processes that share two cores say nothing about time, but they do run the real transport between four
stages: each must take its schedule's actions in their order, hold what the memory model says, and the last
one must end with the loss that one process gets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn

from gpipe_bench.experiments.measuring.processes import run_processes
from gpipe_bench.harness.record import Quantity
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.profile import Profiler
from gpipe_bench.pipeline.memory.stages.workers import pipeline_memory
from gpipe_bench.pipeline.memory.tracker import LiveMemory, tensors_behind
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.schedule import gpipe

NUM_STAGES = 4
NUM_MICROBATCHES = 4
EXAMPLES = 2 * NUM_MICROBATCHES
SEED = 1811


class Ran(NamedTuple):
    """What one process found: its actions by kind and micro-batch in their order, its peak, the loss."""

    actions: tuple[tuple[str, int], ...]
    peak_bytes: int
    loss: float | None  # None but on the last stage


def run(model: str, options: dict[str, Any]) -> tuple[list[Quantity], dict[str, Any]]:
    """Takes the steps and holds them against schedule, memory model and a step in one process.

    Raises RuntimeError where a stage took other actions than its schedule's, or took them in another order.
    """
    found = run_processes(work, NUM_STAGES, model, options)
    schedule = gpipe(NUM_STAGES, NUM_MICROBATCHES, "always")
    for stage, ran in enumerate(found):
        wanted = tuple((action.kind.name, action.microbatch) for action in schedule.actions[stage])
        if ran.actions != wanted:
            raise RuntimeError(f"stage {stage} of {model} took {ran.actions}, its schedule has {wanted}")
    modelled = _modelled(model, options)
    alone = _loss_on_one(model, options)
    quantities = []
    for stage, ran in enumerate(found):
        quantities += [
            Quantity(name="peak", key={"stage": stage, "how": "counted"}, value=ran.peak_bytes, unit="bytes",
                     provenance="measured"),
            Quantity(name="peak", key={"stage": stage, "how": "modelled"}, value=modelled[stage],
                     unit="bytes", provenance="modelled"),
        ]  # fmt: skip
    loss = found[-1].loss
    assert loss is not None  # the last stage has one
    quantities.append(
        Quantity(name="loss", key={"stages": NUM_STAGES}, value=loss, unit="number", provenance="measured")
    )
    quantities.append(
        Quantity(name="loss", key={"stages": 1}, value=alone, unit="number", provenance="measured")
    )
    return quantities, {
        "num_stages": NUM_STAGES, "num_microbatches": NUM_MICROBATCHES, "batch_size": EXAMPLES,
        "actions": [len(ran.actions) for ran in found],
    }  # fmt: skip


def work(model: str, options: dict[str, Any]) -> Ran:
    """Two steps of one stage: the first makes the gradients and the receive buffers, the second counts."""
    layers = _layers(model, options)
    pipeline = Pipeline(
        layers,
        num_stages=NUM_STAGES,
        num_microbatches=NUM_MICROBATCHES,
        cost=[1.0] * len(layers),
        group=dist.group.WORLD,
        seed=SEED,
    )
    batch, target = _example(model, options)
    compute_loss = loss_fn(model, **options)
    pipeline.step(batch, target, compute_loss)
    pipeline.zero_grad()
    stage = pipeline.stages[0]
    memory = LiveMemory()
    with memory:
        memory.watch(tensors_behind(pipeline))
        memory.reset_peaks()
        loss = pipeline.step(batch, target, compute_loss)
    events = sorted(pipeline.timeline.events, key=lambda event: event.start_s)
    return Ran(
        tuple((event.action.kind.name, event.action.microbatch) for event in events),
        sum(memory.peak_bytes.values()),
        float(loss) if stage.index == NUM_STAGES - 1 else None,
    )


def _layers(model: str, options: dict[str, Any]) -> nn.Sequential:
    torch.manual_seed(SEED)
    return MODELS[model](**options)


def _example(model: str, options: dict[str, Any]) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(SEED)
    return example_batch(model, EXAMPLES, generator=generator, **options)


def _loss_on_one(model: str, options: dict[str, Any]) -> float:
    """Of the same two steps with all layers in one stage and one process."""
    pipeline = Pipeline(_layers(model, options), num_stages=1, num_microbatches=NUM_MICROBATCHES, seed=SEED)
    batch, target = _example(model, options)
    for _ in range(2):
        pipeline.zero_grad()
        loss = pipeline.step(batch, target, loss_fn(model, **options))
    return float(loss)


def _modelled(model: str, options: dict[str, Any]) -> list[int]:
    """The memory model's peaks of the stages; nothing is updated, so there is no optimizer's state."""
    microbatch = example_batch(model, EXAMPLES // NUM_MICROBATCHES, device="meta", **options)
    with torch.device("meta"):
        layers = MODELS[model](**options)
    profiles, loss = Profiler().model(layers, loss_fn(model, **options), *map(Boundary.of, microbatch))
    stages = partition([1.0] * len(layers), NUM_STAGES)
    schedule = gpipe(NUM_STAGES, NUM_MICROBATCHES, "always")
    return [each.peak for each in pipeline_memory(profiles, loss, stages, schedule, "sgd")]
