"""A fake accelerator: CPU tensors that claim to be on a device, and streams that only record.

While a `FakeAccelerator` is open, it replaces `pipeline.devices`; every tensor reports the pretended device
of its memory; and each operation of torch, forward or backward, is recorded in a `History` as a kernel in the
current stream of its device, with what it reads and writes. Numbers are the CPU's, so that a step under the
fake also tests exactness.

Copies follow CUDA's rules: one between two devices runs in the current stream of the source, after what the
current stream of the target was given before, and that one waits for it (a barrier both ways); one from
pinned memory runs in the target's stream; one from other memory, and any that is not asked to be
asynchronous, holds up the host.

The history keeps a vector clock for each stream and for the host: two uses of a buffer, one of them a write,
that no chain of waits orders are a fault. Memory belongs to the stream that was current when it was
allocated, and its next allocation gets it at once when the last reference dies: a use in another stream must
be over by then, or the allocator told of it (`record_stream`). Beside the clocks runs a simulation of time:
an operation starts when its stream, and all that the stream waits for, is done.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gpipe_bench.pipeline import Action, devices
from gpipe_bench.pipeline.memory.tracker import tensors_in

TYPE = "privateuseone"
HOST = "host"
_WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class FakeAccelerator:
    """Pretended devices, each with streams, and the history of what they were given.

    Args:
        num_devices: number of devices.
        costs: durations of actions, in any unit, for the makespan; an action's first kernel takes it all.
    """

    def __init__(self, num_devices: int, costs: Callable[[Action], float] | None = None) -> None:
        self.devices = [torch.device(TYPE, index) for index in range(num_devices)]
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
        """Replaces `pipeline.devices` and follows torch's operations."""
        with pytest.MonkeyPatch.context() as patch, ExitStack() as modes:
            for name in vars(devices):
                if not name.startswith("_") and hasattr(self, name):
                    patch.setattr(devices, name, getattr(self, name))
            modes.enter_context(Kernels(self))
            modes.enter_context(Calls(self))
            yield self
            self._references.clear()  # later deaths do not matter

    @contextmanager
    def observe(self, action: Action) -> Iterator[None]:
        """For the engine: attributes the following kernels to the action."""
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
        """Puts the tensor's memory on the device, from now on."""
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
        """Records one operation of torch: inputs, those it wrote, and new tensors."""
        label = f"{func} of {self._where}"
        places = {self.device_of(tensor) for tensor in given if tensor.ndim}
        places |= {place for tensor in given if (place := self.device_of(tensor)).type == TYPE}
        pretended = sorted({place for place in places if place.type == TYPE}, key=str)
        reads, writes = self._known(given), self._known(written)
        if not pretended:
            if reads or writes:
                self.history.operation(HOST, label, reads=reads, writes=writes)
            return
        if len(places) > 1:
            self.history.faults.append(Fault(Kind.DEVICES, f"{label}: {', '.join(sorted(map(str, places)))}"))
        stream = self._streams[pretended[0]]
        new = {address_of(tensor): tensor for tensor in made}
        writes += [self._own(tensor, stream.device, stream.name) for tensor in new.values()]
        cost = 0.0
        if stream.name.endswith("compute"):
            cost, self._pending = self._pending, 0.0
        mark = self.history.operation(stream.name, label, reads=reads, writes=writes, cost=cost)
        if _WAITING_TAGS & set(func.tags):
            self.history.host_wait([mark], label)

    def _known(self, tensors: list[Tensor]) -> list[Buffer]:
        addresses = dict.fromkeys(address_of(tensor) for tensor in tensors)
        return [self._buffers[address][1] for address in addresses if address in self._buffers]

    def moved(self, tensor: Tensor, target: torch.device, *, non_blocking: bool) -> Tensor:
        """`.to(target)` between two devices, at least one pretended, as CUDA does it."""
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


# Calls of torch that the accelerator observes or answers

_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def copy_of(tensor: Tensor) -> Tensor:
    """A copy that is not recorded as a kernel."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return tensor.clone()


class Kernels(TorchDispatchMode):
    """Reports every operation that is no view to the accelerator."""

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
    """Answers questions about a tensor's device, and requests for a pretended one."""

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


class FakeEvent:
    """A mark in a fake stream; times are those of the simulation, a unit taken for a millisecond."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        self._accelerator = accelerator
        self.mark: Mark | None = None

    def record(self, stream: FakeStream) -> None:
        self.mark = self._accelerator.history.mark(stream.name)

    def synchronize(self) -> None:
        if self.mark is not None:
            self._accelerator.history.host_wait([self.mark], "Event.synchronize")

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.mark is not None, "elapsed_time of an event that was not recorded"
        assert end.mark is not None, "elapsed_time up to an event that was not recorded"
        return end.mark.time - self.mark.time


# The order of operations


class Kind(Enum):
    """The kind of a fault."""

    READ = "read without an edge from the write"
    WRITE = "written without an edge from an earlier use"
    FREED = "freed while another stream may use it"
    HOST_WAIT = "the host waits for a device within a step"
    PAGEABLE = "a copy from memory that is not pinned holds up the host within a step"
    DEVICES = "one kernel on tensors of several devices"


@dataclass(frozen=True)
class Fault:
    """A possible error in the order of operations, and where."""

    kind: Kind
    where: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.where}"


@dataclass(frozen=True)
class Mark:
    """A point in a stream: how much of each stream is done by then, and when that is."""

    clock: Mapping[str, int]
    time: float


@dataclass
class Buffer:
    """The memory of one allocation. `home` is the stream that it returns to."""

    name: str
    home: str
    writer: tuple[str, int, str] | None = None  # stream, position in it, label
    uses: dict[str, tuple[int, str]] = field(default_factory=dict)  # the latest in each stream
    recorded: set[str] = field(default_factory=set)  # streams reported to the allocator


class History:
    """Operations in the order of enqueueing, and the faults found."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.num_checked = 0  # uses of buffers compared with the clocks
        self._clocks: dict[str, dict[str, int]] = {HOST: {}}
        self._tails: dict[str, float] = {HOST: 0.0}
        self._in_step = False

    @property
    def makespan(self) -> float:
        """The end of the last stream, in the unit of the costs."""
        return max(self._tails.values())

    @property
    def host_time(self) -> float:
        """The end of all that the host has waited for."""
        return self._tails[HOST]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within it, the host must not wait."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def restart_time(self) -> None:
        """Counts time from zero again, as if all streams were done."""
        self._tails = dict.fromkeys(self._tails, 0.0)

    def operation(
        self,
        stream: str,
        label: str,
        *,
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
        cost: float = 0.0,
    ) -> Mark:
        """Enqueues an operation in the stream; returns the point where it is done."""
        clock = self._clock(stream)
        self._join(clock, self._clocks[HOST])
        here = clock[stream] = clock.get(stream, 0) + 1
        self._tails[stream] = max(self._tails[stream], self.host_time) + cost
        for buffer in reads:
            self.num_checked += 1
            writer = buffer.writer
            if writer is not None and clock.get(writer[0], 0) < writer[1]:
                self._fault(
                    Kind.READ, f"{label} in {stream} reads {buffer.name} of {writer[2]} in {writer[0]}"
                )
            buffer.uses[stream] = (here, label)
        for buffer in writes:
            self.num_checked += 1
            for other, (position, earlier) in buffer.uses.items():
                if clock.get(other, 0) < position:
                    self._fault(
                        Kind.WRITE, f"{label} in {stream} writes {buffer.name}, used by {earlier} in {other}"
                    )
            buffer.uses[stream] = (here, label)
            buffer.writer = (stream, here, label)
        return self.mark(stream)

    def mark(self, stream: str) -> Mark:
        """The current end of the stream: what an event records."""
        clock = self._clock(stream)
        return Mark(dict(clock), max(self._tails[stream], self.host_time))

    def wait(self, stream: str, mark: Mark) -> None:
        """Later operations of the stream come after the mark."""
        self._join(self._clock(stream), mark.clock)
        self._tails[stream] = max(self._tails[stream], mark.time)

    def host_wait(self, marks: Iterable[Mark], what: str, kind: Kind = Kind.HOST_WAIT) -> None:
        """The host waits for the marks."""
        if self._in_step:
            self._fault(kind, what)
        for mark in marks:
            self.wait(HOST, mark)

    def all_streams(self, prefix: str = "") -> list[Mark]:
        """The ends of all streams with this prefix: what a wait for a whole device waits for."""
        return [self.mark(stream) for stream in self._clocks if stream != HOST and stream.startswith(prefix)]

    def free(self, buffer: Buffer) -> None:
        """The last reference has died: the memory returns to its home."""
        if buffer.home == HOST:  # the allocator of pinned memory follows copies by itself
            return
        owner = self._clock(buffer.home)
        for stream, (position, label) in buffer.uses.items():
            over = owner.get(stream, 0) >= position or self._clocks[HOST].get(stream, 0) >= position
            if stream != buffer.home and not over and stream not in buffer.recorded:
                self._fault(Kind.FREED, f"{buffer.name} of {buffer.home}, used by {label} in {stream}")

    def _clock(self, stream: str) -> dict[str, int]:
        self._tails.setdefault(stream, 0.0)
        return self._clocks.setdefault(stream, {})

    @staticmethod
    def _join(clock: dict[str, int], other: Mapping[str, int]) -> None:
        for stream, position in other.items():
            if position > clock.get(stream, 0):
                clock[stream] = position

    def _fault(self, kind: Kind, where: str) -> None:
        self.faults.append(Fault(kind, where))
