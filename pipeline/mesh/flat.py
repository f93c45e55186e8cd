"""Tensors end to end in one piece of memory, so that a collective moves all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe_bench.pipeline.ranks.messages.connection import Form


class Flat(NamedTuple):
    """Room for tensors.

    Args:
        memory: all of it
        views: the room of each tensor
        rest: what is behind them
    """

    memory: Tensor
    views: list[Tensor]
    rest: Tensor

    @property
    def numbers(self) -> Tensor:
        """All of it as real numbers, which is what collectives add."""
        return torch.view_as_real(self.memory) if self.memory.is_complex() else self.memory


class Room:
    """What tensors of one dtype on one device need to stand end to end, each laid out in memory as it is.

    Args:
        like: what the tensors look like, at least one.
        rest: numbers behind them.
    """

    def __init__(self, like: Sequence[Tensor], rest: int = 0) -> None:
        self._forms = [Form.of(tensor) for tensor in like]
        self._dtype, self._device = like[0].dtype, like[0].device
        self._count, self._rest = sum(tensor.numel() for tensor in like), rest

    def empty(self) -> Flat:
        """New memory for them."""
        return self._divide(torch.empty(self._count + self._rest, dtype=self._dtype, device=self._device))

    def of(self, numbers: Tensor) -> Flat:
        """Memory that has been filled elsewhere, as `Flat.numbers`."""
        return self._divide(torch.view_as_complex(numbers) if self._dtype.is_complex else numbers)

    def _divide(self, memory: Tensor) -> Flat:
        views, start = [], 0
        for form in self._forms:
            views.append(memory.as_strided(form.shape, form.stride, start))
            start += form.num_bytes // form.dtype.itemsize
        return Flat(memory, views, memory[self._count :])
