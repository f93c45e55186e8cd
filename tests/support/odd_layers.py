"""Unusual layers, models whose layers share a weight, and a training loop."""

from __future__ import annotations

import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from gpipe_bench.pipeline import Pipeline


class Add(nn.Module):
    """Adds a layer's input and the tensor of an earlier layer: `Pop` gives its layer this pair."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class OverwritesOne(nn.Module):
    """Changes the first tensor of a pair in place; the two may share memory."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        a, b = pair
        return a.mul_(3).sum(1, keepdim=True) * b.square().flatten(1)


class Picky(nn.Module):
    """Uses one of its weights only for inputs whose mean exceeds 5, another never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if float(x.detach().mean()) > 5 else y


class Reentrant(nn.Module):
    """Recomputes its layer by torch's reentrant checkpoint, which builds a new graph in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpointed(self.layer, x, use_reentrant=True)


WORDS, WIDTH = 7, 4


class Mixed(nn.Module):
    """A layer between the embedding and the output that uses the embedding's weight, too."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.linear = nn.Linear(WORDS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(nn.functional.linear(x, self.weight)).tanh()


def tied_model(users: int) -> nn.Sequential:
    """An embedding, layers and an output that share the embedding's weight: 2 or 3 `users` of it."""
    embedding, output = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    output.weight = embedding.weight
    middle = Mixed(embedding) if users == 3 else nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(embedding, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)), middle, output)


def words(batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(WORDS, (batch_size,), generator=generator) for _ in range(2))  # type: ignore[return-value]


def sgd(pipeline: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipeline.parameters(), lr=0.3, momentum=0.9)


def train(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer, steps: range, ranks: Ranks | None = None
) -> list[Tensor]:
    """Trains; returns the loss and the gradients' norm of each step."""
    found = []
    for step in steps:
        batch, target = words(6, step)
        own = (batch, target) if ranks is None else ranks.own(batch, target)
        found.append(pipeline.step(*own, nn.functional.cross_entropy))
        found.append(pipeline.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
    return found
