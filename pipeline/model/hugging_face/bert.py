"""BERT: `BertForMaskedLM` gives logits (N, T, V), `BertForSequenceClassification` logits (N, labels), and
`BertModel` activations (N, T, d), with the pooled first one (N, d) as a tuple if it has a pooler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpipe_bench.pipeline.model.hugging_face.passing import Value, joined, named, parted
from gpipe_bench.pipeline.model.parts import Part

REQUIRED, OPTIONAL = ("input_ids",), ("attention_mask", "token_type_ids")


def parts(model: Any, base: str, inputs: Sequence[str]) -> dict[str, Part]:
    bert = model.get_submodule(base.rstrip("."))
    if bert.config.is_decoder:
        raise ValueError("this BERT is a decoder; layers_of knows it as an encoder, with is_decoder=False")
    blocks = [f"{base}encoder.layer.{i}" for i in range(len(bert.encoder.layer))]
    head: dict[str, str] = {name: name for name in ("cls", "dropout", "classifier") if name in model._modules}
    if bert.pooler is not None:
        head["pooler"] = base + "pooler"
    return {
        f"{base}embeddings": Embedding(model, base, inputs),
        **{name: Block(model, name, bert.config) for name in blocks},
        f"{base}output": Head(model, head),
    }


class Embedding(Part):
    """Tokens (N, T) -> activations (N, T, d), with positions and kinds of tokens."""

    def __init__(self, model: Any, base: str, inputs: Sequence[str]) -> None:
        super().__init__(model, {"embeddings": base + "embeddings"})
        self.inputs = tuple(inputs)

    def forward(self, batch: Value) -> Value:
        given = named(batch, self.inputs)
        mask = given.pop("attention_mask", None)
        return joined(self.embeddings(**given), () if mask is None else (mask,))


class Block(Part):
    """One block; attention is blind to what the mask (N, T) has 0 for."""

    def __init__(self, model: Any, name: str, config: object) -> None:
        from transformers.masking_utils import create_bidirectional_mask

        super().__init__(model, {"block": name})
        self.config, self.mask = config, create_bidirectional_mask

    def forward(self, value: Value) -> Value:
        hidden, rest = parted(value)
        mask = self.mask(self.config, hidden, rest[0] if rest else None)
        return joined(self.block(hidden, mask), rest)


class Head(Part):
    """What follows the last block."""

    def __init__(self, model: Any, modules: dict[str, str]) -> None:
        super().__init__(model, modules)
        self.kind = next((kind for kind in ("cls", "classifier", "pooler") if kind in modules), None)

    def forward(self, value: Value) -> Value:
        hidden, _ = parted(value)
        if self.kind == "cls":
            hidden = self.cls(hidden)
        elif self.kind == "classifier":
            hidden = self.classifier(self.dropout(self.pooler(hidden)))
        return (hidden, self.pooler(hidden)) if self.kind == "pooler" else hidden
