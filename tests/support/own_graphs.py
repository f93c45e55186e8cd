"""Models that are no sequences, as users write them, with a batch and a loss for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Branches(nn.Module):
    """A residual block whose branches meet again, with batch normalization and a parameter of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))
        self.right = nn.Conv2d(channels, channels, 1)
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.left(x) + self.scale * self.right(x)) + x


class Residual(nn.Module):
    """A residual net with branches, functional dropout, a buffer, and sizes used far behind."""

    def __init__(self, channels: int = 4, dropout: float = 0.2) -> None:
        super().__init__()
        self.dropout = dropout
        self.stem = nn.Conv2d(2, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Branches(channels) for _ in range(4))
        self.norm = nn.BatchNorm2d(channels)
        self.register_buffer("mean", torch.full((1, 2, 1, 1), 0.1))
        self.head = nn.Linear(channels, 3)

    def forward(self, images: Tensor) -> Tensor:
        count, _, height, width = images.shape
        x = self.stem(images - self.mean)
        for block in self.blocks:
            x = block(x)
        x = F.dropout(self.norm(x), self.dropout, self.training)
        return self.head(x.sum((2, 3)).view(count, -1) / (height * width))


class UNet(nn.Module):
    """Down twice and up again, each level joined with its way down."""

    def __init__(self, channels: int = 3, dropout: float = 0.2) -> None:
        super().__init__()
        c = channels
        self.down = nn.ModuleList([nn.Conv2d(2, c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, padding=1)])
        self.bottom = nn.Sequential(nn.Conv2d(2 * c, 2 * c, 3, padding=1), nn.Tanh(), nn.Dropout(dropout))
        self.up = nn.ModuleList([nn.Conv2d(4 * c, c, 3, padding=1), nn.Conv2d(2 * c, c, 3, padding=1)])
        self.out = nn.Conv2d(c, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for conv in self.down:
            x = torch.tanh(conv(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.bottom(x)
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = torch.tanh(conv(torch.cat([x, skips.pop()], dim=1)))
        return self.out(x)


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.mix = nn.MultiheadAttention(width, 2, batch_first=True)
        self.deep = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        out, weights = self.mix(x, x, x)
        return self.deep((weights.mean(1).unsqueeze(-1) * out).sum(1))


class TwoTowers(nn.Module):
    """Two inputs, each with layers of its own; their embeddings are tied."""

    def __init__(self, width: int = 6, dropout: float = 0.2) -> None:
        super().__init__()
        self.query, self.document = Tower(width), Tower(width)
        self.drop = nn.Dropout(dropout)
        self.score = nn.Bilinear(width, width, 2)

    def forward(self, query: Tensor, document: Tensor, temperature: float = 0.5) -> Tensor:
        return self.score(self.drop(self.query(query)), self.drop(self.document(document))) / temperature


@dataclass(frozen=True)
class Case:
    build: Callable[..., nn.Module]
    at: tuple[str, ...]
    loss: Callable[[Tensor, Tensor], Tensor]

    def model(self, dropout: float = 0.2, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        return self.build(dropout=dropout).to(dtype)

    def data(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor | tuple[Tensor, ...], Tensor]:
        generator = torch.Generator().manual_seed(1)
        if self.build is TwoTowers:
            ids = torch.randint(11, (2, 8, 5), generator=generator)
            return (ids[0], ids[1]), torch.randint(2, (8,), generator=generator)
        images = torch.randn(8, 2, 8, 8, generator=generator, dtype=dtype)
        if self.build is UNet:
            return images, torch.randn(8, 1, 8, 8, generator=generator, dtype=dtype)
        return images, torch.randint(3, (8,), generator=generator)


CASES = {
    "residual": Case(Residual, ("blocks.1", "blocks.2.right", "norm"), F.cross_entropy),
    "u-net": Case(UNet, ("down.1", "bottom", "up.1"), F.mse_loss),
    "two towers": Case(TwoTowers, ("query.deep", "document", "score"), F.cross_entropy),
}
