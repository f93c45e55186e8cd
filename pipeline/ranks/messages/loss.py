"""The loss on its way from the rank of the last stage to all others, one after another.

Where it shares a connection with gradients its receive is posted behind theirs, because what comes is taken
for the receive that was posted first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpipe_bench.pipeline.ranks.messages.agreement import Agreement, Outline
from gpipe_bench.pipeline.ranks.messages.connection import Buffer, Connection, Form, Work
from gpipe_bench.pipeline.ranks.messages.control import Control, Of
from gpipe_bench.pipeline.ranks.messages.receiving import Receiver
from gpipe_bench.pipeline.ranks.messages.sending import Sender

_TAG = 2**29


class Loss:
    """One rank's part in passing the loss along `chain`; the rank that has it comes first.

    `behind` are the receivers whose receives are posted before that of the loss. `early` allows to post it
    before the step ends, which an accelerator must not: the loss needs all actions of its rank.
    """

    def __init__(
        self,
        connection: Connection,
        control: Control,
        rank: int,
        chain: Sequence[int],
        device: torch.device,
        behind: Sequence[Receiver],
        *,
        early: bool = True,
    ) -> None:
        self._connection, self._control, self._device = connection, control, device
        self._early = early
        position = chain.index(rank)
        self._source = chain[position - 1] if position else None
        self._target = chain[position + 1] if position + 1 < len(chain) else None
        self._sender = None if self._target is None else Sender(connection, self._target)
        self._behind = behind
        self._buffer: Buffer | None = None
        self._work: Work | None = None

    def post(self, form: Form | None) -> None:
        """Posts the receive, once, if it may be early, the form is known and those before it are posted."""
        if self._early:
            self._post(form)

    def _post(self, form: Form | None) -> None:
        source = self._source
        if source is None or form is None or self._work is not None:
            return
        if any(receiver.num_unposted for receiver in self._behind):
            return
        if self._buffer is None or not form.fits(self._buffer.tensor):
            self._buffer = self._connection.buffer(form, source, self._device)
        self._work = self._connection.receive(self._buffer, source, _TAG)
        self._connection.flush(source)

    def pass_on(self, loss: Tensor | None, agreement: Agreement, *, bounded: bool) -> Tensor:
        """The loss, which only the first rank of the chain brings; sends it to the next one."""
        new = agreement.loss is None
        if loss is None:
            assert self._source is not None
            if agreement.loss is None:
                (agreement.loss,) = self._control.receive_outline(self._source, Of.LOSS, None).forms
            self._post(agreement.loss)
            assert self._work is not None
            assert self._buffer is not None
            self._connection.wait(self._work, None, self._source)
            self._work = None
            loss = self._buffer.tensor.clone()
        else:
            agreement.loss = Form.of(loss)
        if self._sender is not None and self._target is not None:
            if new:
                outline = Outline((agreement.loss,))
                self._control.send_outline(outline, self._target, Of.LOSS, None, bounded=bounded)
            self._sender.send([loss], _TAG, bounded=bounded)
        return loss

    def finish(self) -> None:
        """Waits until the loss is gone."""
        if self._sender is not None:
            self._sender.finish()
