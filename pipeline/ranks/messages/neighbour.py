"""Messages between two processes of one host through memory that both map.

gloo serves every message with threads of its own, which on CPUs compete with the stages for their cores:
several wake-ups and system calls a message, and the data travels through the kernel twice. Between processes
of one host the sender can instead copy straight into the buffer that the receiver has posted, and a few bytes
on a local socket say so. No thread is involved; a process moves its messages along whenever it sends, posts
or waits. A process that dies closes its socket, so that its neighbours know at once.

    receiver   empty --- post(tag, place) ----------------- wait ............ arrived
    sender                       '--> knows the place   copy, done(tag) ------'

The memory is anonymous (memfd), handed over through the socket, and gone with the processes.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.pipeline.ranks.messages.holders import Holders
from gpipe_bench.pipeline.ranks.messages.segment import Segment

_RECORD = struct.Struct("<BBIIQ")  # kind, channel, tag, segment, offset or size
_SEGMENT, _POSTED, _DONE = 1, 2, 3
_READ_BYTES = 227 * _RECORD.size
_ALIGNMENT = 64  # bytes; of every buffer, as torch's allocator has it
_SMALLEST_SEGMENT = 1 << 20

Key = tuple[int, int]  # channel and tag


class Neighbour:
    """This process's end of the connection to one other process.

    Messages of one channel and tag arrive in the order in which they are sent, in buffers in the order in
    which these are posted. Every method may raise `RuntimeError` when the other process is gone.
    """

    def __init__(self, link: socket.socket, timeout_s: float) -> None:
        link.setblocking(False)
        self._link, self._timeout_s = link, timeout_s
        self._others: list[Neighbour] = []
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._unread = self._unwritten = b""
        self._descriptors: deque[int] = deque()
        self._mine: list[Segment] = []  # memory to receive into
        self.buffer_bytes = 0  # of it, what buffers take; they are used again, and stay
        self._places: dict[int, tuple[int, int]] = {}  # address of a buffer -> segment, offset
        self._holders: dict[int, Holders] = {}  # address of a buffer -> whether tensors live in it
        self._unused: dict[int, list[Tensor]] = {}  # buffers that were given back, by their length
        self._theirs: list[mmap.mmap] = []  # memory of the other process
        self._views: dict[tuple[int, int, int, torch.dtype], Tensor] = {}
        self._posted: dict[Key, deque[tuple[int, int]]] = {}  # where the other process wants its messages
        self._arrived: dict[Key, int] = {}
        self._pending: deque[tuple[Key, Tensor, Departure]] = deque()  # sent, but not posted over there yet

    def introduce(self, other: Neighbour) -> None:
        """Whoever waits for this neighbour moves the messages of the `other` along as well."""
        self._others.append(other)
        self._poll.register(other._link, select.POLLIN)

    # Receiving

    def empty(self, num_bytes: int) -> Tensor:
        """A buffer of bytes to receive into, which no other tensor lives in."""
        unused = self._unused.get(num_bytes, [])
        for position, buffer in enumerate(unused):
            if not self._holders[buffer.data_ptr()].others:
                return unused.pop(position)
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if not self._mine or self._mine[-1].free < size:
            self._mine.append(Segment(max(size, _SMALLEST_SEGMENT)))
            self._announce(self._mine[-1])
        offset = self._mine[-1].take(size)
        self.buffer_bytes += size
        buffer = torch.frombuffer(self._mine[-1].memory, dtype=torch.uint8, count=num_bytes, offset=offset)
        self._places[buffer.data_ptr()] = (len(self._mine) - 1, offset)
        self._holders[buffer.data_ptr()] = Holders(buffer)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Allows a buffer of `empty` to be used again, once no other tensor lives in it."""
        self._unused.setdefault(len(buffer), []).append(buffer)

    def post(self, channel: int, tag: int, buffer: Tensor) -> Arrival:
        """Lets the next message of this channel and tag come into a buffer made by `empty`.

        The other process learns of it at the next `flush`, `send` or wait.
        """
        segment, offset = self._places[buffer.data_ptr()]
        self._unwritten += _RECORD.pack(_POSTED, channel, tag, segment, offset)
        return Arrival(self, (channel, tag))

    def flush(self) -> None:
        """Tells the other process what has been posted."""
        if self._unwritten:
            record, self._unwritten = self._unwritten, b""
            self._write(record)

    # Sending

    def send(self, channel: int, tag: int, tensor: Tensor) -> Departure:
        """Sends a contiguous tensor, which must not change until the departure has been waited for."""
        departure = Departure(self)
        self._pending.append(((channel, tag), tensor, departure))
        self.progress()
        return departure

    def _deliver(self, key: Key, tensor: Tensor, departure: Departure) -> None:
        segment, offset = self._posted[key].popleft()
        place = (segment, offset, tensor.numel(), tensor.dtype)
        view = self._views.get(place)
        if view is None:
            view = torch.frombuffer(
                self._theirs[segment], dtype=tensor.dtype, count=tensor.numel(), offset=offset
            )
            self._views[place] = view
        view.copy_(tensor.view(-1))
        self._write(_RECORD.pack(_DONE, key[0], key[1], 0, 0))
        departure.gone = True

    # Moving along

    def progress(self) -> None:
        """Takes in what the other process has written, and delivers what waited for it. Never blocks."""
        self.flush()
        while self._read():
            pass
        for _ in range(len(self._pending)):
            key, tensor, departure = self._pending.popleft()
            if self._posted.get(key):
                self._deliver(key, tensor, departure)
            else:
                self._pending.append((key, tensor, departure))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Moves messages along until `condition` holds; `RuntimeError` after the timeout."""
        self.progress()
        self._progress_others(only_pending=True)
        if condition():
            return
        deadline = time.monotonic() + self._timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._poll.poll(left_s * 1e3):
                raise RuntimeError(f"timed out after {self._timeout_s:g} s")
            self._progress_others()
            self.progress()
            if condition():
                return

    def _progress_others(self, *, only_pending: bool = False) -> None:
        for other in tuple(self._others):
            if only_pending and not other._pending:
                continue
            try:
                other.progress()
            except RuntimeError:  # its end is reported when something is wanted of it
                self._others.remove(other)
                self._poll.unregister(other._link)

    @property
    def is_busy(self) -> bool:
        """Whether something sent is still to be handed over."""
        return bool(self._pending)

    def cut(self) -> None:
        """Ends the connection, also for a thread that waits for it just now; the other process notices."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection; the other process notices."""
        self._link.close()

    def _read(self) -> bool:
        """Takes in some records; False if there is nothing more to read."""
        try:
            data, ancillary, _, _ = self._link.recvmsg(_READ_BYTES, socket.CMSG_LEN(16))
        except BlockingIOError:
            return False
        except OSError as error:
            raise RuntimeError(f"connection closed: {error}") from error
        if not data:
            raise RuntimeError("connection closed by peer")
        for _, _, packed in ancillary:
            self._descriptors.extend(array.array("i", packed))
        more = len(data) == _READ_BYTES or bool(ancillary)  # a read ends where descriptors are attached
        data = self._unread + data
        whole = len(data) - len(data) % _RECORD.size
        self._unread = data[whole:]
        for kind, channel, tag, segment, number in _RECORD.iter_unpack(data[:whole]):
            if kind == _DONE:
                self._arrived[channel, tag] = self._arrived.get((channel, tag), 0) + 1
            elif kind == _POSTED:
                self._posted.setdefault((channel, tag), deque()).append((segment, number))
            else:
                descriptor = self._descriptors.popleft()
                self._theirs.append(mmap.mmap(descriptor, number))
                os.close(descriptor)
        return more

    def _write(self, record: bytes, ancillary: list[Any] | None = None) -> None:
        while True:
            try:
                written = self._link.sendmsg([record], ancillary or [])
            except BlockingIOError:
                self._wait_writable()
                continue
            except OSError as error:
                raise RuntimeError(f"connection closed: {error}") from error
            if written == len(record):
                return
            record, ancillary = record[written:], None

    def _wait_writable(self) -> None:
        """Until the other process has read some of its many records; it may be waiting for the same of this
        one.
        """
        readable, writable, _ = select.select([self._link], [self._link], [], self._timeout_s)
        if readable:
            self._read()
        elif not writable:
            raise RuntimeError(f"timed out after {self._timeout_s:g} s")

    def _announce(self, segment: Segment) -> None:
        self.flush()
        record = _RECORD.pack(_SEGMENT, 0, 0, 0, segment.size)
        descriptors = array.array("i", [segment.descriptor])
        self._write(record, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        os.close(segment.descriptor)


def move_along(neighbours: Collection[Neighbour], until: int) -> None:
    """Moves the messages of all neighbours along until file descriptor `until` is readable.

    One that is gone is left out; its end is reported when something is wanted of it.
    """
    poll = select.poll()
    poll.register(until, select.POLLIN)
    present = {neighbour._link.fileno(): neighbour for neighbour in neighbours}
    for descriptor in present:
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, neighbour in tuple(present.items()):
            try:
                neighbour.progress()
            except RuntimeError:
                del present[descriptor]
                poll.unregister(descriptor)
        if any(descriptor == until for descriptor, _ in poll.poll()):
            return


class Arrival:
    """A message to come."""

    __slots__ = ("_key", "_neighbour")

    def __init__(self, neighbour: Neighbour, key: Key) -> None:
        self._neighbour, self._key = neighbour, key

    def wait(self) -> None:
        """Until the message is in its buffer."""
        arrived, key = self._neighbour._arrived, self._key
        if not arrived.get(key):
            self._neighbour.wait_until(lambda: bool(arrived.get(key)))
        arrived[key] -= 1


class Departure:
    """A message on its way."""

    __slots__ = ("_neighbour", "gone")

    def __init__(self, neighbour: Neighbour) -> None:
        self._neighbour, self.gone = neighbour, False

    def wait(self) -> None:
        """Until the tensor that was sent may change."""
        if not self.gone:
            self._neighbour.wait_until(lambda: self.gone)
