"""RMSProp as the paper's recipe means it.

torch's own keeps epsilon outside the root and starts its averages at zero. The recipe's epsilon of 1 only
makes sense in TensorFlow's form: inside the root, with averages that start at one. There the method is close
to momentum with a steady, slightly smaller step, and a step of 0.0025 per example of the mini-batch is
usable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


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
