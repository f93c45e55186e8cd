"""Layer profiles added up to the memory story of a stage, to the byte.

Adding "saved bytes" of layers would be wrong twice: neighbours keep the same storage (a ReLU's result is the
next convolution's input), and the peak of a backward pass depends on what earlier layers still hold. So the
stage is walked through layer by layer, with a storage that crosses a layer boundary known to both sides:

    forward      x0 --[layer 0]--> x1 --[layer 1]--> x2        kept by 0: x1;  kept by 1: x1, a
    backward     g0 <--[layer 0]-- g1 <--[layer 1]-- g2        layer 1 frees a, layer 0 frees x1

A storage is charged once, with the size it was made with (a layer may pass on a slice of it), and freed in
the backward pass of the earliest layer whose graph holds it. What only leads to outputs that no gradient
comes back for is not kept; at the end of a stage the engine does keep it, until B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from gpipe_bench.pipeline.memory.stages.layerwise import (
    Forward,
    fullest,
    walk_backward,
    walk_forward,
    walk_free,
)
from gpipe_bench.pipeline.memory.stages.links import Links, link
from gpipe_bench.pipeline.memory.stages.moments import NO_MESSAGES, Halves, Messages, Moment
from gpipe_bench.pipeline.memory.stages.split_footprint import halves_of
from gpipe_bench.pipeline.memory.story import BufferRole, LayerProfile
from gpipe_bench.pipeline.stage.buffers import SMALL_BYTES


@dataclass(frozen=True)
class Footprint:
    """Bytes of one stage, for one micro-batch. Boundary inputs are never part of the moments."""

    num_parameters: int
    parameter_bytes: int
    trained_sizes: tuple[int, ...]  # of each parameter tensor that gets a gradient
    buffer_bytes: int
    gradient_bytes: int
    input_bytes: int
    kept_input_bytes: int  # of the boundary inputs, what stays from F or R, with a graph, to the end of B
    target_bytes: int
    output_gradient_bytes: int
    saved_bytes: int  # held by the graph from the end of F or R to the end of B
    free: Moment  # F without a graph
    forward: Moment  # F with a graph, and R
    backward_first: Moment  # B that creates the parameter gradients
    backward: Moment  # every later B
    halves: Halves | None = None  # where the layers' profiles have them
    summed_gradient_bytes: int = (
        0  # of the gradients, what is added to that of another layer before the update
    )
    copied_input_bytes: int = 0  # of the boundary inputs, what a forward that runs twice copies
    kept_copied_bytes: int = 0  # of these copies, what stays from R to the end of B
    changing_buffer_bytes: int = 0  # copied for each micro-batch that waits for its R
    shadow_buffer_bytes: int = 0  # copied once where anything is recomputed
    again: Moment | None = None  # R, where it holds more than F with a graph
    messages: Messages = NO_MESSAGES  # what it sends, and receives over processes


def footprint(layers: Sequence[LayerProfile], loss: LayerProfile | None = None) -> Footprint:
    """Add up the profiles of a stage's layers; ``loss`` is the loss of the last stage, as one more layer."""
    walked = (*layers, loss) if loss is not None else tuple(layers)
    targets = loss.inputs.tensors[len(layers[-1].outputs.tensors) :] if loss is not None else ()
    links = link(walked)
    forward = walk_forward(walked, links)
    saved_bytes, holder, _ = forward
    backward_first, backward = (
        walk_backward(walked, links, holder, saved_bytes, first=first) for first in (True, False)
    )
    inputs = layers[0].inputs
    saved_names = {
        names[storage]
        for layer, names in zip(walked, links.names, strict=True)
        for storage in layer.first.kept_ends
    }
    changing, shadows = _buffer_copies(walked)
    lingers = any(layer.replaced_bytes for layer in layers)
    again = fullest(walk_forward(walked, links, again=True).layers) if lingers else None
    halves = halves_of(walked, links, holder, saved_bytes)
    kept_inputs = [
        index for index in inputs.distinct if inputs.tensors[index].requires_grad or index in saved_names
    ]
    return Footprint(
        halves=halves,
        num_parameters=sum(layer.num_parameters for layer in layers),
        parameter_bytes=sum(layer.parameter_bytes for layer in layers),
        trained_sizes=tuple(chain.from_iterable(layer.trained_sizes for layer in layers)),
        buffer_bytes=sum(layer.buffer_bytes for layer in layers),
        gradient_bytes=sum(layer.gradient_bytes for layer in layers),
        input_bytes=inputs.num_bytes,
        kept_input_bytes=sum(inputs.tensors[index].num_bytes for index in kept_inputs),
        target_bytes=sum(target.num_bytes for target in targets),
        output_gradient_bytes=0 if loss is not None else layers[-1].output_gradient_bytes,
        saved_bytes=saved_bytes,
        free=fullest(walk_free(walked, links)),
        forward=fullest(forward.layers),
        backward_first=fullest(backward_first.layers),
        backward=fullest(backward.layers),
        copied_input_bytes=sum(links.sizes[name] for name in links.copied if name < len(inputs.tensors)),
        kept_copied_bytes=sum(links.sizes[name] for name in links.copied.intersection(kept_inputs)),
        changing_buffer_bytes=changing,
        shadow_buffer_bytes=shadows,
        again=again,
        messages=Messages(
            sent_back_bytes=backward.sent_back_bytes,
            **({} if loss is not None else _sent(layers, links, forward, halves)),
        ),
    )


def _sent(
    layers: Sequence[LayerProfile], links: Links, forward: Forward, halves: Halves | None
) -> dict[str, Any]:
    """What `Messages` says of a stage that sends its outputs on."""
    last, (saved_bytes, holder, _) = layers[-1], forward
    names = {links.names[-1][storage] for storage in last.first.outputs} - links.boundary
    of_graph = names & holder.keys()
    received = sum(last.first.sizes[each] for each in last.first.output_gradients if each is not None)
    found = {
        "sent_bytes": sum(links.sizes[name] for name in names),
        "of_graph_bytes": sum(links.sizes[name] for name in of_graph),
        "received_bytes": received,
    }
    if not of_graph:
        return found
    # Storages that nobody frees stay until the end.
    longer = {name: layer for name, layer in holder.items() if name not in of_graph}

    def more(*, first: bool) -> int:
        fuller, plain = (
            fullest(walk_backward(layers, links, each, saved_bytes, first=first).layers).total
            for each in (longer, holder)
        )
        return fuller - plain

    half = halves_of(layers, links, longer, saved_bytes)
    of_half = 0 if half is None or halves is None else half.inputs.total - halves.inputs.total
    return found | {"longer": (more(first=True), more(first=False), of_half)}


def _buffer_copies(layers: Sequence[LayerProfile]) -> tuple[int, int]:
    """Bytes of a stage's buffers that are copied for each micro-batch, and once."""
    changing = once = 0
    for layer in layers:
        for role, size in zip(layer.buffer_roles, layer.buffer_sizes, strict=False):
            small = size if size <= SMALL_BYTES else 0
            if role is BufferRole.CHANGING or role is BufferRole.REPLACED:
                changing += size
            elif role is BufferRole.BESIDE:
                changing += small
            elif role is BufferRole.STILL:
                once += small
    return changing, once
