"""Streams and events of a pretended accelerator (`streams`), which only take notes in its history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fakes.happens_before import Mark

if TYPE_CHECKING:
    from fakes.streams import FakeAccelerator


class FakeStream:
    """A queue of a pretended device."""

    def __init__(self, accelerator: FakeAccelerator, device: torch.device, number: int) -> None:
        self._accelerator, self.device = accelerator, device
        self.name = f"{device.index}:{number}" if number else f"{device.index}:compute"

    def wait_event(self, event: FakeEvent) -> None:
        if event.mark is not None:
            self._accelerator.history.wait(self.name, event.mark)

    def wait_stream(self, stream: FakeStream) -> None:
        self._accelerator.history.wait(self.name, self._accelerator.history.mark(stream.name))

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = FakeEvent(self._accelerator) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        history = self._accelerator.history
        history.host_wait([history.mark(self.name)], f"Stream.synchronize of {self.name}")


class FakeEvent:
    """A mark in a fake stream; times are those of the simulation, a unit taken for a millisecond."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        self._accelerator = accelerator
        self.mark: Mark | None = None

    def record(self, stream: FakeStream) -> None:
        self.mark = self._accelerator.history.mark(stream.name)

    def wait(self, stream: FakeStream) -> None:
        stream.wait_event(self)

    def synchronize(self) -> None:
        if self.mark is not None:
            self._accelerator.history.host_wait([self.mark], "Event.synchronize")

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.mark is not None, "elapsed_time of an event that was not recorded"
        assert end.mark is not None, "elapsed_time up to an event that was not recorded"
        return end.mark.time - self.mark.time
