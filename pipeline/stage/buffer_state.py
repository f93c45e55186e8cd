"""A buffer at a moment: which tensor stands under its name, how often it has changed, what it holds.

A layer may change a buffer in place, put another tensor under its name, or register it only in its first
forward. `buffers` compares and keeps such moments; what a moment is and when two are the same is said here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

Key = tuple[nn.Module, str]


class Absent:
    """Stands for a buffer that had not been registered yet."""


ABSENT = Absent()
Value = Tensor | None | Absent


class State(NamedTuple):
    """A buffer at a moment: which tensor, and how often it has been changed in place."""

    tensor: Tensor | None
    version: int

    @classmethod
    def of(cls, tensor: Tensor | None) -> State:
        # Tensors made in inference mode have no version, and cannot change outside of it.
        return cls(tensor, 0 if tensor is None or tensor.is_inference() else tensor._version)

    def has_moved(self, tensor: Tensor | None) -> bool:
        return tensor is not self.tensor or self.version != State.of(tensor).version


def buffer_of(key: Key) -> Tensor | None:
    module, name = key
    return module._buffers.get(name)


def copy_of(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def same(value: Value, tensor: Tensor | None) -> bool:
    if value is None or tensor is None or isinstance(value, Absent):
        return value is tensor
    if tensor.is_meta or isinstance(tensor, FakeTensor):  # without values, which then can't change unseen
        return True
    return torch.equal(value, tensor)
