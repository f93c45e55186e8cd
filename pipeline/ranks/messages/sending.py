"""The sending half of a connection: how many messages are on their way, and in which form they go.

A send that nobody waits for keeps its tensors alive, and one that is waited for at once makes its stage as
slow as the receiver. Between the two is a short queue, which belongs to the way and not to the transport, as
the receives posted ahead belong to `receiving.Receiver`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe_bench.pipeline.plan.edges import SMALL_BYTES, is_one_too_many
from gpipe_bench.pipeline.plan.schedule import Action
from gpipe_bench.pipeline.ranks.messages.agreement import Outline
from gpipe_bench.pipeline.ranks.messages.connection import Connection, Work, flat


class _Sending(NamedTuple):
    works: list[Work]
    tensors: list[Tensor]  # kept until they are gone
    action: Action | None  # what receives them

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Sender:
    """One direction of sending to rank `target`."""

    def __init__(self, connection: Connection, target: int) -> None:
        self._connection, self._target = connection, target
        self._queue: deque[_Sending] = deque()

    def send(
        self, tensors: list[Tensor], tag: int, action: Action | None = None, *, bounded: bool = False
    ) -> None:
        """Starts to send flat tensors, with `tag` and the following ones, to `action`, which an error will
        name; if `bounded`, waits for the oldest one where it is one too many.
        """
        target = self._target
        works = [
            self._connection.send(tensor, target, tag + i, action)
            for i, tensor in enumerate(tensors)
            if tensor.numel()
        ]
        queue = self._queue
        queue.append(_Sending(works, tensors, action))
        if bounded and is_one_too_many(len(queue), queue[0].num_bytes, SMALL_BYTES):
            self._wait(queue.popleft())

    def finish(self) -> None:
        """Waits until everything is gone."""
        while self._queue:
            self._wait(self._queue.popleft())

    def _wait(self, sending: _Sending) -> None:
        for work in sending.works:
            self._connection.wait(work, sending.action, self._target)


def conform(
    tensors: Sequence[Tensor | None], outline: Outline, device: torch.device, what: str
) -> list[Tensor]:
    """The tensors as the receiver expects them: of the agreed forms, flat."""
    if len(tensors) != len(outline.forms):
        raise changed(
            f"how many tensors make up the {what}, {len(outline.forms)} before and {len(tensors)} now,"
        )
    found = []
    for tensor, form in zip(tensors, outline.forms, strict=True):
        if form is None:
            if tensor is not None:
                raise changed(f"whether there is a {what}")
            tensor = torch.empty(0)
        elif tensor is None:
            tensor = form.empty(device).zero_()
        elif not form.fits(tensor):
            now = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise changed(
                f"the shape or dtype of the {what}, {form.shape} {form.dtype} before and {now} now,"
            )
        elif tensor.stride() != form.stride or tensor.is_conj() or tensor.is_neg():
            tensor = form.empty(device).copy_(tensor)  # its memory is not what it says
        found.append(flat(tensor))
    return found


def changed(what: str) -> RuntimeError:
    """The error for a message that is not what was agreed on."""
    return RuntimeError(
        f"{what} changed since the ranks agreed on what travels; call Pipeline.refresh() on every rank "
        "after changing the model, and give every kind of mini-batch shapes, keys or flags of its own"
    )
