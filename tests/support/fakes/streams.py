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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fakes.happens_before import HOST, Buffer, Fault, History, Kind, Mark
from gpipe_bench.pipeline import Action, devices
from gpipe_bench.pipeline.memory.tracker import tensors_in

TYPE = "privateuseone"
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


# What torch is asked for, told to the accelerator and answered by it

_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def copy_of(tensor: Tensor) -> Tensor:
    """A copy that is no kernel of anybody's."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return tensor.clone()


class Kernels(TorchDispatchMode):
    """Tells the accelerator of every operation that is no view."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            given = tensors_in((args, kwargs))
            result = func(*args, **kwargs)
            if not given:
                return result
            known = {address_of(tensor) for tensor in given}
            made = [tensor for tensor in tensors_in((result,)) if address_of(tensor) not in known]
            written = []
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[position] if position < len(args) else kwargs.get(argument.name)
                    written += tensors_in((value,))
            if made or written or not tensors_in((result,)):  # the last gives a number, as `.item()` does
                self._accelerator.ran(func, given, written, made)
            return result


class Calls(TorchFunctionMode):
    """What a tensor says of its device, and what is asked for on a pretended one."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE_OF:
            return self._accelerator.device_of(args[0])
        if func is torch.Tensor.to or func is torch.Tensor.cpu:
            return self._to(func, args, kwargs)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == TYPE:
            device = torch.device(kwargs["device"])
            device = self._accelerator.current(TYPE) if device.index is None else device
            made = func(*args, **{**kwargs, "device": "cpu"})
            return self._accelerator.made_on(made, device)
        return func(*args, **kwargs)

    def _to(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        tensor, *options = args
        kwargs = dict(kwargs)
        copied = kwargs.pop("copy", False)
        source = self._accelerator.device_of(tensor)
        device, dtype, non_blocking, layout = torch.device("cpu"), None, False, None
        if func is torch.Tensor.to:
            if options and isinstance(options[0], Tensor):
                options = [self._accelerator.device_of(options[0]), options[0].dtype, *options[1:]]
            device, dtype, non_blocking, layout = torch._C._nn._parse_to(*options, **kwargs)
            device = source if device is None else device
        if device.type == TYPE and device.index is None:
            device = self._accelerator.current(TYPE)
        if device != source:
            tensor = self._accelerator.moved(tensor, device, non_blocking=non_blocking)
            copied = False
        wanted = {"dtype": dtype, "memory_format": layout}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        return tensor.to(**wanted, copy=copied) if wanted or copied else tensor


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
