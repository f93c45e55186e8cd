"""Models whose layers share a weight, and some steps of training."""

from __future__ import annotations

import torch
from ranks import Ranks
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline

WORDS, WIDTH = 7, 4


class Mixed(nn.Module):
    """Uses the embedding's weight a third time, between the other two."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.linear = nn.Linear(WORDS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(nn.functional.linear(x, self.weight)).tanh()


def tied_model(users: int) -> nn.Sequential:
    """An embedding, layers, and an output layer that has its weight; a layer between them, too, of three."""
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
    """The losses, and the norms of the gradients."""
    found = []
    for step in steps:
        batch, target = words(6, step)
        own = (batch, target) if ranks is None else ranks.own(batch, target)
        found.append(pipeline.step(*own, nn.functional.cross_entropy))
        found.append(pipeline.clip_grad_norm_(0.5))
        optimizer.step()
        optimizer.zero_grad()
    return found
