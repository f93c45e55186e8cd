"""Layer profiles of the two model families of Table 1 at any size, for the price of a few layers.

Tracing a layer takes a tenth of a second, as a compiler does a second; a search wants a family at every
size, the appendix under every number format and number of micro-batches too. So each kind
of layer is profiled once, at lengths that primes tell apart. The bytes of a storage are a product of lengths:
if the width of the profiled model has a prime factor that nothing else in it has, and the micro-batch
another, then every number says by its factors how it grows with the width and with the micro-batch:

    width 16 x 61, micro-batch 17:    a storage of 4 x 61 x 17 x 1024 bytes is linear in both

It holds as far as a layer runs the same operations at every size; a micro-batch of one example often does
not. AmoebaNet's third stack is its second one with twice the channels on maps of half the side.

What is put together is checked: each layer takes exactly what the one before it returns. The result is
that of profiling every layer at its size, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.models.paper import HALVES
from gpipe_bench.pipeline.memory.profile import ModelProfile, Profiler
from gpipe_bench.pipeline.memory.trace import Boundary, LayerProfile, TensorSpec, Trace

T = TypeVar("T")

EXAMPLES = 43
"""Examples in a micro-batch of the profiled layers; a micro-batch of one is profiled by itself: a dimension
of length 1 has no layout, and batch normalization of a single value takes another path."""
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
        number_format: of the activations, "float32" or "bfloat16"
        autocast: bfloat16 by autocast, as this engine has it, and not throughout
        with_shapes: so that bytes can be counted in another format
    """

    number_format: str = "float32"
    autocast: bool = True
    with_shapes: bool = False

    def profiler(self) -> Profiler:
        """A new profiler for it."""
        half = torch.bfloat16 if self.number_format == "bfloat16" else None
        return Profiler(
            autocast=half if self.autocast else None,
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


def meta_model(half: str, **options: Any) -> nn.Sequential:
    """The model of one half of Table 1, some options changed, without memory for its parameters."""
    with torch.device("meta"):
        return MODELS[HALVES[half].model](**{**HALVES[half].options, **options})


def profiled(reading: Reading, half: str, microbatch_size: int, **options: Any) -> ModelProfile:
    """Every distinct layer of a half's model at its own size, nothing taken from another."""
    return profiled_model(reading, HALVES[half].model, microbatch_size, **{**HALVES[half].options, **options})


@cache
def profiled_model(reading: Reading, name: str, microbatch_size: int, **options: Any) -> ModelProfile:
    """The same of any model of the zoo with these options."""
    with torch.device("meta"):
        model = MODELS[name](**options)
    inputs, target = example_batch(name, microbatch_size, device="meta", **options)
    return reading.profiler().model(
        model, loss_fn(name, **options), reading.boundary(Boundary.of(inputs)), Boundary.of(target)
    )


def transformer(
    reading: Reading,
    num_layers: int,
    microbatch_size: int,
    attention: str = "explicit",
) -> ModelProfile:
    """Transformer-L of any depth with explicit or fused attention."""
    (embedding, layer, softmax), loss = _transformer(reading, microbatch_size, attention)
    return ModelProfile((embedding, *[layer] * num_layers, softmax), loss)


@cache
def _transformer(reading: Reading, microbatch_size: int, attention: str) -> ModelProfile:
    """Embedding, one layer, softmax and the loss."""
    examples = 1 if microbatch_size == 1 else EXAMPLES
    found = profiled(reading, "transformer", examples, num_layers=1, attention=attention)
    if examples == 1:
        return found
    change = Relabel((Label(EXAMPLES, EXAMPLES, microbatch_size),)).profile
    return ModelProfile(tuple(map(change, found.layers)), change(found.loss))


def amoebanet(
    reading: Reading,
    num_layers: int,
    num_filters: int,
    microbatch_size: int,
    num_classes: int = 1001,
    *,
    auxiliary_head: bool = True,
) -> ModelProfile:
    """AmoebaNet-D (L, D). Where L or D lie outside of the family, and only there, every layer is profiled at
    its size.
    """
    if not _is_of_the_family(num_layers, num_filters):
        options = {"num_classes": num_classes, "aux_head": auxiliary_head}
        return profiled(
            reading, "amoebanet", microbatch_size, num_layers=num_layers, num_filters=num_filters, **options
        )
    *parts, (loss,) = _amoebanet(reading, num_filters, microbatch_size, num_classes, auxiliary_head)
    return ModelProfile(stacked(*parts, num_layers=num_layers), loss)


def _is_of_the_family(num_layers: int, num_filters: int) -> bool:
    """Stacks with a third cell, widths with whole numbers of channels everywhere; at a width of 128 the stem
    needs no projection.
    """
    return num_layers % 3 == 0 and num_layers >= 9 and num_filters % 16 == 0 and num_filters != 128


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
    reading: Reading, num_filters: int, examples: int, num_classes: int, auxiliary_head: bool
) -> tuple[tuple[LayerProfile, ...], ...]:
    """Profiles that `stacked` puts together, and the loss's."""
    kinds = _kinds(reading, 1 if examples == 1 else EXAMPLES)
    others = [Label(CLASSES, CLASSES, num_classes)]
    if examples != 1:
        others.append(Label(EXAMPLES, EXAMPLES, examples))

    def at(width: int, *side: Label) -> Callable[[LayerProfile], LayerProfile]:
        return Relabel((Label(WIDTH_PRIME, WIDTH, width), *others, *side)).profile

    at_entry, cell = at(num_filters), at(num_filters, Label(SIDE_PRIME, SIDE_PRIME, SIDE))
    shifted, quartered = (
        at(times * num_filters, Label(SIDE_PRIME, times * SIDE_PRIME, SIDE)) for times in (2, 4)
    )
    classifier, loss = map(at_entry, kinds.ends[auxiliary_head])
    head = (at_entry(kinds.head),) if auxiliary_head else ()
    first_reduction, second_reduction = map(at_entry, kinds.reductions)
    entry = tuple(map(at_entry, kinds.entry))
    middle = (
        *map(cell, kinds.first), first_reduction, *map(cell, kinds.second), shifted(kinds.first[2]),
    )  # fmt: skip
    end = (
        second_reduction, *map(shifted, kinds.second), quartered(kinds.first[2]), quartered(kinds.last),
    )  # fmt: skip
    if head:  # its logits travel on to the classifier, through all cells between
        end = tuple(_carrying(head[0].outputs.tensors[-1], layer) for layer in end)
    for before, after in pairwise((*entry, *middle, *head, *end[:3], *end[4:], classifier)):
        if before.outputs != after.inputs:
            raise RuntimeError(f"{after.name} does not take what {before.name} returns: {before.outputs}")
    return entry, middle, head, end, (classifier,), (loss,)


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


@cache
def _kinds(reading: Reading, examples: int) -> _Kinds:
    """Profiles each kind once: what the paper's image leads into at 224 pixels, the cells at 416."""
    profiler, half = reading.profiler(), HALVES["amoebanet"]
    compute_loss = loss_fn(half.model, **half.options)
    options = {"num_layers": 9, "num_filters": WIDTH, "num_classes": CLASSES}
    plain = meta_model("amoebanet", **options, aux_head=False)
    large = meta_model("amoebanet", **options, aux_head=False, image_size=LARGE_IMAGE)
    with_head = meta_model("amoebanet", **options, aux_head=True)
    image, target = example_batch(half.model, examples, device="meta", **half.options)
    entry = profiler.chain(list(plain)[:3], reading.boundary(Boundary.of(image)))
    # Only shapes are taken from here on; sides are those of the larger image.
    grown = Relabel((Label(7, SIDE, SIDE_PRIME),)).boundary
    # A cell of the next stack returns half the side and twice the channels, each told by its prime.
    halved = Relabel((Label(WIDTH_PRIME, 1, 2), Label(SIDE_PRIME, 2, 1))).boundary
    # A strided window pads one row and column, which tells a map's side no more: these are at 224 pixels.
    small = Relabel((Label(SIDE_PRIME, SIDE_PRIME, SIDE),)).boundary
    cells = list(large)[3:]
    first = profiler.chain(cells[:3], grown(entry[-1].outputs))
    last = profiler.layer(cells[2], first[-1].inputs, frozenset((1,)))
    second_into = halved(first[-1].outputs)
    reductions = (
        profiler.layer(plain[6], small(first[-1].outputs)),
        profiler.layer(plain[10], small(second_into)),
    )
    second = profiler.chain(cells[4:6], grown(reductions[0].outputs))
    head = profiler.layer(with_head.get_submodule("aux_head"), small(second_into))
    final = small(halved(second_into))
    ends = {}
    for model, inputs in ((plain, final), (with_head, final.join(_alone(head.outputs.tensors[-1])))):
        classifier = profiler.layer(model[-1], inputs)
        ends[model is with_head] = (
            classifier,
            profiler.loss(compute_loss, classifier.outputs, Boundary.of(target)),
        )
    return _Kinds(entry, first, reductions, second, last, head, ends)


def _alone(spec: TensorSpec) -> Boundary:
    return Boundary((spec,), (0,), False)


def _carrying(spec: TensorSpec, profile: LayerProfile) -> LayerProfile:
    """The layer as it hands a further tensor on untouched, as cells do with the auxiliary logits."""

    def trace(given: Trace, *, with_graph: bool) -> Trace:
        number = len(given.sizes)
        shape = (*spec.shape, spec.dtype.itemsize)
        return replace(
            given,
            sizes=(*given.sizes, spec.num_bytes, spec.num_bytes),
            shapes=(*given.shapes, shape, shape) if given.shapes else (),
            inputs=(*given.inputs, number),
            outputs=(*given.outputs, number),
            output_gradients=(*given.output_gradients, number + 1 if with_graph else None),
            input_gradients=(*given.input_gradients, number + 1 if with_graph else None),
        )

    return replace(
        profile,
        inputs=profile.inputs.join(_alone(spec)),
        outputs=profile.outputs.join(_alone(spec)),
        free=trace(profile.free, with_graph=False),
        first=trace(profile.first, with_graph=True),
        later=trace(profile.later, with_graph=True),
    )


# Any size from one -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Label:
    """A length of a profiled model and what it is to become.

    Args:
        prime: a factor that the length has once and no other number of the model has
        sampled: the length in the profile, or a part of it
        wanted: what takes its place
    """

    prime: int
    sampled: int
    wanted: int


@dataclass(frozen=True)
class Relabel:
    """Turns the numbers of a profile into those of another size of the same model."""

    labels: tuple[Label, ...]
    _known: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    def number(self, number: int) -> int:
        """A length, or a product of lengths. Raises ValueError where it is not whole at the wanted size."""
        if number not in self._known:
            over, under, rest = number, 1, number
            for label in self.labels:
                while rest and rest % label.prime == 0:
                    rest //= label.prime
                    over, under = over * label.wanted, under * label.sampled
            value, left = divmod(over, under)
            if left:
                raise ValueError(f"{number} is no whole number at the size asked for: {over} / {under}")
            self._known[number] = value
        return self._known[number]

    def boundary(self, boundary: Boundary) -> Boundary:
        """The boundary at the wanted size."""
        return _with_shapes(boundary, [tuple(map(self.number, spec.shape)) for spec in boundary.tensors])

    def profile(self, profile: LayerProfile) -> LayerProfile:
        """The profile at the wanted size."""
        return replace(
            profile,
            inputs=self.boundary(profile.inputs),
            outputs=self.boundary(profile.outputs),
            parameter_counts=self._all(profile.parameter_counts),
            parameter_sizes=self._all(profile.parameter_sizes),
            trained_sizes=self._all(profile.trained_sizes),
            buffer_sizes=self._all(profile.buffer_sizes),
            free=self._trace(profile.free),
            first=self._trace(profile.first),
            later=self._trace(profile.later),
            halves=None,  # knows its storages by other sizes
        )

    def _all(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self.number, numbers))

    def _trace(self, trace: Trace) -> Trace:
        shapes = tuple((*map(self.number, shape[:-1]), shape[-1]) for shape in trace.shapes)
        return replace(trace, sizes=self._all(trace.sizes), shapes=shapes)


def _with_shapes(boundary: Boundary, shapes: Sequence[tuple[int, ...]]) -> Boundary:
    tensors = tuple(replace(spec, shape=shape) for spec, shape in zip(boundary.tensors, shapes, strict=True))
    return replace(boundary, tensors=tensors)
