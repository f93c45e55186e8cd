"""Transformer-L, the decoder-only language model of the paper's Table 1, from 3 to 1663 layers.

Embedding and softmax are separate matrices, so no two layers share a parameter and the sequence can be cut
anywhere. Source: Lingvo's one-billion-word GPipe configuration (V = 32000, d = 2048, f = 8192), with the
paper's 32 heads. Lingvo adds the attention's residual to the normalized input by default; here, as usual, to
the input itself.
"""

from collections import OrderedDict

from torch import Tensor, nn

from gpipe_bench.models import checks
from gpipe_bench.models.transformer.blocks import (
    ATTENTIONS,
    CUTS,
    Attention,
    FeedForward,
    Softmax,
    Table,
    embed,
    stack,
)


class Embedding(nn.Module):
    """Tokens (N, T) -> (N, T, d): scaled rows of the table plus sinusoidal positions."""

    def __init__(self, vocab_size: int, d_model: int, seq_len: int, dropout: float) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.dropout = dropout
        self.table = Table(vocab_size, d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        return embed(self.table, tokens, self.seq_len, self.dropout if self.training else 0.0)

    def extra_repr(self) -> str:
        return f"seq_len={self.seq_len}, dropout={self.dropout}"


def transformer_lm(
    *,
    num_layers: int = 3,
    vocab_size: int = 32_000,
    d_model: int = 2048,
    ffn_dim: int = 8192,
    num_heads: int = 32,
    seq_len: int = 1024,
    dropout: float = 0.0,
    attention: str = "fused",
    deep_init: bool = False,
    logit_clip: float | None = None,
    cut: str = "layer",
) -> nn.Sequential:
    """Builds Transformer-L: tokens (N, T) of int64, T <= seq_len, -> logits of the next (N, T, V).

    Layers: embedding, `num_layers` Transformer layers, softmax.

    Args:
        num_layers: L.
        d_model, ffn_dim, num_heads: d, f and the attention heads; `num_heads` divides `d_model`, which is
            even.
        seq_len: longest sequence.
        dropout: dropout of embeddings, attention weights, hidden units and the result of each block.
        attention: `"fused"` (torch's kernels) or `"explicit"` (softmax in memory, as in 2019); equal results.
        deep_init: the feed-forward matrices start divided by `num_layers`.
        logit_clip: largest magnitude of a logit; None means no limit.
        cut: `"layer"`, or `"sublayer"` to make attention and feed-forward layers of their own, so that a
            stage may end between them. Same parameters in the same order; `to_cut` renames a state dict.

    Raises:
        ValueError: an option is out of range.
    """
    num_layers = checks.positive_int("num_layers", num_layers)
    vocab_size = checks.positive_int("vocab_size", vocab_size)
    ffn_dim = checks.positive_int("ffn_dim", ffn_dim)
    seq_len = checks.positive_int("seq_len", seq_len)
    d_model = checks.even_int("d_model", d_model)
    num_heads = checks.divisor("num_heads", num_heads, "d_model", d_model)
    dropout = checks.probability("dropout", dropout)
    attention = checks.one_of("attention", attention, ATTENTIONS)
    cut = checks.one_of("cut", cut, CUTS)
    logit_clip = checks.optional_positive("logit_clip", logit_clip)
    init_scale = 1.0 / num_layers if checks.flag("deep_init", deep_init) else 1.0

    def blocks() -> OrderedDict[str, nn.Module]:
        return OrderedDict(
            attention=Attention(
                d_model, d_model, num_heads, source="causal", attention=attention, dropout=dropout
            ),
            feed_forward=FeedForward(d_model, ffn_dim, dropout, init_scale),
        )

    return nn.Sequential(
        OrderedDict(
            [
                ("embedding", Embedding(vocab_size, d_model, seq_len, dropout)),
                *stack("layer", num_layers, blocks, cut),
                ("softmax", Softmax(d_model, vocab_size, logit_clip)),
            ]
        )
    )
