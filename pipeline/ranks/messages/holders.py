"""Whether anybody still uses the memory of a tensor.

A layer may pass its input or the gradient of its output on as it is, or a view of it; autograd may make a
gradient that arrives the `.grad` of a parameter; a hook may keep what it sees. All of them then live in the
memory that a message came into, for as long as they like, and nobody announces it. torch counts the tensors
of every storage, so memory is used again only when its owner's are the only ones left.
"""

from __future__ import annotations

from torch import Tensor
from torch._C import _storage_Use_Count as use_count


class Holders:
    """Who else has tensors in the memory of `tensor` than those that were there when this was made."""

    __slots__ = ("_address", "_own", "_storage")

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()  # counts as one, so it is kept
        self._address = self._storage._cdata
        self._own = use_count(self._address)

    @property
    def others(self) -> bool:
        """Whether there are any."""
        return use_count(self._address) > self._own
