"""Bytes that leave a device in one training step: a pipeline against data parallelism.

The paper's case for pipelines on slow links (section 2.3): only activations at the K - 1 boundaries travel,
and their gradients back. Data parallelism moves every gradient of every parameter around a ring, twice,
whatever the batch. Shapes are found on the meta device, layer by layer, each distinct layer once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.models import MODELS, example_batch
from gpipe_bench.pipeline.memory.boundary import Boundary, as_tuple
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.signature import signature


@dataclass(frozen=True)
class Shape:
    """What matters of a model here; bytes are those of one example, and of float32 parameters."""

    num_parameters: int
    gradient_bytes: int
    flops: tuple[int, ...]  # of the forward, per layer
    parameters: tuple[int, ...]  # per layer
    output_bytes: tuple[int, ...]  # what the layer hands on
    output_gradient_bytes: tuple[int, ...]  # what comes back for it: nothing for integers


@dataclass(frozen=True)
class Traffic:
    """Bytes sent in a step: of the device that sends most, and of all devices, per example or per step."""

    pipeline_busiest: int  # per example
    pipeline_total: int  # per example
    data_parallel_each: int  # per step, whatever the batch
    data_parallel_total: int


def shape(name: str, options: Mapping[str, Any]) -> Shape:
    """The model's shape, built without memory for its parameters."""
    return _shape(name, tuple(sorted(options.items())))


@cache
def _shape(name: str, options: tuple[tuple[str, Any], ...]) -> Shape:
    with torch.device("meta"):
        model = MODELS[name](**dict(options))
    value, _ = example_batch(name, 1, device="meta", **dict(options))
    known: dict[object, tuple[int, Any]] = {}
    flops, outputs = [], []
    for layer in model:
        key = (signature(layer), Boundary.of(value))
        if key not in known:
            with FlopCounterMode(display=False) as counter:
                value = _detached(layer(value))
            known[key] = (counter.get_total_flops(), value)
        count, value = known[key]
        flops.append(count)
        outputs.append(Boundary.of(value))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Shape(
        num_parameters=sum(parameter.numel() for parameter in trainable),
        gradient_bytes=sum(parameter.numel() * parameter.itemsize for parameter in trainable),
        flops=tuple(flops),
        parameters=tuple(sum(parameter.numel() for parameter in layer.parameters()) for layer in model),
        output_bytes=tuple(output.num_bytes for output in outputs),
        output_gradient_bytes=tuple(
            sum(output.tensors[i].num_bytes for i in output.distinct if output.tensors[i].requires_grad)
            for output in outputs
        ),
    )


def _detached(value: Any) -> Any:
    """The same without a graph. A tensor that stands twice stays one."""
    seen: dict[int, Tensor] = {}
    tensors = tuple(
        seen.setdefault(id(tensor), tensor.detach().requires_grad_(tensor.requires_grad))
        for tensor in as_tuple(value)
    )
    return tensors[0] if isinstance(value, Tensor) else tensors


def traffic(found: Shape, num_stages: int, costs: Sequence[float] | None = None) -> Traffic:
    """A pipeline of `num_stages` stages of equal costs, by default of forward FLOPs, as far as cuts allow,
    and as many replicas.

    Ring all-reduce: each of K devices sends 2 (K - 1) / K of the gradient bytes. Raises ValueError for more
    stages than layers.
    """
    stages = partition(found.flops if costs is None else costs, num_stages)
    ends = [stage.stop - 1 for stage in stages[:-1]]
    forward = [found.output_bytes[end] for end in ends] + [0]  # the last stage sends no activations
    backward = [0] + [found.output_gradient_bytes[end] for end in ends]  # and the first no gradients
    sent = [ahead + back for ahead, back in zip(forward, backward, strict=True)]
    everyone = 2 * (num_stages - 1) * found.gradient_bytes
    return Traffic(max(sent), sum(sent), everyone // num_stages, everyone)
