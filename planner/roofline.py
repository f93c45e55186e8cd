"""Seconds of layers on an accelerator that is not here: a roofline over their operations.

Each distinct layer runs once, forward and backward, on fake tensors of the micro-batch's size, with the
attention of the accelerator, and every operation is noted with its multiplications and the bytes that it
reads and writes. It takes the longest of

    multiplications / (share x peak)      bytes / (share x bandwidth)      the start of a kernel

What share of its peak a program reaches is not known before it runs. The upper end is known: what the card
reaches in single large products, as somebody measured it (`Accelerator.reached`), and BANDWIDTH of its
memory. A model's own products are of other shapes, and its kernels wait for each other: MIDDLE of that is
predicted, and the range is from all of it to MIDDLE of the middle.

What is compiled, for a TPU or by `torch.compile`, makes one kernel of the operations between two products:
it reads what others made and writes what others read.

I is what a backward takes for the gradients of the inputs alone, W the rest of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gpipe_bench.pipeline.memory.attention import attention_of
from gpipe_bench.pipeline.memory.boundary import Boundary
from gpipe_bench.pipeline.memory.profile import PRECISIONS, LossLayer, fake_copy
from gpipe_bench.pipeline.signature import signature
from gpipe_bench.planner.accelerators import UPDATE_BYTES, Accelerator, accelerator
from gpipe_bench.planner.costs import Costs, SizeCosts
from gpipe_bench.planner.model import Model
from gpipe_bench.planner.request import Request

MIDDLE = 0.8
"""Of what single kernels reach at their best, in the prediction; its square at the slow end of the range."""
BANDWIDTH = 0.92
"""Of the memory's bandwidth that long vectors are taken to reach; no source was found to rely on."""
KERNEL_S = 3.2e-6
"""From one kernel to the next where each has little to do."""

_UNMOVED = ("empty", "new_empty", "detach", "_unsafe_view", "lift_fresh")
"""Operations beside views, by how their names begin, that move no bytes."""


class Operation(NamedTuple):
    """What one operation does: multiplications and additions, and storages with the bytes of them."""

    flops: float
    is_half: bool
    reads: dict[int, float]
    writes: dict[int, float]

    @property
    def moved(self) -> float:
        return sum(self.reads.values()) + sum(self.writes.values())


class Noted(NamedTuple):
    """The operations of a layer; `inputs` are those of a backward that goes for its inputs alone."""

    forward: list[Operation]
    backward: list[Operation]
    inputs: list[Operation]


def by_roofline(
    model: Model, request: Request, sizes: Sequence[int], device: Accelerator | None = None
) -> Costs:
    """Costs of a model at these micro-batch sizes on `device`, the request's accelerator if not given.

    Raises:
        ValueError: an accelerator that is not known, or cannot multiply in the request's precision.
    """
    device = device or accelerator(request.device_type, request.precision)
    found = {}
    for size in sizes:
        profile = model.profile_of(size, request.precision, compiled=request.compiled)
        found[size] = SizeCosts(
            layers_s=_kinds(_layers(model, request, size), device, fuses=request.compiled or device.fuses),
            activation_bytes=[layer.outputs.num_bytes for layer in profile.layers[:-1]],
            gradient_bytes=[layer.output_gradient_bytes for layer in profile.layers[:-1]],
        )
    held = [[p.numel() * p.itemsize for p in layer.parameters() if p.requires_grad] for layer in model.layers]
    bandwidth = MIDDLE * BANDWIDTH * device.bytes_per_s
    update = UPDATE_BYTES[request.optimizer] / 4
    return Costs(
        sizes=found,
        update_s=[update * sum(each) / bandwidth for each in held],
        parameter_bytes=held,
        low=MIDDLE,
        high=1 / MIDDLE,
        provenance={
            "layers": f"modelled: a roofline of {device.name} at {MIDDLE * device.reached:.1%} of its peak, "
            f"{device.reached:.1%} at best; {model.attention} attention, "
            f"{'what lies between products' if request.compiled or device.fuses else 'each operation'} in "
            f"one kernel; {device.source}",
            "links": f"nominal: {request.link.name}"
            + (f", {request.between.name} between hosts" if request.between else ""),
            "memory": "modelled from profiles of the layers",
        },
        profiles=lambda size, split, tp: model.profile_of(
            size, request.precision, compiled=request.compiled, split_backward=split, tp=tp
        ),
    )


def _layers(model: Model, request: Request, size: int) -> list[Noted]:
    """Operations of each layer, the loss with the last."""
    profile = model.profile_of(size, request.precision, compiled=request.compiled)
    known: dict[object, Noted] = {}
    found = []
    loss = LossLayer.of(model.loss_fn, profile.layers[-1].outputs, model.target)
    ends = [layer.inputs for layer in profile.layers] + [profile.loss.inputs]
    for layer, inputs in zip((*model.layers, loss), ends, strict=True):
        key = (signature(layer), inputs)
        if key not in known:
            known[key] = noted(layer, inputs, request.precision, model.attention)
        found.append(known[key])
    *layers, last = found
    layers[-1] = Noted(*(a + b for a, b in zip(layers[-1], last, strict=True)))
    return layers


def noted(layer: nn.Module, inputs: Boundary, precision: str, attention: str = "cpu") -> Noted:
    """The operations of a layer on such inputs, in the precision of its activations."""
    autocast = PRECISIONS[precision]
    with FakeTensorMode(), attention_of(attention):
        copy = fake_copy(layer)
        made = [spec.empty() for spec in inputs.tensors]
        given = [
            made[first].requires_grad_(spec.requires_grad)
            for first, spec in zip(inputs.same_as, inputs.tensors, strict=True)
        ]
        context = nullcontext() if autocast is None else torch.autocast("cpu", autocast, cache_enabled=False)
        with _Notes() as forward, context:
            output = copy(inputs.build(given))
        roots = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        seeds = [torch.empty_like(t) for t in roots]
        leaves = [t for t in made if t.requires_grad]
        with _Notes() as for_inputs:
            if roots and leaves:
                torch.autograd.grad(roots, leaves, seeds, retain_graph=True, allow_unused=True)
        with _Notes() as backward:
            if roots:
                torch.autograd.backward(roots, seeds)
        return Noted(forward.found, backward.found, for_inputs.found)


class _Notes(TorchDispatchMode):
    """Notes every operation that runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[Operation]()
        self._alive: list[torch.UntypedStorage] = []  # so that no two of them have the same number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func.namespace == "prim" or func.is_view or func.__name__.startswith(_UNMOVED):
            return output
        made = self._bytes(output)
        half = [t.itemsize == 2 for t in tree_leaves(output) if isinstance(t, Tensor)]
        flops = _flops(func, args, kwargs, output)
        self.found.append(Operation(flops, half[:1] == [True], self._bytes((args, kwargs)), made))
        return output

    def _bytes(self, value: Any) -> dict[int, float]:
        """Of each storage among the arguments, its parts once."""
        tensors = {id(each): each for each in tree_leaves(value) if isinstance(each, Tensor)}
        found: dict[int, float] = {}
        for tensor in tensors.values():
            storage = tensor.untyped_storage()
            self._alive.append(storage)
            known = found.get(id(storage), 0.0)
            found[id(storage)] = float(min(known + tensor.numel() * tensor.itemsize, storage.nbytes()))
        return found


def _flops(func: Any, args: Any, kwargs: Any, output: Any) -> float:
    """Of fused attention, two products of all pairs of tokens forward and five backward, or half of them
    where no token sees a later one; of other operations, what torch counts.
    """
    packet = func._overloadpacket
    if "_scaled_dot_product" in func.__name__:
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        query, key, value = (given[name] for name in ("query", "key", "value"))
        channels = query.size(-1) + value.size(-1)
        passes = 2.5 if "backward" in func.__name__ else 1.0
        seen = 0.5 if given.get("is_causal") else 1.0
        return float(2 * query[..., 0].numel() * key.size(-2) * channels * passes * seen)
    if packet not in flop_registry:
        return 0.0
    return float(flop_registry[packet](*args, **kwargs, out_val=output))


def _kinds(layers: Sequence[Noted], device: Accelerator, *, fuses: bool) -> dict[str, list[float]]:
    """Seconds of each layer by kind."""
    known: dict[int, tuple[float, float, float]] = {}
    for each in layers:
        if id(each) not in known:
            forward, backward, inputs = (seconds(part, device, fuses=fuses) for part in each)
            known[id(each)] = forward, backward, min(inputs, backward)
    rows = [known[id(each)] for each in layers]
    ahead = [row[0] for row in rows]
    return {
        "F": ahead, "G": ahead, "R": ahead, "B": [row[1] for row in rows],
        "I": [row[2] for row in rows], "W": [row[1] - row[2] for row in rows],
    }  # fmt: skip


def seconds(operations: Sequence[Operation], device: Accelerator, *, fuses: bool = False) -> float:
    """Of operations, one after the other."""
    rates = (MIDDLE * device.reached * device.flops_per_s, MIDDLE * device.reached * device.half_flops_per_s)
    bandwidth = MIDDLE * BANDWIDTH * device.bytes_per_s
    return sum(
        max(each.flops / rates[each.is_half], each.moved / bandwidth, KERNEL_S / MIDDLE)
        for each in (fused(operations) if fuses else operations)
    )


def fused(operations: Sequence[Operation]) -> Iterable[Operation]:
    """One operation for all that follow each other without a product."""
    uses = {storage: place for place, each in enumerate(operations) for storage in each.reads}
    for has_product, run in groupby(enumerate(operations), key=lambda pair: pair[1].flops > 0):
        places, parts = zip(*run, strict=True)
        if has_product:
            yield from parts
            continue
        reads: dict[int, float] = {}
        writes: dict[int, float] = {}
        for each in parts:
            for storage, num_bytes in each.reads.items():
                if storage not in writes:
                    reads[storage] = max(reads.get(storage, 0.0), num_bytes)
            writes |= each.writes
        last = places[-1]
        # What nobody reads later is what the layer returns or keeps.
        inside = {s for each in parts for s in each.reads} & {s for s in writes if uses.get(s, 0) <= last}
        yield Operation(0.0, False, reads, {s: b for s, b in writes.items() if s not in inside})
