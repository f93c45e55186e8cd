"""Trainable parameters, by layer and in total."""

from torch import nn


def layer_parameters(model: nn.Sequential) -> list[int]:
    """Trainable parameters of each layer; one that two layers share counts for the first only."""
    seen: set[int] = set()
    counts = []
    for layer in model:
        fresh = [p for p in layer.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, fresh))
        counts.append(sum(p.numel() for p in fresh))
    return counts


def count_parameters(model: nn.Module) -> int:
    """Trainable parameters of `model`, each counted once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
