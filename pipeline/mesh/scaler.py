"""Gradient scaling with one decision for all ranks.

torch's `GradScaler` skips an optimizer's step, and lowers its scale, where it finds an infinite gradient
among the parameters that it sees. Over processes each rank sees its own, so that some would take a step which
the others skip, with another scale from then on. Here what a rank finds is told to all others before any
decides.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Gathering(Protocol):
    """What a scaler needs of its pipeline."""

    @property
    def group(self) -> object:
        """The processes that have a part of it; None where there is but this one."""

    def gather(self, mine: bool) -> list[bool]:
        """What every rank brings."""


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for the gradients of a pipeline; made by `Pipeline.scaler`.

    Over processes `step` and `unscale_` wait for all ranks, which must call them alike; a rank that does not
    come ends the pipeline as in a step. `state_dict` is the same on every rank.
    """

    def __init__(self, pipeline: Gathering, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        self._pipeline = pipeline

    def step(self, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """As torch's; None for a rank that has nothing to train, which takes part in the decision."""
        if optimizer is not None:
            return super().step(optimizer, *args, **kwargs)
        if self._enabled and not self._per_optimizer_states[id(None)]["found_inf_per_device"]:
            self.unscale_(None)
        return None

    def unscale_(self, optimizer: torch.optim.Optimizer | None) -> None:
        """As torch's; None as in `step`."""
        super().unscale_(optimizer)  # type: ignore[arg-type]

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer | None,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """What every way to a decision goes through: whether an infinite gradient was found, by device."""
        found: dict[torch.device, Tensor] = {}
        if optimizer is not None:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = found or {found_inf.device: found_inf}  # of a rank without gradients
        if self._pipeline.group is not None:
            anywhere = any(self._pipeline.gather(any(bool(flag) for flag in found.values())))
            for flag in found.values():
                flag.fill_(float(anywhere))
        return found


def decides_for(scaler: torch.amp.GradScaler, pipeline: Gathering) -> bool:
    """Whether the decisions of `scaler` hold for all ranks of `pipeline`."""
    return isinstance(scaler, GradScaler) and scaler._pipeline is pipeline
