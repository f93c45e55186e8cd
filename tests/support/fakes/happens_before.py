"""What happened before what on streams that run side by side, and which uses of memory that leaves to chance.

On a GPU nothing fails when a wait is missing: the numbers are right until the day when two streams meet in
the other order. So a `History` is told what is enqueued where, which buffers it reads and writes, which event
is recorded and awaited, and keeps a vector clock for each stream and for the host. Two uses of a buffer, one
of them a write, that no chain of waits orders are a fault, whatever happened to happen.

Memory has rules of its own. It belongs to the stream that was current when it was allocated, and when its
last reference dies the next allocation in that stream gets it at once; a use in any other stream must be over
by then, by a chain of waits or because the allocator was told of it (`record_stream`).

The host, too, is a participant: what it enqueues comes after what it has waited for, and within a step it
should wait for nothing, since the devices run dry while it does.

Beside the clocks runs a simulation of time: a stream's tail is when it has done what it was given, an
operation starts when its stream, and all that the stream waits for, is done. Costs come from the caller; what
has none takes no time, and enqueuing takes none either, so that the longest tail is the makespan that a
schedule can reach at best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

HOST = "host"


class Kind(Enum):
    """What a fault is."""

    READ = "read without an edge from the write"
    WRITE = "written without an edge from an earlier use"
    FREED = "freed while another stream may use it"
    HOST_WAIT = "the host waits for a device within a step"
    PAGEABLE = "a copy from memory that is not pinned holds up the host within a step"
    DEVICES = "one kernel on tensors of several devices"


@dataclass(frozen=True)
class Fault:
    """One thing that may go wrong, and where."""

    kind: Kind
    where: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.where}"


@dataclass(frozen=True)
class Mark:
    """A point in a stream: how much of each stream is over by then, and when that is."""

    clock: Mapping[str, int]
    time: float


@dataclass
class Buffer:
    """Memory that one allocation gave. `home` is the stream that it goes back to."""

    name: str
    home: str
    writer: tuple[str, int, str] | None = None  # stream, position in it, label
    uses: dict[str, tuple[int, str]] = field(default_factory=dict)  # the latest in each stream
    recorded: set[str] = field(default_factory=set)  # streams that the allocator was told of


class History:
    """Operations in the order in which they were enqueued, and the faults found among them."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.num_checked = 0  # uses of buffers that were held against the clocks
        self._clocks: dict[str, dict[str, int]] = {HOST: {}}
        self._tails: dict[str, float] = {HOST: 0.0}
        self._in_step = False

    @property
    def makespan(self) -> float:
        """When the last stream is done, in the unit of the costs."""
        return max(self._tails.values())

    @property
    def host_time(self) -> float:
        """When what the host has waited for so far was done."""
        return self._tails[HOST]

    @contextmanager
    def step(self) -> Iterator[None]:
        """While this is open the host must not wait."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def restart_time(self) -> None:
        """Counts time from zero again, as if all streams were done."""
        self._tails = dict.fromkeys(self._tails, 0.0)

    # What is enqueued

    def operation(
        self,
        stream: str,
        label: str,
        *,
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
        cost: float = 0.0,
    ) -> Mark:
        """Gives the stream something to do; returns the point where it is done."""
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
        """The point that the stream has been filled to: what an event records."""
        clock = self._clock(stream)
        return Mark(dict(clock), max(self._tails[stream], self.host_time))

    def wait(self, stream: str, mark: Mark) -> None:
        """What the stream is given from here on comes after the mark."""
        self._join(self._clock(stream), mark.clock)
        self._tails[stream] = max(self._tails[stream], mark.time)

    # The host

    def host_wait(self, marks: Iterable[Mark], what: str, kind: Kind = Kind.HOST_WAIT) -> None:
        """The host goes on when the marks are over."""
        if self._in_step:
            self._fault(kind, what)
        for mark in marks:
            self.wait(HOST, mark)

    def all_streams(self, prefix: str = "") -> list[Mark]:
        """The ends of all streams whose names begin so: what a wait for a whole device waits for."""
        return [self.mark(stream) for stream in self._clocks if stream != HOST and stream.startswith(prefix)]

    # Memory

    def free(self, buffer: Buffer) -> None:
        """The last reference has died: the memory is its home's again."""
        if buffer.home == HOST:  # the allocator of pinned memory follows copies by itself
            return
        owner = self._clock(buffer.home)
        for stream, (position, label) in buffer.uses.items():
            over = owner.get(stream, 0) >= position or self._clocks[HOST].get(stream, 0) >= position
            if stream != buffer.home and not over and stream not in buffer.recorded:
                self._fault(Kind.FREED, f"{buffer.name} of {buffer.home}, used by {label} in {stream}")

    # Details

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
