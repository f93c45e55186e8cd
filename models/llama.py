"""Llama as a sequence of layers; `shapes` has the published sizes.

RMSNorm before each part, rotary position embeddings, grouped-query attention, a gated feed-forward, no
biases, no dropout, and separate matrices for embedding and output. Sources of the structure: Touvron et al.,
LLaMA (arXiv 2302.13971) and Llama 2 (2307.09288); The Llama 3 Herd of Models (2407.21783). Rotary frequencies
are those of the original context length, without Llama 3.1's scaling of low frequencies.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_bench.models import checks


class Block(nn.Module):
    """Causal attention and feed-forward, each pre-normalized and residual: (N, T, d) -> the same."""

    def __init__(
        self, d_model: int, ffn_dim: int, num_heads: int, num_kv_heads: int, rope_theta: float
    ) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = d_model // num_heads, rope_theta
        narrow = num_kv_heads * self.head_dim
        self.norm_1 = nn.RMSNorm(d_model, eps=1e-5)
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, narrow, bias=False)
        self.value = nn.Linear(d_model, narrow, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.norm_2 = nn.RMSNorm(d_model, eps=1e-5)
        self.gate = nn.Linear(d_model, ffn_dim, bias=False)
        self.inner = nn.Linear(d_model, ffn_dim, bias=False)
        self.outer = nn.Linear(ffn_dim, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_1(x)
        q, k, v = (
            part(normed).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        q, k = rotated(q, self.rope_theta), rotated(k, self.rope_theta)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm_2(x)
        result: Tensor = x + self.outer(F.silu(self.gate(normed)) * self.inner(normed))
        return result


def rotated(x: Tensor, theta: float) -> Tensor:
    """Rotary position embedding: rotates pairs of channels of queries or keys (N, h, T, c)."""
    half = x.size(-1) // 2
    rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.size(-2), device=x.device, dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Output(nn.Module):
    """The last normalization and the output layer: (N, T, d) -> logits (N, T, V)."""

    def __init__(self, d_model: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.logits = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(x))
        return logits


def llama(
    *,
    num_layers: int = 32,
    d_model: int = 4096,
    ffn_dim: int = 11_008,
    num_heads: int = 32,
    num_kv_heads: int | None = None,
    vocab_size: int = 32_000,
    seq_len: int = 2048,
    rope_theta: float = 10_000.0,
) -> nn.Sequential:
    """Builds a Llama: tokens (N, T) of int64 -> logits of the next (N, T, V).

    Layers: embedding, `num_layers` blocks, output.

    Args:
        num_layers, d_model, ffn_dim: number and sizes of the blocks.
        num_heads, num_kv_heads: query heads, which divide `d_model` into an even number of channels each, and
            key and value heads, which divide `num_heads`; None: as many as query heads.
        vocab_size: V.
        seq_len: length of the example batches; the network takes any.
        rope_theta: base of the rotary frequencies.

    Raises:
        ValueError: an option is out of range.
    """
    num_layers = checks.positive_int("num_layers", num_layers)
    d_model = checks.positive_int("d_model", d_model)
    ffn_dim = checks.positive_int("ffn_dim", ffn_dim)
    num_heads = checks.divisor("num_heads", num_heads, "d_model", d_model)
    checks.even_int("d_model / num_heads", d_model // num_heads)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    kv_heads = checks.divisor("num_kv_heads", kv_heads, "num_heads", num_heads)
    vocab_size = checks.positive_int("vocab_size", vocab_size)
    checks.positive_int("seq_len", seq_len)
    theta = checks.optional_positive("rope_theta", rope_theta)
    if theta is None:
        raise ValueError("rope_theta=None is not allowed: give a number above 0")
    blocks = [(f"block_{i}", Block(d_model, ffn_dim, num_heads, kv_heads, theta)) for i in range(num_layers)]
    embedding, output = nn.Embedding(vocab_size, d_model), Output(d_model, vocab_size)
    model = nn.Sequential(OrderedDict([("embedding", embedding), *blocks, ("output", output)]))
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
            nn.init.normal_(module.weight, std=0.02)
    return model
