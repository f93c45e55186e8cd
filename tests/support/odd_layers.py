"""Layers whose weights get gradients in some steps only, or several in one backward."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed


class Add(nn.Module):
    """Of a pair, as behind a portal."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class Picky(nn.Module):
    """Uses one of its weights only for inputs that ask for it, and another never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if float(x.detach().mean()) > 5 else y


class Reentrant(nn.Module):
    """Runs its layer again in the backward, in the way whose graph is another one then."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpointed(self.layer, x, use_reentrant=True)
