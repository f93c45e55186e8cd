"""What the engines train beside each other: for who runs it and for who puts it into words."""

from __future__ import annotations

from typing import Any

MODELS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "amoebanet": (
        "amoebanet-d",
        {
            "num_layers": 3, "num_filters": 64, "image_size": 64, "num_classes": 10, "dropout": 0.0,
            "aux_head": False,
        },
        4,
        "AmoebaNet-D (3, 64), 64 x 64 pixels, 4 images per micro-batch",
    ),
    "transformer": (
        "transformer-lm",
        {
            "num_layers": 6, "vocab_size": 64, "d_model": 256, "ffn_dim": 1024, "num_heads": 4, "seq_len": 64,
        },
        2,
        "Transformer-6, width 256, 2 sequences of 64 tokens per micro-batch",
    ),
}  # fmt: skip
"""Scaled models: builder, options, micro-batch size, in words. Actions take more than 5 ms."""
