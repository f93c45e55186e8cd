"""Layer profiles of the two model families of Table 1 at any size, for the price of a few.

AmoebaNet's cells are profiled at two widths and micro-batch sizes, far apart, and scaled exactly from there;
the Transformer of any depth is the same three layers, profiled at two micro-batch sizes. Whoever asks for
profiles here need not know which it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from gpipe_bench.experiments.table1.paper_models import HALVES
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.profile import LossLayer, Profiler
from gpipe_bench.pipeline.memory.sizes.scaling import Point, ScaledProfile, fit
from gpipe_bench.pipeline.memory.story import LayerProfile

PRECISIONS: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
"""Precision of the activations (autocast); parameters, gradients and optimizer state stay float32."""

SAMPLED_AT = {144: 1, 1040: 5}
"""Widths and the examples in a micro-batch there: multiples of 16 other than 128, where the stem needs no
projection."""
SAMPLED_SIZES = (2, 16)
"""Examples in a micro-batch of the Transformer, both of them numbers that Table 1 asks for."""
# Weights are quadratic in the width, activations linear in the width and in the micro-batch size.
_BY_FILTERS_AND_SIZE = ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1))
_BY_FILTERS = ((0, 0), (1, 0), (2, 0))
_BY_SIZE = ((0,), (1,))


@dataclass(frozen=True)
class ModelProfile:
    """Profiles of all layers of a model, and of its loss, at one micro-batch size."""

    layers: tuple[LayerProfile, ...]
    loss: LayerProfile

    @property
    def num_parameters(self) -> int:
        return sum(layer.num_parameters for layer in self.layers)


def meta_model(half: str, **size: Any) -> nn.Sequential:
    """The model of one half of Table 1 without memory for its parameters."""
    with torch.device("meta"):
        return MODELS[HALVES[half].model](**HALVES[half].options, **size)


def transformer_profile(
    num_layers: int, microbatch_size: int, precision: str = "float32", attention: str = "fused"
) -> ModelProfile:
    """Transformer-L with the options of Table 1."""
    embedding, layer, softmax, loss = _transformer_parts(microbatch_size, precision, attention)
    return ModelProfile((embedding, *[layer] * num_layers, softmax), loss)


@cache
def _transformer_parts(microbatch_size: int, precision: str, attention: str) -> tuple[LayerProfile, ...]:
    """Embedding, layer, softmax and loss. One example is a case of its own: a dimension of length 1 has no
    layout, so less is copied.
    """
    if microbatch_size == 1 or microbatch_size in SAMPLED_SIZES:
        model = meta_model("transformer", num_layers=1, attention=attention)
        layers, loss = _profile(model, "transformer", microbatch_size, Profiler(PRECISIONS[precision]))
        return (*layers, loss)
    return tuple(scaled.at((microbatch_size,)) for scaled in _transformer_family(precision, attention))


@cache
def _transformer_family(precision: str, attention: str) -> tuple[ScaledProfile, ...]:
    samples = {(size,): _transformer_parts(size, precision, attention) for size in SAMPLED_SIZES}
    return tuple(
        fit({point: parts[index] for point, parts in samples.items()}, _BY_SIZE)
        for index in range(len(samples[SAMPLED_SIZES[:1]]))
    )


def _profile(
    model: nn.Sequential, half: str, microbatch_size: int, profiler: Profiler
) -> tuple[tuple[LayerProfile, ...], LayerProfile]:
    name, options = HALVES[half].model, HALVES[half].options
    inputs, target = example_batch(name, microbatch_size, device="meta", **options)
    return profiler.model(model, loss_fn(name, **options), Boundary.of(inputs), Boundary.of(target))


def amoebanet_profile(
    num_layers: int,
    num_filters: int,
    microbatch_size: int,
    precision: str = "float32",
    *,
    direct: bool = False,
    compiled: bool = False,
) -> ModelProfile:
    """AmoebaNet-D (L, D) of Table 1. ``direct`` profiles each distinct layer at this size, ``compiled`` as
    `torch.compile` would run it, which goes with ``direct``.
    """
    if direct:
        model = meta_model("amoebanet", num_layers=num_layers, num_filters=num_filters)
        profiler = Profiler(PRECISIONS[precision], compiled=compiled)
        return ModelProfile(*_profile(model, "amoebanet", microbatch_size, profiler))
    return amoebanet_family(precision).at(num_layers, num_filters, microbatch_size)


@cache
def amoebanet_family(precision: str) -> AmoebaNetFamily:
    return AmoebaNetFamily(precision)


class AmoebaNetFamily:
    """All AmoebaNet-D (L, D) of one precision, D a multiple of 16 other than 128."""

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self._profilers: dict[int, Profiler] = {}
        self._modules: dict[tuple[int, int], list[nn.Module]] = {}
        self._chains: dict[tuple[int, int], list[LayerProfile]] = {}
        self._scaled: dict[tuple[LayerProfile, bool], ScaledProfile] = {}
        self._known: dict[tuple[ScaledProfile, Point], LayerProfile] = {}

    def at(self, num_layers: int, num_filters: int, microbatch_size: int) -> ModelProfile:
        point = (num_filters, microbatch_size)
        layers = []
        for scaled in self._family(num_layers, microbatch_size == 1):
            if (scaled, point) not in self._known:
                self._known[scaled, point] = scaled.at(point)
            layers.append(self._known[scaled, point])
        return ModelProfile(tuple(layers[:-1]), layers[-1])

    def _family(self, num_layers: int, single: bool) -> list[ScaledProfile]:
        """One scaled profile for each layer, and for the loss as the last."""
        pattern = self._chain(num_layers, next(iter(SAMPLED_AT)))
        for index, layer in enumerate(pattern):
            if (layer, single) not in self._scaled:
                self._fit(num_layers, index, layer, single)
        return [self._scaled[layer, single] for layer in pattern]

    def _fit(self, num_layers: int, index: int, layer: LayerProfile, single: bool) -> None:
        """Scale a layer from one and more examples; where one example is a case of its own (batch
        normalization of a single value takes another path), each from its own samples.
        """
        try:
            scaled = fit(self._samples(num_layers, index, list(SAMPLED_AT.items())), _BY_FILTERS_AND_SIZE)
            self._scaled[layer, True] = self._scaled[layer, False] = scaled
        except ValueError:
            if single:
                scaled = fit(self._samples(num_layers, index, [(f, 1) for f in SAMPLED_AT]), _BY_FILTERS)
            else:
                points = [(filters, max(size, 2)) for filters, size in SAMPLED_AT.items()]
                scaled = fit(self._samples(num_layers, index, points), _BY_FILTERS_AND_SIZE)
            self._scaled[layer, single] = scaled

    def _samples(self, num_layers: int, index: int, points: Sequence[Point]) -> dict[Point, LayerProfile]:
        samples: dict[Point, LayerProfile] = {}
        for filters, size in points:
            reference = self._chain(num_layers, filters)[index]
            module = self._layers(num_layers, filters)[index]
            samples[filters, size] = self._profiler(filters).layer(
                module, resized(reference.inputs, size), reference.unused
            )
        return samples

    def _chain(self, num_layers: int, filters: int) -> list[LayerProfile]:
        """All layers and the loss, at as many examples as this width is sampled at."""
        key = (num_layers, filters)
        if key not in self._chains:
            half = HALVES["amoebanet"]
            inputs, target = example_batch(half.model, SAMPLED_AT[filters], device="meta", **half.options)
            modules, profiler = self._layers(num_layers, filters), self._profiler(filters)
            layers = profiler.chain(modules[:-1], Boundary.of(inputs))
            loss = profiler.layer(modules[-1], layers[-1].outputs.join(Boundary.of(target)))
            self._chains[key] = [*layers, loss]
        return self._chains[key]

    def _layers(self, num_layers: int, filters: int) -> list[nn.Module]:
        key = (num_layers, filters)
        if key not in self._modules:
            half = HALVES["amoebanet"]
            model = meta_model("amoebanet", num_layers=num_layers, num_filters=filters)
            self._modules[key] = [*model, LossLayer(loss_fn(half.model, **half.options), is_tuple=True)]
        return self._modules[key]

    def _profiler(self, filters: int) -> Profiler:
        return self._profilers.setdefault(filters, Profiler(PRECISIONS[self.precision]))


def resized(boundary: Boundary, microbatch_size: int) -> Boundary:
    """The same boundary for another micro-batch size."""
    tensors = tuple(replace(spec, shape=(microbatch_size, *spec.shape[1:])) for spec in boundary.tensors)
    return replace(boundary, tensors=tensors)
