"""What each micro-batch counts for where replicas take shares of the batch, and what the loss of all is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from gpipe_bench.pipeline.mesh.collectives import Collectives


class GlobalShares(Sequence[float]):
    """The share of each micro-batch of this replica in the examples of all replicas.

    How many the others have is asked at once and waited for when somebody wants to know, which is behind the
    first forward.
    """

    def __init__(self, lengths: Sequence[int], collectives: Collectives) -> None:
        self._lengths, self._collectives = lengths, collectives
        self._examples = torch.tensor([sum(lengths)], dtype=torch.float64)
        self._work = collectives.sum(self._examples)
        self._shares: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...
    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        if self._shares is None:
            self._collectives.wait(self._work)
            examples = int(self._examples)
            self._shares = tuple([length / examples for length in self._lengths])
        return self._shares[index]


class MeanOfAll:
    """The loss over all replicas of one, `mine`, whose micro-batches counted for their shares of all."""

    def __init__(self, mine: Tensor, collectives: Collectives) -> None:
        self._loss, self._collectives = mine.clone(), collectives
        self._work = collectives.sum(self._loss)

    def wait(self) -> Tensor:
        self._collectives.wait(self._work)
        return self._loss
