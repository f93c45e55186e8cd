"""T(L, H, A), the encoder-decoder of the paper's translation experiments, as one sequence of layers.

Layers pass tuples: encoder layers (x, target), the source's activations and the decoder's future input;
decoder layers (y, memory), activations and the encoder's result.

The paper does not state the number of vocabulary tables, and no number explains all five printed sizes:

    num_tables   tables                                             target in the encoder's tuple
    1            one for source, target and softmax                 embeddings (N, T, d)
    2 (default)  one for source and target, one for the softmax     embeddings (N, T, d)
    3            source, target, softmax (Lingvo's structure)       integer tokens (N, T)

With 2 or 3 no two layers share a parameter, so the sequence can be cut anywhere. With 1 the first and the
last layer share it: for a plain model, or both layers in one stage.
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

NUM_TABLES = (1, 2, 3)


class SourceEmbedding(nn.Module):
    """(source tokens, target tokens) -> (x, target): embeds the source, and the target too if `both`.

    Shapes: tokens (N, S) and (N, T) of int64; x (N, S, d); target (N, T, d), or the tokens unchanged.
    """

    def __init__(self, vocab_size: int, d_model: int, seq_len: int, dropout: float, both: bool) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.dropout = dropout
        self.both = both
        self.table = Table(vocab_size, d_model)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        source, target = state
        dropout = self.dropout if self.training else 0.0
        x = embed(self.table, source, self.seq_len, dropout)
        return x, embed(self.table, target, self.seq_len, dropout) if self.both else target

    def extra_repr(self) -> str:
        return f"seq_len={self.seq_len}, dropout={self.dropout}, both={self.both}"


class TargetEmbedding(nn.Module):
    """(memory, target tokens) -> (y, memory), y (N, T, d): embeds the target from a table of its own."""

    def __init__(self, vocab_size: int, d_model: int, seq_len: int, dropout: float) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.dropout = dropout
        self.table = Table(vocab_size, d_model)

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        memory, target = state
        return embed(self.table, target, self.seq_len, self.dropout if self.training else 0.0), memory

    def extra_repr(self) -> str:
        return f"seq_len={self.seq_len}, dropout={self.dropout}"


class Turn(nn.Module):
    """(memory, y) -> (y, memory), for a target embedded with the source; decoder layers map y."""

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        memory, y = state
        return y, memory


def transformer_seq2seq(
    *,
    num_layers: int = 6,
    ffn_dim: int = 8192,
    num_heads: int = 16,
    vocab_size: int = 64_000,
    d_model: int = 1024,
    head_dim: int = 64,
    num_tables: int = 2,
    seq_len: int = 128,
    dropout: float = 0.0,
    attention: str = "fused",
    deep_init: bool = False,
    logit_clip: float | None = None,
    cut: str = "layer",
) -> nn.Sequential:
    """Builds T(L, H, A): (source (N, S), target (N, T)) tokens -> logits of the next token (N, T, V).

    Layers: source embedding, L encoder layers, target, L decoder layers, softmax. Sequences are full:
    there is no padding token.

    Args:
        num_layers: L, of the encoder and again of the decoder.
        ffn_dim: H.
        num_heads: A; with `head_dim` fixed at 64, A = 32 doubles the attention's channels, as in the
            paper.
        vocab_size, d_model: V and d (even); the paper fixes d at 1024.
        num_tables: 1, 2 or 3, see the module's docstring.
        seq_len: longest sequence, of source and of target.
        dropout, attention, deep_init, logit_clip, cut: as in `transformer_lm`; deep initialisation is the
            paper's remedy for deep translation models, divided by L.

    Raises:
        ValueError: an option is out of range.
    """
    num_layers = checks.positive_int("num_layers", num_layers)
    ffn_dim = checks.positive_int("ffn_dim", ffn_dim)
    vocab_size = checks.positive_int("vocab_size", vocab_size)
    seq_len = checks.positive_int("seq_len", seq_len)
    d_model = checks.even_int("d_model", d_model)
    channels = checks.positive_int("num_heads", num_heads) * checks.positive_int("head_dim", head_dim)
    num_tables = checks.one_of("num_tables", checks.positive_int("num_tables", num_tables), NUM_TABLES)
    dropout = checks.probability("dropout", dropout)
    attention = checks.one_of("attention", attention, ATTENTIONS)
    cut = checks.one_of("cut", cut, CUTS)
    logit_clip = checks.optional_positive("logit_clip", logit_clip)
    init_scale = 1.0 / num_layers if checks.flag("deep_init", deep_init) else 1.0

    def attend_to(source: str) -> Attention:
        return Attention(d_model, channels, num_heads, source=source, attention=attention, dropout=dropout)

    def encoder() -> OrderedDict[str, nn.Module]:
        return OrderedDict(
            attention=attend_to("full"), feed_forward=FeedForward(d_model, ffn_dim, dropout, init_scale)
        )

    def decoder() -> OrderedDict[str, nn.Module]:
        return OrderedDict(
            attention=attend_to("causal"),
            cross=attend_to("memory"),
            feed_forward=FeedForward(d_model, ffn_dim, dropout, init_scale),
        )

    source = SourceEmbedding(vocab_size, d_model, seq_len, dropout, both=num_tables < 3)
    softmax = Softmax(d_model, vocab_size, logit_clip)
    if num_tables == 1:
        softmax.linear.weight = source.table.weight
    target = TargetEmbedding(vocab_size, d_model, seq_len, dropout) if num_tables == 3 else Turn()
    return nn.Sequential(
        OrderedDict(
            [
                ("source", source),
                *stack("encoder", num_layers, encoder, cut),
                ("target", target),
                *stack("decoder", num_layers, decoder, cut),
                ("softmax", softmax),
            ]
        )
    )
