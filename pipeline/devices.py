"""Functions on devices: only this file of `pipeline` calls an accelerator's interface.

Most of them use `torch.accelerator`, `torch.Stream` and `torch.Event`, which serve CUDA, ROCm, XPU and
others; names and random generators come from the device type's own module. On a CPU every function does
nothing and returns a neutral value, so that callers need no second path. Call the functions through the
module (`devices.event(...)`): tests replace them here by fakes that work on CPU tensors and record what is
asked.

Tensors go from device to device beside what both compute (`Transfers`). Under a plain `.to(device)` the
current streams of both devices wait for each other at the moment of sending. Here copies have a stream of
their own on each of the two: the copy alone waits for the sender's computations, and the receiver where it
needs the tensors. What is used in another stream than its own must tell the allocator (`record_stream`), or
its memory would be given away while it is read. From a CPU tensors leave through pinned memory without a
wait; towards a CPU the host waits when they are received, since it is what computes there.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

_ON_HOST = ("cpu", "meta")
_NOTHING: AbstractContextManager[None] = nullcontext()


def is_accelerator(device: torch.device) -> bool:
    """Whether work on the device runs behind the host, in streams."""
    return device.type not in _ON_HOST


def default_type() -> str:
    """The type of this machine's accelerators, such as "cuda"; "cpu" where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def count(device_type: str) -> int:
    """How many devices of the type this process can use; 1 for "cpu"."""
    if device_type in _ON_HOST:
        return 1
    return torch.accelerator.device_count() if default_type() == device_type else 0


def current(device_type: str) -> torch.device:
    """The current device of the type; an accelerator's with its index."""
    if device_type in _ON_HOST:
        return torch.device(device_type)
    return torch.device(device_type, torch.accelerator.current_device_index())


def exact(device: torch.device | str) -> torch.device:
    """The device with its index, as tensors on it have it: "cuda" is the current one."""
    found = torch.device(device)
    return current(found.type) if is_accelerator(found) and found.index is None else found


def name(device: torch.device) -> str:
    """The maker's name of the device, such as "NVIDIA H100 80GB HBM3"."""
    if not is_accelerator(device):
        return platform.processor() or platform.machine()
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else str(device)


def on(device: torch.device) -> AbstractContextManager[None]:
    """Makes an accelerator with an index the current device, for code that names none."""
    if not is_accelerator(device) or device.index is None:
        return _NOTHING
    return cast("AbstractContextManager[None]", torch.accelerator.device_index(device.index))


def select(device: torch.device) -> None:
    """Makes an accelerator the process's current device from here on."""
    if is_accelerator(device) and device.index is not None:
        torch.accelerator.set_device_index(device.index)


# What runs behind the host


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all its work. Never call it within a step."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def new_stream(device: torch.device) -> torch.Stream:
    """A new stream of the device, which runs beside its other streams."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """The device's current stream."""
    return torch.accelerator.current_stream(device) if is_accelerator(device) else torch.Stream(device)


def using(stream: torch.Stream) -> AbstractContextManager[Any]:
    """Sends operations on the stream's device to the stream; other devices' streams stay as they are."""
    return cast("AbstractContextManager[Any]", stream) if is_accelerator(stream.device) else _NOTHING


def event(device: torch.device, *, timing: bool = False) -> torch.Event:
    """A new event, which other streams can wait for; two with `timing` tell the time between them."""
    return torch.Event(device, enable_timing=timing)


def mark(device: torch.device) -> torch.Event:
    """An event behind all that the device has been given in the current stream."""
    made = event(device)
    made.record(current_stream(device))
    return made


def record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    """Keeps the memory of a tensor that was made in another stream until what this one has so far is done."""
    if is_accelerator(tensor.device):
        tensor.record_stream(cast("Any", stream))


def pinned(tensor: Tensor) -> Tensor:
    """A CPU tensor in memory that a device can read by itself, so that a copy need not hold up the host."""
    return tensor if tensor.is_pinned() else tensor.pin_memory()


def hold(device: torch.device, seconds: float) -> None:
    """Keeps the current stream of a CUDA device busy for about so long; nothing on others. Meanwhile the host
    runs ahead, by no more than the thousand operations that a stream takes, so that events around short work
    tell what the device takes, not how fast Python asks.
    """
    if device.type == "cuda" and seconds > 0:
        with on(device):
            torch.cuda._sleep(int(seconds * _cycles_per_s(exact(device))))


@cache
def _cycles_per_s(device: torch.device) -> float:
    """Measures the rate of the clock that `torch.cuda._sleep` counts in."""
    cycles = 2_000_000
    begin, end = event(device, timing=True), event(device, timing=True)
    torch.cuda._sleep(cycles)  # its first use loads it
    begin.record(current_stream(device))
    torch.cuda._sleep(cycles)
    end.record(current_stream(device))
    end.synchronize()
    return cycles / begin.elapsed_time(end) * 1e3


def total_memory_bytes(device: torch.device) -> int:
    """Bytes of memory of an accelerator; 0 for a CPU, whose memory is the host's."""
    return torch.accelerator.get_memory_info(device)[1] if is_accelerator(device) else 0


def peak_bytes(device: torch.device) -> int:
    """The most bytes that tensors took on an accelerator since `reset_peak`; 0 for a CPU."""
    return torch.accelerator.max_memory_allocated(device) if is_accelerator(device) else 0


def reset_peak(device: torch.device) -> None:
    """Counts the peak from here on."""
    if is_accelerator(device):
        current(device.type)  # which brings up an allocator that nobody has used yet; torch 2.11 needs it
        torch.accelerator.reset_peak_memory_stats(device)


def empty_cache(device: torch.device) -> None:
    """Gives cached memory back, on all accelerators of the process."""
    if is_accelerator(device):
        torch.accelerator.empty_cache()


def generator(device: torch.device) -> torch.Generator:
    """The device's default random generator."""
    if not is_accelerator(device):
        return torch.default_generator
    module = torch.get_device_module(device)
    if hasattr(module, "init"):
        module.init()  # the generators are made with the first use of the device
    index = current(device.type).index if device.index is None else device.index
    if hasattr(module, "default_generators"):
        return cast("torch.Generator", module.default_generators[index])
    if hasattr(module, "_get_default_mps_generator"):
        return cast("torch.Generator", module._get_default_mps_generator())
    raise ValueError(f"torch names no random generator of {device}; use one of type cpu, cuda, xpu or mps")


Sent = TypeVar("Sent", Tensor, Tensor | None)


class Mark(NamedTuple):
    """When a copy is done: an event in a stream of the device that `of` names."""

    event: torch.Event
    of: torch.device


class CopyStreams:
    """The streams of copies from one device to another; at least one of them is an accelerator."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        self._leaving = new_stream(source) if is_accelerator(source) else None
        self._landing = new_stream(target) if is_accelerator(target) else None

    def open(self) -> None:
        """Orders the copies that follow after all work that the source has been given so far."""
        if self._leaving is not None:
            self._leaving.wait_stream(current_stream(self._source))

    def send(self, tensor: Tensor) -> Tensor:
        """Returns the tensor on the target; it is complete when the mark of `close` has passed."""
        if self._leaving is None:
            tensor = pinned(tensor)
        with _in(self._leaving), _in(self._landing):
            copy = tensor.to(self._target, non_blocking=True)
        if self._leaving is not None:
            record_stream(tensor, self._leaving)
        return copy

    def close(self) -> Mark:
        """Marks the end of the copies so far."""
        stream, device = self._landing, self._target
        if stream is None:
            stream, device = self._leaving, self._source
        assert stream is not None, "neither end is an accelerator"
        end = event(device)
        end.record(stream)
        return Mark(end, device)


class Transfers:
    """Sends tensors to other devices and receives them there."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, torch.device], CopyStreams] = {}

    def send(
        self, tensors: Iterable[Sent], target: torch.device
    ) -> tuple[tuple[Sent, ...], tuple[Mark, ...]]:
        """Returns the tensors on `target`, and marks of their arrival; those already there are not copied."""
        sent: list[Any] = []
        used: dict[torch.device, CopyStreams] = {}
        for tensor in tensors:
            if tensor is None or tensor.device == target:
                sent.append(tensor)
            elif is_accelerator(tensor.device) or is_accelerator(target):
                ends = tensor.device, target
                if ends not in self._streams:
                    self._streams[ends] = CopyStreams(*ends)
                if tensor.device not in used:
                    used[tensor.device] = self._streams[ends]
                    used[tensor.device].open()
                sent.append(used[tensor.device].send(tensor))
            else:
                sent.append(tensor.to(target))
        return tuple(sent), tuple([streams.close() for streams in used.values()])

    def receive(
        self, tensors: Iterable[Tensor | None], marks: tuple[Mark, ...], target: torch.device
    ) -> None:
        """Makes later work on `target` wait until the tensors are complete."""
        if not marks:
            return
        if not is_accelerator(target):
            for mark in marks:
                mark.event.synchronize()
            return
        stream = current_stream(target)
        for mark in marks:
            stream.wait_event(mark.event)
        for tensor in tensors:
            if tensor is not None:
                record_stream(tensor, stream)


def _in(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    return _NOTHING if stream is None else using(stream)
