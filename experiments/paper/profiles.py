"""Layer profiles of Table 1's two model families at any size, and the memory of their stages.

One model of each family is profiled, with lengths that are told apart by primes. The bytes of a storage are a
product of lengths, so its factors show how it grows with the width and the micro-batch:

    width 16 x 61, micro-batch 43:    a storage of 4 x 61 x 43 x 1024 bytes is linear in both

This holds if a layer runs the same operations at every size; a micro-batch of one example often does not. The
result equals that of profiling every layer at its size, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.harness.reproduction import Value
from gpipe_bench.models import MODELS, count_parameters, example_batch, loss_fn
from gpipe_bench.models.paper import HALVES, Column
from gpipe_bench.models.unet import Join, Stash
from gpipe_bench.pipeline.memory.profile import ModelProfile, Profiler, fake_copy
from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
from gpipe_bench.pipeline.memory.trace import Boundary, LayerProfile, Trace
from gpipe_bench.pipeline.memory.workers import stage_memory
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.partition import Partition, partition

T = TypeVar("T")

EXAMPLES = 43
"""Examples in a micro-batch of profiled layers. A micro-batch of one is profiled separately: a dimension of
length 1 has no layout, and batch normalization of a single value takes another path."""
WIDTH_PRIME, WIDTH = 61, 16 * 61
DEPTH = 12
"""Layers of the profiled AmoebaNet: four cells in each of three stacks."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How layers are profiled.

    Args:
        number_format: of activations, "float32" or "bfloat16"
        autocast: whether bfloat16 is by autocast, as in this engine, or throughout
    """

    number_format: str = "float32"
    autocast: bool = True


def meta_model(half: str, **options: Any) -> nn.Sequential:
    """The model of one half of Table 1, with `options` changed, on the meta device."""
    with torch.device("meta"):
        return MODELS[HALVES[half].model](**{**HALVES[half].options, **options})


def profiled(reading: Reading, half: str, microbatch_size: int, **options: Any) -> ModelProfile:
    """Profiles of a half's model, with every distinct layer at its own size."""
    return profiled_model(reading, HALVES[half].model, microbatch_size, **{**HALVES[half].options, **options})


@cache
def profiled_model(reading: Reading, name: str, microbatch_size: int, **options: Any) -> ModelProfile:
    """Profiles of any model of the zoo with these options."""
    with torch.device("meta"):
        model = MODELS[name](**options)
    inputs, target = map(Boundary.of, example_batch(name, microbatch_size, device="meta", **options))
    half = torch.bfloat16 if reading.number_format == "bfloat16" else None
    profiler = Profiler(half) if reading.autocast else Profiler(number_format=half)
    if half and not reading.autocast:  # the inputs, too
        kinds = [half if each.dtype.is_floating_point else each.dtype for each in inputs.tensors]
        specs = (replace(each, dtype=kind) for each, kind in zip(inputs.tensors, kinds, strict=True))
        inputs = replace(inputs, tensors=tuple(specs))
    return profiler.model(model, loss_fn(name, **options), inputs, target)


def transformer(
    reading: Reading, num_layers: int, microbatch_size: int, attention: str = "explicit"
) -> ModelProfile:
    """Transformer-L of any depth with explicit or fused attention."""
    (embedding, layer, softmax), loss = _transformer(reading, microbatch_size, attention)
    return ModelProfile((embedding, *[layer] * num_layers, softmax), loss)


@cache
def _transformer(reading: Reading, microbatch_size: int, attention: str) -> ModelProfile:
    """Embedding, one layer, softmax and the loss."""
    examples = 1 if microbatch_size == 1 else EXAMPLES
    found = profiled(reading, "transformer", examples, num_layers=1, attention=attention)
    return found if examples == 1 else resized(found, microbatch_size)


def amoebanet(
    reading: Reading, num_layers: int, num_filters: int, microbatch_size: int, num_classes: int = 1001, *,
    auxiliary_head: bool = True,
) -> ModelProfile:  # fmt: skip
    """AmoebaNet-D (L, D). If L or D is outside of the family, every layer is profiled at its size."""
    # The family: stacks with a third cell, whole numbers of channels everywhere. At width 128 the stem needs
    # no projection.
    third_cell, whole = num_layers % 3 == 0 and num_layers >= 9, num_filters % 16 == 0 and num_filters != 128
    if not (third_cell and whole):
        options = {"num_classes": num_classes, "aux_head": auxiliary_head}
        return profiled(
            reading, "amoebanet", microbatch_size, num_layers=num_layers, num_filters=num_filters, **options
        )
    found = _amoebanet(reading, num_filters, microbatch_size, num_classes, auxiliary_head)
    return ModelProfile(of_depth(found.layers, num_layers), found.loss)


def of_depth(layers: Sequence[T], num_layers: int) -> tuple[T, ...]:
    """An AmoebaNet of any depth, from one of depth `DEPTH`: the third of four cells in each stack is
    repeated. Three layers come before the first stack and one after the last; an auxiliary head follows the
    second.
    """
    thirds = (5, 10, len(layers) - 3)
    times = num_layers // 3 - 3
    return tuple(layer for place, layer in enumerate(layers) for _ in range(times if place in thirds else 1))


@cache
def _amoebanet(
    reading: Reading, num_filters: int, examples: int, num_classes: int, auxiliary_head: bool
) -> ModelProfile:
    """AmoebaNet-D (DEPTH, num_filters)."""
    sampled = 1 if examples == 1 else EXAMPLES
    options = {"num_layers": DEPTH, "num_classes": num_classes, "aux_head": auxiliary_head}
    found = profiled(reading, "amoebanet", sampled, num_filters=WIDTH, **options)
    found = resized(found, examples, num_filters)
    for before, after in pairwise(found.layers):
        if before.outputs != after.inputs:
            raise RuntimeError(f"{after.name} does not take what {before.name} returns: {before.outputs}")
    return found


# Any size from one -----------------------------------------------------------------------------------------


def resized(profile: ModelProfile, examples: int, width: int = WIDTH) -> ModelProfile:
    """The profile for so many examples in a micro-batch, made with `EXAMPLES`, and this width, made with
    `WIDTH`. Equal layers stay one object.
    """
    at = cache(partial(_resized, partial(_number, examples, width)))
    return ModelProfile(tuple(map(at, profile.layers)), at(profile.loss))


@cache
def _number(examples: int, width: int, number: int) -> int:
    """A length, or product of lengths, at the new size. Raises ValueError if it is not whole."""
    over, under, rest = number, 1, number
    for prime, sampled, wanted in ((EXAMPLES, EXAMPLES, examples), (WIDTH_PRIME, WIDTH, width)):
        while rest and rest % prime == 0:
            rest //= prime
            over, under = over * wanted, under * sampled
    value, left = divmod(over, under)
    if left:
        raise ValueError(f"{number} is no whole number at the size asked for: {over} / {under}")
    return value


def _resized(number: Callable[[int], int], profile: LayerProfile) -> LayerProfile:
    def every(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(number, numbers))

    def boundary(given: Boundary) -> Boundary:
        return replace(given, tensors=tuple(replace(t, shape=every(t.shape)) for t in given.tensors))

    def trace(given: Trace) -> Trace:
        return replace(given, sizes=every(given.sizes))

    return replace(
        profile,
        inputs=boundary(profile.inputs),
        outputs=boundary(profile.outputs),
        parameter_counts=every(profile.parameter_counts),
        parameter_sizes=every(profile.parameter_sizes),
        trained_sizes=every(profile.trained_sizes),
        buffer_sizes=every(profile.buffer_sizes),
        free=trace(profile.free),
        first=trace(profile.first),
        later=trace(profile.later),
        halves=None,  # its sizes are not scaled
    )


# The memory of an accelerator of Table 1 under given values of the unknowns. Parameter gradients and copies
# of boundary tensors are not counted, as declared.

Combination = Mapping[str, Value]
"""Settings by name."""
BYTES_PER_PARAMETER = 12
PLAIN: Combination = {"activation_format": "float32"}
"""For profiles that only give parameters or numbers of layers."""
FIXED: dict[str, Combination] = {
    "amoebanet": {"auxiliary_head": True, "num_classes": 1001},
    "transformer": {},
}
"""Settings with little effect on what fits, as in `HALVES`."""
RULES = {"least variance": "variance", "cumulative share": "cumulative"}
"""Rules of results/unknowns.toml by their names in pipeline/plan/partition.py."""
OPERATIONS_SAMPLED_AT = (144, 544, 1040)
"""Widths; operations are quadratic in the width."""
WRITTEN_OUT = {"attention": "explicit"}
"""As declared; torch counts no operations of fused attention on a CPU."""
HEAD = 12
"""Index of the auxiliary head in the sampled models."""


class Held(NamedTuple):
    """Bytes of one accelerator: those that come and go in a step, without parameter gradients; and parameters
    with optimizer state, and buffers.
    """

    moving: int
    fixed: int


def held_by_stages(half: str, column: Column, settings: Combination) -> tuple[Held, ...] | None:
    """The memory of every accelerator of a column; None if the partition leaves a stage empty."""
    costs = _costs(half, column.num_layers, column.num_filters, settings)
    cuts = cut_by(costs, str(settings["partition_rule"]), column.num_stages)
    if cuts is None:
        return None
    count = 1 if column.is_naive else int(settings["num_microbatches"])
    size = HALVES[half].batch_size // count
    layers, loss = model_of(half, column.num_layers, column.num_filters, size, settings)
    remat, last = "never" if column.is_naive else "always", len(cuts) - 1
    found: dict[object, Held] = {}
    stages = []
    for index, cut in enumerate(cuts):
        # The Transformer's layers between embedding and softmax are equal.
        like = (len(cut), index == 0, index == last) if half == "transformer" else index
        if like not in found:
            own, end = layers[cut.start : cut.stop], loss if index == last else None
            found[like] = Held(
                held_bytes(own, end, len(cuts), count, index == 0, remat),
                sum(BYTES_PER_PARAMETER * each.num_parameters + each.buffer_bytes for each in own),
            )
        stages.append(found[like])
    return tuple(stages)


@cache
def held_bytes(
    layers: tuple[LayerProfile, ...], loss: LayerProfile | None, k: int, m: int, is_first: bool, remat: str
) -> int:
    """Peak bytes that come and go in a step of one stage, without parameter gradients."""
    stage = replace(
        stage_bytes(tuple(map(_bare, layers)), loss),
        parameter_bytes=0, trained_sizes=(), buffer_bytes=0, gradient_bytes=0,
    )  # fmt: skip
    schedule = gpipe(k, m, remat)
    return stage_memory(stage, schedule.actions[0], "sgd", is_first=is_first, receive_ahead=int(k > 1)).peak


def held_in_cut(
    layers: Sequence[LayerProfile], loss: LayerProfile, cut: Partition, m: int, remat: str
) -> list[int]:
    """Peak bytes that come and go in every stage of a cut."""
    return [
        held_bytes(tuple(layers[span.start : span.stop]), loss if span is cut[-1] else None,
                   len(cut), m, span is cut[0], remat)
        for span in cut
    ]  # fmt: skip


@cache
def _bare(layer: LayerProfile) -> LayerProfile:
    """The layer, as if parameter gradients took no memory."""
    first = layer.first
    sizes = tuple(0 if storage in first.gradients else size for storage, size in enumerate(first.sizes))
    first = replace(first, sizes=sizes)
    return replace(layer, first=first, later=first)


def model_of(
    half: str, num_layers: int, num_filters: int, microbatch_size: int, settings: Combination
) -> ModelProfile:
    """The profiles of a model under some settings."""
    reading = Reading(number_format=str(settings["activation_format"]), autocast=False)
    if half == "transformer":
        return transformer(reading, num_layers, microbatch_size)
    return amoebanet(
        reading, num_layers, num_filters, microbatch_size, int(settings["num_classes"]),
        auxiliary_head=bool(settings["auxiliary_head"]),
    )  # fmt: skip


@cache
def num_parameters(half: str, num_layers: int, num_filters: int) -> int:
    """The number of parameters of a model."""
    return model_of(half, num_layers, num_filters, 2, {**FIXED[half], **PLAIN}).num_parameters


@cache
def cut_by(costs: tuple[float, ...], rule: str, num_stages: int) -> Partition | None:
    """The partition of layers with these costs; None if the rule leaves a stage empty."""
    try:
        return partition(costs, num_stages, RULES[rule])
    except ValueError:  # a stage is empty
        return None


def _costs(half: str, num_layers: int, num_filters: int, settings: Combination) -> tuple[float, ...]:
    """The cost of each layer for the partition."""
    layers = model_of(half, num_layers, num_filters, 2, {**settings, **PLAIN}).layers
    match settings["partition_cost"]:
        case "layers":
            return (1.0,) * len(layers)
        case "parameters":
            return tuple(float(layer.num_parameters) for layer in layers)
    return operations(half, num_layers, num_filters, bool(settings.get("auxiliary_head", False)))


@cache
def operations(half: str, num_layers: int, num_filters: int, auxiliary_head: bool) -> tuple[float, ...]:
    """Multiplications and additions of each layer's forward pass on two examples, as declared."""
    if half == "transformer":
        embedding, layer, softmax = map(float, _counted_operations(half, num_layers=1, **WRITTEN_OUT))
        return (embedding, *[layer] * num_layers, softmax)
    sizes = ({"num_layers": DEPTH, "num_filters": width} for width in OPERATIONS_SAMPLED_AT)
    samples = zip(*(_counted_operations(half, **size) for size in sizes), strict=True)
    layers = [float(_quadratic(OPERATIONS_SAMPLED_AT, values, num_filters)) for values in samples]
    if not auxiliary_head:
        del layers[HEAD]
    return of_depth(layers, num_layers)


def _quadratic(places: Sequence[int], values: Sequence[int], at: int) -> Fraction:
    """The value at `at` of the polynomial through all given points."""
    total = Fraction(0)
    for place, value in zip(places, values, strict=True):
        others = [each for each in places if each != place]
        total += Fraction(value * prod(at - each for each in others), prod(place - each for each in others))
    return total


@cache
def _counted_operations(half: str, **size: Any) -> tuple[int, ...]:
    value: Any = example_batch(HALVES[half].model, 2, device="meta", **HALVES[half].options)[0]
    layers, found = meta_model(half, **size), []
    with FakeTensorMode(), torch.no_grad():
        value = torch.empty(value.shape, dtype=value.dtype)
        for layer in layers:
            with FlopCounterMode(display=False) as counter:
                value = fake_copy(layer)(value)
            found.append(counter.get_total_flops())
    return tuple(found)


def unet_memory(
    options: Mapping[str, Any], cut_of: Callable[[int], Partition], examples: int, m: int, remat: str
) -> tuple[int, list[int]]:
    """Parameters of a U-Net, and each accelerator's peak in bytes of tensors. As in torchgpipe, stages
    between a skip's ends hold nothing of it; waiting gradients of skips are not counted.

    Args:
        options: options of the builder
        cut_of: returns the partition of so many layers
        examples, m: examples of a micro-batch, number of micro-batches
        remat: which micro-batches are recomputed
    """
    with torch.device("meta"):
        model = MODELS["unet"](**options)
    ends = map(Boundary.of, example_batch("unet", examples, device="meta", **options))
    profiler = Profiler()
    layers, loss = profiler.model(model, loss_fn("unet", **options), *ends)
    cut, peaks = cut_of(len(model)), []
    for actions, span in zip(gpipe(len(cut), m, remat).actions, cut, strict=True):
        own = [model[layer] for layer in span]
        entering = _without(layers[span.start].inputs, _taken(own))
        stage = stage_bytes(profiler.chain(own, entering), loss if span is cut[-1] else None)
        peaks.append(stage_memory(stage, actions, "sgd", is_first=span.start == 0).peak)
    return count_parameters(model), peaks


def _taken(layers: Sequence[nn.Module]) -> int:
    """The number of skips that the layers take from earlier stages."""
    own = taken = 0
    for layer in layers:
        own += isinstance(layer, Stash)
        if isinstance(layer, Join):
            own, taken = (own - 1, taken) if own else (0, taken + 1)
    return taken


def _without(entering: Boundary, num_skips: int) -> Boundary:
    """The tensors that enter a stage, without skips that only pass through (those after `num_skips`)."""
    if not entering.is_tuple:
        return entering
    kept = slice(1 + num_skips)
    tensors, same_as = entering.tensors[kept], entering.same_as[kept]
    return replace(entering, tensors=tensors, same_as=same_as, is_tuple=num_skips > 0)
