"""What a step would take on a device that is not here: every operation as fast as its arithmetic or its
memory allows.

Table 3's question is how long messages take beside the computation, and that ratio belongs to the paper's
hardware and to the paper's size. Operations are counted on the meta device, one layer after another, and an
operation takes the longer of its floating-point operations and its bytes at the device's published peaks. No
program reaches both peaks, so whoever uses this says which share of them is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gpipe_bench.experiments.measuring.timed_actions import TimedActions
from gpipe_bench.models import MODELS, example_batch
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.signature import signature
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.plan.schedule import Kind


@dataclass(frozen=True)
class Accelerator:
    """A device by its published peaks."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    source: str


P100 = Accelerator(
    "NVIDIA P100 (PCIe)", 9.3e12, 732e9,
    "NVIDIA's Tesla P100 datasheet, 16 GB for PCIe: 9.3 TFLOP/s in float32, 732 GB/s",
)  # fmt: skip
"""The paper's GPUs of Table 3; float32, since they have no faster matrix units."""


@dataclass(frozen=True)
class Estimate:
    """One micro-batch by layer: seconds of the forward at the device's peaks, bytes over a cut behind it."""

    forward_s: tuple[float, ...]
    output_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    num_parameters: int

    def actions(self, num_stages: int, num_microbatches: int, share_of_peak: float) -> TimedActions:
        """The actions of the best cut into stages. A recomputation takes as long as a forward, a backward
        twice as long; set-up and update are left out.
        """
        if not 0 < share_of_peak <= 1:
            raise ValueError(f"share_of_peak is {share_of_peak}; it is a share of the peak, such as 0.5")
        stages = partition(self.forward_s, num_stages)
        ends = [stage.stop - 1 for stage in stages[:-1]]
        samples: dict[tuple[int, Kind], tuple[float, ...]] = {}
        for number, stage in enumerate(stages):
            seconds = sum(self.forward_s[layer] for layer in stage) / share_of_peak
            samples |= {
                (number, Kind.F): (seconds,),
                (number, Kind.R): (seconds,),
                (number, Kind.B): (2 * seconds,),
            }
        return TimedActions(
            stages,
            num_microbatches,
            "always",
            samples,
            (),
            0.0,
            tuple(self.output_bytes[end] for end in ends),
            tuple(self.gradient_bytes[end] for end in ends),
        )


def estimate(model: str, options: Mapping[str, Any], microbatch_size: int, device: Accelerator) -> Estimate:
    """Counts one micro-batch of a model in float32. Nothing is allocated; equal layers are counted once."""
    return _estimate(model, tuple(sorted(options.items())), microbatch_size, device)


@cache
def _estimate(
    name: str, options: tuple[tuple[str, Any], ...], microbatch_size: int, device: Accelerator
) -> Estimate:
    with torch.device("meta"):
        model = MODELS[name](**dict(options))
    value, _ = example_batch(name, microbatch_size, device="meta", **dict(options))
    known: dict[object, tuple[float, Any]] = {}
    seconds, outputs = [], []
    with torch.no_grad():
        for layer in model:
            key = (signature(layer), Boundary.of(value))
            if key not in known:
                with _Stopwatch(device) as watch:
                    output = layer(value)
                known[key] = (watch.seconds, output)
            taken, value = known[key]
            seconds.append(taken)
            outputs.append(Boundary.of(value))
    return Estimate(
        tuple(seconds),
        tuple(output.num_bytes for output in outputs),
        tuple(
            sum(
                output.tensors[i].num_bytes
                for i in output.distinct
                if output.tensors[i].dtype.is_floating_point
            )
            for output in outputs
        ),
        sum(parameter.numel() for parameter in model.parameters()),
    )


class _Stopwatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what the operations under it would take."""

    def __init__(self, device: Accelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func.is_view:
            return output
        tensors = {id(t): t for t in tree_leaves((args, kwargs, output)) if isinstance(t, Tensor)}
        moved = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **kwargs, out_val=output) if count is not None else 0
        self.seconds += max(flops / self.device.flops_per_s, moved / self.device.bytes_per_s)
        return output
