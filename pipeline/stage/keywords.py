"""Keyword arguments that the layers share in a step: which of them a layer takes, and how they travel.

A mask that all examples share, a table of positions or a flag belong to the step and not to the micro-batch,
and layers name them differently or not at all. So they are given once, every micro-batch uses the same
tensors, none of which may change while the step runs, and a layer is given what its `forward` has a parameter
for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpipe_bench.pipeline.stage.trees import Message, take_apart, unflatten


@dataclass(frozen=True)
class Keywords:
    """The names that a layer's `forward` takes behind its input; `any_name`, if it has `**kwargs`."""

    names: frozenset[str] = frozenset()
    any_name: bool = False

    @classmethod
    def of(cls, layer: nn.Module) -> Keywords:
        try:
            parameters = list(inspect.signature(layer.forward).parameters.values())
        except (TypeError, ValueError):  # a forward that is no Python function
            return cls()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        behind = parameters[1:] if parameters and parameters[0].kind not in named[1:] else parameters
        return cls(
            frozenset(parameter.name for parameter in behind if parameter.kind in named),
            any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in behind),
        )

    @classmethod
    def of_all(cls, layers: Iterable[nn.Module]) -> Keywords:
        """What any of the layers takes."""
        found = [cls.of(layer) for layer in layers]
        return cls(frozenset().union(*(each.names for each in found)), any(each.any_name for each in found))

    def select(self, shared: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of the shared arguments those that the layer takes."""
        if self.any_name:
            return shared
        return {name: value for name, value in shared.items() if name in self.names}

    def check(self, shared: Mapping[str, Any]) -> None:
        """`ValueError` for a name that nobody takes."""
        for name in shared:
            if not (self.any_name or name in self.names):
                known = ", ".join(map(repr, sorted(self.names))) or "nothing"
                raise ValueError(
                    f"shared has {name!r}, but no layer's forward has a parameter of that name behind its "
                    f"input; the layers take {known}"
                )


def flatten_shared(shared: Mapping[str, Any]) -> Message:
    """`ValueError` for a tensor that requires a gradient, `TypeError` for what cannot travel."""
    tensors, structure = take_apart(dict(shared), "shared", constant=True)
    if any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "shared holds a tensor that requires a gradient, which a pipeline does not compute; pass "
            "tensor.detach(), or make it a parameter of the layers"
        )
    return Message(tensors, structure, (False,) * len(tensors))


def unflatten_shared(message: Message, device: torch.device) -> Mapping[str, Any]:
    """The arguments on the device of a stage."""
    tensors = [tensor.to(device, non_blocking=True) for tensor in message.tensors]
    return unflatten(tensors, message.structure)  # type: ignore[no-any-return]


def shared_versions(message: Message) -> tuple[int, ...]:
    """How often each tensor has been changed in place, of those that count it."""
    return tuple([t._version for t in message.tensors if not t.is_inference()])
