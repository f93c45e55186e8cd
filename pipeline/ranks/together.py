"""What all ranks of a group exchange outside of steps: small things, rarely, from every rank to every other.

torch's collectives wait as long as the user's process group says, half an hour by default, and cannot say for
whom. Here each rank waits for every other one by itself, so that an error names the one that is missing.
"""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch
from torch import Tensor

from gpipe_bench.pipeline.ranks.wire import Connection, Form

_LENGTH_TAG, _DATA_TAG, _STAMP_TAG, _TENSOR_TAG = range(2**27, 2**27 + 4)
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
            data = tensor.detach().cpu().contiguous()
            self._connection.wait(self._connection.send(data, target, _TENSOR_TAG), None, target)

    def receive_tensor(self, like: Tensor, source: int) -> Tensor | None:
        """A tensor of the shape and dtype of `like`, on its device."""
        if not self.receive(source):
            return None
        form = Form.of(torch.empty(like.shape, dtype=like.dtype, device="meta"))
        received = self._receive(form, source, _TENSOR_TAG) if like.numel() else torch.empty(like.shape)
        return received.to(like.device, like.dtype)

    def send(self, number: int, target: int) -> None:
        """Sends a number to a rank that calls `receive`."""
        self._connection.wait(self._connection.send(torch.tensor([number]), target, _STAMP_TAG), None, target)

    def receive(self, source: int) -> int:
        return int(self._receive(Form((1,), (1,), torch.int64), source, _STAMP_TAG))

    def _receive(self, form: Form, source: int, tag: int) -> Tensor:
        buffer = self._connection.buffer(form, source, torch.device("cpu"))
        self._connection.wait(self._connection.receive(buffer, source, tag), None, source)
        return buffer.tensor
