"""Layers with portals as layers without: what is carried past a layer is part of what it takes and gives.

That is how a stage holds portals, and how layers are profiled that have some. A cut between such layers would
pass everything on; where portals go past stages, `portals.portal_memory` says what that saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from gpipe_bench.pipeline.plan.portals import Declared
from gpipe_bench.pipeline.stage.portals import declarations


def passed_on(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """All layers of a model."""
    declared = declarations(layers)
    return passing(layers, declared, (), ()) if any(map(any, declared)) else list(layers)


class Passing(nn.Module):
    """A layer, with the portals that are carried past it as part of what it takes and gives.

    `held` are carried in, those at `pops` given to the layer; it stashes `stashed`, and those at the places
    `kept`, of both, are carried on.
    """

    def __init__(
        self, layer: nn.Module, held: int, pops: tuple[int, ...], stashed: int, kept: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.layer, self.held, self.pops, self.stashed, self.kept = layer, held, pops, stashed, kept

    def forward(self, given: Any) -> Any:
        value, carried = given, list[Tensor]()
        if self.held:
            count = len(given) - self.held
            value, carried = given[0] if count == 1 else given[:count], list(given[count:])
        if self.pops:
            value = (value, *[carried[place] for place in self.pops])
        value = self.layer(value)
        if self.stashed:
            value, *stashed = value
            carried += stashed
        if not self.kept:
            return value
        parts = (value,) if isinstance(value, Tensor) else value
        if not (isinstance(parts, tuple) and all(isinstance(part, Tensor) for part in parts)):
            raise beside(type(value).__name__)
        return (*parts, *[carried[place] for place in self.kept])


def beside(kind: str) -> ValueError:
    """What to raise where portals are carried beside another pytree."""
    return ValueError(
        f"a layer passes a {kind} and portals are carried past it; the memory of portals is modelled between "
        "layers that pass tensors or tuples of them"
    )


def passing(
    layers: Sequence[nn.Module], declared: Sequence[Declared], comes: Sequence[str], goes: Sequence[str]
) -> list[nn.Module]:
    """The layers of a stage, which portals come to and go from."""
    held, found = list(comes), []
    for index, (layer, (stashes, pops)) in enumerate(zip(layers, declared, strict=True)):
        later = {name for each in declared[index + 1 :] for name in each.pops} | set(goes)
        known = [*held, *stashes]
        last = index == len(layers) - 1
        kept = list(goes) if last else [name for name in dict.fromkeys(known) if name in later]
        if not known:
            found.append(layer)
            continue
        places = tuple([held.index(name) for name in pops])
        onwards = tuple([known.index(name) for name in kept])
        found.append(Passing(layer, len(held), places, len(stashes), onwards))
        held = kept
    return found
