"""Counting the bytes of live storages, the same way on real, fake and meta tensors.

Neither `sum(t.nbytes for t in saved)` nor an allocator's statistics answer "what does this stage keep": the
first counts views, in-place results and tensors saved twice more than once, the second exists on GPUs only.
Here a dispatch mode sees the result of every operation and counts each *storage* once, from the operation
that made it until its last reference dies (storages keep their Python object, so a weak reference tells).

What it does not see: workspaces that a kernel allocates and frees inside one operation, allocator rounding
and fragmentation. On a GPU its allocator (`devices.peak_bytes`) is the check for those.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class StorageWatch(TorchDispatchMode):
    """Calls `allocated` and `freed` once for each storage that operations under this mode create.

    Storages that existed before are ignored, views of them included, unless `watch` names them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._serials: dict[int, int] = {}  # address of a live storage -> its number
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._next_serial = 0

    def allocated(self, serial: int, num_bytes: int) -> None:
        """A storage appeared. Subclasses override this."""

    def freed(self, serial: int) -> None:
        """The last reference to a storage died. Subclasses override this."""

    @property
    def alive(self) -> set[int]:
        """Numbers of the storages that live now."""
        return set(self._references)

    def serial_of(self, tensor: Tensor) -> int | None:
        """The number of the storage behind ``tensor``, None if it is not watched."""
        return self._serials.get(tensor.untyped_storage()._cdata)

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count storages that existed before, such as parameters."""
        for tensor in tensors:
            self._register(tensor)

    def _register(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._serials:
            return
        serial = self._next_serial
        self._next_serial += 1
        self._serials[address] = serial

        def on_death(_: object) -> None:
            del self._serials[address], self._references[serial]
            self.freed(serial)

        self._references[serial] = weakref.ref(storage, on_death)
        self.allocated(serial, storage.nbytes())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under this mode, so torch need not guard each operation against it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF and hasattr(args[0], "fake_device"):
            return args[0].fake_device  # autograd asks for it more often than for all operations together
        result = func(*args, **kwargs) if kwargs else func(*args)
        made = [result] if isinstance(result, Tensor) else tensors_in(result)
        new = [each for each in made if each.untyped_storage()._cdata not in self._serials]
        if new:
            given = {each.untyped_storage()._cdata for each in tensors_in((args, kwargs))}
            for tensor in new:  # unless a view or in-place result of a storage that is not watched
                if tensor.untyped_storage()._cdata not in given:
                    self._register(tensor)
        return result


_DEVICE_OF = torch.ops.prim.device.default


def on_this_rank(tensor: Tensor) -> Tensor:
    """Returns this rank's tensor inside a tensor that is sharded or that a collective has not finished."""
    while hasattr(tensor, "__tensor_flatten__"):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return [value] if isinstance(value, Tensor) else []
    found: list[Tensor] = []
    for each in value:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (tuple, list, dict)):
            found += tensors_in(each)
    return found


class LiveMemory(StorageWatch):
    """Live and peak bytes by owner. The owner of a storage is the one that ran when it was created.

        memory = LiveMemory()
        with memory:
            with memory.owned_by(stage): ...

    ``memory.peak_bytes[stage]`` is then what that stage would need on a device of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._owner: int | str = ""
        self._held: dict[int, tuple[int | str, int]] = {}
        self.live_bytes: defaultdict[int | str, int] = defaultdict(int)
        self.peak_bytes: defaultdict[int | str, int] = defaultdict(int)

    @contextmanager
    def owned_by(self, owner: int | str) -> Iterator[None]:
        previous, self._owner = self._owner, owner
        try:
            yield
        finally:
            self._owner = previous

    def reset_peaks(self) -> None:
        self.peak_bytes = defaultdict(int, self.live_bytes)

    def allocated(self, serial: int, num_bytes: int) -> None:
        self._held[serial] = (self._owner, num_bytes)
        live = self.live_bytes[self._owner] = self.live_bytes[self._owner] + num_bytes
        if live > self.peak_bytes[self._owner]:
            self.peak_bytes[self._owner] = live

    def freed(self, serial: int) -> None:
        owner, num_bytes = self._held.pop(serial)
        self.live_bytes[owner] -= num_bytes


class EventLog(StorageWatch):
    """The order in which storages appear and die: ``+(s + 1)`` and ``-(s + 1)`` for storage number s."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.shapes: list[tuple[int, ...]] = []  # of the tensor that made it, bytes of an element last

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What a distributed tensor does is seen as what its rank does with its part.
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and func.__name__ == "wait_tensor.default":
            return args[0]  # as of real tensors; of fake ones it would be another
        return super().__torch_dispatch__(func, types, args, kwargs)

    def serial_of(self, tensor: Tensor) -> int | None:
        return super().serial_of(on_this_rank(tensor))

    def _register(self, tensor: Tensor) -> None:
        tensor = on_this_rank(tensor)
        super()._register(tensor)
        if len(self.sizes) > len(self.shapes):
            self.shapes.append((*tensor.shape, tensor.itemsize))

    def allocated(self, serial: int, num_bytes: int) -> None:
        self.sizes.append(num_bytes)
        self.events.append(serial + 1)

    def freed(self, serial: int) -> None:
        self.events.append(-serial - 1)


@contextmanager
def no_collections() -> Iterator[None]:
    """Storages die with their last reference and not where a garbage collection happens to strike. A
    collection would also walk over all of torch's objects, every few layers.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def tensors_behind(*roots: object) -> list[Tensor]:
    """Every tensor that the objects refer to, directly or through other objects; not through code."""
    found: list[Tensor] = []
    seen: set[int] = set()
    waiting: list[object] = [*roots]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found.append(each)
            if each.grad is not None:
                found.append(each.grad)
        else:
            waiting += gc.get_referents(each)
    return found
