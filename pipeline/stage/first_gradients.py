"""A parameter's first gradient in memory of its own.

torch makes a gradient the `.grad` without a copy, and adds the next one to it in place, even if another
tensor lives in its memory: the gradient that came into the stage or the one that goes out, where a layer adds
a view of a parameter to its input, or the `.grad` of a second such parameter. What is on its way to another
stage would become a sum, and the sum wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline.stage.parts import local


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


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor's elements lie; fake tensors have no address."""
    start = tensor.storage_offset() * tensor.element_size()
    span = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (span + 1) * tensor.element_size() if tensor.numel() else start
