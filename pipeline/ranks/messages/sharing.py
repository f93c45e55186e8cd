"""What all layers share in a step, on its way from the first rank to all others.

A mask is often made once and given to every step. So what is shared is sent on only if it is not what was
sent last: the same tensors, unchanged since, in the same structure. It follows the header from rank to rank.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from gpipe_bench.pipeline.ranks.messages.control import Control
from gpipe_bench.pipeline.stage.microbatch import Message


class Shared(IntEnum):
    """What the header of a step says of it."""

    NOTHING = 0
    AS_BEFORE = 1
    FOLLOWS = 2


class Sharing:
    """One rank's part in passing on what is shared."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._latest: Message | None = None
        self._versions: tuple[int, ...] = ()

    def announce(self, message: Message | None) -> Shared:
        """What the first rank says in the header, of the tensors and the structure that it is given."""
        if message is None:
            return Shared.NOTHING
        latest, self._latest = self._latest, message
        if any(tensor.is_inference() for tensor in message.tensors):  # they have no versions
            self._latest = None
            return Shared.FOLLOWS
        before, self._versions = self._versions, tuple([tensor._version for tensor in message.tensors])
        if (
            latest is not None
            and len(latest.tensors) == len(message.tensors)
            and all(a is b for a, b in zip(latest.tensors, message.tensors, strict=True))
            and (latest.structure, before) == (message.structure, self._versions)
        ):
            return Shared.AS_BEFORE
        return Shared.FOLLOWS

    def pass_on(self, what: Shared, message: Message | None, *, bounded: bool) -> Message | None:
        """What is shared in this step, which only the first rank brings; sends it to the next one."""
        if what is Shared.NOTHING:
            return None
        if message is None and what is Shared.AS_BEFORE:
            assert self._latest is not None
            return self._latest
        if message is None:
            message = self._latest = self._control.receive_shared()
        if what is Shared.FOLLOWS:
            # Copied, because the user may change a tensor while it is on its way.
            tensors: list[Tensor] = [torch.clone(tensor.cpu()) for tensor in message.tensors]
            self._control.send_shared(message._replace(tensors=tuple(tensors)), bounded=bounded)
        return message
