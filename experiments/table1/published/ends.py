"""What stands at the ends of a layer that was traced once and is used elsewhere in the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpipe_bench.pipeline.memory.boundary import Boundary, TensorSpec
from gpipe_bench.pipeline.memory.sizes.labels import Label, Relabel
from gpipe_bench.pipeline.memory.story import LayerProfile, Story


def halved(boundary: Boundary, width_prime: int, side_prime: int) -> Boundary:
    """What a cell of the next stack returns: half the side, twice the channels, each told by its prime."""
    halve = Relabel((Label(width_prime, 1, 2), Label(side_prime, 2, 1)))
    return halve.boundary(boundary)


def joined(boundary: Boundary, head: Boundary) -> Boundary:
    logits = Boundary(head.tensors[-1:], (0,), False)
    return boundary.join(logits)


def carrier(spec: TensorSpec) -> Callable[[LayerProfile], LayerProfile]:
    """Makes a layer hand a further tensor on untouched, as cells do with the auxiliary logits."""
    carried = Boundary((spec,), (0,), False)

    def story(given: Story, *, with_graph: bool) -> Story:
        number = len(given.sizes)
        shape = (*spec.shape, spec.dtype.itemsize)
        return replace(
            given,
            sizes=(*given.sizes, spec.num_bytes, spec.num_bytes),
            shapes=(*given.shapes, shape, shape) if given.shapes else (),
            inputs=(*given.inputs, number),
            outputs=(*given.outputs, number),
            output_gradients=(*given.output_gradients, number + 1 if with_graph else None),
            input_gradients=(*given.input_gradients, number + 1 if with_graph else None),
        )

    def carry(profile: LayerProfile) -> LayerProfile:
        return replace(
            profile,
            inputs=profile.inputs.join(carried),
            outputs=profile.outputs.join(carried),
            free=story(profile.free, with_graph=False),
            first=story(profile.first, with_graph=True),
            later=story(profile.later, with_graph=True),
        )

    return carry
