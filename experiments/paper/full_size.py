"""Models at their published size: steps on an accelerator, partitions, and what fits.

Operations and profiles are recorded once, with a prime number of examples, so that every length shows whether
it grows with them. An operation takes the longer of two times: its multiplications at a share of the peak,
and its bytes at the memory bandwidth. A systolic array pads products to its side, and their rows to 8;
tensors are stored in tiles of 8 by 128 in the direction that pads less; fewer than 8 images take as long as
8.

Settings that the paper states are used (results/unknowns.toml). Attention is not fused, as then; the
Transformer is cut between layers, ResNet-101 between its 370 operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline.memory.trace import Boundary, LayerProfile
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import replay
from gpipe_bench.planner.accelerators import TPU_V2, UPDATE_BYTES, Accelerator
from gpipe_bench.planner.predict import breakdown
from gpipe_bench.planner.roofline import Noted, Operation, layers_noted

from .profiles import EXAMPLES, Reading, cut_by, profiled_model, resized

Shape = tuple[tuple[int, ...], int, bool]
"""A recorded tensor: lengths, bytes of an element (as float32), whether it is floating-point."""

CUT_EXAMPLES, CUT_SHARE = 8, 0.374
"""For partitions by seconds: examples of the micro-batch, and the middle of the allowed shares of peak."""
ROWS, LANES = 8, 128
"""Rows and lanes of a tile in a TPU's memory; its matrix unit pads rows alike."""

Tiles = Literal["images", "sequences"] | None
"""The dimensions of a tensor in tiles: examples and channels, or the last two; None: dense."""


class Seconds(NamedTuple):
    """Seconds of one layer on one micro-batch."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Step:
    """One step, ready for a replay."""

    schedule: Schedule
    times: Mapping[tuple[int, Kind], float]
    link: Link
    beside: Mapping[str, Any]

    @property
    def makespan_s(self) -> float:
        """Seconds of the step."""
        return replay(self.schedule, self.times, self.link, **self.beside).makespan_s

    @property
    def shares(self) -> dict[str, float]:
        """Shares of all accelerators' time, by use."""
        found = breakdown(self.schedule, self.times, self.link, **self.beside).shares
        return {part: float(share) for part, share in found.items()}


@dataclass(frozen=True)
class FullSize:
    """A model of the zoo with its options and optimizer."""

    model: str
    options: Mapping[str, Any]
    optimizer: str = field(default="rmsprop", compare=False)  # cached results do not depend on it

    def __hash__(self) -> int:
        return hash((self.model, *sorted(self.options.items())))

    @cache  # noqa: B019
    def noted(self) -> tuple[list[Noted], tuple[int, ...], list[Shape]]:
        """Recorded operations of every layer on `EXAMPLES`, the loss's with the last; number of parameters
        per layer; the inputs.
        """
        with torch.device("meta"):
            modules: list[nn.Module] = [*MODELS[self.model](**self.options)]
        inputs, target = map(Boundary.of, example_batch(self.model, EXAMPLES, device="meta", **self.options))
        return (
            layers_noted(modules, loss_fn(self.model, **self.options), inputs, target, later=True),
            tuple(sum(p.numel() for p in module.parameters()) for module in modules),
            _shapes(inputs),
        )

    @property
    def layers(self) -> Sequence[Noted]:
        return self.noted()[0]

    @property
    def parameters(self) -> tuple[int, ...]:
        return self.noted()[1]

    def flops(self, examples: int) -> list[int]:
        """Multiplications and additions of every layer's forward."""
        return [sum(_flops(each, examples) for each in layer.forward) for layer in self.layers]

    def sent_bytes(self, layer: int, examples: int, activation_format: str) -> int:
        """Bytes sent forward by a cut behind a layer, for distinct tensors."""
        outputs = _shapes(self.layers[layer].outputs)
        return sum(num_bytes(each, examples, activation_format) for each in outputs)

    def returned_bytes(self, layer: int, examples: int, activation_format: str) -> int:
        """Bytes sent back by a cut behind a layer."""
        outputs = _shapes(self.layers[layer].outputs)
        return sum(num_bytes(each, examples, activation_format) for each in outputs if each[2])

    @cache  # noqa: B019
    def seconds(
        self, accelerator: Accelerator, activation_format: str, examples: int, share_of_peak: float
    ) -> tuple[Seconds, ...]:
        """Seconds of every layer on a micro-batch. ValueError for an invalid share."""
        if not 0 < share_of_peak <= 1:
            raise ValueError(
                f"share_of_peak is {share_of_peak}; it must be above 0 and at most 1, such as 0.5"
            )
        tiles = self._tiles(accelerator)
        if tiles == "images":
            examples = padded(examples, ROWS)
        found: dict[int, Seconds] = {}  # equal layers are one object
        for layer in self.layers:
            if id(layer) not in found:
                ways = (layer.forward, layer.backward)
                found[id(layer)] = Seconds(
                    *(
                        _time(way, accelerator, activation_format, examples, share_of_peak, tiles)
                        for way in ways
                    )
                )
        return tuple(found[id(layer)] for layer in self.layers)

    def _tiles(self, accelerator: Accelerator) -> Tiles:
        """How the accelerator stores the model's tensors."""
        if not accelerator.matrix_unit:
            return None
        lengths, *_ = self.noted()[2][0]
        return "images" if len(lengths) == 4 else "sequences"

    @cache  # noqa: B019
    def cut(self, cost: str, rule: str, num_stages: int) -> Partition | None:
        """The partition by a cost and rule of the unknowns; None if the rule leaves a stage empty.

        Seconds are a TPUv2's for forward and backward of `CUT_EXAMPLES` in float32, at `CUT_SHARE` of peak.
        """
        match cost:
            case "operations":
                costs: Sequence[float] = self.flops(1)
            case "parameters":
                costs = self.parameters
            case "layers":
                costs = [1] * len(self.layers)
            case "seconds":
                costs = [*map(sum, self.seconds(TPU_V2, "float32", CUT_EXAMPLES, CUT_SHARE))]
            case _:
                raise ValueError(
                    f"unknown cost {cost!r} of a layer: use operations, parameters, layers or seconds"
                )
        return cut_by(tuple(map(float, costs)), rule, num_stages)

    def step(
        self, accelerator: Accelerator, activation_format: str, cut: Partition, batch: int,
        num_microbatches: int, *, share_of_peak: float, link: Link, remat: str = "always",
        setup: str = "the first accelerator",
    ) -> Step:  # fmt: skip
        """A step of GPipe with `batch` examples; micro-batches are rounded up to whole examples.

        `setup` says where the mini-batch is divided; on "the first accelerator" this takes time: one read and
        one write. A single micro-batch is not divided.
        """
        examples = -(-batch // num_microbatches)
        layers = self.seconds(accelerator, activation_format, examples, share_of_peak)
        times: dict[tuple[int, Kind], float] = {}
        for stage, span in enumerate(cut):
            forward_s = sum(layers[n].forward for n in span)
            times[stage, Kind.F] = times[stage, Kind.R] = forward_s
            times[stage, Kind.B] = sum(layers[n].backward for n in span)
        ends = [span.stop - 1 for span in cut[:-1]]
        setup_s = 0.0
        if num_microbatches > 1 and setup == "the first accelerator":
            tiles = self._tiles(accelerator)
            held = sum(num_bytes(each, batch, activation_format, tiles) for each in self.noted()[2])
            setup_s = 2 * held / accelerator.bytes_per_s
        moved = UPDATE_BYTES[self.optimizer]
        return Step(
            gpipe(len(cut), num_microbatches, remat),
            times,
            link,
            {
                "activation_bytes": [self.sent_bytes(end, examples, activation_format) for end in ends],
                "gradient_bytes": [self.returned_bytes(end, examples, activation_format) for end in ends],
                "setup_s": [setup_s] + [0.0] * (len(cut) - 1),
                "update_s": [
                    sum(self.parameters[layer] for layer in span) * moved / accelerator.bytes_per_s
                    for span in cut
                ],
            },
        )

    @cache  # noqa: B019
    def profiles(self, activation_format: str, examples: int) -> tuple[LayerProfile, ...]:
        """Profiles of all layers, and of the loss as the last one. One example, and 16-bit formats other than
        bfloat16, are scaled from others, though kernels may differ there.
        """
        reading = Reading(number_format="float32" if activation_format == "float32" else "bfloat16")
        layers, loss = resized(profiled_model(reading, self.model, EXAMPLES, **self.options), examples)
        return (*layers, loss)


def _shapes(boundary: Boundary) -> list[Shape]:
    specs = [boundary.tensors[place] for place in boundary.distinct]
    return [(each.shape, each.dtype.itemsize, each.dtype.is_floating_point) for each in specs]


def _time(
    operations: Iterable[Operation], accelerator: Accelerator, activation_format: str, examples: int,
    share: float, tiles: Tiles,
) -> float:  # fmt: skip
    takes = [
        (
            _flops(each, examples, accelerator.matrix_unit) / accelerator.rate(activation_format),
            sum(num_bytes(one, examples, activation_format, tiles) for one in each.tensors)
            / accelerator.bytes_per_s,
        )
        for each in operations
        if not (each.is_elementwise and accelerator.fuses)
    ]
    at_peak, moving = np.array(takes).reshape(-1, 2).T.copy()
    return float(np.maximum(at_peak / share, moving).sum())


def _flops(operation: Operation, examples: int, unit: int = 0) -> int:
    """Multiplications and additions of an operation, padded to a systolic array of side `unit` if not 0."""
    if operation.flops and not operation.products:
        raise ValueError("an operation multiplies matrices, and how is not known; add it to planner.roofline")
    return sum(product_flops(each, examples, unit) for each in operation.products)


def product_flops(product: Sequence[int], examples: int, unit: int = 0) -> int:
    """Operations of a product, given as count, rows, inner dimension and columns."""
    count, rows, inner, columns = (scaled(length, examples) for length in product)
    if unit:
        rows, inner, columns = padded(rows, ROWS), padded(inner, unit), padded(columns, unit)
    return 2 * count * rows * inner * columns


def num_bytes(tensor: Shape, examples: int, activation_format: str, tiles: Tiles = None) -> int:
    """Bytes of a tensor; those that grow with the examples are activations and have their format."""
    lengths, itemsize, is_floating = tensor
    if is_floating and activation_format != "float32" and any(each % EXAMPLES == 0 for each in lengths):
        itemsize = 2
    shape = [scaled(length, examples) for length in lengths]
    return itemsize * (tiled_elements(shape, tiles) if tiles else prod(shape))


def scaled(length: int, examples: int) -> int:
    """A length for `examples`, recorded with `EXAMPLES`."""
    each, fixed = divmod(length, EXAMPLES)
    return length if fixed else each * examples


def tiled_elements(shape: Sequence[int], tiles: Tiles) -> int:
    """Elements with the padding of tiles, in the direction that pads less; vectors are dense."""
    if len(shape) < 2:
        return prod(shape)
    first, second = (shape[0], shape[1]) if tiles == "images" and len(shape) == 4 else (shape[-2], shape[-1])
    rest = prod(shape) // (first * second) if first * second else 0
    return rest * min(
        padded(first, ROWS) * padded(second, LANES), padded(first, LANES) * padded(second, ROWS)
    )


def padded(length: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-length // multiple) * multiple


SIZES = {
    "table2": {"amoebanet": (18, 256), "transformer": (48,)},
    "table3": {"amoebanet": (18, 128), "transformer": (24,)},
    "figure3": {"amoebanet": (12, 512), "resnet101": ()},  # four normal cells in each of three stacks
}
"""The paper's sizes by experiment and model: layers and filters, or layers."""


@cache
def of_the_paper(
    experiment: str, model: str, num_classes: int = 1000, *, d_model: int = 2048, vocab_size: int = 32_000
) -> FullSize:
    """A model of one of the paper's tables; `d_model` and `vocab_size` are for the Transformer."""
    size = SIZES[experiment][model]
    images: dict[str, Any] = {"image_size": 224, "num_classes": num_classes}
    if model == "resnet101":
        return FullSize(model, images)
    if model == "amoebanet":
        sizes = {"num_layers": size[0], "num_filters": size[1], "aux_head": True}
        return FullSize("amoebanet-d", {**sizes, **images})
    return FullSize(
        "transformer-lm",
        {
            "num_layers": size[0], "attention": "explicit", "d_model": d_model, "ffn_dim": 4 * d_model,
            "num_heads": 32, "seq_len": 1024, "vocab_size": vocab_size,
        },
    )  # fmt: skip
