"""The moving average of the weights, which the recipe evaluates instead of the weights themselves.

With TensorFlow's ramp the decay starts low and rises towards its final value, so that short trainings do not
average in their random beginning. The running statistics of batch normalization are averaged along: they
belong to the weights they were seen with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Follows the floating-point state of a module; `applied` lends it the averages for an evaluation."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"average decay {decay} is not allowed: give a share of at least 0 and below 1")
        self._decay = decay
        self._live = {
            name: tensor
            for name, tensor in module.state_dict(keep_vars=True).items()
            if tensor.is_floating_point()
        }
        self.average: dict[str, Tensor] = {
            name: tensor.detach().clone() for name, tensor in self._live.items()
        }

    def update(self, num_updates: int) -> None:
        """Takes the weights in after update number `num_updates`, counted from 1."""
        decay = min(self._decay, (1.0 + num_updates) / (10.0 + num_updates))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.values()), [t.detach() for t in self._live.values()], 1.0 - decay
            )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the module holds the averages; afterwards its own values, bit for bit."""
        own = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        self._fill(self.average)
        try:
            yield
        finally:
            self._fill(own)

    def load(self, average: dict[str, Tensor]) -> None:
        """Goes on from averages kept earlier."""
        for name, tensor in self.average.items():
            tensor.copy_(average[name])

    def _fill(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._live.items():
                tensor.copy_(values[name])
