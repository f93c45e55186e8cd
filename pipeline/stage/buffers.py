"""Buffers that a forward changes: a recomputation sees what the forward saw, and leaves what it left.

A layer may count its calls, follow an estimate or keep a vector from call to call. Under re-materialization
it is called twice for every micro-batch, the second time when later micro-batches have moved its buffers on.
So before a forward that will be recomputed the buffers are copied, and the recomputation works on the copies,
which stand in their places while it runs:

    F0 sees v0, leaves v1    F1 sees v1, leaves v2    R1 on a copy of v1    R0 on a copy of v0    v2 stays

A buffer is copied once for every version that it has in a step: where nothing changes it, all micro-batches
share one copy. Versions are torch's count of in-place operations, and another tensor under the same name is
another version. A change behind torch's back, through `.data`, is none: where it shows in the output the
first step refuses it (`first_step`), and `Pipeline.verify` finds what begins later. Batch normalization's
averages are left to `batchnorm`.

So a stage holds its buffers once more from its first forward to the end of the step, and those that change
once for each micro-batch that waits for its recomputation, which works on one more. The memory model
(`memory.peaks`) counts the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

Key = tuple[nn.Module, str]


@dataclass
class Saved:
    """Copies of the buffers that a forward read, by module and name; and the buffers that it changed."""

    copies: dict[nn.Module, dict[str, Tensor | None]]
    moved: frozenset[Key] = frozenset()


class Buffers:
    """The buffers of a stage's layers, except those of the modules `besides`."""

    def __init__(self, layers: Sequence[nn.Module], first_layer: int, besides: Collection[nn.Module]) -> None:
        self._layers, self._first_layer = layers, first_layer
        self._besides = frozenset(besides)
        self._loss: nn.Module | None = None
        self._modules: dict[nn.Module, str] = {}  # those that have buffers, and what to call them
        self._copies: dict[int, tuple[State, Tensor]] = {}  # of each tensor, of its version of the moment
        self._states: dict[Key, State] = {}  # before the forward of the moment
        self._is_new = True  # a forward may still register buffers
        self._has_looked = False
        self.known_empty = False  # whether a step before has found none
        self._find_modules()

    # A step

    def begin(self, loss_fn: object) -> None:
        """Prepares a training step; a loss that is a module may have buffers too."""
        loss = loss_fn if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.buffers()) else None
        if loss is not self._loss:
            self._loss = loss
            self._modules.clear()
            self.forget()
            self._find_modules()

    def end(self) -> None:
        """The step is over: the copies go."""
        self._copies.clear()
        if self._has_looked:
            self._is_new, self.known_empty = False, not self._modules

    def forget(self) -> None:
        """Looks again in the next step for buffers that are new."""
        self._copies.clear()
        self._states.clear()
        self._is_new, self._has_looked, self.known_empty = True, False, False

    # Forward and recomputation

    def save(self) -> Saved | None:
        """Before a forward that will be recomputed. None if there are no buffers."""
        if not self._modules and not self._is_new:
            return None
        self._states = self._now()
        return Saved({m: {name: self._copy(t) for name, t in m._buffers.items()} for m in self._modules})

    def look(self, saved: Saved) -> None:
        """After that forward."""
        if self._is_new:
            self._find_modules()
        self._has_looked = True
        saved.moved = self._moved(self._states)
        for key in saved.moved & self._states.keys():  # nobody else will see that version
            self._copies.pop(id(self._states[key].tensor), None)
        self._states.clear()  # a tensor that was replaced would linger

    @contextmanager
    def as_saved(self, saved: Saved) -> Iterator[None]:
        """While a recomputation runs, the buffers are copies of what its forward saw."""
        originals = {module: dict(module._buffers) for module in self._modules}
        copies: dict[int, Tensor] = {}  # of what is going to change; two names of one tensor are one copy
        for module in originals:
            module._buffers.clear()
            for name, value in saved.copies.get(module, {}).items():
                if value is not None and (module, name) in saved.moved:
                    if id(value) not in copies:
                        copies[id(value)] = value.clone()
                    value = copies[id(value)]
                module._buffers[name] = value
        copies.clear()
        states = self._now()
        try:
            yield
            moved = self._moved(states)
        finally:
            for module, buffers in originals.items():
                module._buffers.clear()
                module._buffers.update(buffers)
        if moved != saved.moved:
            key = next(iter(moved ^ saved.moved))
            changed, still = ("recomputation", "forward") if key in moved else ("forward", "recomputation")
            raise RuntimeError(
                f"buffer {key[1]!r} of {self._modules[key[0]]} changed in the {changed} of a micro-batch and "
                f"not in its {still}: the layer goes by something that has changed between, such as an "
                "attribute, or asks whether gradients are enabled; keep what it goes by in a buffer "
                "(register_buffer), or use remat='never'"
            )

    def apart(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs of a forward; one that is a buffer, or a view of one, is copied before it changes."""
        if not self._modules:
            return tensors
        storages = {
            buffer.untyped_storage()._cdata
            for module in self._modules
            for buffer in module._buffers.values()
            if buffer is not None
        }
        return tuple([t.clone() if t.untyped_storage()._cdata in storages else t for t in tensors])

    # Parts

    def _find_modules(self) -> None:
        places = [(f"layer {self._first_layer + i}", layer) for i, layer in enumerate(self._layers)]
        if self._loss is not None:
            places.append(("loss_fn", self._loss))
        for place, root in places:
            for path, module in root.named_modules():
                if module._buffers and module not in self._besides and module not in self._modules:
                    self._modules[module] = f"{place}{path and f', {path},'} ({type(module).__name__})"

    def _copy(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        known = self._copies.get(id(tensor))
        if known is None or known[0].has_moved(tensor):
            known = self._copies[id(tensor)] = State.of(tensor), tensor.detach().clone()
        return known[1]

    def _now(self) -> dict[Key, State]:
        return {(m, name): State.of(t) for m in self._modules for name, t in m._buffers.items()}

    def _moved(self, before: Mapping[Key, State]) -> frozenset[Key]:
        """The buffers that are other ones now, or of another version, or new."""
        now = self._now()
        keys = before.keys() | now.keys()
        return frozenset([k for k in keys if k not in before or before[k].has_moved(k[0]._buffers.get(k[1]))])


class State(NamedTuple):
    """A buffer at a moment: which tensor, and how often it has been changed in place."""

    tensor: Tensor | None
    version: int

    @classmethod
    def of(cls, tensor: Tensor | None) -> State:
        # Tensors made in inference mode have no version, and cannot change outside of it.
        return cls(tensor, 0 if tensor is None or tensor.is_inference() else tensor._version)

    def has_moved(self, tensor: Tensor | None) -> bool:
        return tensor is not self.tensor or self.version != State.of(tensor).version
