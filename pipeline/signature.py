"""Telling whether two layers are the same layer, so that each distinct one is profiled once.

`repr` is not enough: it leaves out attributes that a module does not print. Here every attribute counts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

_BASE_ATTRIBUTES = frozenset(vars(nn.Module()))


def signature(layer: nn.Module) -> object:
    """A hashable value that is equal for layers of the same configuration.

    Made of each submodule's type, attributes and tensor shapes; an attribute that cannot be compared by value
    makes layers differ, so that a mistake costs time, not truth.
    """
    return tuple(
        (
            name,
            type(module),
            tuple(
                _comparable(value) for key, value in vars(module).items() if key.endswith("_hooks") and value
            ),
            tuple((k, _comparable(v)) for k, v in vars(module).items() if k not in _BASE_ATTRIBUTES),
            tuple(
                (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
                for key, tensor in (*module._parameters.items(), *module._buffers.items())
                if tensor is not None
            ),
        )
        for name, module in layer.named_modules()
    )


class Same:
    """Equal to itself alone; keeps the object, so that no other can take its identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


def _comparable(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_comparable, value))
    if isinstance(value, dict):
        return tuple((_comparable(key), _comparable(each)) for key, each in value.items())
    if isinstance(value, partial):
        return partial, _comparable(value.func), _comparable(value.args), _comparable(value.keywords)
    if isinstance(value, Tensor):
        return Same(value)
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return type(value), value
