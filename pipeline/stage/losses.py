"""The losses of a step's micro-batches, and what each of them counts for.

A micro-batch's share of the examples and the scale of gradients enter where its backward begins and nowhere
else, so that no pass over the gradients follows, micro-batches may be uneven and steps add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


class Losses:
    """What the last stage knows of the losses of one step."""

    def __init__(self) -> None:
        self._weighted: list[Tensor] = []
        self._shares: Sequence[float] = ()
        self._scaler: torch.amp.GradScaler | None = None
        self._seeds: dict[tuple[float, torch.dtype], Tensor] = {}

    def begin(self, shares: Sequence[float], scaler: torch.amp.GradScaler | None) -> None:
        """A step with each micro-batch's share of the examples."""
        self._shares, self._scaler, self._weighted = shares, scaler, []

    def release(self) -> None:
        """Ends a step; its loss can still be asked for."""
        self._scaler = None

    def forget(self) -> None:
        """Drops the losses too."""
        self._weighted = []

    def add(self, m: int, loss: Tensor) -> None:
        """The loss of a micro-batch, a mean over its examples."""
        self._weighted.append(loss.detach() * self._shares[m])

    def mean(self) -> Tensor | None:
        """The mean loss of the mini-batch, once those of all micro-batches are there."""
        if not self._weighted or len(self._weighted) < len(self._shares):
            return None
        return self._weighted[0] if len(self._weighted) == 1 else torch.stack(self._weighted).sum()

    def gradient(self, m: int, edge: GradientEdge) -> Tensor:
        """Of a micro-batch's loss, which enters the graph by `edge`."""
        metadata = edge.node._input_metadata[edge.output_nr]
        key = (self._shares[m], metadata.dtype)
        gradient = self._seeds.get(key)
        if gradient is None or gradient.shape != tuple(metadata.shape):
            gradient = torch.full(tuple(metadata.shape), key[0], dtype=metadata.dtype, device=metadata.device)
            self._seeds[key] = gradient
        if self._scaler is not None:
            gradient = self._scaler.scale(gradient).to(metadata.dtype)
        return gradient
