"""The residual blocks of both Transformers, as pipeline layers or parts of layers.

Pre-normalization, biases everywhere, ReLU, sinusoidal positions without parameters, and no normalization
after the last layer: the only form whose parameter count equals the paper's in every printed digit. A block
maps a tensor, or the first tensor of a tuple, and passes the rest on.

Shapes: N examples, T tokens, d = `d_model`, f = `ffn_dim`, V = `vocab_size`, h heads.
"""

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_bench.models import checks
from gpipe_bench.models.transformer.draws import WHOLE, draws_of

State = Tensor | tuple[Tensor, ...]
ATTENTIONS = ("fused", "explicit")
CUTS = ("layer", "sublayer")


class Linear(nn.Linear):
    """A fully connected layer with Glorot-uniform weights times `init_scale`, and no initial shift."""

    def __init__(self, channels: int, filters: int, init_scale: float = 1.0) -> None:
        # Set first: nn.Linear initialises its weights as the last thing of its own constructor.
        self.init_scale = init_scale
        super().__init__(channels, filters)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.xavier_uniform_(self.weight, gain=self.init_scale)
            nn.init.zeros_(self.bias)


def drop(x: Tensor, share: float, shard: int | None = None) -> Tensor:
    """Dropout of x. Without a share no operation runs, which would be a copy when compiled.

    `shard` is the index of this rank's part of x; None if all ranks hold the same x.
    """
    if not share:
        return x
    with draws_of(shard, x):
        return F.dropout(x, share)


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, attention: str, dropout: float, shard: int | None = None
) -> Tensor:
    """Scaled dot-product attention: q (N, h, T, c), k and v (N, h, S, c) -> (N, h, T, c).

    `"fused"` uses torch's kernels, which do not keep attention weights; `"explicit"` materialises the (N, h,
    T, S) softmax, as the systems of 2019 did. `dropout` is that of attention weights; `shard` is the index of
    this rank's heads.
    """
    if attention == "fused":
        if dropout:
            with draws_of(shard, q):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    scores = (q / math.sqrt(q.size(-1))) @ k.transpose(-2, -1)
    if causal:
        future = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return drop(scores.softmax(dim=-1), dropout, shard) @ v


class Attention(nn.Module):
    """Residual attention, x + dropout(attention(norm(x))), over x or over a memory.

    Args:
        d_model: d.
        channels: width of queries, keys and values, all heads together.
        num_heads: h, a divisor of `channels`.
        source: `"causal"` (each token sees itself and the ones before), `"full"` (all of x), or
            `"memory"` (the second tensor of the tuple).
        attention: `"fused"` or `"explicit"`, see `attend`.
        dropout: dropout of attention weights and of the block's result.

    Shapes: x (N, T, d) -> the same; memory (N, S, d).
    """

    def __init__(
        self, d_model: int, channels: int, num_heads: int, *, source: str, attention: str, dropout: float
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = channels // num_heads
        self.division = WHOLE
        self.source = source
        self.attention = attention
        self.dropout = dropout
        self.norm = nn.LayerNorm(d_model)
        self.query = Linear(d_model, channels)
        self.key = Linear(d_model, channels)
        self.value = Linear(d_model, channels)
        self.out = Linear(channels, d_model)

    def forward(self, state: State) -> State:
        x, rest = (state[0], state[1:]) if isinstance(state, tuple) else (state, ())
        normed = self.norm(x)
        keys = rest[0] if self.source == "memory" else normed
        q, k, v = (self._heads(tensor) for tensor in (self.query(normed), self.key(keys), self.value(keys)))
        dropout = self.dropout if self.training else 0.0
        mixed = attend(q, k, v, self.source == "causal", self.attention, dropout, self.division.inside)
        x = x + drop(self.out(mixed.transpose(1, 2).flatten(2)), dropout, self.division.between)
        return (x, *rest) if isinstance(state, tuple) else x

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim).transpose(1, 2)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, source={self.source!r}, attention={self.attention!r}, "
            f"dropout={self.dropout}"
        )


class FeedForward(nn.Module):
    """Residual feed-forward, x + dropout(outer(dropout(relu(inner(norm(x)))))): (N, T, d) -> the same.

    `init_scale` multiplies both matrices' initial values (deep initialisation).
    """

    def __init__(self, d_model: int, ffn_dim: int, dropout: float, init_scale: float = 1.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.division = WHOLE
        self.norm = nn.LayerNorm(d_model)
        self.inner = Linear(d_model, ffn_dim, init_scale)
        self.outer = Linear(ffn_dim, d_model, init_scale)

    def forward(self, state: State) -> State:
        x, rest = (state[0], state[1:]) if isinstance(state, tuple) else (state, ())
        dropout = self.dropout if self.training else 0.0
        hidden = drop(F.relu(self.inner(self.norm(x))), dropout, self.division.inside)
        x = x + drop(self.outer(hidden), dropout, self.division.between)
        return (x, *rest) if isinstance(state, tuple) else x

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}"


class Softmax(nn.Module):
    """The output layer: (N, T, d), or the first of a tuple, -> logits (N, T, V).

    `logit_clip` limits their magnitude (None: no limit), as the paper does for deep translation models. The
    softmax itself is part of the loss.
    """

    def __init__(self, d_model: int, vocab_size: int, logit_clip: float | None) -> None:
        super().__init__()
        self.logit_clip = logit_clip
        self.linear = Linear(d_model, vocab_size)

    def forward(self, state: State) -> Tensor:
        logits: Tensor = self.linear(state[0] if isinstance(state, tuple) else state)
        return logits if self.logit_clip is None else logits.clamp(-self.logit_clip, self.logit_clip)

    def extra_repr(self) -> str:
        return f"logit_clip={self.logit_clip}"


class Table(nn.Embedding):
    """An embedding table, initialised with variance 1 / d: 1 after scaling by sqrt(d)."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


def embed(table: Table, tokens: Tensor, seq_len: int, dropout: float) -> Tensor:
    """Tokens (N, T) -> (N, T, d): rows times sqrt(d), plus positions. T > seq_len is a `ValueError`."""
    if tokens.size(1) > seq_len:
        raise ValueError(
            f"sequences of {tokens.size(1)} tokens: the model was built for at most seq_len={seq_len}"
        )
    x = table(tokens) * math.sqrt(table.embedding_dim)
    return drop(x + sinusoids(tokens.size(1), table.embedding_dim, x), dropout)


def sinusoids(length: int, channels: int, like: Tensor) -> Tensor:
    """Positions (length, channels): sines, then cosines, of wavelengths from 2 pi to 20,000 pi.

    Computed in each forward and not kept in a buffer, so that a model built on the meta device needs only its
    parameters. `like` gives dtype and device.
    """
    half = channels // 2
    rates = torch.exp(torch.arange(half, device=like.device) * (-math.log(10_000.0) / max(half - 1, 1)))
    angles = torch.arange(length, device=like.device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


class TransformerLayer(nn.Sequential):
    """The blocks of one Transformer layer as one pipeline layer."""


def stack(
    prefix: str, num_layers: int, blocks: Callable[[], OrderedDict[str, nn.Module]], cut: str
) -> Iterable[tuple[str, nn.Module]]:
    """Names and modules of the layers: whole, or block by block with `cut="sublayer"`."""
    for i in range(num_layers):
        parts = blocks()
        if cut == "layer":
            yield f"{prefix}_{i}", TransformerLayer(parts)
        else:
            yield from ((f"{prefix}_{i}_{name}", block) for name, block in parts.items())


def to_cut(state: Mapping[str, Tensor], cut: str) -> dict[str, Tensor]:
    """Renames a Transformer's state dict for a model built with `cut`; it has the same tensors either way.

    `layer_0.attention.out.bias` of `cut="layer"` is `layer_0_attention.out.bias` of `cut="sublayer"`.
    """
    joint = "." if checks.one_of("cut", cut, CUTS) == "layer" else "_"
    pattern = re.compile(r"^((?:layer|encoder|decoder)_\d+)[._](attention|cross|feed_forward)\.")
    return {pattern.sub(rf"\1{joint}\2.", name): tensor for name, tensor in state.items()}
