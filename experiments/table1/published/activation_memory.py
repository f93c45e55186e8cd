"""Peak activation memory of Table 1's columns under every combination of what the paper does not state.

One walk over a stage's layers gives what it holds; number format, compiler, layout and micro-batches change
the profiles that are walked, the partition where stages begin, copies of gradients and of boundary tensors
what is added. Equal stages are walked once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from gpipe_bench.experiments.paper_models import HALVES, Column
from gpipe_bench.experiments.table1.published.cuts import cuts_of
from gpipe_bench.experiments.table1.published.models import PLAIN, model_of
from gpipe_bench.experiments.table1.published.settings import (
    OWN_OF_MODEL,
    Combination,
    Numbers,
    allowed,
    cap_bytes,
    combinations,
    num_microbatches,
)
from gpipe_bench.harness.judging.unknowns import Value
from gpipe_bench.pipeline.memory.profile import ModelProfile
from gpipe_bench.pipeline.memory.stages.demands import demands
from gpipe_bench.pipeline.memory.stages.footprint import footprint
from gpipe_bench.pipeline.memory.stages.peaks import fullest_moment
from gpipe_bench.pipeline.memory.story import LayerProfile
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.pipeline.plan.schedule import gpipe, naive

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


def activation_memory(half: str, column: Column) -> Numbers:
    """The sum over the accelerators, in bytes, for every combination of the half's unknown settings."""
    _, cap = cap_bytes(half)
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
    return Numbers(tuple(values), tuple(fits))


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
            found[like] = stage_of(model, cuts, index, count, is_naive=column.is_naive)
        stages.append(found[like])
    return tuple(stages)


def stage_of(
    model: ModelProfile, cuts: Partition, index: int, num_microbatches: int, *, is_naive: bool
) -> Stage:
    """What one accelerator holds."""
    layers = model.layers[cuts[index].start : cuts[index].stop]
    is_last = index == len(cuts) - 1
    return _stage(layers, model.loss if is_last else None, len(cuts), index == 0, num_microbatches, is_naive)


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
    stories have them in the format of the activations.
    """
    schedule = naive(num_stages) if is_naive else gpipe(num_stages, num_microbatches, remat="always")
    demanded = demands(schedule.actions[0], 1 if num_stages > 1 else 0)
    bare = footprint(tuple(map(_bare, layers)), loss)
    bare = replace(bare, parameter_bytes=0, trained_sizes=(), buffer_bytes=0, gradient_bytes=0)
    gradients = sum(map(gradient_bytes, layers))
    held = []
    for copies in range(3):
        counted = replace(bare, gradient_bytes=copies * gradients)
        if copies and num_microbatches == 1:
            # A single micro-batch's gradients appear while its activations go; those of several are added
            # to a sum that is whole from the second on.
            growing = footprint(tuple(map(_in_single_precision, layers)), loss).backward_first
            counted = replace(counted, backward_first=growing)
        moment = fullest_moment(counted, demanded, num_microbatches, "sgd", is_first=is_first)
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
