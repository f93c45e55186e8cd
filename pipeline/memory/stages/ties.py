"""Weights that several layers of a worker share, counted once.

Profiles are of layers by themselves, so each counts the weight as its own. In a step each of these layers
does gather a gradient of its own (`stage.tied`); but there is one weight, one state of the optimizer, and
when the optimizer steps one gradient. Workers in processes of their own have a weight each, and for a moment
at the end of a step one gradient more: the sum that another owner has sent (gpipe_bench.pipeline.ranks.tied).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from gpipe_bench.pipeline.memory.stages.footprint import Footprint
from gpipe_bench.pipeline.memory.stages.peaks import StageMemory, memory_at, optimizer_state, rule_of
from gpipe_bench.pipeline.plan.schedule import Schedule


@dataclass(frozen=True)
class SharedWeight:
    """A parameter that several layers use, by their indices.

    Args:
        num_elements, num_bytes: its size
        trained: whether it gets a gradient
        layers: those that use it, the first one first
    """

    num_elements: int
    num_bytes: int
    trained: bool
    layers: tuple[int, ...]


def shared_weights(layers: Sequence[nn.Module]) -> tuple[SharedWeight, ...]:
    """The weights that several of these layers use."""
    users: dict[nn.Parameter, list[int]] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            users.setdefault(parameter, []).append(index)
    return tuple(
        SharedWeight(parameter.numel(), parameter.nbytes, parameter.requires_grad, tuple(found))
        for parameter, found in users.items()
        if len(found) > 1
    )


def counted_once(
    stages: Sequence[Footprint],
    spans: Sequence[range],
    schedule: Schedule,
    weights: Sequence[SharedWeight],
) -> tuple[Footprint, ...]:
    """The footprints of stages with these layers, without what a worker has already with an earlier layer."""
    found = list(stages)
    stage_of = {layer: stage for stage, span in enumerate(spans) for layer in span}
    for weight in weights:
        seen: set[int] = set()
        for stage in [stage_of[layer] for layer in weight.layers]:
            worker = schedule.worker(stage)
            if worker in seen:
                found[stage] = _without(found[stage], weight)
            seen.add(worker)
    return tuple(found)


def with_sums(
    found: Sequence[StageMemory],
    stages: Sequence[Footprint],
    spans: Sequence[range],
    schedule: Schedule,
    optimizer: str,
    weights: Sequence[SharedWeight],
) -> tuple[StageMemory, ...]:
    """The fullest moments of workers in processes of their own, which ``found`` says without the sums.

    ``stages`` are `counted_once`. The weights are summed one after another, when all gradients are there.
    """
    rule = rule_of(optimizer)
    stage_of = {layer: stage for stage, span in enumerate(spans) for layer in span}
    received = [0] * schedule.num_workers
    for weight in weights:
        owners = {schedule.worker(stage_of[layer]) for layer in weight.layers}
        for worker in owners if weight.trained and len(owners) > 1 else ():
            received[worker] = max(received[worker], weight.num_bytes)
    most = list(found)
    for worker, num_bytes in enumerate(received):
        if not num_bytes:
            continue
        parts = dict.fromkeys(("parameters", "buffers", "gradients", "optimizer_state", "boundary"), 0)
        for index in schedule.stages_of(worker):
            stage = stages[index]
            resting = memory_at(
                stage, None, rule, optimizer_state(stage, rule), schedule.num_microbatches,
                is_first=index == 0,
            )  # fmt: skip
            for name in parts:
                parts[name] += getattr(resting, name)
            parts["gradients"] += stage.summed_gradient_bytes
        sums = StageMemory(**parts, activations=0, transients=num_bytes, when="ties")
        most[worker] = max(most[worker], sums, key=lambda each: each.peak)
    return tuple(most)


def _without(stage: Footprint, weight: SharedWeight) -> Footprint:
    sizes = list(stage.trained_sizes)
    if weight.trained:
        sizes.remove(weight.num_bytes)
    return replace(
        stage,
        num_parameters=stage.num_parameters - weight.num_elements,
        parameter_bytes=stage.parameter_bytes - weight.num_bytes,
        trained_sizes=tuple(sizes),
        summed_gradient_bytes=stage.summed_gradient_bytes + weight.num_bytes * weight.trained,
    )
