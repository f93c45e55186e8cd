"""The operations of a model, counted once and known for every size of the micro-batch.

A layer runs forward and backward on the meta device for two and for three examples; every operation is noted
with its matrix products and the tensors it reads and writes. A dimension that differs between the two grows
with the examples, the others do not, so the operations of any micro-batch follow without running anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gpipe_bench.experiments.published.accelerator_steps.work import (
    Dim,
    LayerWork,
    Operation,
    Product,
    TensorSize,
    Work,
)
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline.memory.boundary import Boundary, as_tuple
from gpipe_bench.pipeline.memory.profile import LossLayer
from gpipe_bench.pipeline.signature import signature

EXAMPLES = (2, 3)
"""Sizes that are traced; one example is a case of its own, where a dimension of length 1 has no layout."""

_Traced = tuple[list[tuple[int, ...]], list[tuple[tuple[int, ...], int, bool]], bool]
"""Products, tensors (shape, bytes of an element, whether it is of floating point), element by element."""

aten = torch.ops.aten


def work_of(model: str, options: Mapping[str, Any]) -> Work:
    """The work of all layers of a model of the zoo; the loss is part of the last one."""
    return _work_of(model, tuple(sorted(options.items())))


@cache
def _work_of(name: str, options: tuple[tuple[str, Any], ...]) -> Work:
    given = dict(options)
    with torch.device("meta"):
        modules: list[nn.Module] = [*MODELS[name](**given)]
    sizes = [_chain(name, given, modules, examples) for examples in EXAMPLES]
    known: dict[tuple[int, int], LayerWork] = {}  # equal layers are one object
    layers = [
        known.setdefault((id(small), id(large)), _joined(small, large))
        for small, large in zip(*sizes, strict=True)
    ]
    *rest, last, loss = layers
    parameters = tuple(sum(p.numel() for p in module.parameters()) for module in modules)
    return Work(
        layers=(*rest, last.then(loss)),
        parameters=parameters,
        inputs=tuple(
            TensorSize(
                tuple(map(_dim, *(t.shape for t in both))), both[0].itemsize, both[0].is_floating_point()
            )
            for both in zip(*(as_tuple(_inputs(name, given, n)) for n in EXAMPLES), strict=True)
        ),
    )


def _inputs(name: str, options: dict[str, Any], examples: int) -> Any:
    return example_batch(name, examples, device="meta", **options)[0]


_Layer = tuple[list[_Traced], list[_Traced], list[tuple[tuple[int, ...], int, bool]]]
"""Operations of the forward and of the backward, and what is passed on."""


def _chain(name: str, options: dict[str, Any], modules: Sequence[nn.Module], examples: int) -> list[_Layer]:
    """Forward and backward of every layer, and of the loss, with what each passes on."""
    value, target = example_batch(name, examples, device="meta", **options)
    known: dict[object, tuple[_Layer, Any]] = {}
    found = []
    for module in (*modules, None):
        if module is None:
            module = LossLayer(loss_fn(name, **options), is_tuple=isinstance(value, tuple))
            value = (*as_tuple(value), target)
        key = (signature(module), Boundary.of(value))
        if key not in known:
            known[key] = _trace(module, value)
        layer, value = known[key]
        found.append(layer)
    return found


def _trace(module: nn.Module, value: Any) -> tuple[_Layer, Any]:
    # Storages that two inputs share stay shared: a stage sends them once.
    leaves = {id(t): t.detach().requires_grad_(t.requires_grad) for t in as_tuple(value)}
    entered: Any = tuple(leaves[id(t)] for t in as_tuple(value))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)  # so that the backward adds to it
    with _Notes() as forward:
        output = module(entered if isinstance(value, tuple) else entered[0])
    roots = [t for t in as_tuple(output) if t.requires_grad and t.grad_fn is not None]
    seeds = [torch.empty_like(t) for t in roots]
    with _Notes() as backward:
        if roots:
            torch.autograd.backward(roots, seeds)
    ends = Boundary.of(output)
    tensors = [ends.tensors[i] for i in ends.distinct]
    outputs = [(tuple(t.shape), t.dtype.itemsize, t.dtype.is_floating_point) for t in tensors]
    # What a layer passes on unchanged is one tensor to the next one, too.
    left = {id(t): t.detach().requires_grad_(t.is_floating_point()) for t in as_tuple(output)}
    following = tuple(left[id(t)] for t in as_tuple(output))
    passed: Any = following if isinstance(output, tuple) else following[0]
    return (forward.found, backward.found, outputs), passed


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation that runs under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[_Traced] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func.is_view or func.__name__.startswith(("empty", "new_empty")):
            return output
        tensors = {id(t): t for t in tree_leaves((args, kwargs, output)) if isinstance(t, Tensor)}
        self.found.append(
            (
                _products(func, args, output),
                [(tuple(t.shape), t.itemsize, t.is_floating_point()) for t in tensors.values()],
                torch.Tag.pointwise in func.tags,
            )
        )
        return output


def _products(func: Any, args: Any, output: Any) -> list[tuple[int, ...]]:
    """The matrix products of an operation: how many, rows, inner dimension, columns."""
    packet = func._overloadpacket
    if packet in _PRODUCTS:
        return _PRODUCTS[packet](args, output)
    if packet in flop_registry:
        raise ValueError(f"{func} multiplies matrices, and how it does is not known here; add it")
    return []


def _mm(args: Any, output: Any) -> list[tuple[int, ...]]:
    (rows, inner), columns = args[0].shape, args[1].shape[1]
    return [(1, rows, inner, columns)]


def _bmm(args: Any, output: Any) -> list[tuple[int, ...]]:
    (count, rows, inner), columns = args[0].shape, args[1].shape[2]
    return [(count, rows, inner, columns)]


def _convolution(args: Any, output: Any) -> list[tuple[int, ...]]:
    rows, inner, columns = _as_product(output.shape, args[1].shape, args[8])
    return [(args[8], rows, inner, columns)]


def _convolution_backward(args: Any, output: Any) -> list[tuple[int, ...]]:
    groups, mask = args[9], args[10]
    rows, inner, columns = _as_product(args[0].shape, args[2].shape, groups)
    products: list[tuple[int, ...]] = [(groups, rows, columns, inner)] if mask[0] else []
    return [*products, (groups, inner, rows, columns)] if mask[1] else products


def _as_product(result: Sequence[int], weight: Sequence[int], groups: int) -> tuple[int, int, int]:
    """A convolution as a product: examples and positions x channels and places of the window x filters."""
    return result[0] * prod(result[2:]), weight[1] * prod(weight[2:]), weight[0] // groups


_PRODUCTS: dict[Any, Callable[[Any, Any], list[tuple[int, ...]]]] = {
    aten.mm: _mm,
    aten.addmm: lambda args, output: _mm(args[1:], output),
    aten.bmm: _bmm,
    aten.baddbmm: lambda args, output: _bmm(args[1:], output),
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
}


def _joined(small: _Layer, large: _Layer) -> LayerWork:
    """One layer, from its operations at both sizes."""
    return LayerWork(
        forward=tuple(_operation(a, b) for a, b in zip(small[0], large[0], strict=True)),
        backward=tuple(_operation(a, b) for a, b in zip(small[1], large[1], strict=True)),
        outputs=tuple(_tensor(a, b) for a, b in zip(small[2], large[2], strict=True)),
    )


def _operation(small: _Traced, large: _Traced) -> Operation:
    return Operation(
        products=tuple(
            Product(*(_dim(a, b) for a, b in zip(one, other, strict=True)))
            for one, other in zip(small[0], large[0], strict=True)
        ),
        tensors=tuple(_tensor(a, b) for a, b in zip(small[1], large[1], strict=True)),
        elementwise=small[2],
    )


def _tensor(small: tuple[tuple[int, ...], int, bool], large: tuple[tuple[int, ...], int, bool]) -> TensorSize:
    shape = tuple(_dim(a, b) for a, b in zip(small[0], large[0], strict=True))
    return TensorSize(shape=shape, itemsize=small[1], is_floating=small[2])


def _dim(small: int, large: int) -> Dim:
    each = (large - small) // (EXAMPLES[1] - EXAMPLES[0])
    return Dim(small - EXAMPLES[0] * each, each)
