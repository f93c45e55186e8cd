"""The models of the paper's performance tables at their published size, and small ones that prove the path.

What the paper states is taken from it (results/unknowns.toml, the stated settings); the rest is not a setting
of the predictions: attention is written out, since nothing of that time fused it; layers of the Transformer
are cut whole, ResNet-101 between any two of its 370 operations.
"""

from __future__ import annotations

from typing import Any

from gpipe_bench.experiments.published.accelerator_steps.full_size import FullSize


def _amoebanet(num_layers: int, num_filters: int, *, quick: bool, num_classes: int) -> FullSize:
    if quick:
        num_layers, num_filters = 6, 16
    options = {
        "num_layers": num_layers, "num_filters": num_filters, "image_size": 64 if quick else 224,
        "num_classes": num_classes, "aux_head": not quick,
    }  # fmt: skip
    return FullSize("amoebanet-d", options)


def _transformer(num_layers: int, *, quick: bool) -> FullSize:
    size: dict[str, Any] = (
        {"d_model": 32, "ffn_dim": 128, "num_heads": 2, "seq_len": 16, "vocab_size": 500}
        if quick
        else {"d_model": 2048, "ffn_dim": 8192, "num_heads": 32, "seq_len": 1024, "vocab_size": 32_000}
    )
    return FullSize(
        "transformer-lm", {"num_layers": 10 if quick else num_layers, "attention": "explicit", **size}
    )


def table2(model: str, num_classes: int = 1000, *, quick: bool = False) -> FullSize:
    """AmoebaNet-D (18, 256) and Transformer-48."""
    if model == "amoebanet":
        return _amoebanet(18, 256, quick=quick, num_classes=num_classes)
    return _transformer(48, quick=quick)


def table3(model: str, num_classes: int = 1000, *, quick: bool = False) -> FullSize:
    """AmoebaNet-D (18, 128) and Transformer-24."""
    if model == "amoebanet":
        return _amoebanet(18, 128, quick=quick, num_classes=num_classes)
    return _transformer(24, quick=quick)


def figure3(model: str, num_classes: int = 1000, *, quick: bool = False) -> FullSize:
    """AmoebaNet-D (4, 512), which has four normal cells in each of three stacks, and ResNet-101."""
    if model == "amoebanet":
        return _amoebanet(12, 512, quick=quick, num_classes=num_classes)
    image_size = 64 if quick else 224
    return FullSize("resnet101", {"num_classes": num_classes, "image_size": image_size})
