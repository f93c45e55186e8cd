"""ViT: `ViTForImageClassification` gives logits (N, labels), `ViTModel` activations (N, 1 + patches, d), with
the pooled first one (N, d) as a tuple if it has a pooler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gpipe_bench.pipeline.model.hugging_face.passing import Value, named
from gpipe_bench.pipeline.model.parts import Part

REQUIRED, OPTIONAL = ("pixel_values",), ()


def parts(model: Any, base: str, inputs: Sequence[str]) -> dict[str, Part]:
    vit = model.get_submodule(base.rstrip("."))
    blocks = [f"{base}layers.{i}" for i in range(len(vit.layers))]
    return {
        f"{base}embeddings": Embedding(model, base),
        **{name: Block(model, name) for name in blocks},
        f"{base}layernorm": Head(model, base, vit.pooler is not None),
    }


class Embedding(Part):
    """Images (N, channels, height, width) -> activations (N, 1 + patches, d)."""

    def __init__(self, model: Any, base: str) -> None:
        super().__init__(model, {"embeddings": base + "embeddings"})

    def forward(self, batch: Value) -> Tensor:
        images = named(batch, REQUIRED)["pixel_values"]
        embedded: Tensor = self.embeddings(
            images.to(self.embeddings.patch_embeddings.projection.weight.dtype)
        )
        return embedded


class Block(Part):
    """One block."""

    def __init__(self, model: Any, name: str) -> None:
        super().__init__(model, {"block": name})

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.block(hidden, None)
        return result


class Head(Part):
    """The last normalization and what follows it."""

    def __init__(self, model: Any, base: str, pooled: bool) -> None:
        modules = {"layernorm": base + "layernorm"}
        if base:
            modules["classifier"] = "classifier"
        elif pooled:
            modules["pooler"] = "pooler"
        super().__init__(model, modules)
        self.kind = "classifier" if base else "pooler" if pooled else None

    def forward(self, hidden: Tensor) -> Value:
        hidden = self.layernorm(hidden)
        if self.kind == "classifier":
            logits: Tensor = self.classifier(hidden[:, 0, :])
            return logits
        return (hidden, self.pooler(hidden)) if self.kind == "pooler" else hidden
