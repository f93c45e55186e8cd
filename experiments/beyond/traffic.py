"""Bytes that a pipeline and data parallelism send in a step, by the shapes of a model alone.

Only activations at the boundaries of a pipeline travel, and their gradients back. Data parallelism moves the
gradient of every parameter around a ring, twice, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpipe_bench.pipeline.plan.partition import partition


class Shape(NamedTuple):
    """Sizes of a model's layers that decide its traffic; bytes are those of one example in float32."""

    flops: tuple[int, ...]  # of the forward
    parameters: tuple[int, ...]
    output_bytes: tuple[int, ...]  # what the layer hands on
    output_gradient_bytes: tuple[int, ...]  # what comes back for it: nothing for integers


class Traffic(NamedTuple):
    """Bytes sent in a step: of the device that sends most, and of all devices, per example or per step."""

    pipeline_busiest: int  # per example
    pipeline_total: int  # per example
    data_parallel_each: int  # per step, whatever the batch
    data_parallel_total: int


def shape(name: str, options: Mapping[str, Any]) -> Shape:
    """The model's shape; nothing of its size is allocated. Whatever computes the attention, its operations
    are those of the written one.
    """
    from gpipe_bench.experiments.paper.predicted.sizes import FullSize

    written_out = {"attention": "explicit"} if name.startswith("transformer") else {}
    full = FullSize(name, {**options, **written_out})
    every = range(len(full.layers))
    return Shape(
        tuple(full.flops(1)),
        full.parameters,
        tuple(full.sent_bytes(layer, 1, "float32") for layer in every),
        tuple(full.returned_bytes(layer, 1, "float32") for layer in every),
    )


def traffic(found: Shape, num_stages: int, costs: Sequence[float] | None = None) -> Traffic:
    """A pipeline of `num_stages` stages of equal costs, by default of forward FLOPs, as far as cuts allow,
    and as many replicas.

    Ring all-reduce: each of K devices sends 2 (K - 1) / K of the bytes of the gradients. Raises ValueError
    for more stages than layers.
    """
    stages = partition(found.flops if costs is None else costs, num_stages)
    ends = [stage.stop - 1 for stage in stages[:-1]]
    forward = [found.output_bytes[end] for end in ends] + [0]  # the last stage sends no activations
    backward = [0] + [found.output_gradient_bytes[end] for end in ends]  # and the first no gradients
    sent = [ahead + back for ahead, back in zip(forward, backward, strict=True)]
    everyone = 2 * (num_stages - 1) * 4 * sum(found.parameters)
    return Traffic(max(sent), sum(sent), everyone // num_stages, everyone)
