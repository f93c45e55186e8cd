"""Models of one's own, as users bring them: of the first the blocks are not alike, so that cutting is not
counting; the second is made of torch's own attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

IMAGE_SIZE, PATCH, CLASSES = 32, 4, 10
WIDTHS = (48, 48, 64, 64, 96, 96, 128, 128, 96, 64)


class Mixing(nn.Module):
    """Mixes places, then channels, and changes the width."""

    def __init__(self, width: int, next_width: int) -> None:
        super().__init__()
        places = (IMAGE_SIZE // PATCH) ** 2
        self.norm = nn.LayerNorm(width)
        self.places = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.channels = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, next_width)
        )

    def forward(self, value: Tensor) -> Tensor:
        value = value + self.places(self.norm(value).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = self.channels(value)
        return mixed


def mixer() -> tuple[Sequence[nn.Module], Tensor, Tensor, Callable[[Any, Tensor], Tensor]]:
    """(layers, inputs, target, loss_fn)."""
    first = nn.Sequential(nn.Conv2d(3, WIDTHS[0], PATCH, PATCH), nn.Flatten(2), _Transposed())
    blocks = [Mixing(*widths) for widths in zip(WIDTHS, (*WIDTHS[1:], WIDTHS[0]), strict=True)]
    head = nn.Sequential(nn.LayerNorm(WIDTHS[0]), _Mean(), nn.Linear(WIDTHS[0], CLASSES))
    inputs = torch.zeros(8, 3, IMAGE_SIZE, IMAGE_SIZE)
    target = torch.zeros(8, dtype=torch.long)
    if inputs.device.type != "meta":
        inputs.normal_()
    return [first, *blocks, head], inputs, target, nn.functional.cross_entropy


class Attending(nn.Module):
    """A block of a language model."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, value: Tensor) -> Tensor:
        normed = self.norm(value)
        value = value + self.attention(normed, normed, normed, need_weights=False)[0]
        made: Tensor = value + self.feed_forward(value)
        return made


def attending() -> tuple[Sequence[nn.Module], Tensor, Tensor, Callable[[Any, Tensor], Tensor]]:
    """(layers, inputs, target, loss_fn)."""
    width, words = 192, 1000
    blocks = [Attending(width, heads=6) for _ in range(9)]
    tokens = torch.zeros(8, 32, dtype=torch.long)
    return [nn.Embedding(words, width), *blocks, nn.Linear(width, words)], tokens, tokens, _next_word


def _next_word(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class _Transposed(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        """(N, channels, places) to (N, places, channels)."""
        return value.transpose(1, 2)


class _Mean(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        """Mean over the places."""
        return value.mean(1)
