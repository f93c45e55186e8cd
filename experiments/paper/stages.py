"""What the accelerators of Table 1 hold under given choices of what the paper does not state.

One walk over a stage's layers gives what it holds; number format and micro-batches change the profiles that
are walked, the partition where stages begin. Gradients of parameters and copies of boundary tensors are not
counted, as declared. Equal stages are walked once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.experiments.paper.profiles import (
    DEPTH,
    Reading,
    amoebanet,
    meta_model,
    of_depth,
    transformer,
)
from gpipe_bench.harness.unknowns import Value
from gpipe_bench.models import example_batch
from gpipe_bench.models.paper import HALVES, Column
from gpipe_bench.pipeline.memory.profile import ModelProfile, fake_copy
from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
from gpipe_bench.pipeline.memory.trace import LayerProfile
from gpipe_bench.pipeline.memory.workers import stage_memory
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.partition import Partition, partition

Combination = Mapping[str, Value]
"""Settings by name."""
BYTES_PER_PARAMETER = 12


@dataclass(frozen=True)
class Stage:
    """Bytes of one accelerator.

    Args:
        held: all that comes and goes in a step, without gradients of parameters
        fixed: parameters with the optimizer's state, and buffers
    """

    held: int
    fixed: int


def num_microbatches(half: str, column: Column, settings: Combination) -> int:
    """M of a column: one without a pipeline, the stated or the chosen one with it."""
    if column.is_naive:
        return 1
    return int(settings.get("num_microbatches", HALVES[half].num_microbatches))


def stages_of(half: str, column: Column, settings: Combination) -> tuple[Stage, ...] | None:
    """Every accelerator of a column; None where the partition would leave one without a layer."""
    cuts = cuts_of(half, column, settings)
    if cuts is None:
        return None
    count = num_microbatches(half, column, settings)
    model = model_of(half, column.num_layers, column.num_filters, HALVES[half].batch_size // count, settings)
    found: dict[object, Stage] = {}
    stages = []
    for index, cut in enumerate(cuts):
        # All of the Transformer's layers between embedding and softmax are one.
        like = (len(cut), index == 0, index == len(cuts) - 1) if half == "transformer" else index
        if like not in found:
            layers = model.layers[cut.start : cut.stop]
            loss = model.loss if index == len(cuts) - 1 else None
            found[like] = _stage(layers, loss, len(cuts), index == 0, count, column.is_naive)
        stages.append(found[like])
    return tuple(stages)


@cache
def _stage(
    layers: tuple[LayerProfile, ...],
    loss: LayerProfile | None,
    num_stages: int,
    is_first: bool,
    num_microbatches: int,
    is_naive: bool,
) -> Stage:
    """Equal stages are walked once."""
    remat = "never" if is_naive else "always"
    return Stage(
        held=held_bytes(layers, loss, num_stages, num_microbatches, is_first, remat),
        fixed=sum(BYTES_PER_PARAMETER * layer.num_parameters + layer.buffer_bytes for layer in layers),
    )


@cache
def held_bytes(
    layers: tuple[LayerProfile, ...], loss: LayerProfile | None, k: int, m: int, is_first: bool, remat: str
) -> int:
    """Bytes that a step of one stage takes and gives back, at its peak, without gradients of parameters."""
    stage = replace(
        stage_bytes(tuple(map(bare, layers)), loss),
        parameter_bytes=0, trained_sizes=(), buffer_bytes=0, gradient_bytes=0,
    )  # fmt: skip
    schedule = gpipe(k, m, remat)
    return stage_memory(stage, schedule.actions[0], "sgd", is_first=is_first, receive_ahead=int(k > 1)).peak


@cache
def bare(layer: LayerProfile) -> LayerProfile:
    """The layer as if gradients of parameters took no memory, in every backward."""
    first = layer.first
    sizes = tuple(0 if storage in first.gradients else size for storage, size in enumerate(first.sizes))
    first = replace(first, sizes=sizes)
    return replace(layer, first=first, later=first)


PLAIN: Combination = {"activation_format": "float32"}
"""Profiles of which only parameters or the number of layers are asked."""


def model_of(
    half: str, num_layers: int, num_filters: int, microbatch_size: int, settings: Combination
) -> ModelProfile:
    """The profiles of a model under some settings, without the gradients of parameters."""
    reading = Reading(
        number_format=str(settings["activation_format"]),
        autocast=False,
        with_shapes=True,
    )
    if half == "transformer":
        return transformer(reading, num_layers, microbatch_size)
    return amoebanet(
        reading, num_layers, num_filters, microbatch_size, int(settings["num_classes"]),
        auxiliary_head=bool(settings["auxiliary_head"]),
    )  # fmt: skip


RULES = {"least variance": "variance", "cumulative share": "cumulative"}


def cuts_of(half: str, column: Column, settings: Combination) -> Partition | None:
    """The layers of a column's stages; None where a stage would be empty."""
    return _cut(
        costs_of(half, column.num_layers, column.num_filters, settings),
        column.num_stages,
        RULES[str(settings["partition_rule"])],
    )


@cache
def _cut(costs: tuple[float, ...], num_stages: int, rule: str) -> Partition | None:
    try:
        return partition(costs, num_stages, rule)
    except ValueError:  # a stage without layers
        return None


def costs_of(half: str, num_layers: int, num_filters: int, settings: Combination) -> tuple[float, ...]:
    """Cost of each layer in the choice of cuts."""
    model = model_of(half, num_layers, num_filters, 2, {**settings, **PLAIN})
    match settings["partition_cost"]:
        case "layers":
            return (1.0,) * len(model.layers)
        case "parameters":
            return tuple(float(layer.num_parameters) for layer in model.layers)
    return _operations(half, num_layers, num_filters, bool(settings.get("auxiliary_head", False)))


@cache
def _operations(half: str, num_layers: int, num_filters: int, auxiliary_head: bool) -> tuple[float, ...]:
    """Multiplications and additions of each layer's forward pass."""
    if half == "transformer":
        embedding, layer, softmax = map(float, _counted_operations(half, 0))
        return (embedding, *[layer] * num_layers, softmax)
    samples = zip(*(_counted_operations(half, width) for width in OPERATIONS_SAMPLED_AT), strict=True)
    layers = [float(quadratic(OPERATIONS_SAMPLED_AT, values, num_filters)) for values in samples]
    if not auxiliary_head:
        del layers[HEAD]
    return of_depth(layers, num_layers)


OPERATIONS_SAMPLED_AT = (144, 544, 1040)
"""Widths; operations are quadratic in the width."""
HEAD = 12
"""Place of the auxiliary head in the sampled models."""


def quadratic(places: Sequence[int], values: Sequence[int], at: int) -> Fraction:
    """The value at a place of the polynomial through all given ones."""
    total = Fraction(0)
    for place, value in zip(places, values, strict=True):
        others = [each for each in places if each != place]
        over, under = prod(at - each for each in others), prod(place - each for each in others)
        total += Fraction(value * over, under)
    return total


@cache
def _counted_operations(half: str, num_filters: int) -> tuple[int, ...]:
    size = {"num_layers": DEPTH, "num_filters": num_filters} if num_filters else {"num_layers": 1}
    layers = meta_model(half, **size)
    value: Any = example_batch(HALVES[half].model, 2, device="meta", **HALVES[half].options)[0]
    found = []
    with FakeTensorMode(), torch.no_grad():
        value = torch.empty(value.shape, dtype=value.dtype)
        for layer in layers:
            with FlopCounterMode(display=False) as counter:
                value = fake_copy(layer)(value)
            found.append(counter.get_total_flops())
    return tuple(found)


FIXED: dict[str, Combination] = {
    "amoebanet": {"auxiliary_head": True, "num_classes": 1001},
    "transformer": {},
}
"""Settings that hardly move a capacity, as in `HALVES`."""


@cache
def num_parameters(half: str, num_layers: int, num_filters: int) -> int:
    """Number of parameters of a model, by its size."""
    return model_of(half, num_layers, num_filters, 2, {**FIXED[half], **PLAIN}).num_parameters
