"""What all ranks of a group find out together, outside of steps: small things, rarely.

That is whether everybody builds the same, what happened when, and sums of weights that ranks share. torch's
collectives wait as long as the user's process group says, half an hour by default, and cannot say for whom.
Here each rank waits for every other one by itself, so that an error names the one that is missing.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gpipe_bench.pipeline.clock import Clock, conditions
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.timeline import Event, Span, Timeline
from gpipe_bench.pipeline.ranks.host import machine_id
from gpipe_bench.pipeline.ranks.wire import Connection, Form

_LENGTH_TAG, _DATA_TAG, _NUMBER_TAG, _TENSOR_TAG = range(2**27, 2**27 + 4)
_ROUND_TRIPS = 10
T = TypeVar("T")


class Together:
    """One rank's part in what `size` ranks do at the same time. Every method may raise `PeerError`."""

    def __init__(self, connection: Connection, rank: int, size: int) -> None:
        # Without the neighbours' shared memory, whose messages move only while their sender waits for one.
        self._connection = connection.over_network()
        self.rank, self.size = rank, size

    def gather(self, mine: T) -> list[T]:
        """What every rank brings, by rank; all must call."""
        data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent = [
            (rank, self._connection.send(tensor, rank, tag))
            for rank in others
            for tensor, tag in ((length, _LENGTH_TAG), (data, _DATA_TAG))
        ]
        found = [mine] * self.size
        for rank in others:
            num_bytes = int(self._receive(Form((1,), (1,), torch.int64), rank, _LENGTH_TAG))
            received = self._receive(Form((num_bytes,), (1,), torch.uint8), rank, _DATA_TAG)
            found[rank] = pickle.loads(received.numpy().tobytes())
        for rank, work in sent:
            self._connection.wait(work, None, rank)
        return found

    def send_tensor(self, tensor: Tensor | None, target: int) -> None:
        """Sends a tensor, or that there is none, to a rank that calls `receive_tensor`."""
        self.send(int(tensor is not None), target)
        if tensor is not None and tensor.numel():
            self._send(tensor.detach().cpu().contiguous(), target, _TENSOR_TAG)

    def receive_tensor(self, like: Tensor, source: int) -> Tensor | None:
        """A tensor of the shape and dtype of `like`, on its device."""
        if not self.receive(source):
            return None
        form = Form.of(torch.empty(like.shape, dtype=like.dtype, device="meta"))
        received = self._receive(form, source, _TENSOR_TAG) if like.numel() else torch.empty(like.shape)
        return received.to(like.device, like.dtype)

    def send(self, number: int, target: int) -> None:
        """Sends a number to a rank that calls `receive`."""
        self._send(torch.tensor([number]), target, _NUMBER_TAG)

    def receive(self, source: int) -> int:
        return int(self._receive(Form((1,), (1,), torch.int64), source, _NUMBER_TAG))

    def _send(self, tensor: Tensor, target: int, tag: int) -> None:
        self._connection.wait(self._connection.send(tensor, target, tag), None, target)

    def _receive(self, form: Form, source: int, tag: int) -> Tensor:
        buffer = self._connection.buffer(form, source, torch.device("cpu"))
        self._connection.wait(self._connection.receive(buffer, source, tag), None, source)
        return buffer.tensor


def check_equal(found: Sequence[object], who: str = "rank") -> None:
    """`ValueError`, on every rank alike, if what the ranks (or what `who` says) build is not the same."""
    for rank, other in enumerate(found):
        if other != found[0]:
            raise ValueError(
                f"{who} {rank} builds another pipeline than {who} 0: its layers, cuts, schedule or seed "
                "differ; give all ranks the same arguments"
            )


def gather_timeline(together: Together, clock: Clock, device: torch.device, schedule: Schedule) -> Timeline:
    """The latest step of all ranks on one time axis, that of rank 0's host."""
    offset_ns = _clock_offset_ns(together)
    sums = clock.collectives(offset_ns)
    mine = (clock.events(offset_ns), f"{socket.gethostname()} {device}", conditions(), sums)
    ranks: list[tuple[tuple[Event, ...], str, dict[str, str], tuple[Span, ...]]] = together.gather(mine)
    return Timeline.of(
        [event for rank in ranks for event in rank[0]],
        schedule.num_stages,
        devices=[ranks[schedule.worker(stage)][1] for stage in range(schedule.num_stages)],
        conditions={name: "; ".join(dict.fromkeys(rank[2][name] for rank in ranks)) for name in ranks[0][2]},
        placement=schedule.placement,
        collectives=[span for rank in ranks for span in rank[3]],
    )


def _clock_offset_ns(together: Together) -> int:
    """What to add to this rank's clock to get rank 0's: the middle of the quickest of some round trips.

    Processes on one machine have one clock.
    """
    machines = together.gather(machine_id())
    quickest_ns, offset_ns = 1 << 62, 0
    for other, machine in enumerate(machines):
        if machine == machines[0] or together.rank not in (0, other):
            continue
        for _ in range(_ROUND_TRIPS):
            if together.rank == 0:
                together.receive(other)
                together.send(time.perf_counter_ns(), other)
                continue
            sent_ns = time.perf_counter_ns()
            together.send(sent_ns, 0)
            answer_ns = together.receive(0)
            back_ns = time.perf_counter_ns()
            if back_ns - sent_ns < quickest_ns:
                quickest_ns, offset_ns = back_ns - sent_ns, answer_ns - (sent_ns + back_ns) // 2
    return offset_ns
