"""The loss on its way from the rank of the last stage to all others.

Where the host waits for messages, the loss leaves when the last micro-batch is forward, though backwards are
still to come: in a V the last stage is on the first rank, whose row is the longest, and nobody should wait
for its end to learn a number. A tag tells it from gradients. On accelerators, which take what comes for the
receive that was posted first, it passes along when all else is done.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpipe_bench.pipeline.ranks.messages.agreement import Agreement, Outline
from gpipe_bench.pipeline.ranks.messages.connection import Buffer, Connection, Form, Work
from gpipe_bench.pipeline.ranks.messages.control import Control, Of
from gpipe_bench.pipeline.ranks.messages.sending import Sender, conform
from gpipe_bench.pipeline.ranks.routes import LossRoute

_TAG = 2**29


class Loss:
    """One rank's part in telling the loss. `early` allows to post and send it before the step ends, which an
    accelerator must not: the loss needs all actions of its rank.
    """

    def __init__(
        self,
        connection: Connection,
        control: Control,
        route: LossRoute,
        device: torch.device,
        *,
        early: bool = True,
    ) -> None:
        self._connection, self._control, self._device = connection, control, device
        self._early, self._source = early, route.source
        self._senders = {target: Sender(connection, target) for target in route.targets}
        self._buffer: Buffer | None = None
        self._work: Work | None = None
        self._mine: Tensor | None = None
        self._told = False

    def post(self, form: Form | None) -> None:
        """Posts the receive, once, if it may be early and the form is known."""
        if self._early and form is not None:
            self._post(form)

    def _post(self, form: Form) -> None:
        source = self._source
        if source is None or self._work is not None:
            return
        if self._buffer is None or not form.fits(self._buffer.tensor):
            if self._buffer is not None:
                self._connection.give_back(self._buffer, source)
            self._buffer = self._connection.buffer(form, source, self._device)
        self._work = self._connection.receive(self._buffer, source, _TAG)
        self._connection.flush(source)

    def send(self, loss: Tensor, agreement: Agreement) -> None:
        """The rank that has the loss starts to tell it, if it may be early and the others know its form; if
        not, `settle` does when the step ends.
        """
        if agreement.loss is not None:
            conform((loss,), Outline((agreement.loss,)), self._device, "loss")  # raises if it is another
        self._mine, self._told = loss, False
        if self._early and agreement.loss is not None:
            self._tell(loss)

    def settle(self, agreement: Agreement) -> Tensor:
        """The loss, at the end of a step, on every rank; passes it on where it was not told yet."""
        new = agreement.loss is None
        if self._source is None:
            loss, self._mine = self._mine, None
            assert loss is not None
            agreement.loss = Form.of(loss)
        else:
            self._told = False
            if agreement.loss is None:
                (agreement.loss,) = self._control.receive_outline(self._source, Of.LOSS, None).forms
                assert agreement.loss is not None
            self._post(agreement.loss)
            assert self._work is not None
            assert self._buffer is not None
            self._connection.wait(self._work, None, self._source)
            self._work = None
            loss = self._buffer.tensor.clone()
        if new:
            for target in self._senders:
                outline = Outline((agreement.loss,))
                self._control.send_outline(outline, target, Of.LOSS, None, bounded=False)
        if not self._told:
            self._tell(loss)
        for sender in self._senders.values():
            sender.finish()
        return loss

    def _tell(self, loss: Tensor) -> None:
        self._told = True
        for sender in self._senders.values():
            sender.send([loss], _TAG)
