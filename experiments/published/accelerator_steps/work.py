"""What the operations of a model take on an accelerator, for any size of the micro-batch.

An operation takes the longer of two times: its floating-point operations at a share of the accelerator's
peak, and the bytes it moves at the bandwidth of the memory. Where products run on a systolic array they are
padded to it: the inner dimension and the columns to its side, the rows to 8; tensors are kept in tiles of 8
by 128, of which the compiler picks the direction that pads less, and a micro-batch of fewer than 8 images
takes as long as one of 8. Only the standard library and numpy are imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.planner.accelerators import Accelerator

Array = NDArray[np.float64]

ROWS = 8
"""Rows of a tile of a TPU's memory and of what its matrix unit takes at once."""
LANES = 128
"""Columns of a tile."""


Tiles = Literal["images", "sequences"] | None
"""Which two dimensions of a tensor are kept in tiles: examples and channels, or the last two; None: dense."""


class Dim(NamedTuple):
    """A dimension: `fixed` + `each` for each example."""

    fixed: int
    each: int

    def at(self, examples: int) -> int:
        return self.fixed + self.each * examples


class Product(NamedTuple):
    """`groups` products of (rows x inner) and (inner x columns)."""

    groups: Dim
    rows: Dim
    inner: Dim
    columns: Dim

    def flops(self, examples: int, unit: int = 0) -> int:
        """Floating-point operations, padded to a systolic array of that side where it is not 0."""
        groups, rows, inner, columns = (dim.at(examples) for dim in self)
        if unit:
            rows, inner, columns = padded(rows, ROWS), padded(inner, unit), padded(columns, unit)
        return 2 * groups * rows * inner * columns


@dataclass(frozen=True, slots=True)
class TensorSize:
    """A tensor by its shape; `itemsize` in bytes, as float32 where it is of floating point."""

    shape: tuple[Dim, ...]
    itemsize: int
    is_floating: bool

    def num_bytes(self, examples: int, activation_format: str, tiles: Tiles = None) -> int:
        """Bytes; only what grows with the examples is an activation and has their format."""
        shape = [dim.at(examples) for dim in self.shape]
        is_activation = self.is_floating and any(dim.each for dim in self.shape)
        itemsize = 2 if is_activation and activation_format != "float32" else self.itemsize
        return itemsize * (tiled_elements(shape, tiles) if tiles else prod(shape))


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its matrix products, and the tensors it reads and writes."""

    products: tuple[Product, ...]
    tensors: tuple[TensorSize, ...]
    elementwise: bool


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One layer on one micro-batch; `outputs` are the distinct tensors that it passes on."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    outputs: tuple[TensorSize, ...]

    def then(self, other: LayerWork) -> LayerWork:
        """This layer and another one as one."""
        return LayerWork(self.forward + other.forward, self.backward + other.backward, other.outputs)

    def flops(self, examples: int, unit: int = 0) -> int:
        """Of the forward."""
        return sum(product.flops(examples, unit) for each in self.forward for product in each.products)

    def output_bytes(self, examples: int, activation_format: str) -> int:
        """What a cut behind the layer sends forward."""
        return sum(tensor.num_bytes(examples, activation_format) for tensor in self.outputs)

    def gradient_bytes(self, examples: int, activation_format: str) -> int:
        """What a cut behind the layer sends back."""
        floating = (tensor for tensor in self.outputs if tensor.is_floating)
        return sum(tensor.num_bytes(examples, activation_format) for tensor in floating)


class Seconds(NamedTuple):
    """Of one layer, forward and backward, for each of some shares of the peak."""

    forward: Array
    backward: Array


@dataclass(frozen=True, eq=False)
class Work:
    """All layers of a model with the loss in the last, their counts of parameters, and its inputs."""

    layers: tuple[LayerWork, ...]
    parameters: tuple[int, ...]
    inputs: tuple[TensorSize, ...]

    @property
    def tiles(self) -> Tiles:
        """How a TPU keeps the model's tensors."""
        return "images" if len(self.inputs[0].shape) == 4 else "sequences"

    def input_bytes(self, examples: int, activation_format: str, accelerator: Accelerator) -> int:
        """The inputs in the memory of an accelerator."""
        tiles = self.tiles if accelerator.matrix_unit else None
        return sum(tensor.num_bytes(examples, activation_format, tiles) for tensor in self.inputs)

    def seconds(
        self,
        accelerator: Accelerator,
        activation_format: str,
        examples: int,
        shares_of_peak: tuple[float, ...],
    ) -> tuple[Seconds, ...]:
        """Seconds of every layer on a micro-batch of that many examples."""
        return _seconds(self, accelerator, activation_format, examples, shares_of_peak)


@cache
def _seconds(
    work: Work, accelerator: Accelerator, activation_format: str, examples: int, shares: tuple[float, ...]
) -> tuple[Seconds, ...]:
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(f"shares_of_peak is {shares}; each is a share of the peak, such as 0.5")
    tiles = work.tiles if accelerator.matrix_unit else None
    if tiles == "images":
        examples = padded(examples, ROWS)
    known: dict[int, Seconds] = {}
    found = []
    for layer in work.layers:
        if id(layer) not in known:
            known[id(layer)] = Seconds(
                *(
                    _time(operations, accelerator, activation_format, examples, shares, tiles)
                    for operations in (layer.forward, layer.backward)
                )
            )
        found.append(known[id(layer)])
    return tuple(found)


def _time(
    operations: Iterable[Operation],
    accelerator: Accelerator,
    activation_format: str,
    examples: int,
    shares: Sequence[float],
    tiles: Tiles,
) -> Array:
    unit = accelerator.matrix_unit
    arithmetic_s, memory_s = [], []
    for each in operations:
        if each.elementwise and accelerator.fuses:
            continue
        flops = sum(product.flops(examples, unit) for product in each.products)
        moved = sum(t.num_bytes(examples, activation_format, tiles) for t in each.tensors)
        arithmetic_s.append(flops / accelerator.rate(activation_format))
        memory_s.append(moved / accelerator.bytes_per_s)
    at_peak, moving = np.array(arithmetic_s), np.array(memory_s)
    return np.array([np.maximum(at_peak / share, moving).sum() for share in shares])


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
    """The next multiple of `multiple`, a length of at least one."""
    return -(-length // multiple) * multiple
