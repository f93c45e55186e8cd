"""Counts layers and trainable parameters of the configurations that the paper names.

Models are built on the meta device, where five billion parameters take no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


# Tables 1-3 (AmoebaNet-D, Transformer-L), section 4 (AmoebaNet-B), section 5 (multilingual), v1
# (ResNet-101).
CONFIGURATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("amoebanet-a", {"num_layers": 18, "num_filters": 190, "num_classes": 1001, "aux_head": False}),
    ("amoebanet-b", {"num_layers": 18, "num_filters": 512, "num_classes": 1001, "aux_head": False}),
    ("amoebanet-c", {"num_layers": 18, "num_filters": 228, "num_classes": 1001, "aux_head": False}),
    ("amoebanet-d", {"num_layers": 18, "num_filters": 208, "num_classes": 1001, "aux_head": True}),
    ("amoebanet-d", {"num_layers": 18, "num_filters": 256, "num_classes": 1001, "aux_head": True}),
    ("amoebanet-d", {"num_layers": 72, "num_filters": 512, "num_classes": 1001, "aux_head": True}),
    ("amoebanet-d", {"num_layers": 72, "num_filters": 512, "preset": "torchgpipe", "num_classes": 1000}),
    ("transformer-lm", {"num_layers": 3}),
    ("transformer-lm", {"num_layers": 24}),
    ("transformer-lm", {"num_layers": 48}),
    ("transformer-lm", {"num_layers": 103}),
    ("transformer-lm", {"num_layers": 1663}),
    ("transformer-seq2seq", {"num_layers": 6, "ffn_dim": 8192, "num_heads": 16}),
    ("transformer-seq2seq", {"num_layers": 24, "ffn_dim": 8192, "num_heads": 16}),
    ("transformer-seq2seq", {"num_layers": 12, "ffn_dim": 16384, "num_heads": 32}),
    ("transformer-seq2seq", {"num_layers": 32, "ffn_dim": 16384, "num_heads": 32}),
    ("transformer-seq2seq", {"num_layers": 64, "ffn_dim": 16384, "num_heads": 32}),
    ("resnet101", {}),
)


def rows() -> Iterator[dict[str, Any]]:
    """For each configuration: model, keywords, number of layers and trainable parameters."""
    import torch

    from gpipe_bench.models import MODELS

    for name, keywords in CONFIGURATIONS:
        with torch.device("meta"):
            model = MODELS[name](**keywords)
        parameters = count_parameters(model)
        yield {"model": name, "configuration": keywords, "layers": len(model), "parameters": parameters}


def layer_parameters(model: nn.Sequential) -> list[int]:
    """Trainable parameters of each layer; one that two layers share counts in the first."""
    seen: set[int] = set()
    counts = []
    for layer in model:
        fresh = [p for p in layer.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, fresh))
        counts.append(sum(p.numel() for p in fresh))
    return counts


def count_parameters(model: nn.Module) -> int:
    """Trainable parameters of `model`, each counted once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
