"""GPT-2 as a sequence of layers; `shapes` has the published sizes.

Pre-normalization, biases everywhere, GELU, learned positions, and one matrix for the embedding and the output
layer, which stays one weight wherever the sequence is cut.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_bench.models import checks
from gpipe_bench.models.transformer.blocks import drop


class Embedding(nn.Module):
    """Tokens (N, T) -> (N, T, d): token embeddings plus position embeddings. T > seq_len is refused."""

    def __init__(self, vocab_size: int, d_model: int, seq_len: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(seq_len, d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.size(1)
        if length > self.positions.num_embeddings:
            raise ValueError(
                f"sequences of {length} tokens: the model was built for at most "
                f"seq_len={self.positions.num_embeddings}"
            )
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        return drop(x, self.dropout if self.training else 0.0)


class Block(nn.Module):
    """Causal attention and feed-forward, each pre-normalized and residual: (N, T, d) -> the same."""

    def __init__(self, d_model: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm_1 = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.norm_2 = nn.LayerNorm(d_model)
        self.inner = nn.Linear(d_model, 4 * d_model)
        self.outer = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        heads = self.qkv(self.norm_1(x)).unflatten(2, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + drop(self.out(mixed.transpose(1, 2).flatten(2)), dropout)
        hidden = F.gelu(self.inner(self.norm_2(x)), approximate="tanh")
        return x + drop(self.outer(hidden), dropout)


class Output(nn.Module):
    """The last normalization and the output layer: (N, T, d) -> logits (N, T, V)."""

    def __init__(self, d_model: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.logits = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(x))
        return logits


def gpt2(
    *,
    num_layers: int = 12,
    d_model: int = 768,
    num_heads: int = 12,
    vocab_size: int = 50_257,
    seq_len: int = 1024,
    dropout: float = 0.1,
    tied: bool = True,
) -> nn.Sequential:
    """Builds a GPT-2: tokens (N, T) of int64, T <= seq_len, -> logits of the next (N, T, V).

    Layers: embedding, `num_layers` blocks, output.

    Args:
        num_layers, d_model, num_heads: number and sizes of the blocks; `num_heads` divides `d_model`.
        vocab_size: V.
        seq_len: longest sequence.
        dropout: dropout of embeddings, attention weights and the results of attention and feed-forward.
        tied: whether the embedding and the output layer are one matrix, as in the published models.

    Raises:
        ValueError: an option is out of range.
    """
    num_layers = checks.positive_int("num_layers", num_layers)
    d_model = checks.positive_int("d_model", d_model)
    num_heads = checks.divisor("num_heads", num_heads, "d_model", d_model)
    vocab_size = checks.positive_int("vocab_size", vocab_size)
    seq_len = checks.positive_int("seq_len", seq_len)
    dropout = checks.probability("dropout", dropout)
    embedding, output = Embedding(vocab_size, d_model, seq_len, dropout), Output(d_model, vocab_size)
    if checks.flag("tied", tied):
        output.logits.weight = embedding.tokens.weight
    blocks = [(f"block_{i}", Block(d_model, num_heads, dropout)) for i in range(num_layers)]
    model = nn.Sequential(OrderedDict([("embedding", embedding), *blocks, ("output", output)]))
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
            nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
