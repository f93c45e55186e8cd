"""The stride control of v1, section 5: what it does to activations and to the size of the model.

The paper moved a stride from the first convolution of AmoebaNet-D (2, 256) to the last and says that
activations grew fourfold and the model did not grow. Both are counted here on models without memory, for all
that is left open: where the stride went, the size of the images, whether the auxiliary head counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpipe_bench.experiments.computed.answer import Computed
from gpipe_bench.harness.unknowns import Value, load_unknowns, steps_from_middle
from gpipe_bench.harness.verdict import Part, Spread
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.profile import Profiler
from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes

TABLE = "control-stride"
NUM_LAYERS, NUM_FILTERS = 6, 256  # v1 counts the normal cells of one stack: (2, 256)
SETTINGS = ("moved_stride", "image_size", "auxiliary_head")
BATCH_SIZE = 2
"""All that is kept is proportional to it; batch normalization treats a single example in another way."""


@dataclass(frozen=True)
class Size:
    """Bytes kept for the backward passes of one example, all layers, and trained parameters."""

    activation_bytes: float
    num_parameters: int


def size(image_size: int, auxiliary_head: bool, moved_stride: str | None) -> Size:
    """Of the model, in float32 and without re-materialization."""
    options: dict[str, Any] = {
        "num_layers": NUM_LAYERS, "num_filters": NUM_FILTERS, "num_classes": 1001, "image_size": image_size,
        "aux_head": auxiliary_head, "moved_stride": moved_stride,
    }  # fmt: skip
    with torch.device("meta"):
        model = MODELS["amoebanet-d"](**options)
    inputs, target = example_batch("amoebanet-d", BATCH_SIZE, device="meta", **options)
    layers, loss = Profiler().model(
        model, loss_fn("amoebanet-d", **options), Boundary.of(inputs), Boundary.of(target)
    )
    found = stage_bytes(layers, loss)
    return Size(
        (found.saved_bytes + found.input_bytes) / BATCH_SIZE, sum(layer.num_parameters for layer in layers)
    )


def stride() -> list[Computed]:
    """Activations and parameters of the moved stride over the original's."""
    unknowns = load_unknowns().of(TABLE)
    allowed = {setting: unknowns[setting].allowed for setting in SETTINGS}
    ratios: dict[tuple[Value, ...], tuple[float, float]] = {}
    for image_size, head in itertools.product(allowed["image_size"], allowed["auxiliary_head"]):
        counted = head == "counted in"
        original = size(int(image_size), counted, None)
        for moved in allowed["moved_stride"]:
            found = size(int(image_size), counted, str(moved))
            ratios[moved, image_size, head] = (
                found.activation_bytes / original.activation_bytes,
                found.num_parameters / original.num_parameters,
            )
    rows = (
        ("activation memory over the original's", "kept for the backward pass of all layers"),
        ("parameters over the original's", "trained parameters"),
    )
    return [
        _answer(row, what, allowed, {point: pair[index] for point, pair in ratios.items()})
        for index, (row, what) in enumerate(rows)
    ]


def _answer(
    row: str,
    what: str,
    allowed: Mapping[str, tuple[Value, ...]],
    ratios: Mapping[tuple[Value, ...], float],
) -> Computed:
    """The range over all combinations, and of each setting alone with the others in their middle."""
    middle = tuple(values[steps_from_middle(values).index(0)] for values in allowed.values())
    parts = []
    for place, (setting, values) in enumerate(allowed.items()):
        alone = [ratios[*middle[:place], value, *middle[place + 1 :]] for value in values]
        parts.append(Part(what=setting, low=min(alone), high=max(alone)))
    return Computed(
        row=row,
        column="moved stride",
        value=ratios[middle],
        unit="ratio",
        what=f"{what}; the number is that of {', '.join(map(str, middle))}",
        spread=Spread(
            low=min(ratios.values()),
            high=max(ratios.values()),
            parts=tuple(parts),
            combinations=len(ratios),
        ),
    )
