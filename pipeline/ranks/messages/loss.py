"""The loss on its way from the rank of the last stage to all others.

It leaves when the last micro-batch is forward, though backwards are still to come: in a V the last stage is
on the first rank, whose row is the longest, and nobody should wait for its end to learn a number. Between
processes of one host and over gloo its tag tells it from gradients; NCCL, which takes what comes for the
receive that was posted first, gets a connection for it alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpipe_bench.pipeline.ranks.messages.agreement import Agreement, Outline
from gpipe_bench.pipeline.ranks.messages.connection import Buffer, Connection, Form, Work
from gpipe_bench.pipeline.ranks.messages.control import Control, Of
from gpipe_bench.pipeline.ranks.messages.sending import Sender

_TAG = 2**29


class Loss:
    """The part of rank `rank` of `size` in telling the loss that rank `source` has."""

    def __init__(
        self,
        connection: Connection,
        control: Control,
        rank: int,
        size: int,
        source: int,
        device: torch.device,
    ) -> None:
        self._connection, self._control, self._device = connection, control, device
        self._source = None if rank == source else source
        listeners = [other for other in range(size) if other != source] if rank == source else []
        self._senders = {target: Sender(connection, target) for target in listeners}
        self._buffer: Buffer | None = None
        self._work: Work | None = None
        self._mine: Tensor | None = None

    def post(self, form: Form | None) -> None:
        """Posts the receive, once, if the form is known."""
        source = self._source
        if source is None or form is None or self._work is not None:
            return
        if self._buffer is None or not form.fits(self._buffer.tensor):
            self._buffer = self._connection.buffer(form, source, self._device)
        self._work = self._connection.receive(self._buffer, source, _TAG)
        self._connection.flush(source)

    def send(self, loss: Tensor, agreement: Agreement) -> None:
        """Starts to tell all others, if they know its form; if not, `settle` does when the step ends."""
        self._mine = loss
        if agreement.loss is not None:
            self._tell(loss)

    def settle(self, agreement: Agreement) -> Tensor:
        """The loss, at the end of a step, on every rank."""
        if self._source is None:
            loss, self._mine = self._mine, None
            assert loss is not None
            if agreement.loss is None:
                agreement.loss = Form.of(loss)
                for target in self._senders:
                    self._control.send_outline(
                        Outline((agreement.loss,)), target, Of.LOSS, None, bounded=False
                    )
                self._tell(loss)
            for sender in self._senders.values():
                sender.finish()
            return loss
        if agreement.loss is None:
            (agreement.loss,) = self._control.receive_outline(self._source, Of.LOSS, None).forms
        self.post(agreement.loss)
        assert self._work is not None
        assert self._buffer is not None
        self._connection.wait(self._work, None, self._source)
        self._work = None
        return self._buffer.tensor.clone()

    def _tell(self, loss: Tensor) -> None:
        for sender in self._senders.values():
            sender.send([loss], _TAG)
