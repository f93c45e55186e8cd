"""Portals: tensors that go from the layer that makes them straight to the layers that use them.

A skip connection that passes through the stages between its ends is sent once for each of them and kept by
each. A portal has a name instead: one layer stashes, later ones pop. Which messages that makes follows from
the declarations and the cuts alone, before anything runs, and beside the schedule, whose order they cannot
break: a portal runs along the way that the activations take from stage to stage, and its gradient along
theirs, so both are always made before they are needed.

    layers     0 stash a   1   2 stash b   3 pop b   4   5 pop a          cut into three stages of two
    edges      stage 0 -> stage 2 with a,   stage 1 -> stage 1 is none: b stays in its stage

Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .edges import Edge


class Declared(NamedTuple):
    """The portal names that one layer stashes, and those that it pops."""

    stashes: tuple[str, ...] = ()
    pops: tuple[str, ...] = ()


def check(declared: Sequence[Declared]) -> None:
    """`ValueError`, which names the portal, unless each is stashed once and popped by later layers only."""
    home: dict[str, int] = {}
    for index, layer in enumerate(declared):
        for name in layer.stashes:
            if name in home:
                raise ValueError(
                    f"portal {name!r} is stashed by layer {home[name]} and by layer {index}; give each a "
                    "name of its own"
                )
            home[name] = index
    popped: set[str] = set()
    for index, layer in enumerate(declared):
        for name in layer.pops:
            if name not in home:
                raise ValueError(f"layer {index} pops portal {name!r}, which no layer stashes")
            if home[name] >= index:
                raise ValueError(
                    f"layer {index} pops portal {name!r}, which layer {home[name]} stashes; a portal leads "
                    "to a later layer"
                )
            if layer.pops.count(name) > 1:
                raise ValueError(f"layer {index} pops portal {name!r} more than once; it is given it once")
            popped.add(name)
    for name, index in home.items():
        if name not in popped:
            raise ValueError(f"layer {index} stashes portal {name!r}, which no later layer pops")


def edges_of(declared: Sequence[Declared], spans: Sequence[range]) -> tuple[Edge, ...]:
    """The edges of portals between stages of these layers, by source and target, numbered on from those of
    the chain; `check` has passed.
    """
    first = len(spans) - 1
    stage_of = {layer: stage for stage, span in enumerate(spans) for layer in span}
    home = {name: stage_of[i] for i, layer in enumerate(declared) for name in layer.stashes}
    found: dict[tuple[int, int], dict[str, None]] = {}
    for name, source in home.items():
        for index, layer in enumerate(declared):
            if name in layer.pops and (target := stage_of[index]) != source:
                found.setdefault((source, target), {})[name] = None
    return tuple(
        [Edge(i, *ends, tuple(names)) for i, (ends, names) in enumerate(sorted(found.items()), first)]
    )


def arriving(edges: Sequence[Edge], stage: int) -> tuple[str, ...]:
    """Names of the portals that end in a stage and come from others, in the order of its edges."""
    return tuple([name for edge in edges if edge.target == stage for name in edge.names])


def leaving(edges: Sequence[Edge], stage: int) -> tuple[str, ...]:
    """Names of the portals that begin in a stage and end in others."""
    return tuple(dict.fromkeys(name for edge in edges if edge.source == stage for name in edge.names))
