"""What the ranks tell each other beside the tensors: the header of each step and outlines of messages.

The first rank alone sees the batch, and the shapes of what travels show in the first real micro-batch. Both
are read by the host before anything can be received, so they have a connection of their own, which is never
NCCL's, and queue behind no activation.
"""

from __future__ import annotations

import pickle
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe_bench.pipeline.plan.schedule import Action, Kind
from gpipe_bench.pipeline.ranks.messages.agreement import Outline
from gpipe_bench.pipeline.ranks.messages.connection import Buffer, Connection, Form, Work
from gpipe_bench.pipeline.ranks.messages.sending import Sender

_OUTLINE_TAG, _HEADER_TAG = 0, 2**28
_CPU = torch.device("cpu")


class Header(NamedTuple):
    """What every rank is told before a step."""

    number: int  # of the agreement
    examples: int  # in the mini-batch
    training: bool  # or forwards only


_HEADER = Form((len(Header._fields),), (1,), torch.int64)


class Control:
    """Headers pass from rank to rank towards the last one, outlines between any two."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self._connection, self._rank = connection, rank
        self._sender = Sender(connection)
        self._header_buffer: Buffer | None = None
        self._header_work: Work | None = None  # posted a step ahead

    def expect_header(self) -> None:
        """Posts the receive of the next step's header, from the rank before."""
        if self._header_buffer is None:
            self._header_buffer = self._connection.buffer(_HEADER, self._rank - 1, _CPU)
        self._header_work = self._connection.receive(self._header_buffer, self._rank - 1, _HEADER_TAG)
        self._connection.flush(self._rank - 1)

    def receive_header(self) -> Header:
        """The header that is expected; from then on the next one is."""
        assert self._header_buffer is not None
        assert self._header_work is not None
        self._connection.wait(self._header_work, None, self._rank - 1)
        number, examples, training = self._header_buffer.tensor.tolist()
        self.expect_header()
        return Header(number, examples, bool(training))

    def send_header(self, header: Header, *, bounded: bool) -> None:
        """To the next rank; `bounded` as in `Sender.send`."""
        target = Action(self._rank + 1, Kind.F, 0)
        self._sender.send([torch.tensor(header, dtype=_HEADER.dtype)], target, _HEADER_TAG, bounded=bounded)

    def send_outline(self, outline: Outline, target: Action, *, bounded: bool) -> None:
        """To the rank of `target`; `bounded` as in `Sender.send`."""
        data = torch.frombuffer(bytearray(pickle.dumps(outline)), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self._sender.send([length, data], target, _OUTLINE_TAG, bounded=bounded)

    def receive_outline(self, source: Action) -> Outline:
        """From the rank of `source`, which sends it before the message itself."""
        length = self._receive_now(Form((1,), (1,), torch.int64), source, _OUTLINE_TAG)
        data = self._receive_now(Form((int(length),), (1,), torch.uint8), source, _OUTLINE_TAG + 1)
        outline = pickle.loads(data.numpy().tobytes())
        assert isinstance(outline, Outline)
        return outline

    def finish(self) -> None:
        """Waits until everything that was sent is gone."""
        self._sender.finish()

    def _receive_now(self, form: Form, source: Action, tag: int) -> Tensor:
        buffer = self._connection.buffer(form, source.stage, _CPU)
        work = self._connection.receive(buffer, source.stage, tag, source)
        self._connection.wait(work, source, source.stage)
        data = buffer.tensor.clone()
        self._connection.give_back(buffer, source.stage)
        return data
