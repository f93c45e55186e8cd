"""A Transformer with attention residuals: every layer reads the outputs of all blocks before it.

Other Transformers add a layer's output to its input. Here the input of each attention and feed-forward is a
weighted mean of sources: the embedding, the sum of the outputs of each earlier block, and that of the current
block so far. The weights are a softmax over products of one learned vector with the normalized sources:

    h = sum_i a_i v_i,   a = softmax_i(q . RMSNorm(v_i))

So a stage needs the sums of all earlier blocks. Layers pass them on in a tuple, or each sum is a portal,
which the layer that begins the next block stashes and all later layers pop.

Source: Kimi Team, Attention Residuals (arXiv 2603.15031), section 3.2 and figure 2, with blocks of whole
Transformer layers. Attention and feed-forward are Llama's.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_bench.models import checks, llama
from gpipe_bench.models.unet import State, WithPortals


class Mean(nn.Module):
    """Sources (N, T, d) each -> their weighted mean (N, T, d). Initially all weights are equal."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.query = nn.Parameter(torch.zeros(d_model))

    def forward(self, *sources: Tensor) -> Tensor:
        values = torch.stack(sources)
        weights = (self.norm(values) @ self.query).softmax(0)
        mean: Tensor = (weights.unsqueeze(-1) * values).sum(0)
        return mean


class Layer(llama.Block):
    """(sum of this block so far, sum of each earlier block) -> the same; the first layer of a block gets the
    finished sum of the block before in place of its own.

    With portals, layers pop the sums of blocks, and the first layer of a block stashes its input.
    """

    def __init__(self, index: int, layers_per_block: int, portals: bool, d_model: int, *sizes: int) -> None:
        ffn_dim, num_heads, num_kv_heads = sizes
        super().__init__(d_model, ffn_dim, num_heads, num_kv_heads, 10_000.0)
        self.before_attention, self.before_feed = Mean(d_model), Mean(d_model)
        block, place = divmod(index, layers_per_block)
        self.begins, self.passes_on = place == 0, not portals
        self.stashes = _names([block]) if portals and self.begins else ()
        self.pops = _names(range(block + (not self.begins))) if portals else ()

    def forward(self, state: State) -> State:  # type: ignore[override]  # a tuple, where Llama's is a tensor
        x, *blocks = (state,) if isinstance(state, Tensor) else state
        h = self.norm_1(self.before_attention(*blocks, x))
        q, k, v = (
            part(h).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        q, k = llama.rotated(q, self.rope_theta), llama.rotated(k, self.rope_theta)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
        y = self.out(mixed.transpose(1, 2).flatten(2))
        if self.begins:
            blocks.append(x)
        else:
            y = x + y
        h = self.norm_2(self.before_feed(*blocks, y))
        y = y + self.outer(F.silu(self.gate(h)) * self.inner(h))
        if self.passes_on:
            return (y, *blocks)
        return (y, x) if self.stashes else y


class Output(llama.Output):
    """(sum of the last block, sums of earlier blocks) -> logits (N, T, V)."""

    def __init__(self, num_blocks: int, portals: bool, d_model: int, vocab_size: int) -> None:
        super().__init__(d_model, vocab_size)
        self.mean = Mean(d_model)
        self.pops = _names(range(num_blocks)) if portals else ()

    def forward(self, state: tuple[Tensor, ...]) -> Tensor:  # type: ignore[override]  # as there
        x, *blocks = state
        return super().forward(self.mean(*blocks, x))


def _names(blocks: range | list[int]) -> tuple[str, ...]:
    """Names of the blocks' portals; block 0 is the embedding."""
    return tuple([f"block {number}" for number in blocks])


def attention_residuals(
    *,
    num_layers: int = 16,
    layers_per_block: int = 2,
    d_model: int = 1024,
    ffn_dim: int = 2816,
    num_heads: int = 16,
    num_kv_heads: int | None = None,
    vocab_size: int = 32_000,
    seq_len: int = 2048,
    portals: bool = False,
) -> nn.Sequential:
    """Builds a Transformer with attention residuals: tokens (N, T) of int64 -> logits of the next (N, T, V).

    Layers: embedding, `num_layers` layers of attention and feed-forward, output.

    Args:
        num_layers, d_model, ffn_dim: number and sizes of the layers.
        layers_per_block: layers whose outputs are summed; a remainder is a block of its own.
        num_heads, num_kv_heads: as in `llama`.
        vocab_size: V.
        seq_len: length of the example batches; the network takes any.
        portals: whether sums of blocks are portals, which skip the layers between.

    Raises:
        ValueError: an option is out of range.
    """
    num_layers = checks.positive_int("num_layers", num_layers)
    per_block = checks.positive_int("layers_per_block", layers_per_block)
    d_model = checks.positive_int("d_model", d_model)
    ffn_dim = checks.positive_int("ffn_dim", ffn_dim)
    num_heads = checks.divisor("num_heads", num_heads, "d_model", d_model)
    checks.even_int("d_model / num_heads", d_model // num_heads)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    kv_heads = checks.divisor("num_kv_heads", kv_heads, "num_heads", num_heads)
    vocab_size = checks.positive_int("vocab_size", vocab_size)
    checks.positive_int("seq_len", seq_len)
    checks.flag("portals", portals)
    blocks = [
        (f"layer_{i}", Layer(i, per_block, portals, d_model, ffn_dim, num_heads, kv_heads))
        for i in range(num_layers)
    ]
    output = Output(-(-num_layers // per_block), portals, d_model, vocab_size)
    layers = OrderedDict([("embedding", nn.Embedding(vocab_size, d_model)), *blocks, ("output", output)])
    model = (WithPortals if portals else nn.Sequential)(layers)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
            nn.init.normal_(module.weight, std=0.02)
    return model
