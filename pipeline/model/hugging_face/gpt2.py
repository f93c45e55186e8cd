"""GPT-2: `GPT2LMHeadModel` gives logits (N, T, V), `GPT2Model` activations (N, T, d)."""

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
    if decoder.config.add_cross_attention:
        raise ValueError("this GPT-2 has cross-attention, for which nothing arrives; build it without")
    blocks = [f"{base}h.{i}" for i in range(len(decoder.h))]
    return {
        f"{base}wte": Embedding(model, base, inputs),
        **{name: Block(model, name, decoder.config) for name in blocks},
        f"{base}ln_f": Head(model, base),
    }


class Embedding(Part):
    """Tokens (N, T) -> activations (N, T, d), with positions."""

    def __init__(self, model: Any, base: str, inputs: Sequence[str]) -> None:
        super().__init__(model, {name: base + name for name in ("wte", "wpe", "drop")})
        self.inputs = tuple(inputs)

    def forward(self, batch: Value) -> Value:
        given = named(batch, self.inputs)
        tokens = given.pop("input_ids")
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        return joined(self.drop(self.wte(tokens) + self.wpe(positions)), tuple(given.values()))


class Block(Part):
    """One block; attention is causal, and blind to what the mask (N, T) has 0 for."""

    def __init__(self, model: Any, name: str, config: object) -> None:
        from transformers.masking_utils import create_causal_mask

        super().__init__(model, {"block": name})
        self.config, self.mask = config, create_causal_mask

    def forward(self, value: Value) -> Value:
        hidden, rest = parted(value)
        mask = self.mask(self.config, hidden, rest[0] if rest else None, None)
        return joined(self.block(hidden, None, mask), rest)


class Head(Part):
    """The last normalization and, where the model has one, the output layer."""

    def __init__(self, model: Any, base: str) -> None:
        head = {"lm_head": "lm_head"} if base else {}
        super().__init__(model, {"ln_f": base + "ln_f", **head})
        self.has_head = bool(base)

    def forward(self, value: Value) -> Tensor:
        hidden: Tensor = self.ln_f(parted(value)[0])
        return self.lm_head(hidden) if self.has_head else hidden
