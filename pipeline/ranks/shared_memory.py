"""Messages between two processes of one host through shared memory.

gloo serves every message with threads of its own, which on CPUs compete with the stages for their cores, and
the data travels through the kernel twice. Here the sender copies straight into the buffer that the receiver
has posted, and a few bytes on a local socket say so. No thread is involved; a process moves its messages
along whenever it posts or waits. A process that dies closes its socket, so that its neighbours know at once.

    receiver   empty --- post(tag, place) ----------------- wait ............ arrived
    sender                       '--> knows the place   copy, done(tag) ------'

Every buffer is memory of its own: made by the one that receives, anonymous (memfd), so that nothing is left
in the file system when a process dies, and handed over through the socket. It is used again, for a smaller
message too, when no tensor lives in it; of what is free when more is needed, no more stays than is in use.
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _storage_Use_Count as use_count

_RECORD = struct.Struct("<BBIIQ")  # kind, channel, tag, number of a buffer, its size
_NEW, _LET_GO, _POSTED, _DONE = 1, 2, 3, 4
_READ_BYTES = 227 * _RECORD.size

Key = tuple[int, int]  # channel and tag


class Memory:
    """Bytes that a neighbour maps and writes, in whole pages. They are free when no tensor lives in them.

    What a message brought may live on in an output, a `.grad` or a hook, as it is or as a view, and nobody
    announces it. torch counts the tensors of every storage, so memory is used again only when its owner's is
    the only one left.
    """

    __slots__ = ("address", "bytes", "is_used", "number", "own")

    def __init__(self, number: int, mapped: Tensor) -> None:
        self.number, self.bytes = number, mapped
        self.is_used = False  # by a message that has come, and perhaps still
        self.address = mapped.untyped_storage()._cdata
        self.own = use_count(self.address)  # free where there are no more


class Neighbour:
    """This process's end of the connection to one other process. Messages of one channel and tag arrive in
    order. Every method may raise `RuntimeError` when the other process is gone.
    """

    def __init__(self, link: socket.socket, timeout_s: float) -> None:
        link.setblocking(False)
        self._link, self._timeout_s = link, timeout_s
        self._others: list[Neighbour] = []
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._unread = self._unwritten = b""
        self._descriptors: deque[int] = deque()
        self._mine: dict[int, Memory] = {}  # to receive into, by its address
        self.buffer_bytes = 0  # of it all
        self._num_made = 0
        self._used: deque[Memory] = deque()  # of it, what messages have come into
        self._theirs: dict[int, Tensor] = {}  # memory of the other process, by its number
        self._views: dict[int, Tensor] = {}  # of it, as the latest message into it saw it
        self._posted: dict[Key, deque[int]] = {}  # where the other process wants its messages
        self._arrived: dict[Key, int] = {}
        self._pending: deque[tuple[Key, Tensor, Departure]] = deque()  # sent, but not posted over there yet

    def introduce(self, other: Neighbour) -> None:
        """Makes every wait for this neighbour move messages of the `other` one, too."""
        self._others.append(other)
        self._poll.register(other._link, select.POLLIN)

    # Receiving

    def empty(self, num_bytes: int) -> Tensor:
        """A buffer of bytes to receive into, in which no other tensor lives."""
        size, used = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, self._used
        for _ in range(len(used)):  # what was used longest ago is most likely free
            memory = used.popleft()
            if size <= len(memory.bytes) <= 2 * size and use_count(memory.address) <= memory.own:
                memory.is_used = False
                return memory.bytes[:num_bytes]
            used.append(memory)
        free = [memory for memory in used if use_count(memory.address) <= memory.own]
        most_bytes = 2 * (self.buffer_bytes + size - sum(len(each.bytes) for each in free))
        made = self._made(size)
        for each in free:
            if self.buffer_bytes > most_bytes:
                used.remove(each)
                self._let_go(each)
        return made.bytes[:num_bytes]

    def _made(self, size: int) -> Memory:
        descriptor = os.memfd_create("pipeline")
        try:
            os.posix_fallocate(descriptor, 0, size)  # a lack of memory is an error here, not a signal later
            memory = Memory(self._num_made, _map(descriptor, size))
            self.flush()
            handed = array.array("i", [descriptor])
            record = _RECORD.pack(_NEW, 0, 0, memory.number, size)
            self._write(record, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handed)])
        finally:
            os.close(descriptor)
        self._mine[memory.bytes.data_ptr()] = memory
        self._num_made += 1
        self.buffer_bytes += size
        return memory

    def _let_go(self, memory: Memory) -> None:
        self._unwritten += _RECORD.pack(_LET_GO, 0, 0, memory.number, 0)
        self.buffer_bytes -= len(memory.bytes)
        del self._mine[memory.bytes.data_ptr()]

    def post(self, channel: int, tag: int, buffer: Tensor) -> Arrival:
        """Lets the next message of this channel and tag come into a buffer made by `empty`, of which the
        other process learns at the next `flush`, `send` or wait.
        """
        memory = self._mine[buffer.data_ptr()]
        self._unwritten += _RECORD.pack(_POSTED, channel, tag, memory.number, 0)
        return Arrival(self, (channel, tag), memory)

    def flush(self) -> None:
        """Tells the other process what has been posted."""
        if self._unwritten:
            record, self._unwritten = self._unwritten, b""
            self._write(record)

    # Sending

    def send(self, channel: int, tag: int, tensor: Tensor) -> Departure:
        """Sends a contiguous tensor, which must not change until the departure has been waited for."""
        departure, key = Departure(self), (channel, tag)
        if self._pending or not self._posted.get(key):
            self._pending.append((key, tensor, departure))
            self.progress()
        else:  # whatever else has been written can be read later
            self._deliver(key, tensor, departure)
        return departure

    def _deliver(self, key: Key, tensor: Tensor, departure: Departure) -> None:
        number = self._posted[key].popleft()
        view = self._views.get(number)
        if view is None or view.dtype != tensor.dtype or len(view) != tensor.numel():
            view = self._views[number] = self._theirs[number][: tensor.nbytes].view(tensor.dtype)
        view.copy_(tensor.view(-1))
        records, self._unwritten = self._unwritten, b""
        self._write(records + _RECORD.pack(_DONE, key[0], key[1], 0, 0))
        departure.gone = True

    # Moving along

    def progress(self) -> None:
        """Reads what the other process has written, and delivers waiting messages. Never blocks."""
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
        deadline, has_polled = time.monotonic() + self._timeout_s, False
        while True:
            self.progress()
            for other in tuple(self._others):
                if has_polled or other._pending:
                    try:
                        other.progress()
                    except RuntimeError:  # its end is reported when something is wanted of it
                        self._others.remove(other)
                        self._poll.unregister(other._link)
            if condition():
                return
            left_s, has_polled = deadline - time.monotonic(), True
            if left_s <= 0 or not self._poll.poll(left_s * 1e3):
                raise RuntimeError(f"timed out after {self._timeout_s:g} s")

    def cut(self) -> None:
        """Ends the connection, also for a thread that waits for it just now; the other process notices."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection; the other process notices, even if a fork of this one has it too."""
        self.cut()
        self._link.close()

    def _read(self) -> bool:
        """Reads some records; returns False if there are no more."""
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
        for kind, channel, tag, number, size in _RECORD.iter_unpack(data[:whole]):
            if kind == _DONE:
                self._arrived[channel, tag] = self._arrived.get((channel, tag), 0) + 1
            elif kind == _POSTED:
                self._posted.setdefault((channel, tag), deque()).append(number)
            elif kind == _LET_GO:
                del self._theirs[number]
                self._views.pop(number, None)
            else:
                descriptor = self._descriptors.popleft()
                self._theirs[number] = _map(descriptor, size)
                os.close(descriptor)
        return more

    def _write(self, record: bytes, ancillary: list[Any] | None = None) -> None:
        while True:
            try:
                written = self._link.sendmsg([record], ancillary or [])
            except BlockingIOError:
                # Until the other process has read some of its many records; it may wait for the same here.
                poll = select.poll()
                poll.register(self._link, select.POLLIN | select.POLLOUT)
                found = poll.poll(self._timeout_s * 1e3)
                if not found:
                    raise RuntimeError(f"timed out after {self._timeout_s:g} s") from None
                if found[0][1] & ~select.POLLOUT:
                    self._read()
                continue
            except OSError as error:
                raise RuntimeError(f"connection closed: {error}") from error
            if written == len(record):
                return
            record, ancillary = record[written:], None


def _map(descriptor: int, size: int) -> Tensor:
    """The bytes of a file that processes share; unlike with `mmap`, no descriptor stays open."""
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", shared=True, nbytes=size)
    with torch.inference_mode(mode=False):  # what is evaluated first may be trained on later
        return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]


class Arrival(NamedTuple):
    """A message to come."""

    neighbour: Neighbour
    key: Key
    memory: Memory

    def wait(self) -> None:
        """Waits until the message is in its buffer."""
        arrived, key = self.neighbour._arrived, self.key
        if not arrived.get(key):
            self.neighbour.wait_until(lambda: bool(arrived.get(key)))
        arrived[key] -= 1
        if not self.memory.is_used:
            self.memory.is_used = True
            self.neighbour._used.append(self.memory)


@dataclass(slots=True, eq=False)
class Departure:
    """A message on its way."""

    neighbour: Neighbour
    gone: bool = False

    def wait(self) -> None:
        """Waits until the sent tensor may change."""
        if not self.gone:
            self.neighbour.wait_until(lambda: self.gone)
