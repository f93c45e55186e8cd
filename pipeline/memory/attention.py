"""The attention of an accelerator, for layers that run on fake tensors of the CPU.

Which kernel `scaled_dot_product_attention` takes decides what a layer keeps and computes, and a CPU takes
others than a GPU: with dropout it makes all weights, where a GPU keeps none. So the operations that torch
would take on the device that is asked about are called by their names, and fake tensors follow torch's own
rules for them. Dropout is called the same way: a GPU keeps a byte for each element, a CPU what it multiplied
by.

    flash       GPUs since Ampere: in 16 bits and without a mask; otherwise as efficient
    efficient   older GPUs, and float32: where keys have as many heads as queries; otherwise as math
    math        whatever has no fused kernel: the weights of all pairs of tokens are made, and kept
    cpu         whatever torch takes on this CPU
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

ATTENTIONS = ("cpu", "math", "efficient", "flash")
_MOST_CHANNELS = 256
"""Of a head in the flash kernel."""


@contextmanager
def attention_of(kind: str) -> Iterator[None]:
    """Layers that run inside take this attention, one of ATTENTIONS, if they call torch's by its module."""
    if kind not in ATTENTIONS:
        raise ValueError(f"attention is {kind!r}; choose one of {', '.join(ATTENTIONS)}")
    if kind == "cpu":
        yield
    else:
        attention = patch.object(F, "scaled_dot_product_attention", partial(_attend, kind))
        with attention, patch.object(F, "dropout", partial(_drop, F.dropout)):
            yield


def _drop(
    otherwise: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if inplace or not training:
        return otherwise(input, p, training, inplace)  # type: ignore[no-any-return]
    return torch.native_dropout(input, p, training)[0]


def _attend(
    kind: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if torch.is_autocast_enabled("cpu"):  # which knows the function that is replaced, not what replaces it
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    aten: Any = torch.ops.aten
    is_fused = kind != "math" and query.dim() == 4 and query.dtype != torch.float64
    is_small = query.itemsize == 2 and max(query.size(-1), value.size(-1)) <= _MOST_CHANNELS
    output: Tensor
    if is_fused and kind == "flash" and is_small and attn_mask is None:
        output, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    elif is_fused and query.size(1) == key.size(1):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.size(2))
        output, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )
    else:
        output = _by_pairs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return output


def _by_pairs(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """The steps of torch's operation, with a GPU's dropout, and in 16 bits where layers are of 16 bits."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.size(-3) // each.size(-3), -3) for each in (key, value))
    factor = math.sqrt(1 / math.sqrt(query.size(-1)) if scale is None else scale)
    scores = (query * factor) @ (key.transpose(-2, -1) * factor)
    if is_causal:
        attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(~attn_mask, -torch.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    return (torch.native_dropout(weights, dropout_p, True)[0] if dropout_p else weights) @ value
