"""Buffers that a forward changes: a recomputation sees what the forward saw, and leaves what it left.

A layer may count its calls, follow an estimate or keep a vector from call to call. Under re-materialization
it is called twice for every micro-batch, the second time when later micro-batches have moved its buffers on.
So what a forward is about to change is copied before, and the recomputation works on the copy, which stands
in its place while it runs. The copies live as long as the inputs that are kept for the recomputation.

Which buffers change nobody announces. In the first step all are copied and compared, forward by forward;
from then on only those that change are copied, and the small ones beside them. A change shows in torch's
count of in-place operations or in another tensor under the same name; one made behind torch's back, through
`.data`, shows in the comparison, if it is made in the first step. Of small buffers that do not change one
copy is kept, so that they may begin to at any time; for a larger one that begins to change in place that is
an error, which says what to do. What layers keep in attributes is looked at in `first_step`, and batch
normalization's averages are left to `batchnorm`.

Beside the buffers themselves a stage so holds the changing ones once for every micro-batch that waits for its
recomputation and those of at most `SMALL_BYTES` once; in the first step all of them once while a forward
runs. The memory model (`memory.peaks`) counts the same in a step that is not the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

# A buffer of which a copy is kept although it has never changed.
SMALL_BYTES = 2**16

Key = tuple[nn.Module, str]


class Absent:
    """Stands for a buffer, or an attribute, that is not there."""


ABSENT = Absent()
Value = Tensor | None | Absent


@dataclass
class Saved:
    """What a forward saw of the buffers that change, and which of them it did change."""

    copies: dict[Key, Value] = field(default_factory=dict)
    moved: frozenset[Key] = frozenset()


class Buffers:
    """The buffers of a stage's layers, except those of the modules `besides`."""

    def __init__(self, layers: Sequence[nn.Module], first_layer: int, besides: Collection[nn.Module]) -> None:
        self._layers, self._first_layer = layers, first_layer
        self._besides = frozenset(besides)
        self._loss: nn.Module | None = None
        self._modules: dict[nn.Module, str] = {}  # those that have buffers, and what to call them
        self._training: list[bool] = []  # whether each of them was in training mode when we looked
        self._changing: set[Key] = set()
        self._still: dict[Key, State] = {}
        self._shadows: dict[Key, Tensor | None] = {}  # values of the small ones that are still
        self._silent: set[Key] = set()  # change behind torch's back
        self._moved: set[Key] = set()  # have changed in this step
        # Of those that began to change in this step: the value until then.
        self._before: dict[Key, Value] = {}
        self._states: dict[Key, State] = {}  # of those that change, before the forward of the moment
        self._learning = True
        self._begun = False
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
        """The step is over: by now it is known which buffers change."""
        if not self._begun:
            return
        if not self._learning:  # what no longer changes, as a table that the first forward has made
            changing = self._moved | self._silent
            modules = {module for module, _ in changing}
            for key in self._changing - changing:
                tensor = buffer_of(key)
                if key[0] not in modules or (tensor is not None and tensor.nbytes > SMALL_BYTES):
                    self._changing.remove(key)
                    self._record(key)
        self._learning = self._begun = False
        self.known_empty = not self._modules
        self._before.clear()
        self._moved.clear()

    def forget(self) -> None:
        """Looks again in the next step which buffers change."""
        self._begun, self._learning, self.known_empty = False, True, False
        self._before.clear()
        self._moved.clear()

    # Forward and recomputation

    def save(self) -> Saved | None:
        """Before a forward that will be recomputed. None if there are no buffers."""
        if not self._begun:
            self._begun = True
            training = [module.training for module in self._modules]
            if training != self._training:
                self._learning, self._training = True, training
            if self._learning:
                for known in (self._changing, self._silent, self._still, self._shadows):
                    known.clear()
                self._find()
            else:
                for key, state in self._still.items():  # what the user has changed between two steps
                    if state.has_moved(buffer_of(key)):
                        self._record(key)
        if not self._modules and not self._learning:
            return None
        self._notice()
        kept = [*self._changing, *self._still] if self._learning else self._changing
        saved = Saved(_copies({(module, name): module._buffers.get(name) for module, name in kept}))
        self._states = {key: State.of(buffer_of(key)) for key in self._changing}
        return saved

    def look(self, saved: Saved) -> None:
        """After that forward."""
        moved = {key for key, state in self._states.items() if state.has_moved(buffer_of(key))}
        self._states.clear()  # one that was replaced would linger
        moved.update(self._notice(saved))
        if self._learning:
            for key in [key for key in self._still if not same(saved.copies[key], buffer_of(key))]:
                self._silent.add(key)
                self._begins_to_change(key, saved.copies[key])
            for key in self._find():
                saved.copies[key] = ABSENT
            for key in self._still:
                if saved.copies.get(key) is not ABSENT:
                    saved.copies.pop(key, None)
        saved.moved = frozenset(moved)
        self._moved |= moved

    @contextmanager
    def as_saved(self, saved: Saved) -> Iterator[None]:
        """While a recomputation runs, the buffers are copies of what its forward saw."""
        self._notice()
        values: dict[Key, Value] = {**self._before, **saved.copies}
        originals = {module: dict(module._buffers) for module, _ in values}
        states: dict[Key, State] = {}
        copies = _copies(values)
        for (module, name), copy in copies.items():
            if isinstance(copy, Absent):
                del module._buffers[name]
            else:
                module._buffers[name] = copy
                states[module, name] = State.of(copy)
        try:
            yield
            moved = {key for key, state in states.items() if state.has_moved(buffer_of(key))}
            moved.update(key for key, state in self._still.items() if state.has_moved(buffer_of(key)))
            moved.difference_update(key for key, value in values.items() if isinstance(value, Absent))
        finally:
            for module, buffers in originals.items():
                module._buffers.clear()
                module._buffers.update(buffers)
        if moved != saved.moved:
            key = next(iter(moved ^ saved.moved))
            changed, still = ("recomputation", "forward") if key in moved else ("forward", "recomputation")
            raise RuntimeError(
                f"{self._name(key)} changed in the {changed} of a micro-batch and not in its {still}: the "
                "layer goes by something that has changed between, such as an attribute, or asks whether "
                "gradients are enabled; keep what it goes by in a buffer (register_buffer), or use "
                "remat='never'"
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
        self._training = [module.training for module in self._modules]

    def _find(self) -> list[Key]:
        """Takes in modules and buffers that are new; gives the latter."""
        self._find_modules()
        new = [
            (module, name)
            for module in self._modules
            for name in module._buffers
            if (module, name) not in self._still and (module, name) not in self._changing
        ]
        for key in new:
            self._record(key)
        return new

    def _record(self, key: Key) -> None:
        tensor = buffer_of(key)
        self._still[key] = State.of(tensor)
        self._shadows.pop(key, None)
        if tensor is None or tensor.nbytes <= SMALL_BYTES:
            self._shadows[key] = None if tensor is None else tensor.detach().clone()

    def _notice(self, saved: Saved | None = None) -> list[Key]:
        """Takes in which buffers have begun to change since the last look, in the forward of `saved` or by
        something that is not recomputed; their values until then are still known.
        """
        found = [key for key, state in self._still.items() if state.has_moved(buffer_of(key))]
        for key in found:
            value: Value
            if saved is not None and key in saved.copies:
                value = saved.copies[key]
            elif key in self._shadows:
                value = self._shadows[key]
            elif not self._still[key].has_moved(self._still[key].tensor):  # replaced, and still as it was
                value = self._still[key].tensor
            else:
                raise RuntimeError(
                    f"{self._name(key)} has begun to change, and what it held before is needed for a "
                    "recomputation; call Pipeline.refresh() on every rank before the first step in which a "
                    f"layer begins to change a buffer of more than {SMALL_BYTES // 1024} KiB, or use "
                    "remat='never'"
                )
            if saved is not None:
                saved.copies[key] = value
            self._begins_to_change(key, value)
        return found

    def _begins_to_change(self, key: Key, value: Value) -> None:
        """From now on it is copied before each forward, and so are the small buffers of the same module."""
        module, _ = key
        siblings = [(module, name) for name in module._buffers if (module, name) in self._shadows]
        for each in (*siblings, key):
            self._changing.add(each)
            self._still.pop(each, None)
            self._before[each] = self._shadows.pop(each, ABSENT)
        self._before[key] = value

    def _name(self, key: Key) -> str:
        module, name = key
        return f"buffer {name!r} of {self._modules[module]}"


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


def buffer_of(key: Key) -> Tensor | None:
    module, name = key
    return module._buffers.get(name)


def _copies(values: Mapping[Key, Value]) -> dict[Key, Value]:
    """Copies of the values; two names of one tensor are one copy."""
    copies: dict[int, Tensor] = {}
    found: dict[Key, Value] = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            if id(value) not in copies:
                copies[id(value)] = value.detach().clone()
            found[key] = copies[id(value)]
        else:
            found[key] = value
    return found


def same(value: Value, tensor: Tensor | None) -> bool:
    if value is None or tensor is None or isinstance(value, Absent):
        return value is tensor
    if tensor.is_meta or isinstance(tensor, FakeTensor):  # without values, which then can't change unseen
        return True
    return torch.equal(value, tensor)
