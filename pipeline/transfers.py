"""Tensors on their way between devices, beside what both compute.

A plain `.to(device)` is enqueued among the computations: the current streams of both devices wait for each
other at the moment of sending, so that the receiver, whose next action may need something else, stands still
until the sender has come to it, and the other way round. Here the copies from one device to another have a
stream of their own on each of the two. The sender's computations are waited for by the copy alone, and the
receiver waits where it needs the tensors and not before.

What was made in one stream and is used in another must tell the allocator (`record_stream`), or its memory
would be given away while it is still read. From a CPU tensors leave through pinned memory and the host does
not wait for them; towards a CPU the host waits when they are received, since it is what computes there.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gpipe_bench.pipeline import devices

Sent = TypeVar("Sent", Tensor, Tensor | None)
_HERE: AbstractContextManager[None] = nullcontext()


class Mark(NamedTuple):
    """When a copy is done: an event in a stream of the device that `of` names."""

    event: torch.Event
    of: torch.device


class Way:
    """From one device to another; at least one of them is an accelerator."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        self._leaving = devices.new_stream(source) if devices.is_accelerator(source) else None
        self._landing = devices.new_stream(target) if devices.is_accelerator(target) else None

    def open(self) -> None:
        """The copies that follow come after what the source has been given to compute so far."""
        if self._leaving is not None:
            self._leaving.wait_stream(devices.current_stream(self._source))

    def send(self, tensor: Tensor) -> Tensor:
        """The tensor on the target, where it is when `close`'s mark is over."""
        if self._leaving is None:
            tensor = devices.pinned(tensor)
        with _in(self._leaving), _in(self._landing):
            copy = tensor.to(self._target, non_blocking=True)
        if self._leaving is not None:
            devices.record_stream(tensor, self._leaving)
        return copy

    def close(self) -> Mark:
        """Marks the end of the copies so far."""
        stream, device = self._landing, self._target
        if stream is None:
            stream, device = self._leaving, self._source
        assert stream is not None, "neither end is an accelerator"
        event = devices.event(device)
        event.record(stream)
        return Mark(event, device)


class Transfers:
    """Sends tensors to other devices and receives them there."""

    def __init__(self) -> None:
        self._ways: dict[tuple[torch.device, torch.device], Way] = {}

    def __reduce__(self) -> tuple[type[Transfers], tuple[()]]:
        """A copy of a pipeline opens streams of its own."""
        return Transfers, ()

    def send(
        self, tensors: Iterable[Sent], target: torch.device
    ) -> tuple[tuple[Sent, ...], tuple[Mark, ...]]:
        """The tensors on `target`, and when they are there; what is there already is passed on as it is."""
        sent: list[Any] = []
        ways: dict[torch.device, Way] = {}
        for tensor in tensors:
            if tensor is None or tensor.device == target:
                sent.append(tensor)
            elif devices.is_accelerator(tensor.device) or devices.is_accelerator(target):
                way = ways.get(tensor.device)
                if way is None:
                    ends = tensor.device, target
                    way = ways[tensor.device] = self._ways.get(ends) or self._ways.setdefault(
                        ends, Way(*ends)
                    )
                    way.open()
                sent.append(way.send(tensor))
            else:
                sent.append(tensor.to(target))
        return tuple(sent), tuple([way.close() for way in ways.values()])

    def receive(
        self, tensors: Iterable[Tensor | None], marks: tuple[Mark, ...], target: torch.device
    ) -> None:
        """What `target` is given to compute from here on finds the tensors complete."""
        if not marks:
            return
        if not devices.is_accelerator(target):
            for mark in marks:
                mark.event.synchronize()
            return
        stream = devices.current_stream(target)
        for mark in marks:
            stream.wait_event(mark.event)
        for tensor in tensors:
            if tensor is not None:
                devices.record_stream(tensor, stream)


def _in(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    return _HERE if stream is None else devices.using(stream)
