"""Refuses, in the first step, side effects of layers that a cut or a recomputation cannot reproduce.

A recomputation calls the layers of a stage once more. What they leave in attributes, do to parameters or add
to gradients would happen twice, and what they then find may be another thing than the forward found. In a
step of which nothing is known yet, forwards and recomputations are therefore compared: by sums, which take no
memory. What begins later, or shows nowhere here, `Pipeline.verify` finds.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .buffers import State
from .trees import Tree, tensors_of

# How far sums of a forward and its recomputation may be apart: without a graph torch takes other kernels.
_ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-3}
_LOOSE = 0.1  # of other dtypes, and under autocast
_MANY = 256  # of a longer list the length is looked at
_DEEP = 16  # of what lies deeper the type
_TABLES = frozenset(vars(nn.Module()))
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_REMEDY = "keep it in a buffer (register_buffer), or use remat='never'"

Sums = tuple[float, float]  # of numbers, and of their squares


class FirstStep:
    """Looks at one stage while its first training step runs; `first_layer` is the index of `layers[0]`."""

    def __init__(self, stage: int, layers: Sequence[nn.Module], first_layer: int) -> None:
        self._stage, self._layers, self._first_layer = stage, layers, first_layer
        self._outputs: dict[int, tuple[Sums, ...]] = {}  # of forwards that will be recomputed
        self._trained = [p for layer in layers for p in layer.parameters() if _has_values(p)]
        self._before: list[tuple[Sums, ...]] | None = None  # sums of parameters before the first forward
        self._gradients: list[State] = []  # of their `.grad`, before the latest forward
        self._found: Mapping[tuple[int, str, str], object] = {}  # in attributes, before a recomputation
        self._shares_target = self._has_warned = False

    def begin(self, batch: Tree, target: Tree | None) -> None:
        """The mini-batch and the target of the first stage. `ValueError` for attributes of its tensors."""
        self.refuse_attributes(tensors_of(batch), "the mini-batch", of_batch=True)
        if target is not None:
            taken = {_storage(tensor) for tensor in tensors_of(batch)} - {None}
            self._shares_target = not taken.isdisjoint(map(_storage, tensors_of(target, "the target")))

    def before_forward(self) -> None:
        """Called right before the layers run."""
        if self._before is None:
            self._before = [sums([p]) for p in self._trained]
        self._gradients = [State.of(p.grad) for p in self._trained]

    def after_forward(self, m: int, outputs: Sequence[Tensor], *, graph: bool) -> None:
        """Called right after a forward; `outputs` are those of the stage, or the loss."""
        if self._before and self._before != [sums([p]) for p in self._trained]:
            raise RuntimeError(
                f"a layer of stage {self._stage} changes a parameter in its forward, which the micro-batches "
                "before it have used; do that between steps, or keep what changes in a buffer"
            )
        self._before = []  # of the first forward alone: it is a pass over all parameters
        if graph:
            return
        if any(was.has_moved(p.grad) for was, p in zip(self._gradients, self._trained, strict=True)):
            raise RuntimeError(
                f"a layer of stage {self._stage} gives parameters a gradient in its forward, which its "
                "recomputation would add once more; use torch.autograd.grad there, or remat='never'"
            )
        self._outputs[m] = sums(outputs)

    def before_recomputation(self) -> None:
        self._found = self._attributes()

    def after_recomputation(self, m: int, outputs: Sequence[Tensor]) -> None:
        now = self._attributes()
        changed = [key for key in {**self._found, **now} if self._found.get(key) != now.get(key)]
        kinds = [_ROUNDING.get(tensor.dtype, _LOOSE) for tensor in outputs]
        if any(torch.is_autocast_enabled(kind) for kind in {"cpu", *(t.device.type for t in outputs)}):
            kinds = [_LOOSE]
        most = max(kinds, default=_LOOSE)
        for found, wanted in zip(sums(outputs), self._outputs.pop(m, ()), strict=False):
            size = max(abs(wanted[0]), wanted[1], 1e-30)
            if any(abs(a - b) > most * size for a, b in zip(found, wanted, strict=True)):
                why = (
                    f"{self._named(changed[0])} changes in each forward"
                    if changed
                    else "a layer goes by something that has changed since, such as an object, a list or a "
                    "buffer that changes by .data, or draws random numbers that are not of torch's default "
                    "generators, or asks whether gradients are enabled"
                )
                raise RuntimeError(
                    f"stage {self._stage} gives another output in the recomputation of micro-batch {m} than "
                    f"in its forward: {why}; {_REMEDY}"
                )
        for key in changed:
            if self._has_graph(key):
                raise RuntimeError(
                    f"{self._named(key)} holds a tensor with a graph after a forward, and another one after "
                    "its recomputation, so what uses it elsewhere gets no gradient, or a wrong one; pass the "
                    "tensor on from layer to layer, or use remat='never'"
                )
        if changed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._named(changed[0])} changes in each forward, and once more in each recomputation; "
                "what reads it, such as a loss or a layer of another stage, finds another value; "
                f"{_REMEDY}",
                stacklevel=2,
            )

    def refuse_overwritten(self) -> None:
        """`RuntimeError` where the first layers overwrite the mini-batch and the target is in its memory."""
        if self._shares_target:
            raise RuntimeError(
                "the first layer changes the mini-batch in place, and the target is in its memory, where "
                "the change would show or not by the schedule; pass target.clone(), or use the out-of-place "
                "form of the operation (inplace=False)"
            )

    def refuse_attributes(self, tensors: Iterable[Tensor], what: str, *, of_batch: bool = False) -> None:
        """`ValueError` for tensors that are more than their numbers; those of the mini-batch, which is only
        divided, may be of any type.
        """
        for tensor in tensors:
            kind = type(tensor)
            names = [name for name in getattr(tensor, "__dict__", ()) if not name.startswith("_")]
            is_torchs = kind.__module__.partition(".")[0] in ("torch", "torchvision")
            if names and kind in (Tensor, nn.Parameter):
                raise ValueError(
                    f"a tensor of {what} has the attribute {names[0]!r}, and only its numbers come to the "
                    "next layers; pass what the attribute says beside the tensor, as in (x, scale)"
                )
            if not is_torchs and not of_batch:
                raise ValueError(
                    f"a tensor of {what} is of type {kind.__name__}, and only its numbers come to the next "
                    "layers; pass tensor.as_subclass(torch.Tensor), and make the other one of it there"
                )

    def _named(self, key: tuple[int, str, str]) -> str:
        index, path, name = key
        kind = type(self._layers[index - self._first_layer]).__name__
        return f"attribute {f'{path}.{name}' if path else name!r} of layer {index} ({kind})"

    def _has_graph(self, key: tuple[int, str, str]) -> bool:
        index, path, name = key
        value = vars(self._layers[index - self._first_layer].get_submodule(path)).get(name)
        inside = value if isinstance(value, list | tuple) else (value,)
        return any(isinstance(each, Tensor) and each.requires_grad for each in inside)

    def _attributes(self) -> Mapping[tuple[int, str, str], object]:
        """Returns attributes other than parameters, buffers, modules and hooks, as values to compare."""
        found = {}
        for index, layer in enumerate(self._layers, self._first_layer):
            for path, module in layer.named_modules():
                # Where a hook before the forward makes it anew, as those of torch.nn.utils do.
                made = {getattr(hook, "name", "") for hook in module._forward_pre_hooks.values()}
                for name, value in vars(module).items():
                    if name not in _TABLES and name not in made and not name.startswith("_dynamo"):
                        found[index, path, name] = _value(value, set(), _DEEP)
        return found


def sums(tensors: Iterable[Tensor]) -> tuple[Sums, ...]:
    """Returns the sum and the norm of each tensor that has values; 0 for what is not finite."""
    found = []
    for tensor in tensors:
        if _has_values(tensor):
            numbers = tensor.detach()
            numbers = torch.view_as_real(numbers.resolve_conj()) if numbers.is_complex() else numbers
            wide = numbers if numbers.is_floating_point() else numbers.double()
            total = wide.sum(dtype=torch.float64).item()
            norm = torch.linalg.vector_norm(wide, dtype=torch.float64).item()
            found.append((total if math.isfinite(total) else 0.0, norm if math.isfinite(norm) else 0.0))
    return tuple(found)


def _has_values(tensor: Tensor) -> bool:
    is_there = not (tensor.is_meta or isinstance(tensor, FakeTensor) or hasattr(tensor, "device_mesh"))
    return is_there and tensor.layout is torch.strided and bool(tensor.numel())


def _storage(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _value(value: object, seen: set[int], levels: int) -> object:
    """Something that is equal to what it was as long as a forward would find the same."""
    if type(value) in _PLAIN:
        return type(value), repr(value)
    if isinstance(value, nn.Module | nn.Parameter):
        return id(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), sums([value])
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        return type(value), repr(value)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if id(value) in seen or not levels:
        return type(value)
    seen.add(id(value))
    if isinstance(value, dict | list | tuple | deque | set | frozenset):
        if len(value) > _MANY or isinstance(value, set | frozenset):
            return type(value), len(value)
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return type(value), tuple((repr(key), _value(each, seen, levels - 1)) for key, each in pairs)
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict) and not callable(value) and not type(value).__module__.startswith("torch"):
        return type(value), _value(own, seen, levels - 1)
    return type(value)
