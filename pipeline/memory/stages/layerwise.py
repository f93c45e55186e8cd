"""What each layer of a stage holds at its own fullest moment, and when it is through.

The peak of an action needs the fullest layer alone (`footprint`). On a grid, what is gathered, copied into a
bucket or scattered comes on top of whichever layer runs then, so the same walk is taken here layer by layer:

    backward     [layer 2][layer 1][layer 0]
    gathered         2        1        0        comes on top of what that layer holds, and of nothing else
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_bench.pipeline.memory.stages.footprint import passed_back, walk_forward
from gpipe_bench.pipeline.memory.stages.links import Links, link, names_in
from gpipe_bench.pipeline.memory.story import LayerProfile, Received


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
    saved_bytes, holder, _ = walk_forward(walked, links)
    count = len(layers)
    return Passes(
        parameter_sizes=tuple(layer.parameter_sizes for layer in layers),
        trained_sizes=tuple(layer.trained_sizes for layer in layers),
        free=_joined(_free(walked, links), count),
        forward=_joined(_forward(walked, links), count),
        backward_first=_joined(
            _backward(walked, links, holder, saved_bytes, first=True)[::-1], count, back=True
        ),
        backward=_joined(_backward(walked, links, holder, saved_bytes, first=False)[::-1], count, back=True),
    )


_Triple = tuple[int, int, int]
"""Bytes before, at most, and after."""


def _joined(found: Sequence[_Triple], count: int, *, back: bool = False) -> Pass:
    """By layer in the order of the forward pass; what is behind the last layer is the loss."""
    *rest, last = found[:count]
    for more in found[count:]:
        most = max(last[1], more[1])
        last = (more[0], most, last[2]) if back else (last[0], most, more[2])
    before, most_, after = zip(*rest, last, strict=True)
    return Pass(before, most_, after)


def _free(walked: Sequence[LayerProfile], links: Links) -> list[_Triple]:
    found: list[_Triple] = []
    ends = [*links.inputs[1:], None]
    for layer, inputs, following in zip(walked, links.inputs, ends, strict=True):
        loose = sum([links.sizes[name] for name in inputs - links.whole])
        after = 0 if following is None else sum([links.sizes[name] for name in following - links.whole])
        found.append((loose, loose + layer.free.forward_peak, after))
    return found


def _forward(walked: Sequence[LayerProfile], links: Links) -> list[_Triple]:
    saved, found = 0, list[_Triple]()
    held: set[int] = set()
    for index, layer in enumerate(walked):
        story, names = layer.first, links.names[index]
        loose = sum([links.sizes[name] for name in links.inputs[index] - links.boundary - held])
        before, most = saved + loose, saved + loose + story.forward_peak
        saved += story.kept_inside
        for storage in story.kept_ends:
            name = names[storage]
            if name not in links.boundary and name not in held:
                held.add(name)
                saved += links.sizes[name]
        found.append((before, most, saved))
    return found


def _backward(
    walked: Sequence[LayerProfile], links: Links, holder: dict[int, int], saved: int, *, first: bool
) -> list[_Triple]:
    """From the last layer to the first; as `footprint` walks, which says what is what."""
    last = walked[-1].first if first else walked[-1].later
    received = tuple(
        None if storage is None else Received(index, last.sizes[storage], is_held=True)
        for index, storage in enumerate(last.output_gradients)
    )
    held = sum(each.num_bytes for each in received if each is not None)
    gradients, found = 0, list[_Triple]()
    for index in range(len(walked) - 1, -1, -1):
        layer = walked[index]
        story = layer.first if first else layer.later
        names = links.names[index] if first else names_in(layer.later, layer.first, links.names[index])
        received = received[: len(story.outputs)]
        holds: dict[int, int] = {}
        for storage in story.kept_ends:
            holds[names[storage]] = holds.get(names[storage], 0) + 1
        other = held + sum([each.num_bytes for each in {*received} if each is not None and not each.is_held])
        before = most = saved + gradients + other
        for stretch in story.stretches(received):
            most = max(most, saved + gradients + other + stretch.peak)
            saved += stretch.saved
            gradients += stretch.gradients
            other += stretch.other
            if stretch.released is not None:
                name = names[stretch.released]
                holds[name] = holds.get(name, 0) - 1
                if holder.get(name) == index and holds[name] == 0:
                    saved -= links.sizes[name]
        received = passed_back(story, received)
        found.append((before, most, saved + gradients + other))
    return found
