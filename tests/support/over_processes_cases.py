"""Tiny models whose messages are a good part of what a worker holds, and what their processes count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gpipe_bench.experiments.beyond.plan import peaks
from gpipe_bench.experiments.beyond.plan.steps import Planned
from gpipe_bench.planner import Candidate

Built = tuple[Sequence[nn.Module], Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]
MICROBATCHES, BATCH_SIZE = 4, 8


class Apart(nn.Module):
    """Adds what it computes to its input: no graph keeps its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = value + torch.tanh(value * self.scale)
        return made


class Kept(nn.Module):
    """Keeps its own output, as a rectifier does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, value: Tensor) -> Tensor:
        return torch.relu(value + self.shift)


def _built(make: Callable[[int], nn.Module], width: int) -> Built:
    layers = [make(width) for _ in range(8)]
    example = torch.zeros(BATCH_SIZE, width)
    return layers, example, torch.zeros(BATCH_SIZE, width), nn.functional.mse_loss


def small() -> Built:
    """Messages of 16 KiB."""
    return _built(Apart, 2048)


def small_kept() -> Built:
    """The same of outputs that a graph holds."""
    return _built(Kept, 2048)


def large() -> Built:
    """Messages of 320 KiB."""
    return _built(Apart, 2**15 + 2**13)


def large_kept() -> Built:
    """The same of outputs that a graph holds."""
    return _built(Kept, 2**15 + 2**13)


MODELS = ("small", "small_kept", "large", "large_kept")


def planned(name: str) -> Planned:
    """One of the models, for two processes."""
    return Planned(name, f"over_processes_cases:{name}", {}, "tiny", batch_size=BATCH_SIZE)


def ways() -> list[Candidate]:
    """All ways to train."""
    return peaks.ways(planned("small"), MICROBATCHES)


def count_all() -> dict[str, list[int]]:
    """What one process does: bytes of each way, by model, and by model over gloo."""
    found = {name: peaks.count(planned(name), ways()) for name in MODELS}
    for name in ("small", "large"):
        found[f"{name} over gloo"] = peaks.count(planned(name), ways()[:4], share_memory=False)
    return found
