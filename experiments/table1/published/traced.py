"""Layer profiles of Table 1's models at any size, from as few traced layers as there are kinds of them.

Tracing a layer as a compiler does takes a second, and a table of hypotheses wants every column under every
number format, number of micro-batches and layout. So each kind of layer is profiled once, at lengths that
primes tell apart (pipeline.memory.sizes.labels), and AmoebaNet's third stack is its second one with
twice the channels on maps of half the side. What is put together is checked: each layer takes exactly what
the one before it returns. Differentiated operation by operation the result is that of profiling every layer
at its size, to the byte; compiled, the cut may fall otherwise among the smallest tensors of the auxiliary
head and the loss (2.5 kB of 1.6 GB).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import nn

from gpipe_bench.experiments.table1.model_costs import ModelProfile
from gpipe_bench.experiments.table1.paper_models import HALVES
from gpipe_bench.experiments.table1.published.ends import carrier, halved, joined
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.profile import Profiler
from gpipe_bench.pipeline.memory.sizes.labels import Label, Relabel, tiled
from gpipe_bench.pipeline.memory.story import LayerProfile

EXAMPLES = 43
"""Examples in a micro-batch of the profiled layers; a micro-batch of one is profiled by itself."""
WIDTH_PRIME, WIDTH = 61, 16 * 61
CLASSES = 103
SIDE_PRIME = 13
"""Side of the last maps of the profiled cells: 416 pixels halved five times, where 224 leave 7. With 7
itself, the length of a kernel, maps could not be told from weights."""
SIDE, LARGE_IMAGE = 7, 416


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How layers are profiled.

    Args:
        compiled: as `torch.compile` would run them
        number_format: of the activations, "float32" or "bfloat16"
        autocast: bfloat16 by autocast, as here, and not throughout
        with_shapes: so that layouts can be applied
    """

    compiled: bool = False
    number_format: str = "float32"
    autocast: bool = False
    with_shapes: bool = False

    def profiler(self) -> Profiler:
        """A new profiler for it."""
        half = torch.bfloat16 if self.number_format == "bfloat16" else None
        return Profiler(
            autocast=half if self.autocast else None,
            compiled=self.compiled,
            number_format=None if self.autocast else half,
            with_shapes=self.with_shapes,
        )

    def boundary(self, boundary: Boundary) -> Boundary:
        """The model's input in the number format."""
        if self.autocast or self.number_format == "float32":
            return boundary
        tensors = tuple(
            replace(spec, dtype=torch.bfloat16) if spec.dtype.is_floating_point else spec
            for spec in boundary.tensors
        )
        return replace(boundary, tensors=tensors)


@cache
def transformer(reading: Reading, microbatch_size: int, attention: str = "explicit") -> ModelProfile:
    """Embedding, one layer, softmax and the loss of Transformer-L."""
    if microbatch_size != 1:
        if microbatch_size == EXAMPLES:
            return _traced_transformer(reading, EXAMPLES, attention)
        relabel = Relabel((Label(EXAMPLES, EXAMPLES, microbatch_size),))
        return _each(transformer(reading, EXAMPLES, attention), relabel.profile)
    return _traced_transformer(reading, 1, attention)


def transformer_at(
    reading: Reading,
    num_layers: int,
    microbatch_size: int,
    attention: str = "explicit",
    *,
    pads: bool = False,
) -> ModelProfile:
    """Transformer-L of any depth; ``pads`` in tiled memory."""
    parts = _tiled_transformer(reading, microbatch_size, attention) if pads else None
    embedding, layer, softmax = (parts or transformer(reading, microbatch_size, attention)).layers
    loss = (parts or transformer(reading, microbatch_size, attention)).loss
    return ModelProfile((embedding, *[layer] * num_layers, softmax), loss)


@cache
def _tiled_transformer(reading: Reading, microbatch_size: int, attention: str) -> ModelProfile:
    return _each(transformer(reading, microbatch_size, attention), tiled)


def _traced_transformer(reading: Reading, examples: int, attention: str) -> ModelProfile:
    half = HALVES["transformer"]
    model = _meta("transformer", num_layers=1, attention=attention)
    inputs, target = example_batch(half.model, examples, device="meta", **half.options)
    layers, loss = reading.profiler().model(
        model, loss_fn(half.model, **half.options), Boundary.of(inputs), Boundary.of(target)
    )
    return ModelProfile(layers, loss)


@dataclass(frozen=True)
class _Kinds:
    """The profiled layers of AmoebaNet-D, at `WIDTH`."""

    entry: tuple[LayerProfile, ...]  # stem and two stem cells
    first: tuple[LayerProfile, ...]  # first, second and any further cell of the first stack
    reductions: tuple[LayerProfile, ...]
    second: tuple[LayerProfile, ...]  # first and second cell of the second stack
    last: LayerProfile  # a further cell of the first stack whose second output nothing uses
    head: LayerProfile
    ends: dict[bool, tuple[LayerProfile, LayerProfile]]  # classifier and loss, without and with the head


@dataclass(frozen=True)
class Size:
    """AmoebaNet-D (L, D), L a multiple of 3 and at least 9, D a multiple of 16 other than 128."""

    num_layers: int
    num_filters: int
    microbatch_size: int
    num_classes: int = 1001
    auxiliary_head: bool = True


def is_traceable(num_layers: int, num_filters: int) -> bool:
    """Whether `amoebanet_at` can put the model together."""
    return num_layers % 3 == 0 and num_layers >= 9 and num_filters % 16 == 0 and num_filters != 128


def amoebanet_at(reading: Reading, size: Size, *, pads: bool = False) -> ModelProfile:
    """All layers of the model; ``pads`` in tiled memory."""
    *parts, loss = _amoebanet(
        reading, size.num_filters, size.microbatch_size, size.num_classes, size.auxiliary_head, pads
    )
    return ModelProfile(stacked(*parts, num_layers=size.num_layers), *loss)


T = TypeVar("T")


def stacked(
    entry: Sequence[T],
    middle: Sequence[T],
    head: Sequence[T],
    end: Sequence[T],
    classifier: Sequence[T],
    *,
    num_layers: int,
) -> tuple[T, ...]:
    """The sequence of an AmoebaNet from one layer of each kind.

    ``middle`` are three cells, a reduction and three cells; ``end`` a reduction, three cells and the last
    one. The third of three is repeated.
    """
    more = num_layers // 3 - 2
    first, second, third = middle[:3], middle[4:7], end[1:4]
    return (
        *entry,
        *(*first[:2], *[first[2]] * more, middle[3]),
        *(*second[:2], *[second[2]] * more),
        *head,
        *(end[0], *third[:2], *[third[2]] * (more - 1), end[4]),
        *classifier,
    )


@cache
def _amoebanet(
    reading: Reading, num_filters: int, examples: int, num_classes: int, auxiliary_head: bool, pads: bool
) -> tuple[tuple[LayerProfile, ...], ...]:
    """What `stacked` puts together, and the loss."""
    kinds = _kinds(reading, 1 if examples == 1 else EXAMPLES)
    labels = [Label(WIDTH_PRIME, WIDTH, num_filters), Label(CLASSES, CLASSES, num_classes)]
    if examples != 1:
        labels.append(Label(EXAMPLES, EXAMPLES, examples))
    at_entry = Relabel(tuple(labels)).profile
    cell = Relabel((*labels, Label(SIDE_PRIME, SIDE_PRIME, SIDE))).profile
    shifted, quartered = (
        Relabel(
            (
                replace(labels[0], wanted=times * num_filters),
                *labels[1:],
                Label(SIDE_PRIME, times * SIDE_PRIME, SIDE),
            )
        ).profile
        for times in (2, 4)
    )
    classifier, loss = map(at_entry, kinds.ends[auxiliary_head])
    head = (at_entry(kinds.head),) if auxiliary_head else ()
    # The head's logits travel on to the classifier, through all cells between.
    carried = carrier(head[0].outputs.tensors[-1]) if head else _unchanged
    first_reduction, second_reduction = map(at_entry, kinds.reductions)
    entry = tuple(map(at_entry, kinds.entry))
    middle = (
        *map(cell, kinds.first), first_reduction, *map(cell, kinds.second), shifted(kinds.first[2]),
    )  # fmt: skip
    end = tuple(
        map(
            carried,
            (
                second_reduction, *map(shifted, kinds.second), quartered(kinds.first[2]),
                quartered(kinds.last),
            ),
        )
    )  # fmt: skip
    groups = (entry, middle, head, end, (classifier,), (loss,))
    _check((*entry, *middle, *head, *end[:3], *end[4:], classifier))
    return tuple(tuple(map(tiled, group)) for group in groups) if pads else groups


def _unchanged(profile: LayerProfile) -> LayerProfile:
    return profile


def _check(layers: Sequence[LayerProfile]) -> None:
    for before, after in pairwise(layers):
        if before.outputs != after.inputs:
            raise RuntimeError(f"{after.name} does not take what {before.name} returns: {before.outputs}")


@cache
def _kinds(reading: Reading, examples: int) -> _Kinds:
    """Profiles each kind once: what the paper's image leads into at 224 pixels, the cells at 416."""
    profiler = reading.profiler()
    plain, large = (
        _meta(
            "amoebanet", num_layers=9, num_filters=WIDTH, num_classes=CLASSES, aux_head=False, image_size=side
        )
        for side in (HALVES["amoebanet"].options["image_size"], LARGE_IMAGE)
    )
    with_head = _meta("amoebanet", num_layers=9, num_filters=WIDTH, num_classes=CLASSES, aux_head=True)
    half = HALVES["amoebanet"]
    image, target = example_batch(half.model, examples, device="meta", **half.options)
    entry = profiler.chain(list(plain)[:3], reading.boundary(Boundary.of(image)))
    # Only shapes are taken from here on; sides are those of the larger image.
    grown = Relabel((Label(7, SIDE, SIDE_PRIME),))
    into = grown.boundary(entry[-1].outputs)
    cells = list(large)[3:]
    first = profiler.chain(cells[:3], into)
    last = profiler.layer(cells[2], first[-1].inputs, frozenset((1,)))
    # A strided window pads one row and column, which tells a map's side no more: these are at 224 pixels.
    small = Relabel((Label(SIDE_PRIME, SIDE_PRIME, SIDE),)).boundary
    second_into = halved(first[-1].outputs, WIDTH_PRIME, SIDE_PRIME)
    reductions = (
        profiler.layer(plain[6], small(first[-1].outputs)),
        profiler.layer(plain[10], small(second_into)),
    )
    second = profiler.chain(cells[4:6], grown.boundary(reductions[0].outputs))
    head = profiler.layer(with_head.get_submodule("aux_head"), small(second_into))
    final = small(halved(second_into, WIDTH_PRIME, SIDE_PRIME))
    ends = {
        False: _ends(profiler, plain[-1], final, target),
        True: _ends(profiler, with_head[-1], joined(final, head.outputs), target),
    }
    return _Kinds(entry, first, reductions, second, last, head, ends)


def _ends(
    profiler: Profiler, classifier: nn.Module, inputs: Boundary, target: torch.Tensor
) -> tuple[LayerProfile, LayerProfile]:
    half = HALVES["amoebanet"]
    profile = profiler.layer(classifier, inputs)
    return profile, profiler.loss(loss_fn(half.model, **half.options), profile.outputs, Boundary.of(target))


def _each(model: ModelProfile, change: Callable[[LayerProfile], LayerProfile]) -> ModelProfile:
    return ModelProfile(tuple(map(change, model.layers)), change(model.loss))


def _meta(half: str, **options: object) -> nn.Sequential:
    with torch.device("meta"):
        return MODELS[HALVES[half].model](**{**HALVES[half].options, **options})
