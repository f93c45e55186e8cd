"""The largest mini-batch whose stages stay under a memory cap, as the paper chose its own (section 3:
"adjusted to fit memory"), from the memory model.

Micro-batch sizes are powers of two. Nothing is allocated: layers are profiled on fake tensors. The cut is by
the estimated cost of the layers, since nothing has been timed yet.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.cost import layer_costs
from gpipe_bench.pipeline.memory.profile import Profiler
from gpipe_bench.pipeline.memory.stages.workers import pipeline_memory
from gpipe_bench.pipeline.memory.story import LayerProfile
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.schedule import gpipe

LARGEST_MICROBATCH = 32

_Options = tuple[tuple[str, Any], ...]


def fitted_microbatch(
    model: str, options: dict[str, Any], num_stages: int, num_microbatches: int, cap_bytes: int
) -> tuple[int, int]:
    """Examples of a micro-batch, and the peak bytes of the fullest stage. ValueError if none fits."""
    found = None
    size = 1
    while size <= LARGEST_MICROBATCH:
        peak = peak_bytes(model, options, num_stages, num_microbatches, size)
        if peak > cap_bytes:
            break
        found = size, peak
        size *= 2
    if found is None:
        raise ValueError(
            f"{model} on {num_stages} stages with {num_microbatches} micro-batches of one example needs "
            f"{peak:,} bytes on one stage; the cap is {cap_bytes:,}: raise it or take more stages"
        )
    return found


def peak_bytes(
    model: str, options: dict[str, Any], num_stages: int, num_microbatches: int, microbatch_size: int
) -> int:
    """Peak bytes of the fullest stage under gpipe with re-materialization and RMSProp (modelled)."""
    given = tuple(sorted(options.items()))
    layers, loss = _profiles(model, given, microbatch_size)
    stages = partition(_costs(model, given), num_stages)
    schedule = gpipe(num_stages, num_microbatches, "always")
    return max(stage.peak for stage in pipeline_memory(layers, loss, stages, schedule, receive_ahead=1))


@cache
def _profiles(
    model: str, options: _Options, microbatch_size: int
) -> tuple[tuple[LayerProfile, ...], LayerProfile]:
    given = dict(options)
    inputs, target = example_batch(model, microbatch_size, device="meta", **given)
    with torch.device("meta"):
        layers = MODELS[model](**given)
    return Profiler(None).model(layers, loss_fn(model, **given), Boundary.of(inputs), Boundary.of(target))


@cache
def _costs(model: str, options: _Options) -> tuple[float, ...]:
    given = dict(options)
    inputs, _ = example_batch(model, 1, device="meta", **given)
    with torch.device("meta"):
        return layer_costs(list(MODELS[model](**given)), inputs)
