"""Layer profiles added up to the memory story of a stage, to the byte.

Adding "saved bytes" of layers would be wrong twice: neighbours keep the same storage (a ReLU's result is the
next convolution's input), and the peak of a backward pass depends on what earlier layers still hold. So the
stage is walked through layer by layer, with a storage that crosses a layer boundary known to both sides:

    forward      x0 --[layer 0]--> x1 --[layer 1]--> x2        kept by 0: x1;  kept by 1: x1, a
    backward     g0 <--[layer 0]-- g1 <--[layer 1]-- g2        layer 1 frees a, layer 0 frees x1

A storage is charged once and freed in the backward pass of the earliest layer whose graph holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.profile import LayerProfile
from pipeline.story import Story


@dataclass(frozen=True)
class Moment:
    """What one action of one micro-batch holds at its fullest, beyond the boundary inputs of the stage."""

    activations: int = 0  # bytes held by the graph
    gradients: int = 0  # bytes of parameter gradients that appeared in this action
    transients: int = 0  # everything else: passing outputs, gradients of activations, temporaries

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.transients


@dataclass(frozen=True)
class Footprint:
    """Bytes of one stage, for one micro-batch. Boundary inputs are never part of the moments."""

    num_parameters: int
    parameter_sizes: tuple[int, ...]
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    input_bytes: int
    target_bytes: int
    output_gradient_bytes: int
    saved_bytes: int  # held by the graph from the end of F or R to the end of B
    free: Moment  # F without a graph
    forward: Moment  # F with a graph, and R
    backward_first: Moment  # B that creates the parameter gradients
    backward: Moment  # every later B


def footprint(layers: Sequence[LayerProfile], loss: LayerProfile | None = None) -> Footprint:
    """Add up the profiles of a stage's layers; ``loss`` is the loss of the last stage, as one more layer."""
    chain = (*layers, loss) if loss is not None else tuple(layers)
    target_bytes = loss.inputs.tensors[-1].num_bytes if loss is not None else 0
    links = _link(chain)
    saved_bytes, holder, forward = _walk_forward(chain, links)
    return Footprint(
        num_parameters=sum(layer.num_parameters for layer in layers),
        parameter_sizes=tuple(size for layer in layers for size in layer.parameter_sizes),
        parameter_bytes=sum(layer.parameter_bytes for layer in layers),
        buffer_bytes=sum(layer.buffer_bytes for layer in layers),
        gradient_bytes=sum(layer.gradient_bytes for layer in layers),
        input_bytes=layers[0].inputs.num_bytes,
        target_bytes=target_bytes,
        output_gradient_bytes=0 if loss is not None else layers[-1].output_gradient_bytes,
        saved_bytes=saved_bytes,
        free=_walk_free(chain, links),
        forward=forward,
        backward_first=_walk_backward(chain, links, holder, saved_bytes, first=True),
        backward=_walk_backward(chain, links, holder, saved_bytes, first=False),
    )


@dataclass(frozen=True)
class _Link:
    """Names, unique within the stage, of the storages at a layer's two ends, and their bytes."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_bytes: tuple[int, ...]


def _link(chain: Sequence[LayerProfile]) -> tuple[list[_Link], frozenset[int]]:
    """Follow storages through the chain. Also returns those that the stage's boundary holds."""
    links: list[_Link] = []
    names: tuple[int, ...] = tuple(chain[0].inputs.same_as)
    boundary = frozenset(names)
    unused = len(names)
    for index, layer in enumerate(chain):
        if index and len(layer.first.inputs) > len(names):  # the loss: its last input is the target
            names = (*names, unused)
            boundary |= {unused}
            unused += 1
        story = layer.first
        known = dict(zip(story.inputs, names, strict=True))
        outputs = []
        for storage in story.outputs:
            if storage not in known:
                known[storage], unused = unused, unused + 1
            outputs.append(known[storage])
        links.append(_Link(names, tuple(outputs), tuple(story.sizes[storage] for storage in story.inputs)))
        names = tuple(outputs)
    return links, boundary


def _names(story: Story, link: _Link) -> dict[int, int]:
    """The stage's names of the storages at the two ends of a layer."""
    return dict(zip(story.inputs + story.outputs, link.inputs + link.outputs, strict=True))


def _walk_free(chain: Sequence[LayerProfile], linked: tuple[list[_Link], frozenset[int]]) -> Moment:
    links, boundary = linked
    peak = 0
    for layer, link in zip(chain, links, strict=True):
        loose = {n: size for n, size in zip(link.inputs, link.input_bytes, strict=True) if n not in boundary}
        peak = max(peak, sum(loose.values()) + layer.free.forward_peak)
    return Moment(transients=peak)


def _walk_forward(
    chain: Sequence[LayerProfile], linked: tuple[list[_Link], frozenset[int]]
) -> tuple[int, dict[int, int], Moment]:
    """Bytes saved at the end, the earliest layer whose graph holds each storage, and the fullest moment."""
    links, boundary = linked
    saved, holder, fullest = 0, dict[int, int](), Moment()
    for index, (layer, link) in enumerate(zip(chain, links, strict=True)):
        story = layer.first
        loose = {
            n: size
            for n, size in zip(link.inputs, link.input_bytes, strict=True)
            if n not in boundary and n not in holder
        }
        moment = Moment(activations=saved, transients=sum(loose.values()) + story.forward_peak)
        fullest = max(fullest, moment, key=lambda each: each.total)
        ends = _names(story, link)
        saved += story.kept_inside
        for storage, name in ends.items():
            if storage in story.kept and name not in boundary and name not in holder:
                holder[name] = index
                saved += story.sizes[storage]
    return saved, holder, fullest


def _walk_backward(
    chain: Sequence[LayerProfile],
    linked: tuple[list[_Link], frozenset[int]],
    holder: dict[int, int],
    saved: int,
    *,
    first: bool,
) -> Moment:
    links, _ = linked
    gradients, fullest, held = 0, Moment(), 0
    for index in range(len(chain) - 1, -1, -1):
        story, link = chain[index].first if first else chain[index].later, links[index]
        names = _names(story, link)
        other = held  # gradients of activations and temporaries
        is_last = index == len(chain) - 1
        for stretch in story.stretches_of_last if is_last else story.stretches:
            if stretch.peak > fullest.total - saved - gradients - other:
                fullest = Moment(
                    saved + stretch.peak_saved, gradients + stretch.peak_gradients, other + stretch.peak_other
                )
            saved += stretch.saved
            gradients += stretch.gradients
            other += stretch.other
            if stretch.released is not None and holder.get(names[stretch.released]) == index:
                saved -= story.sizes[stretch.released]
        if is_last:
            held = sum(story.sizes[storage] for storage in story.output_gradients)
    return fullest
