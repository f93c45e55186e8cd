"""Llama: `LlamaForCausalLM` gives logits (N, T, V), `LlamaModel` activations (N, T, d).

Each block turns its positions into rotations itself: they take no time beside the block, and need not travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.pipeline.model.hugging_face.passing import Value, joined, named, parted
from gpipe_bench.pipeline.model.parts import Part

REQUIRED, OPTIONAL = ("input_ids",), ("attention_mask",)


def parts(model: Any, base: str, inputs: Sequence[str]) -> dict[str, Part]:
    decoder = model.get_submodule(base.rstrip("."))
    blocks = [f"{base}layers.{i}" for i in range(len(decoder.layers))]
    return {
        f"{base}embed_tokens": Embedding(model, base, inputs),
        **{name: Block(model, base, name, decoder.config) for name in blocks},
        f"{base}norm": Head(model, base),
    }


class Embedding(Part):
    """Tokens (N, T) -> activations (N, T, d)."""

    def __init__(self, model: Any, base: str, inputs: Sequence[str]) -> None:
        super().__init__(model, {"embed_tokens": base + "embed_tokens"})
        self.inputs = tuple(inputs)

    def forward(self, batch: Value) -> Value:
        given = named(batch, self.inputs)
        tokens = given.pop("input_ids")
        return joined(self.embed_tokens(tokens), tuple(given.values()))


class Block(Part):
    """One block; attention is causal, and blind to what the mask (N, T) has 0 for."""

    def __init__(self, model: Any, base: str, name: str, config: object) -> None:
        from transformers.masking_utils import create_causal_mask

        super().__init__(model, {"block": name, "rotary_emb": base + "rotary_emb"})
        self.config, self.mask = config, create_causal_mask

    def forward(self, value: Value) -> Value:
        hidden, rest = parted(value)
        mask = self.mask(self.config, hidden, rest[0] if rest else None, None)
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotations = self.rotary_emb(hidden, position_ids=positions)
        hidden = self.block(
            hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotations
        )
        return joined(hidden, rest)


class Head(Part):
    """The last normalization and, where the model has one, the output layer."""

    def __init__(self, model: Any, base: str) -> None:
        head = {"lm_head": "lm_head"} if base else {}
        super().__init__(model, {"norm": base + "norm", **head})
        self.has_head = bool(base)

    def forward(self, value: Value) -> Tensor:
        hidden: Tensor = self.norm(parted(value)[0])
        return self.lm_head(hidden) if self.has_head else hidden
