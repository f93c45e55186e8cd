"""Torch's fake tensors, sooner: what an operation returns is known from the last one of its kind.

Torch finds out by rules that are written in Python for the most part: a tenth of a millisecond for an
operation that it has seen before, several for a batch normalization that it has not. A layer is hundreds of
operations, nearly all of them repeated, and what comes out depends on shapes, layouts and dtypes alone. So
torch is asked once for each kind of operation and its answer is given again. Operations are of one kind

    if all arguments are equal: tensors in shape, strides, offset, dtype and device
    or if they work element by element (or are batch normalizations) and their arguments differ in lengths
    alone, the dimensions of all tensors being in order: the result is shaped as the same argument again

An answer that is not plainly new storages or the first argument itself is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from gpipe_bench.pipeline.memory.tracker import tensors_in

_NORMALIZATION_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_MASK = 9  # its argument that says which gradients are asked for
_NORMALIZATIONS = frozenset((torch.ops.aten.native_batch_norm.default, _NORMALIZATION_BACKWARD))
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


class _Like(NamedTuple):
    """A new tensor, dense, shaped as one of the tensors among the arguments."""

    argument: int
    dtype: torch.dtype
    device: torch.device


class _Answer(NamedTuple):
    """`collect` makes the result of its tensors; None where the result is the first argument."""

    collect: Callable[[list[Any]], Any] | None
    results: tuple[Any, ...]  # _New or None, and _Like or None where it is for every size


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
            return _as_asked_for(
                func, args, FakeTensorMode.__torch_dispatch__(self, func, types, args, kwargs)
            )

        if not _is_torchs(func):
            return ask()
        return (_view if _is_view(func) else _result)(self, func, args, kwargs, ask)


def _as_asked_for(func: Any, args: Sequence[Any], result: Any) -> Any:
    """A batch normalization whose input needs no gradient makes none; torch's rule for it makes one."""
    if func is _NORMALIZATION_BACKWARD and not args[_MASK][0]:
        return (None, *result[1:])
    return result


def _result(
    mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], ask: Callable[[], Any]
) -> Any:
    try:
        key = _key(func, args, kwargs, _exactly)
    except _UnknownError:
        return ask()
    answer = _answers.get(key)
    if answer is not None:
        return _given(mode, answer, args)
    tensors = tensors_in((args, kwargs))
    every_size = _key_of_every_size(func, args, kwargs, tensors)
    answer = _answers.get(every_size)
    if answer is not None:
        answer = _answers[key] = _of_this_size(answer, tensors)
        return _given(mode, answer, args)
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    result = ask()
    answer = _answer(func, args, storages, result)
    if answer is not None:
        _answers[key] = answer
        likeness = _of_every_size(answer, tensors)
        if every_size is not None and likeness is not None:
            _answers[every_size] = likeness
    return result


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


def _view(
    mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], ask: Callable[[], Any]
) -> Any:
    """Views need no rules: their kernels move no data and are the same on every device."""
    base = args[0]
    if type(base) is not FakeTensor or base.constant is not None or base.layout is not torch.strided:
        return ask()
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    if isinstance(result, Tensor):
        return FakeTensor(mode, result, base.fake_device)
    return type(result)(FakeTensor(mode, each, base.fake_device) for each in result)


def _key(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], of_tensor: Callable[[Tensor], Any]
) -> tuple[Any, ...]:
    def kind(value: Any) -> Any:
        if type(value) is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
                raise _UnknownError
            return of_tensor(value)
        if type(value) is list or type(value) is tuple:
            return (type(value), *map(kind, value))
        if isinstance(value, _PLAIN):
            return type(value), value
        raise _UnknownError

    named = [(name, kind(value)) for name, value in kwargs.items()]
    return (func, torch.get_default_dtype(), *map(kind, args), *named)


def _exactly(tensor: Any) -> Any:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.fake_device


def _given(mode: FakeTensorMode, answer: _Answer, args: Sequence[Any]) -> Any:
    if answer.collect is None:
        return args[0]
    made: list[Tensor | None] = []
    for each in answer.results:
        if each is not None:
            with torch._C._DisableTorchDispatch():
                meta = torch.empty_strided(each.shape, each.strides, dtype=each.dtype, device="meta")
            made.append(FakeTensor(mode, meta, each.device))
        else:
            made.append(None)
    return answer.collect(made)


def _answer(func: Any, args: Sequence[Any], storages: list[int], result: Any) -> _Answer | None:
    """The answer that a result is; ``storages`` are those of the tensors among the arguments."""
    if torch.Tag.inplace_view in func.tags:
        return None
    if args and result is args[0]:
        return _Answer(None, ())
    collect: Callable[[list[Any]], Any]
    if isinstance(result, Tensor):
        collect, results = itemgetter(0), [result]
    elif isinstance(result, (list, tuple)):  # tuples with names too
        collect, results = list if isinstance(result, list) else tuple, [*result]
    else:
        return None
    found: list[_New | None] = []
    new: set[int] = set()
    for each in results:
        if each is None:
            found.append(None)
            continue
        if type(each) is not FakeTensor or each.constant is not None or each.layout is not torch.strided:
            return None
        if each.dtype.is_complex or each.is_neg():
            return None
        storage, shape, strides = each.untyped_storage()._cdata, tuple(each.shape), each.stride()
        if storage in storages or storage in new or each.storage_offset():
            return None
        if each.untyped_storage().nbytes() != _least_bytes(each):
            return None
        new.add(storage)
        found.append(_New(shape, strides, each.dtype, each.fake_device))
    return _Answer(collect, tuple(found))


def _least_bytes(tensor: Tensor) -> int:
    """Of a storage that just holds the tensor."""
    if tensor.numel() == 0:
        return 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _key_of_every_size(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> Any:
    """Of the operation with numbers in the place of lengths, equal ones for equal lengths; a length of 1 is
    like no other. None where the result may depend on sizes in other ways.
    """
    if not (torch.Tag.pointwise in func.tags or func in _NORMALIZATIONS):
        return None
    if not all(map(_is_in_order, tensors)):
        return None
    numbers = {1: 1, 0: 0}

    def of_tensor(tensor: Any) -> Any:
        shape = tuple(numbers.setdefault(length, len(numbers)) for length in tensor.shape)
        is_dense = tensor.stride() == _dense_strides(tensor.shape)
        return "every size", shape, is_dense, tensor.dtype, tensor.fake_device

    return _key(func, args, kwargs, of_tensor)


def _of_every_size(answer: _Answer, tensors: Sequence[Tensor]) -> _Answer | None:
    """The same with the argument that each result is shaped as, None if there is none."""
    found: list[_Like | None] = []
    for each in answer.results:
        if each is None:
            found.append(None)
            continue
        shaped = [index for index, tensor in enumerate(tensors) if tuple(tensor.shape) == each.shape]
        if each.strides != _dense_strides(each.shape) or not shaped:
            return None
        found.append(_Like(shaped[0], each.dtype, each.device))
    return answer._replace(results=tuple(found))


def _of_this_size(answer: _Answer, tensors: Sequence[Tensor]) -> _Answer:
    found: list[_New | None] = []
    for each in answer.results:
        if each is None:
            found.append(None)
            continue
        shape = tuple(tensors[each.argument].shape)
        found.append(_New(shape, _dense_strides(shape), each.dtype, each.device))
    return answer._replace(results=tuple(found))


def _is_in_order(tensor: Tensor) -> bool:
    """Whether no dimension lies inside a later one; gaps between the elements are allowed."""
    least = 1
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if length != 1:
            if stride < least:
                return False
            least = stride * length
    return True


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for length in reversed(shape):
        strides.append(stride)
        stride *= max(length, 1)
    return tuple(reversed(strides))
