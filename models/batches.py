"""Made-up batches of the right shape and type, for measurements that need data but not its content.

Each function draws from `generator` (None: torch's default), so a seeded batch is the same on every run;
on the meta device nothing is drawn. Options are those of the model's builder.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.models import checks

Batch = tuple[Any, Tensor]


def image_batch(
    batch_size: int, options: Mapping[str, Any], device: torch.device, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Images (N, 3, S, S) from a standard normal, classes (N,) of int64."""
    side = checks.positive_int("image_size", options["image_size"])
    images = torch.randn(batch_size, 3, side, side, device=device, generator=generator)
    return images, _draw("num_classes", options, (batch_size,), device, generator)


def language_batch(
    batch_size: int, options: Mapping[str, Any], device: torch.device, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Tokens (N, T) and, as target, the tokens one further on; both int64, T = `seq_len`."""
    length = checks.positive_int("seq_len", options["seq_len"])
    tokens = _draw("vocab_size", options, (batch_size, length + 1), device, generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def translation_batch(
    batch_size: int, options: Mapping[str, Any], device: torch.device, generator: torch.Generator | None
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(source, target input), each (N, T), and the target one token further on; int64, T = `seq_len`."""
    source, _ = language_batch(batch_size, options, device, generator)
    target_in, target_out = language_batch(batch_size, options, device, generator)
    return (source, target_in), target_out


def _draw(
    size: str,
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    device: torch.device,
    generator: torch.Generator | None,
) -> Tensor:
    below = checks.positive_int(size, options[size])
    return torch.randint(below, shape, device=device, generator=generator)
