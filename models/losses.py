"""The models' losses: a scalar, the mean over the examples of a micro-batch."""

import torch
import torch.nn.functional as F
from torch import Tensor

AUX_LOSS_WEIGHT = 0.4


def class_loss(output: Tensor | tuple[Tensor, ...], target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of logits (N, classes), plus 0.4 times that of auxiliary logits if there are any.

    Args:
        output: logits, or (logits, auxiliary logits).
        target: classes (N,) of int64.
        label_smoothing: share of the target that is spread evenly over all classes, of both parts.
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


def _widened(logits: Tensor) -> Tensor:
    """Half-precision logits as float32, the reference's rule; float32 and float64 as they are."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
