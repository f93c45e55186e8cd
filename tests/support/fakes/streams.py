"""An accelerator that is none: CPU tensors that say they are on a device, and streams that only take notes.

While a `FakeAccelerator` is open, `pipeline.devices` is served by it, every tensor names the pretended device
that its memory belongs to, and each operation that torch carries out, forward or backward, is noted in a
`History` as a kernel in the current stream of its device, with what it reads and writes. The numbers are
those of the CPU, so that a step under the fake is also a test of exactness.

Copies follow CUDA's rules: one between two devices runs in the current stream of the source, after what the
current stream of the target was given before, and that one waits for it (a barrier both ways); one from
pinned memory runs in the target's stream; one from other memory, and any that is not asked to be
asynchronous, holds up the host.

Why not torch's own Python backend on `PrivateUse1` (`_setup_privateuseone_for_python_backend`): in 2.11 to
2.13 it has one device with one stream, whatever is asked for; of its device guard only the type can be
written in Python, so that no event and no switch of streams reaches the test; and every operation would need
a kernel registered for it. The device type's name is used here, the backend is not.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.calls import TYPE, Calls, Kernels, address_of, copy_of
from fakes.happens_before import HOST, Buffer, Fault, History, Kind
from fakes.queues import FakeEvent, FakeStream
from gpipe_bench.pipeline import Action, devices

_WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def fake_devices(number: int) -> list[torch.device]:
    """The first devices of the pretended accelerator."""
    return [torch.device(TYPE, index) for index in range(number)]


class FakeAccelerator:
    """Pretended devices, each with streams, and the history of what they were given.

    Args:
        num_devices: how many there are.
        costs: what the actions take, in any unit, for the makespan; the first kernel of an action bears it.
    """

    def __init__(self, num_devices: int, costs: Callable[[Action], float] | None = None) -> None:
        self.devices = fake_devices(num_devices)
        self.history = History()
        self._costs = costs
        self._pending = 0.0
        self._where = "outside of an action"
        self._current = 0  # index of the current device
        self._num_streams: defaultdict[torch.device, int] = defaultdict(int)
        self._streams = {device: self.new_stream(device) for device in self.devices}  # the current ones
        self._buffers: dict[int, tuple[torch.device, Buffer]] = {}  # by the address of the live storage
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._pinned: set[int] = set()
        self._generators = {device: torch.Generator() for device in self.devices}

    @contextmanager
    def opened(self) -> Iterator[FakeAccelerator]:
        """Serves `pipeline.devices` and follows what torch does."""
        with pytest.MonkeyPatch.context() as patch, ExitStack() as modes:
            for name in vars(devices):
                if not name.startswith("_") and hasattr(self, name):
                    patch.setattr(devices, name, getattr(self, name))
            modes.enter_context(Kernels(self))
            modes.enter_context(Calls(self))
            yield self
            self._references.clear()  # what lives on is nobody's concern any more

    @contextmanager
    def observe(self, action: Action) -> Iterator[None]:
        """For the engine: the kernels that follow are those of the action."""
        self._where = str(action)
        self._pending = self._costs(action) if self._costs is not None else 0.0
        try:
            yield
            assert not self._pending, f"{action} ran no kernel that could bear its cost"
        finally:
            self._where = "outside of an action"

    # What `pipeline.devices` offers

    def count(self, device_type: str) -> int:
        return len(self.devices) if device_type == TYPE else 1

    def current(self, device_type: str) -> torch.device:
        return self.devices[self._current] if device_type == TYPE else torch.device(device_type)

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before = self._current
        if device.type == TYPE:
            self._current = device.index
        try:
            yield
        finally:
            self._current = before

    def synchronize(self, device: torch.device) -> None:
        if device.type == TYPE:
            self.history.host_wait(self.history.all_streams(f"{device.index}:"), f"synchronize({device})")

    def new_stream(self, device: torch.device) -> FakeStream:
        number = self._num_streams[device]
        self._num_streams[device] += 1
        return FakeStream(self, device, number)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._streams[device]

    @contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        before, self._streams[stream.device] = self._streams[stream.device], stream
        try:
            with self.on(stream.device):
                yield
        finally:
            self._streams[stream.device] = before

    def event(self, device: torch.device, *, timing: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        entry = self._buffers.get(address_of(tensor))
        if entry is not None:
            entry[1].recorded.add(stream.name)

    def pinned(self, tensor: Tensor) -> Tensor:
        if address_of(tensor) in self._pinned:
            return tensor
        copy = copy_of(tensor)
        self._pinned.add(address_of(copy))
        self._own(copy, torch.device("cpu"), HOST)
        return copy

    def generator(self, device: torch.device) -> torch.Generator:
        return self._generators[device] if device.type == TYPE else torch.default_generator

    # Tensors

    def device_of(self, tensor: Tensor) -> torch.device:
        """The device that the tensor's memory pretends to be on."""
        entry = self._buffers.get(address_of(tensor))
        return tensor.device if entry is None else entry[0]

    def _own(self, tensor: Tensor, device: torch.device, home: str) -> Buffer:
        """The tensor's memory, from here on on the device."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        buffer = Buffer(f"{tuple(tensor.shape)} made in {self._where}", home)
        self._buffers[address] = (device, buffer)

        def died(_: object) -> None:
            self._buffers.pop(address, None)
            self._pinned.discard(address)
            self._references.pop(address, None)
            self.history.free(buffer)

        self._references[address] = weakref.ref(storage, died)
        return buffer

    def ran(self, func: Any, given: list[Tensor], written: list[Tensor], made: list[Tensor]) -> None:
        """Notes one operation of torch: of what it was given it has written some, and made others."""
        label = f"{func} of {self._where}"
        places = {self.device_of(tensor) for tensor in given if tensor.ndim or self._is_on_device(tensor)}
        pretended = sorted({place for place in places if place.type == TYPE}, key=str)
        if not pretended:
            self._ran_on_host(label, given, written)
            return
        if len(places) > 1:
            self.history.faults.append(Fault(Kind.DEVICES, f"{label}: {', '.join(sorted(map(str, places)))}"))
        stream = self._streams[pretended[0]]
        new = {address_of(tensor): tensor for tensor in made}
        writes = self._known(written) + [self._own(t, stream.device, stream.name) for t in new.values()]
        cost = 0.0
        if stream.name.endswith("compute"):
            cost, self._pending = self._pending, 0.0
        mark = self.history.operation(stream.name, label, reads=self._known(given), writes=writes, cost=cost)
        if _WAITING_TAGS & set(func.tags):
            self.history.host_wait([mark], label)

    def _ran_on_host(self, label: str, given: list[Tensor], written: list[Tensor]) -> None:
        reads, writes = self._known(given), self._known(written)
        if reads or writes:
            self.history.operation(HOST, label, reads=reads, writes=writes)

    def _is_on_device(self, tensor: Tensor) -> bool:
        return self.device_of(tensor).type == TYPE

    def _known(self, tensors: list[Tensor]) -> list[Buffer]:
        addresses = dict.fromkeys(address_of(tensor) for tensor in tensors)
        return [self._buffers[address][1] for address in addresses if address in self._buffers]

    def moved(self, tensor: Tensor, target: torch.device, *, non_blocking: bool) -> Tensor:
        """`.to(target)` between two places, at least one of them pretended, as CUDA does it."""
        source = self.device_of(tensor)
        label = f"copy from {source} to {target} of {self._where}"
        copy = copy_of(tensor)
        kind, history = Kind.HOST_WAIT, self.history
        if source.type == TYPE and target.type == TYPE:
            runs, lands = self._streams[source], self._streams[target]
            history.wait(runs.name, history.mark(lands.name))
            home = lands.name
        else:
            runs = self._streams[source if source.type == TYPE else target]
            home = runs.name if target.type == TYPE else HOST
        written = self._own(copy, target, home)
        mark = history.operation(runs.name, label, reads=self._known([tensor]), writes=[written])
        if home not in (runs.name, HOST):
            history.wait(home, mark)
        if source.type != TYPE and address_of(tensor) not in self._pinned:
            non_blocking, kind = False, Kind.PAGEABLE
        if source.type != target.type and not non_blocking:
            history.host_wait([mark], label, kind)
        return copy

    def made_on(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A new tensor, made by a kernel on the device."""
        stream = self._streams[device]
        buffer = self._own(tensor, device, stream.name)
        self.history.operation(stream.name, f"fill of {self._where}", writes=[buffer])
        return tensor
