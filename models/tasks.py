"""What a model is trained on: made-up batches of the right shape and type, and the loss.

The batches are for measurements that need data but not its content. Each function draws from `generator`
(None: torch's default), so a seeded batch is the same on every run; on the meta device nothing is drawn.
Options are those of the model's builder. A loss is a scalar, the mean over the examples of a micro-batch.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
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
    """Tokens (N, T) and, as target, the next tokens; both int64, T = `seq_len`."""
    length = checks.positive_int("seq_len", options["seq_len"])
    tokens = _draw("vocab_size", options, (batch_size, length + 1), device, generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def translation_batch(
    batch_size: int, options: Mapping[str, Any], device: torch.device, generator: torch.Generator | None
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(source, target input), each (N, T), and as target the next tokens; int64, T = `seq_len`."""
    source, _ = language_batch(batch_size, options, device, generator)
    target_in, target_out = language_batch(batch_size, options, device, generator)
    return (source, target_in), target_out


def pixel_batch(
    batch_size: int, options: Mapping[str, Any], device: torch.device, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Images (N, channels, S, S) from a standard normal, and masks (N, channels, S, S) of 0.0 and 1.0."""
    side = checks.positive_int("image_size", options["image_size"])
    shapes = [(batch_size, options[f"{end}_channels"], side, side) for end in ("input", "output")]
    images = torch.randn(shapes[0], device=device, generator=generator)
    return images, torch.randint(2, shapes[1], device=device, generator=generator).float()


def _draw(
    size: str,
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    device: torch.device,
    generator: torch.Generator | None,
) -> Tensor:
    below = checks.positive_int(size, options[size])
    return torch.randint(below, shape, device=device, generator=generator)


AUX_LOSS_WEIGHT = 0.4


def class_loss(output: Tensor | tuple[Tensor, ...], target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of logits (N, classes), plus 0.4 times that of auxiliary logits if there are any.

    Args:
        output: logits, or (logits, auxiliary logits).
        target: classes (N,) of int64.
        label_smoothing: share of the target that is spread over all classes, in both parts.
    """
    logits, *aux = output if isinstance(output, tuple) else (output,)
    loss = F.cross_entropy(_widened(logits), target, label_smoothing=label_smoothing)
    for auxiliary in aux:
        part = F.cross_entropy(_widened(auxiliary), target, label_smoothing=label_smoothing)
        loss = loss + AUX_LOSS_WEIGHT * part
    return loss


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits (N, T, V) for tokens (N, T): the mean over all tokens of all examples."""
    return F.cross_entropy(_widened(output).flatten(0, 1), target.flatten())


def pixel_loss(output: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of logits and mask, both (N, channels, S, S): the mean over all pixels."""
    return F.binary_cross_entropy_with_logits(_widened(output), target)


def _widened(logits: Tensor) -> Tensor:
    """16-bit logits as float32, like the reference; float32 and float64 unchanged."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
