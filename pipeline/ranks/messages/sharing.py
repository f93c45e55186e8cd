"""What all layers share in a step, on its way from the first rank to all others.

A mask is often made once and given to every step. So what is shared is sent on only if it is not what was
sent last. On the CPU that is seen by the contents, which may have changed through numpy or `.data`, where no
version counts. On an accelerator a look at them would wait for it: there it must be the same tensors, of the
same versions. It follows the header from rank to rank.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from gpipe_bench.pipeline.ranks.messages.connection import Form
from gpipe_bench.pipeline.ranks.messages.control import Control
from gpipe_bench.pipeline.stage.trees import Message


class Shared(IntEnum):
    """What the header of a step says of it."""

    NOTHING = 0
    AS_BEFORE = 1
    FOLLOWS = 2


class Sharing:
    """One rank's part in passing on what is shared."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._sent: Message | None = None  # as it was then, and is elsewhere
        self._given: list[tuple[Tensor, int]] = []  # what was sent, and its versions

    def announce(self, message: Message | None) -> Shared:
        """What the first rank says in the header, of the tensors and the structure that it is given."""
        if message is None:
            return Shared.NOTHING
        given, sent = self._given, self._sent
        self._given = [
            (tensor, -1 if tensor.is_inference() else tensor._version) for tensor in message.tensors
        ]
        if (
            sent is not None
            and (sent.structure, len(sent.tensors)) == (message.structure, len(message.tensors))
            and all(map(_is_as_sent, self._given, given, sent.tensors))
        ):
            return Shared.AS_BEFORE
        return Shared.FOLLOWS

    def pass_on(self, what: Shared, message: Message | None, *, bounded: bool) -> Message | None:
        """What is shared in this step, which only the first rank brings; sends it to the next one."""
        if what is Shared.NOTHING:
            return None
        if what is Shared.FOLLOWS:
            if message is None:
                self._sent = self._control.receive_shared()
            else:
                # Copied, because the user may change a tensor while it is on its way.
                copies = tuple([torch.clone(tensor.cpu()) for tensor in message.tensors])
                self._sent = message._replace(tensors=copies)
            self._control.send_shared(self._sent, bounded=bounded)
        return message or self._sent


def _is_as_sent(now: tuple[Tensor, int], before: tuple[Tensor, int], sent: Tensor) -> bool:
    """Whether a tensor is what was sent, given what it was and which version, now and when it was."""
    tensor, version = now
    if tensor.device.type != "cpu":  # an inference tensor, with version -1, has none
        return tensor is before[0] and version == before[1] >= 0
    return Form.of(tensor) == Form.of(sent) and torch.equal(_bits(tensor), _bits(sent))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
