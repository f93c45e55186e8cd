"""What crosses from one layer to the next, described without its data.

The profile, the memory model and the transports must agree on which tensors travel: a tensor that stands
twice in a tuple travels once, and integer tensors travel forward but no gradient comes back for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


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
        count = self.dtype.itemsize
        for length in self.shape:
            count *= length
        return count


@dataclass(frozen=True)
class Boundary:
    """What passes between two layers: a tensor or a tuple of tensors.

    ``same_as[i]`` is the first position that holds the same tensor as position i (AmoebaNet's stem passes one
    tensor twice); it travels and is kept once.
    """

    tensors: tuple[TensorSpec, ...]
    same_as: tuple[int, ...]
    is_tuple: bool

    @classmethod
    def of(cls, value: Tensor | Sequence[Tensor]) -> Boundary:
        """The boundary that a (real, fake or meta) value would cross."""
        tensors = as_tuple(value)
        first: dict[int, int] = {}
        same_as = tuple(first.setdefault(id(tensor), index) for index, tensor in enumerate(tensors))
        return cls(tuple(map(TensorSpec.of, tensors)), same_as, not isinstance(value, Tensor))

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


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    """A layer's value as a tuple. Raises ValueError for anything but a tensor or a sequence of tensors."""
    values = (value,) if isinstance(value, Tensor) else value
    if not isinstance(values, (tuple, list)) or not all(isinstance(each, Tensor) for each in values):
        raise ValueError(f"a layer passed {value!r}: layers must pass a tensor or a tuple of tensors")
    return tuple(values)
