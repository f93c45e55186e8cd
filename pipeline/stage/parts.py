"""Tensors that processes have a part of each, told from plain ones.

torch's `DTensor` is loaded by whoever makes one; who only meets them asks here, so that a pipeline alone does
not wait a second for what it never uses.
"""

from __future__ import annotations

from typing import Any, overload

from torch import Tensor


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
