"""Which keyword arguments a layer takes.

A mask that all examples share, a table of positions or a flag belong to the step and not to the micro-batch,
and layers name them differently or not at all. So a layer is given what its `forward` has a parameter for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


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
