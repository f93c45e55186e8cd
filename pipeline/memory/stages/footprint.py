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

from gpipe_bench.pipeline.memory.stages.links import Links, link, names_in
from gpipe_bench.pipeline.memory.stages.moments import Halves, Moment
from gpipe_bench.pipeline.memory.stages.split_footprint import halves_of
from gpipe_bench.pipeline.memory.story import BufferRole, LayerProfile, Received, Story
from gpipe_bench.pipeline.stage.state.buffers import SMALL_BYTES


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


def footprint(layers: Sequence[LayerProfile], loss: LayerProfile | None = None) -> Footprint:
    """Add up the profiles of a stage's layers; ``loss`` is the loss of the last stage, as one more layer."""
    walked = (*layers, loss) if loss is not None else tuple(layers)
    targets = loss.inputs.tensors[len(layers[-1].outputs.tensors) :] if loss is not None else ()
    links = link(walked)
    saved_bytes, holder, forward = walk_forward(walked, links)
    inputs = layers[0].inputs
    saved_names = {
        names[storage]
        for layer, names in zip(walked, links.names, strict=True)
        for storage in layer.first.kept_ends
    }
    changing, shadows = _buffer_copies(walked)
    lingers = any(layer.replaced_bytes for layer in layers)
    again = walk_forward(walked, links, again=True)[2] if lingers else None
    kept_inputs = [
        index for index in inputs.distinct if inputs.tensors[index].requires_grad or index in saved_names
    ]
    return Footprint(
        halves=halves_of(walked, links, holder, saved_bytes),
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
        free=_walk_free(walked, links),
        forward=forward,
        backward_first=_walk_backward(walked, links, holder, saved_bytes, first=True),
        backward=_walk_backward(walked, links, holder, saved_bytes, first=False),
        copied_input_bytes=sum(links.sizes[name] for name in links.copied if name < len(inputs.tensors)),
        kept_copied_bytes=sum(links.sizes[name] for name in links.copied.intersection(kept_inputs)),
        changing_buffer_bytes=changing,
        shadow_buffer_bytes=shadows,
        again=again,
    )


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


def _walk_free(chain: Sequence[LayerProfile], links: Links) -> Moment:
    peak = lingers = 0
    for layer, inputs in zip(chain, links.inputs, strict=True):
        loose = sum([links.sizes[name] for name in inputs - links.whole])
        peak = max(peak, loose + lingers + layer.free.forward_peak)
        lingers += layer.replaced_bytes  # what was in their place is looked at in the end (`stage.buffers`)
    return Moment(transients=peak)


def walk_forward(
    chain: Sequence[LayerProfile], links: Links, *, again: bool = False
) -> tuple[int, dict[int, int], Moment]:
    """Bytes saved at the end, the earliest layer whose graph holds each storage, and the fullest moment.

    With ``again``, of R: what was in the place of a replaced buffer is looked at when all layers are through.
    """
    saved, holder, fullest, most, lingers = 0, dict[int, int](), Moment(), 0, 0
    for index, layer in enumerate(chain):
        story, names = layer.first, links.names[index]
        loose = sum([links.sizes[name] for name in links.inputs[index] - links.boundary - holder.keys()])
        if saved + loose + lingers + story.forward_peak > most:
            fullest = Moment(activations=saved, transients=loose + lingers + story.forward_peak)
            most = fullest.total
        lingers += layer.replaced_bytes * again
        saved += story.kept_inside
        for storage in story.kept_ends:
            name = names[storage]
            if name not in links.boundary and name not in holder:
                holder[name] = index
                saved += links.sizes[name]
    return saved, holder, fullest


def _walk_backward(
    chain: Sequence[LayerProfile], links: Links, holder: dict[int, int], saved: int, *, first: bool
) -> Moment:
    gradients, fullest, most = 0, Moment(), 0
    last = chain[-1].first if first else chain[-1].later
    received = tuple(
        None if storage is None else Received(index, last.sizes[storage], is_held=True)
        for index, storage in enumerate(last.output_gradients)
    )
    held = sum(each.num_bytes for each in received if each is not None)
    for index in range(len(chain) - 1, -1, -1):
        layer = chain[index]
        story = layer.first if first else layer.later
        names = links.names[index] if first else names_in(layer.later, layer.first, links.names[index])
        received = received[: len(story.outputs)]  # without the target's place
        # A layer may hold a name more than once: two slices of one storage are two storages to it.
        holds: dict[int, int] = {}
        for storage in story.kept_ends:
            holds[names[storage]] = holds.get(names[storage], 0) + 1
        # Gradients of activations and temporaries.
        other = held + sum([each.num_bytes for each in {*received} if each is not None and not each.is_held])
        for stretch in story.stretches(received):
            if stretch.peak > most - saved - gradients - other:
                fullest = Moment(
                    saved + stretch.peak_saved, gradients + stretch.peak_gradients, other + stretch.peak_other
                )
                most = fullest.total
            saved += stretch.saved
            gradients += stretch.gradients
            other += stretch.other
            if stretch.released is not None:
                name = names[stretch.released]
                holds[name] = holds.get(name, 0) - 1
                if holder.get(name) == index and holds[name] == 0:
                    saved -= links.sizes[name]
        received = passed_back(story, received)
    return fullest


def passed_back(story: Story, received: tuple[Received | None, ...]) -> tuple[Received | None, ...]:
    """The gradients of a layer's inputs, as the layer before receives them. Storages are numbered as they
    turn up, so that equal layers receive equal gradients wherever they stand.
    """
    known = dict(zip(story.output_gradients, received, strict=True))
    numbers: dict[int, int] = {}
    passed: list[Received | None] = []
    for storage in story.input_gradients:
        if storage is not None and storage not in known:
            known[storage] = Received(-1 - storage, story.sizes[storage], is_held=False)
        each = None if storage is None else known[storage]
        if each is not None:
            each = Received(numbers.setdefault(each.storage, len(numbers)), each.num_bytes, each.is_held)
        passed.append(each)
    return tuple(passed)
