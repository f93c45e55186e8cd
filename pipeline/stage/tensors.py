"""Where the numbers of a tensor are: with several processes, or in the memory of another tensor too.

torch's `DTensor`, of which processes have a part each, is loaded by whoever makes one; who only meets them
asks here, so that a pipeline alone does not wait a second for what it never uses.

Tensors share memory where it would show, in two places.

A parameter's first gradient: torch makes it the `.grad` without a copy, and adds the next one to it in place,
even if another tensor lives in its memory: the gradient that came into the stage or the one that goes out,
where a layer adds a view of a parameter to its input, or the `.grad` of a second such parameter. What is on
its way to another stage would become a sum, and the sum wrong.

Two tensors of one message: what a layer changes in one of them in place shows in the other, and in its
gradients, as long as no stage begins between; behind a cut they are two tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn


def is_divided(tensor: Any) -> bool:
    """Whether it is a `DTensor`."""
    return hasattr(tensor, "device_mesh")


@overload
def local(tensor: Tensor) -> Tensor: ...
@overload
def local(tensor: None) -> None: ...
def local(tensor: Any) -> Tensor | None:
    """What this process has of a tensor, as a plain one whose numbers are there."""
    return None if tensor is None else here(tensor.to_local() if is_divided(tensor) else tensor)


def here(tensor: Any) -> Tensor:
    """The tensor, once a collective that may still be writing it is done.

    torch gives those of its functional collectives out at once, as tensors of a type that waits when an
    operation reads them. Who reads their memory without an operation has to wait itself.
    """
    found: Tensor = tensor.wait() if hasattr(tensor, "wait") else tensor
    return found


def separate(parameters: Iterable[nn.Parameter], others: Iterable[Tensor | None]) -> list[nn.Parameter]:
    """Copies the `.grad` of `parameters` that had none where it overlaps with `others` or with one another.

    Returns the parameters that still have no gradient.
    """
    taken: dict[int, list[tuple[int, int]]] = {}  # extents, by storage
    for tensor in others:
        if tensor is not None and tensor.layout is torch.strided:
            tensor = local(tensor)
            taken.setdefault(tensor.untyped_storage()._cdata, []).append(_extent(tensor))
    waiting: list[nn.Parameter] = []
    for parameter in parameters:
        gradient = local(parameter.grad)
        if parameter.grad is None or gradient is None:
            waiting.append(parameter)
        elif gradient.layout is torch.strided:
            neighbours = taken.setdefault(gradient.untyped_storage()._cdata, [])
            start, end = _extent(gradient)
            if any(start < other_end and other_start < end for other_start, other_end in neighbours):
                parameter.grad = parameter.grad.clone()
            else:
                neighbours.append((start, end))
    return waiting


def version(tensor: Tensor) -> int:
    """Changes when somebody overwrites the tensor; inference tensors don't say."""
    return 0 if tensor.is_inference() else tensor._version


def overlapping(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The positions of those that have an element in common with another one of them."""
    if len(tensors) < 2:
        return ()
    found = [local(tensor) if tensor.layout is torch.strided else None for tensor in tensors]
    storages = [None if tensor is None else tensor.untyped_storage()._cdata for tensor in found]
    if len(set(storages)) == len(storages):
        return ()
    positions: set[int] = set()
    for (i, a), (j, b) in combinations(enumerate(found), 2):
        if a is None or b is None or storages[i] != storages[j]:
            continue
        (start, end), (other_start, other_end) = _extent(a), _extent(b)
        if start < other_end and other_start < end and _meet(_places(a), _places(b)):
            positions |= {i, j}
    return tuple(sorted(positions))


_Places = tuple[tuple[int, ...], tuple[int, ...], int]  # shape and strides, both in bytes, and the first byte


def _places(tensor: Tensor) -> _Places:
    size = tensor.element_size()
    return (
        (*tensor.shape, size),
        (*[stride * size for stride in tensor.stride()], 1),
        int(tensor.storage_offset()) * size,
    )


@lru_cache(maxsize=256)
def _meet(a: _Places, b: _Places) -> bool:
    """Whether two tensors of one storage share a byte. Halves of a row lie between each other and don't."""
    first = min(a[2], b[2])
    ends = [sum((n - 1) * s for n, s in zip(*each[:2], strict=True)) + each[2] + 1 for each in (a, b)]
    taken = np.zeros(max(ends) - first, dtype=bool)
    views = [
        np.lib.stride_tricks.as_strided(taken[start - first :], shape, strides)
        for shape, strides, start in (a, b)
    ]
    views[0][...] = True
    return bool(views[1].any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor's elements lie; fake tensors have no address."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    span = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (span + 1) * tensor.element_size() if tensor.numel() else start
