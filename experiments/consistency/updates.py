"""How the paper's recipe moves the weights, where torch does not: TensorFlow's RMSProp and moving average.

torch's RMSProp keeps epsilon outside the root and starts its averages at zero. The recipe's epsilon of 1 only
makes sense in TensorFlow's form: inside the root, with averages that start at one. There the method is close
to momentum with a steady, slightly smaller step, and a step of 0.0025 per example of the mini-batch is
usable.

The recipe evaluates a moving average of the weights instead of the weights themselves. With TensorFlow's ramp
its decay starts low and rises towards its final value, so that short trainings do not average in their random
beginning. The running statistics of batch normalization are averaged along: they belong to the weights they
were seen with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class RMSPropTF(torch.optim.Optimizer):
    """`square` follows g^2; `velocity = momentum * velocity + lr * g / sqrt(square + eps)` is subtracted.

    Args:
        lr: may be changed between steps; the velocity holds steps already multiplied by it.
        decay: of the average of squares, which starts at 1.
        weight_decay: L2, added to the gradient; set it per parameter group.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        decay: float = 0.9,
        momentum: float = 0.9,
        eps: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        if not (lr >= 0 and 0 <= decay < 1 and 0 <= momentum < 1 and eps > 0 and weight_decay >= 0):
            raise ValueError(
                f"lr={lr}, decay={decay}, momentum={momentum}, eps={eps}, weight_decay={weight_decay}: give "
                "lr and weight_decay of at least 0, eps above 0, and shares between 0 and 1"
            )
        super().__init__(
            params,
            {"lr": lr, "decay": decay, "momentum": momentum, "eps": eps, "weight_decay": weight_decay},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; parameters without a gradient stay."""
        if closure is not None:
            raise ValueError("RMSPropTF takes no closure; compute the gradients before step()")
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients: list[Tensor] = [weight.grad for weight in weights]
            if group["weight_decay"]:
                gradients = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight] = {
                        "square": torch.ones_like(weight),
                        "velocity": torch.zeros_like(weight),
                    }
            squares = [self.state[weight]["square"] for weight in weights]
            velocities = [self.state[weight]["velocity"] for weight in weights]
            torch._foreach_mul_(squares, group["decay"])
            torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - group["decay"])
            roots = torch._foreach_add(squares, group["eps"])
            torch._foreach_sqrt_(roots)
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_addcdiv_(velocities, gradients, roots, value=group["lr"])
            torch._foreach_sub_(weights, velocities)


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
