"""What each layer of a stage holds at its own fullest moment, and when it is through.

A stage is walked layer by layer, with what the layers before have kept and those behind still hold. Its own
fullest moment (`footprint`) is that of the fullest layer. On a grid, what is gathered, copied into a bucket
or scattered comes on top of whichever layer runs then (`passes`):

    backward     [layer 2][layer 1][layer 0]
    gathered         2        1        0        comes on top of what that layer holds, and of nothing else
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpipe_bench.pipeline.memory.stages.links import Links, link, names_in
from gpipe_bench.pipeline.memory.stages.moments import Moment
from gpipe_bench.pipeline.memory.story import LayerProfile, Received, Story


class LayerMoment(NamedTuple):
    """One layer in a pass over its stage, beyond the stage's boundary inputs; the ends in bytes."""

    before: int
    fullest: Moment
    after: int


class Forward(NamedTuple):
    """A forward with a graph: bytes saved, and the earliest layer whose graph holds each storage."""

    saved_bytes: int
    holder: dict[int, int]
    layers: list[LayerMoment]


class Backward(NamedTuple):
    """A backward, layers in the order of the forward; bytes of the gradients of the stage's inputs."""

    layers: list[LayerMoment]
    sent_back_bytes: int


def fullest(layers: Sequence[LayerMoment]) -> Moment:
    """Of all layers, the first one of equals."""
    return max((each.fullest for each in layers), key=lambda moment: moment.total, default=Moment())


def walk_free(chain: Sequence[LayerProfile], links: Links) -> list[LayerMoment]:
    """A forward without a graph."""
    found, lingers = [], 0
    ends = [*links.inputs[1:], None]
    for layer, inputs, following in zip(chain, links.inputs, ends, strict=True):
        loose = sum([links.sizes[name] for name in inputs - links.whole])
        after = 0 if following is None else sum([links.sizes[name] for name in following - links.whole])
        moment = Moment(transients=loose + lingers + layer.free.forward_peak)
        found.append(LayerMoment(loose + lingers, moment, after + lingers))
        lingers += layer.replaced_bytes  # what they replace is looked at last (`stage.buffers`)
    return found


def walk_forward(chain: Sequence[LayerProfile], links: Links, *, again: bool = False) -> Forward:
    """A forward with a graph.

    With ``again``, of R: what was in the place of a replaced buffer is looked at when all layers are through.
    """
    saved, holder, found, lingers = 0, dict[int, int](), list[LayerMoment](), 0
    for index, layer in enumerate(chain):
        story, names = layer.first, links.names[index]
        loose = sum([links.sizes[name] for name in links.inputs[index] - links.boundary - holder.keys()])
        before = saved + loose + lingers
        moment = Moment(activations=saved, transients=loose + lingers + story.forward_peak)
        lingers += layer.replaced_bytes * again
        saved += story.kept_inside
        for storage in story.kept_ends:
            name = names[storage]
            if name not in links.boundary and name not in holder:
                holder[name] = index
                saved += links.sizes[name]
        found.append(LayerMoment(before, moment, saved + lingers))
    return Forward(saved, holder, found)


def walk_backward(
    chain: Sequence[LayerProfile], links: Links, holder: dict[int, int], saved: int, *, first: bool
) -> Backward:
    """A backward, from the last layer to the first; ``first`` is one that makes the parameters' gradients."""
    last = chain[-1].first if first else chain[-1].later
    received = tuple(
        None if storage is None else Received(index, last.sizes[storage], is_held=True)
        for index, storage in enumerate(last.output_gradients)
    )
    held = sum(each.num_bytes for each in received if each is not None)
    gradients, found = 0, list[LayerMoment]()
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
        before, moment, most = saved + gradients + other, Moment(), -1
        for stretch in story.stretches(received):
            if saved + gradients + other + stretch.peak > most:
                moment = Moment(
                    saved + stretch.peak_saved, gradients + stretch.peak_gradients, other + stretch.peak_other
                )
                most = moment.total
            saved += stretch.saved
            gradients += stretch.gradients
            other += stretch.other
            if stretch.released is not None:
                name = names[stretch.released]
                holds[name] = holds.get(name, 0) - 1
                if holder.get(name) == index and holds[name] == 0:
                    saved -= links.sizes[name]
        received = _passed_back(story, received)
        found.append(LayerMoment(before, moment, saved + gradients + other))
    sent_back = sum([each.num_bytes for each in {*received} if each is not None and not each.is_held])
    return Backward(found[::-1], sent_back)


def _passed_back(story: Story, received: tuple[Received | None, ...]) -> tuple[Received | None, ...]:
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


@dataclass(frozen=True)
class Pass:
    """Bytes of one pass over a stage's layers, beyond the stage's boundary inputs, by layer.

    Args:
        before: when the layer begins
        most: at its fullest moment
        after: when it is through
    """

    before: tuple[int, ...]
    most: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class Passes:
    """The passes of one micro-batch, and the parameters of the layers; the loss counts to the last layer.

    Args:
        parameter_sizes: of each layer, bytes of each parameter tensor, trained or not
        trained_sizes: of each layer, of those that get a gradient
        free: F without a graph
        forward: F with a graph, and R
        backward_first: B that makes the gradients of the parameters; those are in it
        backward: every later B
    """

    parameter_sizes: tuple[tuple[int, ...], ...]
    trained_sizes: tuple[tuple[int, ...], ...]
    free: Pass
    forward: Pass
    backward_first: Pass
    backward: Pass


def passes(layers: Sequence[LayerProfile], loss: LayerProfile | None = None) -> Passes:
    """Of a stage's layers; ``loss`` is the loss of the last stage."""
    walked = (*layers, loss) if loss is not None else tuple(layers)
    links = link(walked)
    forward, count = walk_forward(walked, links), len(layers)

    def backward(*, first: bool) -> Pass:
        walk = walk_backward(walked, links, forward.holder, forward.saved_bytes, first=first)
        return _joined(walk.layers, count, back=True)

    return Passes(
        parameter_sizes=tuple(layer.parameter_sizes for layer in layers),
        trained_sizes=tuple(layer.trained_sizes for layer in layers),
        free=_joined(walk_free(walked, links), count),
        forward=_joined(forward.layers, count),
        backward_first=backward(first=True),
        backward=backward(first=False),
    )


def _joined(found: Sequence[LayerMoment], count: int, *, back: bool = False) -> Pass:
    """By layer in the order of the forward pass; what is behind the last layer is the loss."""
    each = [(one.before, one.fullest.total, one.after) for one in found]
    *rest, last = each[:count]
    for more in each[count:]:
        most = max(last[1], more[1])
        last = (more[0], most, last[2]) if back else (last[0], most, more[2])
    before, most_, after = zip(*rest, last, strict=True)
    return Pass(before, most_, after)
