"""Table 1 predicted for the paper's accelerators, under every combination of what the paper does not state.

One walk over a stage's layers gives what it holds; number format, compiler, layout and micro-batches change
the profiles that are walked, the partition where stages begin, copies of gradients and of boundary tensors
what is added. Equal stages are walked once.

The largest models are searched at the paper's micro-batches (M = 16 where it is stated, the allowed ones
where it is not), with stages cut by a rule that does not look at memory, on the grid of what was tried, in
the memory that an accelerator may have had. What this engine can do is another search (`largest`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from itertools import product
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.experiments.paper_profiles import (
    Reading,
    amoebanet,
    meta_model,
    stacked,
    transformer,
)
from gpipe_bench.experiments.table1.largest import Size, largest_size
from gpipe_bench.experiments.table1.settings import (
    CAP,
    OWN_OF_MODEL,
    SHARED,
    Combination,
    allowed,
    combinations,
    num_microbatches,
    unknown,
)
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Quantity
from gpipe_bench.harness.unknowns import Value
from gpipe_bench.models import example_batch
from gpipe_bench.models.paper import COLUMNS, HALVES, Column
from gpipe_bench.pipeline.memory.profile import ModelProfile, fake_copy
from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
from gpipe_bench.pipeline.memory.trace import LayerProfile
from gpipe_bench.pipeline.memory.workers import stage_memory
from gpipe_bench.pipeline.plan.named import gpipe, naive
from gpipe_bench.pipeline.plan.partition import Partition, partition

KEEPS_LEAST = "a compiler that keeps as little as it can"
"""A setting of no range: only a reason by name has it (`naive`)."""
BYTES_PER_PARAMETER = 12
GRADIENT_BYTES = 4  # parameters are single precision, as stated, and so are the sums of their gradients


@dataclass(frozen=True)
class Stage:
    """Bytes of one accelerator.

    Args:
        held: by the number of copies of the gradients that are counted, all that comes and goes in a step
        outputs: what its output tensors of all micro-batches would take, 0 on the last stage
        fixed: parameters with the optimizer's state, and buffers
    """

    held: tuple[int, ...]
    outputs: int
    fixed: int


def activation_memory(half: str, column: Column) -> tuple[list[int | None], list[bool]]:
    """For every combination of the half's unknown settings, the sum over the accelerators in bytes, None
    where there can be none; and whether the column's model then fits into the largest memory there may be.
    """
    cap = float(unknown(half)[CAP].ends[1])
    walked: dict[tuple[Value, ...], tuple[Stage, ...] | None] = {}
    values: list[int | None] = []
    fits: list[bool] = []
    for settings in combinations(half):
        key = tuple(value for name, value in settings.items() if name not in ADDED)
        if key not in walked:
            walked[key] = stages_of(half, column, settings)
        stages = walked[key]
        if stages is None:
            values.append(None)
            fits.append(False)
            continue
        values.append(sum(counted(stage, settings) for stage in stages))
        fits.append(max(needed(stage, settings) for stage in stages) <= cap)
    return values, fits


def parameter_counts(half: str, column: Column) -> tuple[int, ...]:
    """Parameters of a column's model for every combination of `OWN_OF_MODEL`."""
    names = OWN_OF_MODEL[half]
    return tuple(
        model_of(
            half, column.num_layers, column.num_filters, 2, {**PLAIN, **dict(zip(names, values, strict=True))}
        ).num_parameters
        for values in product(*(allowed(half)[name] for name in names))
    )


def counted(stage: Stage, settings: Combination) -> int:
    """Bytes that a report of the activation memory would count."""
    twice = settings["boundary_tensors"] == "inputs and outputs"
    return stage.held[int(settings["gradient_copies"])] + twice * stage.outputs


def needed(stage: Stage, settings: Combination) -> int:
    """Bytes that the accelerator must have. Whether they are counted or not, the gradients are there."""
    copies = max(int(settings["gradient_copies"]), 1)
    return stage.fixed + counted(stage, {**settings, "gradient_copies": copies})


ADDED = ("gradient_copies", "boundary_tensors")
"""Settings that add to what a walk has found."""


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
    """Equal stages are walked once. Gradients of parameters are counted apart and in single precision; the
    traces have them in the format of the activations.
    """
    schedule = naive(num_stages) if is_naive else gpipe(num_stages, num_microbatches, remat="always")
    ahead = 1 if num_stages > 1 else 0
    bare = stage_bytes(tuple(map(_bare, layers)), loss)
    bare = replace(bare, parameter_bytes=0, trained_sizes=(), buffer_bytes=0, gradient_bytes=0)
    gradients = sum(map(gradient_bytes, layers))
    held = []
    for copies in range(3):
        counted = replace(bare, gradient_bytes=copies * gradients)
        if copies and num_microbatches == 1:
            # A single micro-batch's gradients appear while its activations go; those of several are added
            # to a sum that is whole from the second on.
            growing = stage_bytes(tuple(map(_in_single_precision, layers)), loss).backward_first
            counted = replace(counted, backward_first=growing)
        moment = stage_memory(counted, schedule.actions[0], "sgd", is_first=is_first, receive_ahead=ahead)
        held.append(moment.peak)
    return Stage(
        held=tuple(held),
        outputs=0 if loss is not None else num_microbatches * layers[-1].outputs.num_bytes,
        fixed=sum(BYTES_PER_PARAMETER * layer.num_parameters + layer.buffer_bytes for layer in layers),
    )


@cache
def _bare(layer: LayerProfile) -> LayerProfile:
    """The layer as if gradients of parameters took no memory, in every backward."""
    first = layer.first
    sizes = tuple(0 if storage in first.gradients else size for storage, size in enumerate(first.sizes))
    first = replace(first, sizes=sizes)
    return replace(layer, first=first, later=first)


@cache
def _in_single_precision(layer: LayerProfile) -> LayerProfile:
    first = layer.first
    sizes = list(first.sizes)
    for storage in first.gradients:
        sizes[storage] = sizes[storage] // first.shapes[storage][-1] * GRADIENT_BYTES
    return replace(layer, first=replace(first, sizes=tuple(sizes)))


@cache
def gradient_bytes(layer: LayerProfile) -> int:
    """Of one copy of the gradients of the layer's parameters, padded where its memory is tiled."""
    return _in_single_precision(layer).gradient_bytes


PLAIN: Combination = {
    "activation_format": "float32", "kept_by": "every operation", "tensor_layout": "dense",
}  # fmt: skip
"""Profiles of which only parameters or the number of layers are asked."""


def model_of(
    half: str, num_layers: int, num_filters: int, microbatch_size: int, settings: Combination
) -> ModelProfile:
    """The profiles of a model under some settings, without the gradients of parameters."""
    reading = Reading(
        compiled=settings["kept_by"] in ("a fusing compiler", KEEPS_LEAST),
        keeps_least=settings["kept_by"] == KEEPS_LEAST,
        number_format=str(settings["activation_format"]),
        autocast=False,
        with_shapes=True,
    )
    pads = settings["tensor_layout"] != "dense"
    if half == "transformer":
        return transformer(reading, num_layers, microbatch_size, pads=pads)
    return amoebanet(
        reading, num_layers, num_filters, microbatch_size, int(settings["num_classes"]),
        auxiliary_head=bool(settings["auxiliary_head"]), pads=pads,
    )  # fmt: skip


RULES = {"least variance": "variance", "cumulative share": "cumulative"}


def cuts_of(half: str, column: Column, settings: Combination) -> Partition | None:
    """Where the stages of a column begin; None where one would be empty."""
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
    """What each layer counts for when the model is cut."""
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
    kinds = _operations_by_kind(half, num_filters)
    if half == "transformer":
        embedding, layer, softmax = kinds
        return (embedding, *[layer] * num_layers, softmax)
    entry, middle, head, end, classifier = kinds[:3], kinds[3:10], kinds[10:11], kinds[11:15], kinds[15:]
    return stacked(
        entry, middle, head if auxiliary_head else (), (*end, end[-1]), classifier, num_layers=num_layers
    )


OPERATIONS_SAMPLED_AT = (144, 544, 1040)
"""Widths; operations are quadratic in the width."""


@cache
def _operations_by_kind(half: str, num_filters: int) -> tuple[float, ...]:
    """Of one layer each, in the order in which a model has them."""
    if half == "transformer":
        return tuple(map(float, _counted_operations(half, 0)))
    samples = zip(*(_counted_operations(half, width) for width in OPERATIONS_SAMPLED_AT), strict=True)
    return tuple(float(quadratic(OPERATIONS_SAMPLED_AT, values, num_filters)) for values in samples)


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
    size = {"num_layers": 9, "num_filters": num_filters} if num_filters else {"num_layers": 1}
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


PARTITION = ("partition_cost", "partition_rule")
KINDS = ("activation_format", "kept_by", "tensor_layout")
EXTREMES = (
    ("float32", "every operation", "tiled 8 x 128"),
    ("bfloat16", "a fusing compiler", "dense"),
)
"""Of `KINDS`, what takes most memory and what takes least."""
FIXED: dict[str, Combination] = {
    "amoebanet": {"auxiliary_head": True, "num_classes": 1001},
    "transformer": {},
}
"""Settings that hardly move a capacity, as in `HALVES`."""


@cache
def choices(half: str) -> dict[str, tuple[Value, ...]]:
    """The values of each setting that a capacity depends on, both ends of a range.

    Gradients are there whether a report counts them or not, so of their copies 1 and 2 are distinct here.
    """
    grid = ("filters_step",) if half == "amoebanet" else ("num_microbatches",)
    found = {name: unknown(half)[name].ends for name in (*SHARED, *grid, CAP)}
    found["gradient_copies"] = tuple(each for each in found["gradient_copies"] if each != 0)
    return found


@cache
def capacity_combinations(half: str) -> tuple[Combination, ...]:
    """All combinations with the first partition; every partition with the first of `KINDS` and with those
    that take most and least memory. Partitions are exchanged for one another without moving the ends.
    """
    values = choices(half)
    first_kinds = tuple(values[name][0] for name in KINDS)
    first_cut = tuple(values[name][0] for name in PARTITION)
    every = (dict(zip(values, each, strict=True)) for each in product(*values.values()))
    return tuple(
        each
        for each in every
        if tuple(each[name] for name in PARTITION) == first_cut
        or tuple(each[name] for name in KINDS) in (first_kinds, *EXTREMES)
    )


def largest(half: str, column: Column, settings: Combination) -> Size | None:
    """The largest model of a column under some settings."""
    settings = {**settings, **FIXED[half]}
    return largest_size(
        half,
        partial(_fits, half, column, settings),
        partial(num_parameters, half),
        step=int(settings.get("filters_step", 1)), guess=(column.num_layers, column.num_filters),
        least=max(column.num_stages - 2, 1),  # the embedding and the softmax are layers too
    )  # fmt: skip


def _fits(half: str, column: Column, settings: Combination, num_layers: int, num_filters: int) -> bool:
    """Whether every accelerator has the memory that its stage needs. A model that is too small for the rule
    to give every accelerator a layer is not too large.
    """
    sized = replace(column, num_layers=num_layers, num_filters=num_filters)
    walked = tuple(sorted((name, each) for name, each in settings.items() if name not in (*ADDED, CAP)))
    stages = _stages(half, sized, walked)
    cap = float(settings[CAP])
    return stages is None or all(needed(stage, settings) <= cap for stage in stages)


@cache
def _stages(half: str, column: Column, settings: tuple[tuple[str, Value], ...]) -> frozenset[Stage] | None:
    """The distinct accelerators of a model; None where the rule leaves one without a layer."""
    stages = stages_of(half, column, dict(settings))
    return None if stages is None else frozenset(stages)


@cache
def num_parameters(half: str, num_layers: int, num_filters: int) -> int:
    """Of a model by its size."""
    return model_of(half, num_layers, num_filters, 2, {**FIXED[half], **PLAIN}).num_parameters


def hypotheses(half: str) -> Outcome:
    """Activation memory and parameters of the paper's columns under every combination of what is unknown."""
    found = {each.name: activation_memory(half, each) for each in COLUMNS[half]}
    return Outcome(
        (_combinations(len(combinations(half))),),
        {
            "settings": {name: list(values) for name, values in allowed(half).items()},
            "columns": {
                name: {"bytes": values, "fits": "".join("01"[each] for each in fits)}
                for name, (values, fits) in found.items()
            },
            "parameters": {
                "settings": {name: list(allowed(half)[name]) for name in OWN_OF_MODEL[half]},
                "columns": {each.name: list(parameter_counts(half, each)) for each in COLUMNS[half]},
            },
        },
    )


def capacities(half: str) -> Outcome:
    """The largest models at the paper's micro-batches and by its partitions, under what is unknown."""
    values = choices(half)
    found = {
        each.name: [largest(half, each, settings) for settings in capacity_combinations(half)]
        for each in COLUMNS[half]
    }
    return Outcome(
        (_combinations(len(capacity_combinations(half))),),
        {
            "settings": {name: list(each) for name, each in values.items()},
            "combinations": [
                [each.index(settings[name]) for name, each in values.items()]
                for settings in capacity_combinations(half)
            ],
            "columns": {
                name: {
                    "parameters": [each.num_parameters if each else 0 for each in models],
                    "num_layers": [each.num_layers if each else 0 for each in models],
                    "num_filters": [each.num_filters if each else 0 for each in models],
                }
                for name, models in found.items()
            },
        },
    )


def _combinations(number: int) -> Quantity:
    return Quantity(name="combinations", value=number, unit="number", provenance="modelled")


RUNS: dict[str, Callable[[str], Outcome]] = {"hypotheses": hypotheses, "capacity": capacities}
"""By the part of the case's key; each takes a half of the table."""
