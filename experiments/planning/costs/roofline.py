"""Seconds of layers on an accelerator that is not here: a roofline over their operations.

Each distinct layer runs once, forward and backward, on fake tensors of the micro-batch's size, and every
operation is noted with its multiplications and the bytes that it reads and writes. It takes the longest of

    multiplications / (share x peak)      bytes / (share x bandwidth)      the start of a kernel

What share of its peak a program reaches is not known before it runs: SHARES says from where to where, the
middle is what is predicted, and the ends are the range. Of a backward, what has the shape of a parameter is W
and the rest is I.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gpipe_bench.experiments.planning.accelerators import accelerator
from gpipe_bench.experiments.planning.costs.costs import Costs, SizeCosts
from gpipe_bench.experiments.planning.models import Model
from gpipe_bench.experiments.planning.request import Request
from gpipe_bench.experiments.published.accelerator_steps.accelerators import Accelerator
from gpipe_bench.experiments.table1.model_costs import PRECISIONS
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.profile import LossLayer, fake_copy
from gpipe_bench.pipeline.signature import signature

SHARES = {"low": (0.35, 0.6, 8e-6), "middle": (0.5, 0.75, 4e-6), "high": (0.7, 0.9, 2.5e-6)}
"""Of the peak and of the bandwidth, and seconds from one kernel to the next where each has little to do: what
kernels of large products and long vectors are reported to reach."""
_PASSES = {"sgd": 3, "rmsprop": 9, "adam": 11}
"""How often an optimizer that takes one tensor at a time reads or writes as many bytes as the parameters."""

_Ops = list[tuple[float, float, bool]]
"""Of each operation: multiplications over the peak, bytes over the bandwidth, whether it belongs to W."""


def by_roofline(model: Model, request: Request, sizes: Sequence[int]) -> Costs:
    """Costs of a model at these micro-batch sizes on the request's accelerator.

    Raises:
        ValueError: an accelerator that is not known.
    """
    device = accelerator(request.device_type)
    found, spread = {}, {"low": 0.0, "middle": 0.0, "high": 0.0}
    for size in sizes:
        layers, seconds = _layers(model, request, size), {}
        for share in SHARES:
            seconds[share] = _kinds(layers, device, share)
            spread[share] += sum(map(sum, (seconds[share]["F"], seconds[share]["B"])))
        profile = model.profile_of(size, request.precision, compiled=request.compiled)
        found[size] = SizeCosts(
            layers_s=seconds["middle"],
            activation_bytes=[layer.outputs.num_bytes for layer in profile.layers[:-1]],
            gradient_bytes=[layer.output_gradient_bytes for layer in profile.layers[:-1]],
        )
    held = [[p.numel() * p.itemsize for p in layer.parameters() if p.requires_grad] for layer in model.layers]
    passes, bandwidth = _PASSES[request.optimizer], device.bytes_per_s * SHARES["middle"][1]
    return Costs(
        sizes=found,
        update_s=[passes * sum(each) / bandwidth for each in held],
        parameter_bytes=held,
        low=spread["high"] / spread["middle"],
        high=spread["low"] / spread["middle"],
        provenance={
            "layers": f"modelled: a roofline of {device.name} at {SHARES['low'][0]:.0%} to "
            f"{SHARES['high'][0]:.0%} of its peak, predicted at {SHARES['middle'][0]:.0%}; {device.source}",
            "links": f"nominal: {request.link.name}"
            + (f", {request.between.name} between hosts" if request.between else ""),
            "memory": "modelled from profiles of the layers",
        },
        profiles=lambda size, split: model.profile_of(
            size, request.precision, compiled=request.compiled, split_backward=split
        ),
    )


def _layers(model: Model, request: Request, size: int) -> list[tuple[_Ops, _Ops]]:
    """Operations of each layer's forward and backward, the loss with the last."""
    profile = model.profile_of(size, request.precision, compiled=request.compiled)
    known: dict[object, tuple[_Ops, _Ops]] = {}
    found = []
    loss = LossLayer.of(model.loss_fn, profile.layers[-1].outputs, model.target)
    ends = [layer.inputs for layer in profile.layers] + [profile.loss.inputs]
    for layer, inputs in zip((*model.layers, loss), ends, strict=True):
        key = (signature(layer), inputs)
        if key not in known:
            known[key] = _noted(layer, inputs, request)
        found.append(known[key])
    *layers, last = found
    layers[-1] = (layers[-1][0] + last[0], layers[-1][1] + last[1])
    return layers


def _noted(layer: nn.Module, inputs: Boundary, request: Request) -> tuple[_Ops, _Ops]:
    precision = PRECISIONS[request.precision]
    with FakeTensorMode():
        copy = fake_copy(layer)
        made = [spec.empty() for spec in inputs.tensors]
        given = [
            made[first].requires_grad_(spec.requires_grad)
            for first, spec in zip(inputs.same_as, inputs.tensors, strict=True)
        ]
        shapes = {tuple(p.shape) for p in copy.parameters()}
        shapes |= {shape[::-1] for shape in shapes}
        context = (
            nullcontext() if precision is None else torch.autocast("cpu", precision, cache_enabled=False)
        )
        with _Notes(set()) as forward, context:
            output = copy(inputs.build(given))
        roots = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        seeds = [torch.empty_like(t) for t in roots]
        with _Notes(shapes) as backward:
            if roots:
                torch.autograd.backward(roots, seeds)
    return forward.found, backward.found


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation that runs under it."""

    def __init__(self, weights: set[tuple[int, ...]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights, self.found = weights, list[tuple[float, float, bool]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func.is_view or func.__name__.startswith(("empty", "new_empty", "detach")):
            return output
        packet, flops = func._overloadpacket, 0.0
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=output))
        tensors = {id(t): t for t in tree_leaves((args, kwargs, output)) if isinstance(t, Tensor)}
        moved = float(sum(t.numel() * t.itemsize for t in tensors.values()))
        made = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        is_half = bool(made) and made[0].itemsize == 2
        of_weights = any(tuple(t.shape) in self.weights for t in made)
        self.found.append((-flops if is_half else flops, moved, of_weights))
        return output


def _kinds(layers: Sequence[tuple[_Ops, _Ops]], device: Accelerator, share: str) -> dict[str, list[float]]:
    """Seconds of each layer by kind."""

    arithmetic, memory, kernel_s = SHARES[share]

    def seconds(operations: _Ops) -> float:
        total = 0.0
        for flops, moved, _ in operations:
            rate = device.half_flops_per_s if flops < 0 else device.flops_per_s
            total += max(
                abs(flops) / (rate * arithmetic),
                moved / (device.bytes_per_s * memory),
                kernel_s,
            )
        return total

    known: dict[int, tuple[float, float, float]] = {}
    for forward, backward in layers:
        if id(forward) not in known:
            weights = [each for each in backward if each[2]]
            inputs = [each for each in backward if not each[2]]
            known[id(forward)] = seconds(forward), seconds(inputs), seconds(weights)
    rows = [known[id(forward)] for forward, _ in layers]
    ahead = [row[0] for row in rows]
    return {
        "F": ahead, "G": ahead, "R": ahead, "B": [row[1] + row[2] for row in rows],
        "I": [row[1] for row in rows], "W": [row[2] for row in rows],
    }  # fmt: skip
