"""Counts the bytes of live storages, in the same way for real, fake and meta tensors.

A dispatch mode sees the result of every operation and counts each *storage* once, from the operation that
made it until its last reference dies (a weak reference tells). It does not see workspaces inside one
operation, nor allocator rounding and fragmentation; a GPU's allocator reports these (`devices.peak_bytes`).

`LayerRun` runs one layer under such a mode, with no more references than in a stage: autograd functions that
keep nothing stand for the layer before, which takes the gradients of the inputs and frees them, and for the
layers after, which hold the outputs and send new gradients back.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..stage.buffers import State, Statistics
from ..stage.split_backward import Split
from .trace import Boundary, BufferRole, SplitTrace, Trace, as_tuple, rise


class StorageWatch(TorchDispatchMode):
    """Calls `allocated` and `freed` once for each storage that operations under this mode create, and for
    those given to `watch`. Other storages from before, and views of them, are ignored.
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
        """Torch need not guard operations against this mode: nothing is compiled under it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF and hasattr(args[0], "fake_device"):
            return args[0].fake_device  # a frequent call of autograd
        result = func(*args, **kwargs) if kwargs else func(*args)
        made = [result] if isinstance(result, Tensor) else tensors_in(result)
        new = [each for each in made if each.untyped_storage()._cdata not in self._serials]
        if new:
            given = {each.untyped_storage()._cdata for each in tensors_in((args, kwargs))}
            for tensor in new:  # not views and in-place results of ignored storages
                if tensor.untyped_storage()._cdata not in given:
                    self._register(tensor)
        return result


_DEVICE_OF = torch.ops.prim.device.default


def on_this_rank(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a distributed tensor, or the tensor that a pending collective returns."""
    while hasattr(tensor, "__tensor_flatten__"):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


class LiveMemory(StorageWatch):
    """Live and peak bytes by owner. A storage belongs to the owner that ran when it was created.

        memory = LiveMemory()
        with memory:
            with memory.owned_by(stage): ...

    ``memory.peak_bytes[stage]`` is then the memory that this stage would need on a device of its own.
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Operations on a distributed tensor are counted as those on this rank's part.
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and func.__name__ == "wait_tensor.default":
            return args[0]  # as with real tensors; fake ones return another tensor
        return super().__torch_dispatch__(func, types, args, kwargs)

    def serial_of(self, tensor: Tensor) -> int | None:
        return super().serial_of(on_this_rank(tensor))

    def _register(self, tensor: Tensor) -> None:
        super()._register(on_this_rank(tensor))

    def allocated(self, serial: int, num_bytes: int) -> None:
        self.sizes.append(num_bytes)
        self.events.append(serial + 1)

    def freed(self, serial: int) -> None:
        self.events.append(-serial - 1)


class LayerRun:
    """Runs a layer of fake tensors forward and backward, once, and frees inputs and outputs as in a stage;
    `LayerProfile` describes the arguments. ``precision`` is entered around the forward.

    Afterwards ``outputs`` describes the layer's result, ``overwritten`` the positions of inputs that it
    changes in place, and ``moved`` the buffers that it changes, by name.
    """

    def __init__(
        self,
        layer: nn.Module,
        inputs: Boundary,
        unused: frozenset[int],
        precision: AbstractContextManager[object],
    ) -> None:
        self._layer, self._inputs, self._unused = layer, inputs, unused
        self._precision = precision
        self._leaves = [spec.empty() for spec in inputs.tensors]
        self._seed = torch.empty(())
        self._log = EventLog()
        self._delivered: dict[int, Tensor] = {}  # gradients of the inputs
        self._sent_back: list[int | None] = []
        self._kept: frozenset[int] = frozenset()
        self.overwritten: frozenset[int] = frozenset()
        self.moved: dict[str, BufferRole] = {}

    def whole(self) -> Trace:
        """The trace of a forward, and of a backward if gradients are enabled."""
        with self._log as log:
            root = self._forward()
            if root is not None and root.requires_grad:
                root.backward(self._seed)
            del root
            backward = tuple(log.events)
            gradients = {log.serial_of(p.grad) for p in self._layer.parameters() if p.grad is not None}
        return self._trace(backward, gradients)

    def halves(self, whole: Trace) -> SplitTrace:
        """Traces the layer with I and W instead of a backward; ``whole`` is the trace with a backward."""
        with self._log as log:
            root = self._forward()
            if root is None or not root.requires_grad:
                return SplitTrace(False, whole)
            edges = (get_gradient_edge(root),)
            del root
            split = Split(edges, _SOURCE)
            if split.whole:
                return SplitTrace(True, whole)
            exits: list[Tensor | None] = [None] * len(self._inputs.tensors)
            weights = split.inputs(edges, (self._seed,), exits)
            del split, edges
            backward = tuple(log.events)
            self._delivered.update((i, gradient) for i, gradient in enumerate(exits) if gradient is not None)
            trace = self._trace(backward, set())
            self._delivered.clear()
            exits.clear()
            before = log.alive
            # W runs twice: it creates the gradients, then accumulates; storages that wait are freed the
            # second time.
            again = replace(weights, waiting=[*weights.waiting], done=[*weights.done])
            rises = []
            for half in (again, weights):
                log.events.clear()
                half.accumulate()
                rises.append(rise(log.sizes, log.events))
            (first_peak, made), (later_peak, _) = rises
            waiting = frozenset(before - log.alive)
        return SplitTrace(False, trace, waiting, first_peak, later_peak, made)

    def _forward(self) -> Tensor | None:
        """Runs the forward. Returns the tensor to start the backward from; None without a graph."""
        log, inputs = self._log, self._inputs
        differentiates = torch.is_grad_enabled()
        values = [
            _Source.apply(leaf.requires_grad_(), position, self._delivered)
            if spec.requires_grad and differentiates
            else torch.empty_like(leaf)
            for position, (leaf, spec) in enumerate(zip(self._leaves, inputs.tensors, strict=True))
        ]
        values = [values[first] for first in inputs.same_as]
        self._input_storages = _serials(log, values)
        log.events.clear()
        versions = [value._version for value in values]
        buffers = {
            (path, name): (module, State.of(buffer))
            for path, module in self._layer.named_modules()
            for name, buffer in module._buffers.items()
        }
        with self._precision:
            result = self._layer(inputs.build(values))
        self.overwritten = frozenset([i for i in inputs.distinct if values[i]._version != versions[i]])
        self.moved = _moved(buffers)
        del buffers
        self._forward_events = tuple(log.events)
        self.outputs = Boundary.of(result)
        self._output_storages = _serials(log, as_tuple(result))
        root: Tensor | None = None
        if differentiates:
            # The graph of an output that nothing differentiates is freed with the output; its backward never
            # runs.
            given = [t.detach() if i in self._unused else t for i, t in enumerate(as_tuple(result))]
            root = _Tail.apply(log, self._sent_back, self._seed, *given)
            del given
        del result, values
        if root is not None:
            self._kept = frozenset(log.alive)
        log.events.clear()
        return root

    def _trace(self, backward: tuple[int, ...], gradients: set[int | None]) -> Trace:
        """Builds the trace; ``gradients`` are storages of parameter gradients that ``backward`` made."""
        log, inputs, delivered = self._log, self._inputs, self._delivered
        return Trace(
            sizes=tuple(log.sizes),
            inputs=self._input_storages,
            outputs=self._output_storages,
            kept=self._kept,
            gradients=frozenset(serial for serial in gradients if serial is not None),
            output_gradients=tuple(self._sent_back) or (None,) * len(self._output_storages),
            input_gradients=tuple(
                log.serial_of(delivered[i]) if i in delivered else None for i in range(len(inputs.tensors))
            ),
            forward=self._forward_events,
            backward=backward if torch.is_grad_enabled() else (),
            without_gradient=frozenset(
                i
                for i, first in enumerate(inputs.same_as)
                if inputs.tensors[i].requires_grad and first not in delivered
            ),
        )


def _serials(log: EventLog, tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Numbers of the tensors' storages; those that the run did not make (parameters) get size 0."""
    tensors, made = tuple(tensors), len(log.sizes)
    log.watch(tensors)
    log.sizes[made:] = [0] * (len(log.sizes) - made)
    return tuple(serial for serial in map(log.serial_of, tensors) if serial is not None)


class _Source(torch.autograd.Function):
    """Stands for the layer before: makes an input that is no leaf, and takes its gradient."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, position: int, delivered: dict[int, Tensor]) -> Tensor:
        ctx.position, ctx.delivered = position, delivered
        return torch.empty_like(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.delivered[ctx.position] = gradient
        return None, None, None


class _Tail(torch.autograd.Function):
    """Stands for the layers after: keeps nothing, sends new gradients back."""

    @staticmethod
    def forward(
        ctx: Any, log: EventLog, sent_back: list[int | None], root: Tensor, *outputs: Tensor
    ) -> Tensor:
        ctx.log, ctx.sent_back = log, sent_back
        ctx.specs = [(t.shape, t.dtype) if t.requires_grad else None for t in outputs]
        ctx.same_as = Boundary.of(outputs).same_as
        return root.detach()  # a storage that is not watched

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [
            torch.empty(spec[0], dtype=spec[1]) if spec is not None and first == index else None
            for index, (spec, first) in enumerate(zip(ctx.specs, ctx.same_as, strict=True))
        ]
        ctx.sent_back.extend(None if each is None else ctx.log.serial_of(each) for each in gradients)
        return None, None, None, *gradients


_SOURCE: type = _Source._backward_cls  # class of the graph's nodes at the layer's inputs


def _moved(buffers: Mapping[tuple[str, str], tuple[nn.Module, State]]) -> dict[str, BufferRole]:
    """The buffers that a forward has changed, by name, and how; ``buffers`` has their states before.

    A tensor that a forward assigns to a buffer would count as kept by the graph. So the former tensor is put
    back if it has the same size; a table that was made or has grown stays.
    """
    moved = {}
    for (path, name), (module, state) in buffers.items():
        now = module._buffers.get(name)
        if not state.has_moved(now):
            continue
        before, role = state.tensor, BufferRole.CHANGING
        if before is not None and now is not None and now is not before and now.nbytes == before.nbytes:
            module._buffers[name], role = before, BufferRole.REPLACED
        moved[f"{path}.{name}" if path else name] = role
    return moved


def buffer_roles(layer: nn.Module, moved: Mapping[str, BufferRole]) -> tuple[BufferRole, ...]:
    """Returns the roles of the layer's distinct buffers, in order; ``moved`` has those that change."""
    statistics = Statistics([layer]).modules
    left = {path for path, module in layer.named_modules() if module in statistics}
    names: dict[int, list[str]] = {}
    for name, buffer in layer.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    found = []
    for mine in names.values():
        role = next((moved[name] for name in mine if name in moved), BufferRole.STILL)
        is_left = {name.rpartition(".")[0] for name in mine} <= left
        found.append(BufferRole.STATISTICS if is_left else role)
    return tuple(found)
