"""Seconds of layers on an accelerator that is not here: a roofline over their operations.

Each distinct layer runs once, forward and backward, on fake tensors, and every operation is noted with its
multiplications and the bytes that it reads and writes. It takes the longest of

    multiplications / (share x peak)      bytes / (share x bandwidth)      the start of a kernel

What share of its peak a program reaches is not known before it runs. The upper end is known: what the card
reaches in single large products, as somebody measured it (`Accelerator.reached`), and BANDWIDTH of its
memory. A model's own products are of other shapes, and its kernels wait for each other: MIDDLE of that is
predicted, and the range is from all of it to MIDDLE of the middle.

What is compiled, for a TPU or by `torch.compile`, makes one kernel of the operations between two products. I
is what a backward takes for the gradients of the inputs alone, W the rest of it. Predictions for the paper's
accelerators scale the same operations to other sizes, so each keeps the shapes of tensors and products, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import count, groupby
from math import prod
from operator import add, sub
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gpipe_bench.pipeline.memory.profile import LossLayer, attention_of, fake_copy, passed_on
from gpipe_bench.pipeline.memory.trace import Boundary
from gpipe_bench.pipeline.stage.compiled import signature

from .accelerators import UPDATE_BYTES, Accelerator, accelerator
from .costs import Costs, SizeCosts, inside
from .model import HALF, Checkpointed, Model
from .request import Request

MIDDLE = 0.8
"""Share of a single kernel's best rate that the prediction uses; the range's slow end uses its square."""
BANDWIDTH = 0.92
"""Share of the memory bandwidth that long vectors reach: an assumption, no reliable source was found."""
KERNEL_S = 3.2e-6
"""Time from one kernel to the next where each kernel has little to do."""

_aten: Any = torch.ops.aten
_NUMBERS = count()
_ROUNDS = {"all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
"""How often a collective sends its whole tensor around the ring."""
_UNMOVED = ("empty", "new_empty", "detach", "_unsafe_view", "lift_fresh")
"""Operations beside views, by how their names begin, that move no bytes."""


Copy = Callable[[nn.Module], nn.Module]
"""A layer of fake tensors like another one, or what one rank has of it."""


class Operation(NamedTuple):
    """The work of one operation.

    Args:
        flops: multiplications and additions
        is_half: whether it makes a tensor of 16 bits
        reads, writes: storages with the bytes of them
        products: its matrix products, where known: how many, rows, inner dimension, columns
        tensors: shape, bytes of an element, whether of floating point, of each that it reads or makes
        is_elementwise: whether it works element by element
        sent: bytes of a collective's whole tensor, which goes once round
    """

    flops: float
    is_half: bool
    reads: dict[int, float]
    writes: dict[int, float]
    products: tuple[tuple[int, int, int, int], ...] = ()
    tensors: tuple[tuple[tuple[int, ...], int, bool], ...] = ()
    is_elementwise: bool = False
    sent: float = 0.0

    @property
    def moved(self) -> float:
        return sum(self.reads.values()) + sum(self.writes.values())


class Noted(NamedTuple):
    """The operations of a layer, also of a backward for its inputs alone, and what it passes on."""

    forward: list[Operation]
    backward: list[Operation]
    inputs: list[Operation]
    outputs: Boundary


def by_roofline(
    model: Model, request: Request, sizes: Sequence[int], device: Accelerator | None = None
) -> Costs:
    """Costs of a model at these micro-batch sizes on `device`, the request's accelerator if not given.
    ValueError for an accelerator that is not known, or cannot multiply in the request's precision.
    """
    device = device or accelerator(request.device_type, request.precision)
    fuses = request.compiled or device.fuses

    def variant(size: int, tp: int, sharded: bool) -> SizeCosts | None:
        return one(size, tp, sharded) if model.is_divisible(tp) else None

    @cache
    def one(size: int, tp: int, sharded: bool) -> SizeCosts:
        read = HALF.get(request.precision) if sharded else None
        inputs, target = model.of_microbatch(size, read)
        precision = "float32" if read else request.precision
        with model.divided_over(tp, read) as divided:
            copied = divided or partial(fake_copy, number_format=read)

            def of(remat: str, known: dict[object, Noted]) -> list[Noted]:
                return layers_noted(
                    model.recomputing(remat), model.loss_fn, inputs, target, precision, model.attention,
                    copied=copied, known=known,
                )  # fmt: skip

            if tp > 1 and not model.by_megatron:
                of("never", {})  # DTensor multiplies whole tensors once, for their shapes: no rank's work
            known = dict[object, Noted]()
            plain, selective = of("never", known), of("selective", known)
        layers_s = _kinds(plain, device, fuses=fuses)
        again_s = [
            max(0.0, seconds(a.backward, device, fuses=fuses) - seconds(b.backward, device, fuses=fuses))
            for a, b in zip(selective, plain, strict=True)
        ]
        for kind in ("B", "I"):
            layers_s[inside(kind, "selective")] = list(map(add, layers_s[kind], again_s))
        passed_bytes = [each.outputs.num_bytes for each in plain[:-1]]
        rings: Any = ()
        if tp > 1 and model.by_megatron:  # a layer sums twice each way, mixed precision in 16 bits
            share = 1.0 if request.precision not in HALF or read else 0.5
            rings = [([share * each] * 4, [share * each] * 4) for each in (*passed_bytes, 0.0)]
        elif tp > 1:
            ways = ((each.forward, each.backward) for each in plain)
            rings = [tuple([step.sent for step in way if step.sent] for way in both) for both in ways]
        return SizeCosts(
            layers_s=layers_s,
            activation_bytes=passed_bytes,
            gradient_bytes=[_gradient_bytes(each.outputs) for each in plain[:-1]],
            ring_bytes=rings,
        ).with_blocks(model.blocks)

    found = {size: one(size, 1, False) for size in sizes}
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
        profiles=partial(model.profile_of, precision=request.precision),
        variants=variant,
    )


def layers_noted(
    layers: Iterable[nn.Module],
    loss_fn: Callable[..., Tensor],
    inputs: Boundary,
    target: Boundary,
    precision: str = "float32",
    attention: str = "cpu",
    *,
    later: bool = False,
    copied: Copy = fake_copy,
    known: dict[object, Noted] | None = None,
) -> list[Noted]:
    """Operations of each layer of a model, those of the loss with the last; layers that are alike once.

    Args:
        layers, loss_fn: on any device; nothing of their size is allocated
        inputs, target: of one micro-batch
        precision: of the activations
        attention: of the device, as `pipeline.memory.profile` has it
        later, copied: as `noted` says
        known: what was noted of other layers of the same model, which is added to
    """
    known = {} if known is None else known
    found = []
    for layer in (*passed_on(list(layers)), None):
        if layer is None:
            layer, inputs = LossLayer(loss_fn, inputs, target), inputs.join(target)
        key = (signature(layer), inputs)
        if key not in known:
            known[key] = noted(layer, inputs, precision, attention, later=later, copied=copied)
        found.append(known[key])
        inputs = known[key].outputs
    *rest, last, loss = found
    both = last._replace(
        forward=last.forward + loss.forward,
        backward=last.backward + loss.backward,
        inputs=last.inputs + loss.inputs,
    )
    return [*rest, both]


def noted(
    layer: nn.Module,
    inputs: Boundary,
    precision: str,
    attention: str = "cpu",
    *,
    later: bool = False,
    copied: Copy = fake_copy,
) -> Noted:
    """The operations of a layer on such inputs, in the precision of its activations.

    `later` is a micro-batch that adds to earlier gradients, as in the paper's predictions: what the layer
    hands on untouched has no gradient, the backward for inputs alone is left out, and `_unsafe_view` is a
    copy.
    """
    autocast = HALF.get(precision)
    with FakeTensorMode(), attention_of(attention):
        copy = copied(layer)
        for parameter in copy.parameters() if later else ():
            parameter.grad = torch.zeros_like(parameter)
        made = [spec.empty() for spec in inputs.tensors]
        given = [
            made[first].requires_grad_(spec.requires_grad)
            for first, spec in zip(inputs.same_as, inputs.tensors, strict=True)
        ]
        context = nullcontext() if autocast is None else torch.autocast("cpu", autocast, cache_enabled=False)
        unmoved = _UNMOVED[:2] if later else _UNMOVED
        with _Notes(unmoved) as forward, context:
            output = copy(inputs.build(given))
        roots = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        roots = [t for t in roots if not later or t.grad_fn is not None]
        seeds = [torch.empty_like(t) for t in roots]
        leaves = [t for t in made if t.requires_grad]
        with _Notes(unmoved) as for_inputs:
            if roots and leaves and not later and not isinstance(copy, Checkpointed):
                torch.autograd.grad(roots, leaves, seeds, retain_graph=True, allow_unused=True)
        with _Notes(unmoved) as backward:
            if roots:
                torch.autograd.backward(roots, seeds)
        return Noted(forward.found, backward.found, for_inputs.found, Boundary.of(output))


class _Notes(TorchDispatchMode):
    """Notes every operation that runs under it, but those whose names begin like `unmoved`."""

    def __init__(self, unmoved: tuple[str, ...]) -> None:
        super().__init__()
        self.found = list[Operation]()
        self._unmoved = unmoved
        # Every storage with a number that no other one gets, and itself: a freed one's id would come again.
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # which makes operations on what this rank has of it
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func.namespace == "prim" or func.is_view or func.__name__.startswith(self._unmoved):
            return output
        if func.namespace == "_c10d_functional":
            whole = max(t.nbytes for t in (*_tensors(args), *_tensors(output)))
            rounds = _ROUNDS.get(func.__name__.partition(".")[0], 0)
            self.found += [Operation(0.0, False, {}, {}, sent=float(whole))] * rounds
            return output
        given, made = _tensors((args, kwargs)), _tensors(output)
        flops, products = _flops(func, args, kwargs, output), _products(func, args, output)
        every = {id(t): t for t in (*given, *made)}.values()
        tensors = tuple((tuple(t.shape), t.itemsize, t.is_floating_point()) for t in every)
        is_half, alone = any(t.itemsize == 2 for t in made[:1]), torch.Tag.pointwise in func.tags
        reads, writes = self._bytes(given), self._bytes(made)
        self.found.append(Operation(flops, is_half, reads, writes, products, tensors, alone))
        return output

    def _bytes(self, tensors: Iterable[Tensor]) -> dict[int, float]:
        """Returns the bytes that the tensors use of each storage, at most the storage's size."""
        found: dict[int, float] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            number, _ = self._storages.setdefault(id(storage), (next(_NUMBERS), storage))
            known = found.get(number, 0.0)
            found[number] = float(min(known + tensor.numel() * tensor.itemsize, storage.nbytes()))
        return found


def _tensors(value: Any) -> list[Tensor]:
    """Returns the distinct tensors among arguments or results."""
    return list({id(each): each for each in tree_leaves(value) if isinstance(each, Tensor)}.values())


def _flops(func: Any, args: Any, kwargs: Any, output: Any) -> float:
    """As torch counts; fused attention has two products of all pairs ahead, five back; half if causal."""
    packet = func._overloadpacket
    if "_scaled_dot_product" in func.__name__:
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
        query, key, value = (given[name] for name in ("query", "key", "value"))
        channels = query.size(-1) + value.size(-1)
        passes = 2.5 if "backward" in func.__name__ else 1.0
        seen = 0.5 if given.get("is_causal") else 1.0
        return float(2 * query[..., 0].numel() * key.size(-2) * channels * passes * seen)
    return float(flop_registry[packet](*args, **kwargs, out_val=output)) if packet in flop_registry else 0.0


def _products(func: Any, args: Any, output: Any) -> tuple[tuple[int, int, int, int], ...]:
    """The matrix products of an operation, where they are known."""
    match func._overloadpacket:
        case _aten.mm | _aten.addmm:
            ours, theirs = args[-2:]
            return ((1, *ours.shape, theirs.shape[1]),)
        case _aten.bmm | _aten.baddbmm:
            ours, theirs = args[-2:]
            return ((*ours.shape, theirs.shape[2]),)
        case _aten.convolution:
            groups = args[8]
            return ((groups, *_as_product(output.shape, args[1].shape, groups)),)
        case _aten.convolution_backward:
            groups, (for_inputs, for_weights, _) = args[9:]
            rows, inner, columns = _as_product(args[0].shape, args[2].shape, groups)
            of_inputs, of_weights = (groups, rows, columns, inner), (groups, inner, rows, columns)
            return (*[of_inputs] * for_inputs, *[of_weights] * for_weights)
    return ()


def _gradient_bytes(outputs: Boundary) -> int:
    """Bytes of the gradients that come back for a layer's outputs."""
    tensors = (outputs.tensors[place] for place in outputs.distinct)
    return sum(tensor.num_bytes for tensor in tensors if tensor.requires_grad)


def _as_product(result: Sequence[int], weight: Sequence[int], groups: int) -> tuple[int, int, int]:
    """A convolution as a product: examples and positions x channels and places of the window x filters."""
    return result[0] * prod(result[2:]), weight[1] * prod(weight[2:]), weight[0] // groups


def _kinds(layers: Sequence[Noted], device: Accelerator, *, fuses: bool) -> dict[str, list[float]]:
    """Seconds of each layer by kind."""
    once = {id(each): each[:3] for each in layers}
    distinct = {key: [seconds(part, device, fuses=fuses) for part in parts] for key, parts in once.items()}
    ahead, back, inputs = (list(row) for row in zip(*(distinct[id(each)] for each in layers), strict=True))
    inputs = list(map(min, inputs, back))
    weights = list(map(sub, back, inputs))
    return {"F": ahead, "G": ahead, "R": ahead, "B": back, "I": inputs, "W": weights}


def seconds(operations: Sequence[Operation], device: Accelerator, *, fuses: bool = False) -> float:
    """Predicts the seconds of operations that run one after the other."""
    rates = (MIDDLE * device.reached * device.flops_per_s, MIDDLE * device.reached * device.half_flops_per_s)
    bandwidth = MIDDLE * BANDWIDTH * device.bytes_per_s
    operations = [each for each in operations if not each.sent]
    return sum(
        max(each.flops / rates[each.is_half], each.moved / bandwidth, KERNEL_S / MIDDLE)
        for each in (fused(operations) if fuses else operations)
    )


def fused(operations: Sequence[Operation]) -> Iterable[Operation]:
    """Merges operations that follow each other without a matrix product into one."""
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
