"""Which buffers of a layer its forward changes, and what a recomputation copies of each.

A forward may change a buffer in place or put another tensor under its name. The other tensor takes the place
of the one before, so that a step holds one of them; in a profile the new one would count as kept by the
graph. So the buffers are put back as they were.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from gpipe_bench.pipeline.memory.story import BufferRole
from gpipe_bench.pipeline.stage.batchnorm import Statistics
from gpipe_bench.pipeline.stage.buffers import State


class Moved:
    """The buffers of a layer before its forward."""

    def __init__(self, layer: nn.Module) -> None:
        self._states = {
            (path, name): (module, State.of(buffer))
            for path, module in layer.named_modules()
            for name, buffer in module._buffers.items()
        }

    def look(self) -> dict[str, BufferRole]:
        """After it: those that have changed, by their names. One that was replaced by another of its size is
        put back; a table that was made or has grown stays.
        """
        moved = {}
        for (path, name), (module, state) in self._states.items():
            now = module._buffers.get(name)
            if not state.has_moved(now):
                continue
            before, role = state.tensor, BufferRole.CHANGING
            if before is not None and now is not None and now is not before and now.nbytes == before.nbytes:
                module._buffers[name], role = before, BufferRole.REPLACED
            moved[f"{path}.{name}" if path else name] = role
        return moved


def roles(layer: nn.Module, moved: Mapping[str, BufferRole]) -> tuple[BufferRole, ...]:
    """Of the layer's buffers, each once, in their order; ``moved`` are those that change."""
    statistics = Statistics([layer]).modules
    changing = {name.rpartition(".")[0] for name in moved}
    names: dict[int, list[str]] = {}
    for name, buffer in layer.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    left = {path for path, module in layer.named_modules() if module in statistics}
    found = []
    for mine in names.values():
        paths = {name.rpartition(".")[0] for name in mine}
        if paths <= left:
            found.append(BufferRole.STATISTICS)
        elif changes := [moved[name] for name in mine if name in moved]:
            found.append(changes[0])
        else:
            found.append(BufferRole.STILL if changing.isdisjoint(paths) else BufferRole.BESIDE)
    return tuple(found)
