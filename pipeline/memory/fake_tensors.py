"""Torch's fake tensors, sooner: what an operation returns is known from the last time it was asked.

Torch finds out by rules that are written in Python for the most part: a tenth of a millisecond for an
operation that it has seen before, several for a batch normalization that it has not. A layer is hundreds of
operations, nearly all of them repeated, and what comes out depends on the arguments alone: on the shapes,
strides, offsets, dtypes and devices of tensors. So torch is asked once, and its answer is given again. One
that is not plainly new storages, or the first argument itself, is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import itemgetter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.nn import functional as F

from gpipe_bench.pipeline.memory.tracker import tensors_in

_NORMALIZATION_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_MASK = 9  # its argument that says which gradients are asked for
_DEVICE_OF = torch.ops.prim.device.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # a view of a tensor that nobody else will see
_PLAIN = (
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class _New(NamedTuple):
    """A tensor with a storage of its own, no larger than it must be."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Answer(NamedTuple):
    """`collect` makes the result of its tensors; None where the result is the first argument."""

    collect: Callable[[list[Any]], Any] | None
    results: tuple[_New | None, ...]


class _UnknownError(Exception):
    """The arguments do not say all: constants, sparse tensors, what is no tensor and no plain value."""


_answers: dict[Any, _Answer] = {}


class QuickFakeTensors(FakeTensorMode):
    """Fake tensors as torch's, sooner."""

    def __init__(self) -> None:
        super().__init__()
        self.cache_enabled = False  # torch's own memory of results is slow to fill and would seldom be asked

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under this mode, so torch need not guard each operation against it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].device

        def ask() -> Any:
            result: Any = FakeTensorMode.__torch_dispatch__(self, func, types, args, kwargs)
            if func is _NORMALIZATION_BACKWARD and not args[_MASK][0]:
                # One whose input needs no gradient makes none; torch's rule for it makes one.
                return (None, *result[1:])
            return result

        if not _is_torchs(func):
            return ask()
        if _is_view(func):
            return self._view(func, args, kwargs, ask)
        try:
            key = _key(func, args, kwargs)
        except _UnknownError:
            return ask()
        if (answer := _answers.get(key)) is not None:
            return self._given(answer, args)
        storages = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = ask()
        if (answer := _answer(func, args, storages, result)) is not None:
            _answers[key] = answer
        return result

    def _view(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], ask: Callable[[], Any]) -> Any:
        """Views need no rules: their kernels move no data and are the same on every device."""
        base = args[0]
        if type(base) is not FakeTensor or base.constant is not None or base.layout is not torch.strided:
            return ask()
        with in_kernel_invocation_manager(self):
            result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            return FakeTensor(self, result, base.fake_device)
        return type(result)(FakeTensor(self, each, base.fake_device) for each in result)

    def _given(self, answer: _Answer, args: Sequence[Any]) -> Any:
        if answer.collect is None:
            return args[0]
        made: list[Tensor | None] = []
        for each in answer.results:
            if each is None:
                made.append(None)
                continue
            with torch._C._DisableTorchDispatch():
                meta = torch.empty_strided(each.shape, each.strides, dtype=each.dtype, device="meta")
            made.append(FakeTensor(self, meta, each.device))
        return answer.collect(made)


@cache
def _is_torchs(func: Any) -> bool:
    """Rules that others wrote for operations of their own may depend on anything."""
    return isinstance(func, torch._ops.OpOverload) and func.namespace in ("aten", "prims")


@cache
def _is_view(func: Any) -> bool:
    """Whether all results are views; an operation made of others (`to`) may do this or that."""
    if not func.is_view:
        return func is _UNSAFE_VIEW
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    named = [(name, _kind(value)) for name, value in kwargs.items()]
    return (func, torch.get_default_dtype(), *map(_kind, args), *named)


def _kind(value: Any) -> Any:
    if type(value) is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
            raise _UnknownError
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if type(value) is list or type(value) is tuple:
        return (type(value), *map(_kind, value))
    if isinstance(value, _PLAIN):
        return type(value), value
    raise _UnknownError


def _answer(func: Any, args: Sequence[Any], storages: set[int], result: Any) -> _Answer | None:
    """The answer that a result is, None if it is none to keep; `storages` are the arguments'."""
    if torch.Tag.inplace_view in func.tags:
        return None
    if args and result is args[0]:
        return _Answer(None, ())
    if not isinstance(result, Tensor | list | tuple):
        return None
    found: list[_New | None] = []
    for each in [result] if isinstance(result, Tensor) else result:
        if each is None:
            found.append(None)
            continue
        if type(each) is not FakeTensor or each.constant is not None or each.layout is not torch.strided:
            return None
        storage, shape, strides = each.untyped_storage(), tuple(each.shape), each.stride()
        last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        least_bytes = (last + 1) * each.itemsize if each.numel() else 0
        if each.dtype.is_complex or each.is_neg() or each.storage_offset() or storage._cdata in storages:
            return None
        if storage.nbytes() != least_bytes:
            return None
        storages.add(storage._cdata)
        found.append(_New(shape, strides, each.dtype, each.fake_device))
    collect: Callable[[list[Any]], Any] = itemgetter(0)
    if not isinstance(result, Tensor):  # a tuple may have names, too
        collect = list if isinstance(result, list) else tuple
    return _Answer(collect, tuple(found))


# The attention of an accelerator, for layers that run on fake tensors of the CPU. Which kernel
# `scaled_dot_product_attention` takes decides what a layer keeps and computes, and a CPU takes others than
# a GPU: with dropout it makes all weights, where a GPU keeps none. So the operations that torch would take
# on the device that is asked about are called by their names, and fake tensors follow torch's own rules for
# them. Dropout is called the same way: a GPU keeps a byte for each element, a CPU what it multiplied by.
#
#     flash       GPUs since Ampere: in 16 bits and without a mask; otherwise as efficient
#     efficient   older GPUs, and float32: where keys have as many heads as queries; otherwise as math
#     math        whatever has no fused kernel: the weights of all pairs of tokens are made, and kept
#     cpu         whatever torch takes on this CPU

ATTENTIONS = ("cpu", "math", "efficient", "flash")
_MOST_CHANNELS = 256
"""Of a head in the flash kernel."""


@contextmanager
def attention_of(kind: str) -> Iterator[None]:
    """Layers that run inside take this attention, one of ATTENTIONS, if they call torch's by its module."""
    if kind not in ATTENTIONS:
        raise ValueError(f"attention is {kind!r}; choose one of {', '.join(ATTENTIONS)}")
    if kind == "cpu":
        yield
    else:
        attention = patch.object(F, "scaled_dot_product_attention", partial(_attend, kind))
        with attention, patch.object(F, "dropout", partial(_drop, F.dropout)):
            yield


def _drop(
    otherwise: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if inplace or not training:
        return otherwise(input, p, training, inplace)  # type: ignore[no-any-return]
    return torch.native_dropout(input, p, training)[0]


def _attend(
    kind: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if torch.is_autocast_enabled("cpu"):  # which knows the function that is replaced, not what replaces it
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    aten: Any = torch.ops.aten
    is_fused = kind != "math" and query.dim() == 4 and query.dtype != torch.float64
    is_small = query.itemsize == 2 and max(query.size(-1), value.size(-1)) <= _MOST_CHANNELS
    output: Tensor
    if is_fused and kind == "flash" and is_small and attn_mask is None:
        output, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    elif is_fused and query.size(1) == key.size(1):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.size(2))
        output, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )
    else:
        output = _by_pairs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return output


def _by_pairs(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """The steps of torch's operation, with a GPU's dropout, and in 16 bits where layers are of 16 bits."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.size(-3) // each.size(-3), -3) for each in (key, value))
    factor = math.sqrt(1 / math.sqrt(query.size(-1)) if scale is None else scale)
    scores = (query * factor) @ (key.transpose(-2, -1) * factor)
    if is_causal:
        attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(~attn_mask, -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    return (torch.native_dropout(weights, dropout_p, True)[0] if dropout_p else weights) @ value
