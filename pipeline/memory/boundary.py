"""What crosses from one layer to the next, described without its data.

The profile, the memory model and the transports must agree on which tensors travel: a tensor that stands
twice in a tuple travels once, and integer tensors travel forward but no gradient comes back for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..stage.trees import Nested, Tree, take_apart


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by what its cost depends on. The first dimension is the micro-batch.

    ``layout`` names the dimensions from the outermost in memory to the innermost, None where that is their
    order: whether a layer copies its input (a `reshape` of a transposed one) depends on it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    layout: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The description of a (real, fake or meta) tensor."""
        layout = None
        if not tensor.is_contiguous():
            strides = tensor.stride()
            order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
            layout = order if order != tuple(range(tensor.dim())) else None
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, layout)

    def empty(self) -> Tensor:
        """A dense tensor like that, without a gradient."""
        layout = self.layout or tuple(range(len(self.shape)))
        return torch.empty_permuted(self.shape, layout, dtype=self.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Boundary:
    """The value that passes between two layers: a tensor, a tuple of tensors, or another pytree. ``nested``
    is the pytree's structure, with its constants; the tensors are those that travel, each once.

    ``same_as[i]`` is the first position that holds the same tensor as position i (AmoebaNet's stem passes one
    tensor twice); it travels and is kept once.
    """

    tensors: tuple[TensorSpec, ...]
    same_as: tuple[int, ...]
    is_tuple: bool
    nested: Nested | None = None

    @classmethod
    def of(cls, value: Tree) -> Boundary:
        """The boundary that a (real, fake or meta) value would cross."""
        tensors, nested = _apart(value)
        first: dict[int, int] = {}
        same_as = tuple(first.setdefault(id(tensor), index) for index, tensor in enumerate(tensors))
        return cls(
            tuple(map(TensorSpec.of, tensors)),
            same_as,
            nested is None and not isinstance(value, Tensor),
            nested,
        )

    def build(self, tensors: Sequence[Tensor]) -> Tree:
        """Builds the value that crosses the boundary from these tensors, one for each position."""
        if self.nested is not None:
            return self.nested.build(tensors)
        return tuple(tensors) if self.is_tuple else tensors[0]

    @cached_property
    def distinct(self) -> tuple[int, ...]:
        """Positions of the tensors that really travel."""
        return tuple(index for index, first in enumerate(self.same_as) if index == first)

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.tensors[index].num_bytes for index in self.distinct)

    def join(self, other: Boundary) -> Boundary:
        """Both side by side, as a loss takes outputs and target."""
        offset = len(self.tensors)
        return Boundary(
            self.tensors + other.tensors, self.same_as + tuple(offset + i for i in other.same_as), True
        )


def as_tuple(value: Tree) -> tuple[Tensor, ...]:
    """The tensors of a layer's value, one for each position of its boundary. Raises ValueError for what
    cannot pass between layers.
    """
    return _apart(value)[0]


def _apart(value: Tree) -> tuple[tuple[Tensor, ...], Nested | None]:
    if isinstance(value, Tensor):
        return (value,), None
    if type(value) is tuple and all(isinstance(each, Tensor) for each in value):
        return value, None
    try:
        return take_apart(value, "what a layer passed")
    except TypeError as error:
        raise ValueError(str(error)) from error


def resized(boundary: Boundary, microbatch_size: int) -> Boundary:
    """The same boundary for another micro-batch size."""
    tensors = tuple(replace(spec, shape=(microbatch_size, *spec.shape[1:])) for spec in boundary.tensors)
    return replace(boundary, tensors=tensors)
