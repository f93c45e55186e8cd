"""What the ranks tell each other beside the tensors: the header of each step and outlines of messages.

The first rank alone sees the batch, and the shapes of what travels show in the first real micro-batch. Both
are read by the host before anything can be received, so they have a connection of their own, which is never
NCCL's, and queue behind no activation.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe_bench.pipeline.plan.schedule import Action
from gpipe_bench.pipeline.ranks.messages.agreement import Outline
from gpipe_bench.pipeline.ranks.messages.connection import Buffer, Connection, Form, Work
from gpipe_bench.pipeline.ranks.messages.sending import Sender, conform
from gpipe_bench.pipeline.stage.trees import Message

_HEADER_TAG = 2**28
_CPU = torch.device("cpu")


class Of(IntEnum):
    """What an outline is of: the tag of its length, which the outline itself follows."""

    ACTIVATION = 0
    GRADIENT = 2
    LOSS = 4
    SHARED = 6


class Header(NamedTuple):
    """What every rank is told before a step."""

    number: int  # of the agreement
    examples: int  # in the mini-batch
    num_microbatches: int
    training: bool  # or forwards only
    shared: int  # whether the layers share something, and whether it follows (`sharing`)


_HEADER = Form((len(Header._fields),), (1,), torch.int64)


class Control:
    """Headers pass from rank to rank along `chain`, outlines between any two."""

    def __init__(self, connection: Connection, rank: int, chain: Sequence[int]) -> None:
        self._connection = connection
        position = chain.index(rank)
        self._before = chain[position - 1] if position else None
        self._behind = chain[position + 1] if position + 1 < len(chain) else None
        self._senders: dict[int, Sender] = {}
        self._header_buffer: Buffer | None = None
        self._header_work: Work | None = None  # posted a step ahead
        if self._before is not None:
            self._expect_header(self._before)

    def _expect_header(self, source: int) -> None:
        """Posts the receive of the next step's header."""
        if self._header_buffer is None:
            self._header_buffer = self._connection.buffer(_HEADER, source, _CPU)
        self._header_work = self._connection.receive(self._header_buffer, source, _HEADER_TAG)
        self._connection.flush(source)

    def receive_header(self) -> Header:
        """The header that is expected; from then on the next one is."""
        assert self._before is not None
        assert self._header_buffer is not None
        assert self._header_work is not None
        self._connection.wait(self._header_work, None, self._before)
        number, examples, num_microbatches, training, shared = self._header_buffer.tensor.tolist()
        self._expect_header(self._before)
        return Header(number, examples, num_microbatches, bool(training), shared)

    def send_header(self, header: Header, *, bounded: bool) -> None:
        """To the next rank of the chain, if there is one; `bounded` as in `Sender.send`."""
        if self._behind is not None:
            data = torch.tensor(header, dtype=_HEADER.dtype)
            self._sender(self._behind).send([data], _HEADER_TAG, bounded=bounded)

    def send_shared(self, message: Message, *, bounded: bool) -> None:
        """What the layers share, on the CPU, to the next rank of the chain, if there is one."""
        target = self._behind
        if target is None:
            return
        outline = Outline(tuple([Form.of(tensor) for tensor in message.tensors]), message.structure)
        self.send_outline(outline, target, Of.SHARED, None, bounded=bounded)
        tensors = conform(message.tensors, outline, _CPU, "shared arguments")
        self._sender(target).send(tensors, Of.SHARED + 2, bounded=bounded)

    def receive_shared(self) -> Message:
        """What the rank before sends in that way."""
        assert self._before is not None
        outline = self.receive_outline(self._before, Of.SHARED, None)
        tensors = [
            self._receive_now(form, self._before, Of.SHARED + 2 + i, None)
            for i, form in enumerate(outline.forms)
            if form is not None
        ]
        return Message(tuple(tensors), outline.structure, (False,) * len(tensors))

    def send_outline(
        self, outline: Outline, target: int, of: int, action: Action | None, *, bounded: bool
    ) -> None:
        """To rank `target`, of the message for `action`; `of` is `Of` or another tag, which the next one
        follows, `bounded` as in `Sender.send`.
        """
        data = torch.frombuffer(bytearray(pickle.dumps(outline)), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self._sender(target).send([length, data], of, action, bounded=bounded)

    def receive_outline(self, source: int, of: int, action: Action | None) -> Outline:
        """From rank `source`, which sends it before the message of `action` itself."""
        length = self._receive_now(Form((1,), (1,), torch.int64), source, of, action)
        data = self._receive_now(Form((int(length),), (1,), torch.uint8), source, of + 1, action)
        outline = pickle.loads(data.numpy().tobytes())
        assert isinstance(outline, Outline)
        return outline

    def finish(self) -> None:
        """Waits until everything that was sent is gone."""
        for sender in self._senders.values():
            sender.finish()

    def _sender(self, target: int) -> Sender:
        if target not in self._senders:
            self._senders[target] = Sender(self._connection, target)
        return self._senders[target]

    def _receive_now(self, form: Form, source: int, tag: int, action: Action | None) -> Tensor:
        buffer = self._connection.buffer(form, source, _CPU)
        if form.num_bytes:
            self._connection.wait(self._connection.receive(buffer, source, tag, action), action, source)
        data = buffer.tensor.clone()
        self._connection.give_back(buffer, source)
        return data
