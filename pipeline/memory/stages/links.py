"""Which storages the layers of a stage pass to one another, by names that are unique within the stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_bench.pipeline.memory.story import LayerProfile, Story


@dataclass(frozen=True)
class Links:
    """The storages that layers of a stage pass to one another, by names that are unique within the stage."""

    inputs: tuple[frozenset[int], ...]  # names at the entry of each layer
    names: tuple[dict[int, int], ...]  # of the storages at both ends of each layer, as its `first` knows them
    sizes: dict[int, int]  # bytes of each name
    boundary: frozenset[int]  # names that the stage's boundary holds, and the target
    copied: frozenset[int]  # of these, what a layer overwrites: a forward that runs twice works on a copy

    @property
    def whole(self) -> frozenset[int]:
        """Names that a forward without a graph finds in the stage's boundary."""
        return self.boundary - self.copied


def link(chain: Sequence[LayerProfile]) -> Links:
    """Follow storages through the chain."""
    inputs: list[frozenset[int]] = []
    every: list[dict[int, int]] = []
    names: tuple[int, ...] = tuple(chain[0].inputs.same_as)
    sizes = {name: chain[0].inputs.tensors[name].num_bytes for name in names}
    boundary, copied = set(names), set[int]()
    unused = len(names)
    for index, layer in enumerate(chain):
        story = layer.first
        for target in layer.inputs.tensors[len(names) :] if index else ():  # the loss: its last inputs
            sizes[unused] = target.num_bytes
            boundary.add(unused)
            names = (*names, unused)
            unused += 1
        known = dict(zip(story.inputs, names, strict=True))
        copied.update(names[position] for position in layer.overwritten)
        for storage in story.outputs:
            if storage not in known:
                known[storage], sizes[unused] = unused, story.sizes[storage]
                unused += 1
        inputs.append(frozenset(names))
        every.append(known)
        names = tuple([known[storage] for storage in story.outputs])
    return Links(tuple(inputs), tuple(every), sizes, frozenset(boundary), frozenset(copied & boundary))


def names_in(story: Story, first: Story, names: dict[int, int]) -> dict[int, int]:
    """The names of the storages at a layer's ends as another story of it knows them, as a rule by the same
    numbers as ``first``.
    """
    if story.inputs == first.inputs and story.outputs == first.outputs:
        return names
    ends = [names[storage] for storage in first.inputs + first.outputs]
    return dict(zip(story.inputs + story.outputs, ends, strict=True))
