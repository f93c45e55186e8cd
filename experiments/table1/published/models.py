"""The models of Table 1, profiled under some settings of what the paper does not state."""

from __future__ import annotations

from gpipe_bench.experiments.paper_profiles import (
    Reading,
    amoebanet,
    transformer,
)
from gpipe_bench.experiments.table1.published.settings import Combination
from gpipe_bench.pipeline.memory.profile import ModelProfile

PLAIN: Combination = {
    "activation_format": "float32", "kept_by": "every operation", "tensor_layout": "dense",
}  # fmt: skip
"""Profiles of which only parameters or the number of layers are asked."""


def model_of(
    half: str, num_layers: int, num_filters: int, microbatch_size: int, settings: Combination
) -> ModelProfile:
    """The profiles of a model under some settings, without the gradients of parameters."""
    reading = Reading(
        compiled=settings["kept_by"] == "a fusing compiler",
        number_format=str(settings["activation_format"]),
        autocast=False,
        with_shapes=True,
    )
    pads = settings["tensor_layout"] != "dense"
    if half == "transformer":
        return transformer(reading, num_layers, microbatch_size, pads=pads)
    return amoebanet(
        reading, num_layers, num_filters, microbatch_size, int(settings["num_classes"]),
        auxiliary_head=bool(settings["auxiliary_head"]), pads=pads,
    )  # fmt: skip
