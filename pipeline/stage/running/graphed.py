"""The layers of a stage as graphs of a device: recorded once, then started with one call each way.

A small micro-batch on a GPU waits for the host, which starts its operations one by one. A graph starts all of
them at once, always on the memory that it was recorded with. So a micro-batch needs buffers of its own from
its forward to its backward (`Slot`), what comes in is copied there, and what goes out is copied from there,
since the next micro-batch will overwrite it. Nothing that Python decides at each call can be in a graph: no
random streams, no averages of batch normalization, no recomputation. What changes from step to step (another
size, another precision, other weights) has graphs of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.stage.microbatch import Tree, flatten, unflatten
from gpipe_bench.pipeline.stage.rng import Generators, surely_draws

Tensors = tuple[Tensor | None, ...]


class Recorder(Protocol):
    """Records what a call gives to the device."""

    def warm_up(self, call: Callable[[], object]) -> None:
        """Calls as often as it takes until libraries have their memory."""

    def record(self, call: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        """The tensors of the call, empty so far, and what fills them each time."""


class DeviceRecorder:
    """The graphs of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def warm_up(self, call: Callable[[], object]) -> None:
        stream, current = devices.new_stream(self._device), devices.current_stream(self._device)
        stream.wait_stream(current)
        with devices.using(stream):
            for _ in range(3):
                call()
        current.wait_stream(stream)

    def record(self, call: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        graph = self._module.CUDAGraph()
        # In a pool of its own: what the forward keeps must outlive other recordings.
        with self._module.graph(graph, capture_error_mode="thread_local"):
            found = call()
        return found, graph.replay


def recorder(device: torch.device) -> Recorder:
    """Of a device that has graphs; `ValueError` for any other."""
    if devices.is_accelerator(device) and hasattr(torch.get_device_module(device), "CUDAGraph"):
        return DeviceRecorder(device)
    raise ValueError(
        f"compile='graphs' records graphs of a device, which {device} does not have; use devices='cuda', or "
        "compile=True, which compiles for any device"
    )


def refuse_graphs(layers: Sequence[nn.Module], recomputes: bool) -> None:
    """`ValueError` for what a graph cannot hold."""
    if recomputes:
        raise ValueError(
            "compile='graphs' holds the buffers of every micro-batch from its forward to its backward, so "
            "that a recomputation would save nothing; use remat='never', or compile=True"
        )
    for index, layer in enumerate(layers):
        if any(isinstance(m, _BatchNorm) and m.running_mean is not None for m in layer.modules()):
            what = "has batch normalization, whose averages follow the mini-batch"
        elif surely_draws(layer):
            what = "draws random numbers, of a stream for each micro-batch"
        else:
            continue
        raise ValueError(f"compile='graphs': layer {index} {what}, which no graph can do; use compile=True")


class Slot:
    """Buffers and graphs of one micro-batch at a time."""

    def __init__(
        self,
        layers: Callable[[Tree], Tree],
        tensors: Sequence[Tensor],
        structure: Any,
        parameters: Sequence[nn.Parameter],
        record: Recorder,
    ) -> None:
        self.inputs = tuple([t.detach().clone().requires_grad_(t.requires_grad) for t in tensors])
        self._sources = [t for t in (*self.inputs, *parameters) if t.requires_grad]
        self._layers, self._given = layers, structure
        self._live: tuple[Tensor, ...] = ()  # of the graph that autograd holds
        self._gradients: tuple[Tensor, ...] = ()
        self.structure: Any = None
        with torch.enable_grad():
            record.warm_up(self._both)
            outputs, self.replay_forward = record.record(self._forward)
            self.outputs = tuple([t for t in outputs if t is not None])
            self._gradients = self._empty_gradients()
            self.results, self.replay_backward = record.record(self._backward)
        self.needs_grad = self._needs_grad()
        self._live = ()

    def _forward(self) -> Tensors:
        self._live, self.structure = flatten(self._layers(unflatten(self.inputs, self._given)))
        return tuple([t.detach() for t in self._live])

    def _backward(self) -> Tensors:
        ends = [t for t in self._live if t.requires_grad]
        return torch.autograd.grad(ends, self._sources, self._gradients, allow_unused=True)

    def _both(self) -> None:
        self._forward()
        self._gradients = self._empty_gradients()
        self._backward()

    def _empty_gradients(self) -> tuple[Tensor, ...]:
        return tuple([torch.zeros_like(t) for t in self._live if t.requires_grad])

    def _needs_grad(self) -> tuple[bool, ...]:
        return tuple([t.requires_grad for t in self._live])

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Outputs of a micro-batch, in memory of their own."""
        for mine, given in zip(self.inputs, tensors, strict=True):
            mine.data.copy_(given)
        self.replay_forward()
        return tuple([t.clone() for t in self.outputs])

    def backward(self, gradients: Sequence[Tensor]) -> Tensors:
        """Gradients of the inputs and parameters that need one, in memory of their own."""
        for mine, given in zip(self._gradients, gradients, strict=True):
            mine.copy_(given)
        self.replay_backward()
        return tuple([None if t is None else t.clone() for t in self.results])


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slot: Slot, free: list[Slot], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.slot, ctx.free = slot, free
        outputs = slot.forward(tensors[:count])
        ctx.mark_non_differentiable(
            *[t for t, needed in zip(outputs, slot.needs_grad, strict=True) if not needed]
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        slot = ctx.slot
        wanted = [g for g, needed in zip(gradients, slot.needs_grad, strict=True) if needed]
        found = iter(slot.backward(wanted))
        ctx.free.append(slot)  # its buffers are free for the next micro-batch
        needed = ctx.needs_input_grad[3:]
        return (None, None, None, *[next(found) if each else None for each in needed])


class GraphedLayers:
    """Calls the layers of a stage through graphs, with as many slots as micro-batches are in flight."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._layers, self._device = tuple(layers), device
        self._recorder = recorder(device)
        self._slots: dict[object, list[Slot]] = {}
        self._free: dict[object, list[Slot]] = {}
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._weights: object = None
        self._draws = False

    def begin(self) -> None:
        """Prepares a step: all slots are free, and none is left of other weights or another mode."""
        self._parameters = tuple(dict.fromkeys(p for layer in self._layers for p in layer.parameters()))
        weights = (
            tuple([(p.data_ptr(), p.requires_grad) for p in self._parameters]),
            tuple([module.training for layer in self._layers for module in layer.modules()]),
        )
        if weights != self._weights:
            self._weights = weights
            self._slots.clear()
        self._free = {key: list(slots) for key, slots in self._slots.items()}

    def __call__(self, value: Tree) -> Tree | None:
        """What the layers make of a micro-batch; None without gradients and where layers draw after all,
        which shall run as they are.
        """
        if self._draws or not torch.is_grad_enabled():
            return None
        tensors, structure = flatten(value)
        precision = torch.is_autocast_enabled(self._device.type), torch.get_autocast_dtype(self._device.type)
        key = (
            structure,
            precision,
            tuple([(t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors]),
        )
        free = self._free.setdefault(key, [])
        if not free:
            slot = self._record(tensors, structure)
            if slot is None:
                return None
            self._slots.setdefault(key, []).append(slot)
            free.append(slot)
        slot = free.pop()
        outputs = _Replayed.apply(slot, free, len(tensors), *tensors, *self._parameters)
        return unflatten(outputs, slot.structure)

    def _run(self, value: Tree) -> Tree:
        for layer in self._layers:
            value = layer(value)
        return value

    def _record(self, tensors: Sequence[Tensor], structure: Any) -> Slot | None:
        """A new slot; None where it turned out that layers draw."""
        generators = Generators(self._device)
        before = generators.save()
        buffers = [(b, b.detach().clone()) for layer in self._layers for b in layer.buffers()]
        try:
            with torch.no_grad():
                self._run(unflatten(tuple([t.detach() for t in tensors]), structure))
            self._draws = generators.have_moved(before)
            if self._draws:
                warnings.warn(
                    "compile='graphs': layers of a stage draw random numbers, of a stream for each "
                    "micro-batch, which no graph can do; the stage runs as it is",
                    stacklevel=2,
                )
                return None
            return Slot(self._run, tensors, structure, self._parameters, self._recorder)
        finally:
            generators.restore(before)
            for buffer, kept in buffers:
                buffer.data.copy_(kept)
