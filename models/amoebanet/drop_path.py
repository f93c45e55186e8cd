"""Drop path: the output of an operation is dropped for a whole example at a time.

The keep probability changes during training, so it is a plain attribute that `set_drop_path` sets for a
model or for one stage of it; the schedules of the reference are the two functions below. Draws use
torch's default generator.
"""

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Keeps each example with probability `keep` and scales it by 1 / keep, or makes it zero.

    Does nothing, and draws nothing, in evaluation and at `keep` = 1. Shape: (N, ...) -> the same.
    """

    def __init__(self, keep: float = 1.0) -> None:
        super().__init__()
        self.keep = check_keep(keep)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keep == 1.0:
            return x
        kept = torch.rand((x.size(0),) + (1,) * (x.dim() - 1), device=x.device) < self.keep
        return x * (kept.to(x.dtype) / self.keep)

    def extra_repr(self) -> str:
        return f"keep={self.keep}"


def check_keep(keep: float) -> float:
    """Returns `keep` if 0 < keep <= 1, else raises `ValueError`."""
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"drop path keep={keep!r} is not allowed: give a number with 0 < keep <= 1")
    return float(keep)


def set_drop_path(model: nn.Module, keep: float) -> int:
    """Sets the keep probability of every `DropPath` in `model`; returns how many there are."""
    check_keep(keep)
    paths = [module for module in model.modules() if isinstance(module, DropPath)]
    for path in paths:
        path.keep = float(keep)
    return len(paths)


def keep_at_step(keep: float, step: int, total_steps: int) -> float:
    """The reference's schedule v1: falls linearly from 1 at step 0 to `keep` at `total_steps`."""
    return 1.0 - min(1.0, step / total_steps) * (1.0 - check_keep(keep))


def keep_at_cell(keep: float, cell: int, num_layers: int) -> float:
    """The reference's schedule v2: falls linearly to `keep` at the last cell.

    `cell` counts all cells from 0, the two stem cells first; `num_layers` counts the normal cells (L), so
    that there are L + 4 cells. Schedule v3 is `keep_at_cell(keep_at_step(...), ...)`.
    """
    return 1.0 - (cell + 1) / (num_layers + 4) * (1.0 - check_keep(keep))
