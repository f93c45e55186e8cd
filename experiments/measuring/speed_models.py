"""The models of the performance tables: as the paper has them, and scaled to what two laptop cores can time.

A scaled model keeps the number of layers and their kinds, so it cuts into stages as the paper's does; widths,
images and sequences shrink until an action takes milliseconds. What that leaves comparable is the shape of a
table, not its absolute speeds, and the tables say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """One model at one size. `cap_bytes` bounds a stage's memory where the mini-batch is fitted to it."""

    options: dict[str, Any]
    batch_size: int
    cap_bytes: int
    scale: str = ""  # in words; empty for the paper's own size


@dataclass(frozen=True)
class Subject:
    """A model of the paper; `sizes` by profile."""

    title: str
    model: str
    sizes: dict[str, Size]


_MIB, _GIB = 2**20, 2**30


def _amoebanet(
    num_layers: int, num_filters: int, image_size: int, num_classes: int, *, aux_head: bool = True
) -> dict[str, Any]:
    return {
        "num_layers": num_layers, "num_filters": num_filters, "image_size": image_size,
        "num_classes": num_classes, "aux_head": aux_head,
    }  # fmt: skip


def _transformer(
    num_layers: int, d_model: int, num_heads: int, seq_len: int, vocab_size: int, **more: Any
) -> dict[str, Any]:
    return {
        "num_layers": num_layers, "d_model": d_model, "ffn_dim": 4 * d_model, "num_heads": num_heads,
        "seq_len": seq_len, "vocab_size": vocab_size, "cut": "sublayer", **more,
    }  # fmt: skip


SUBJECTS: dict[str, Subject] = {
    "amoebanet": Subject(
        "AmoebaNet-D (18, 256)",
        "amoebanet-d",
        {
            "smoke": Size(
                _amoebanet(6, 16, 32, 10, aux_head=False), 8, 7 * _MIB // 2,
                "6 cells, 16 filters, 32 x 32 pixels",
            ),
            "short": Size(
                _amoebanet(18, 64, 112, 100), 32, 180 * _MIB, "filters / 4, 112 x 112 pixels, 100 classes"
            ),
            "full": Size(_amoebanet(18, 256, 224, 1001), 128, 8 * _GIB),
        },
    ),
    "transformer": Subject(
        "Transformer-48",
        "transformer-lm",
        {
            "smoke": Size(
                _transformer(8, 32, 2, 16, 500), 8, 9 * _MIB // 4, "8 layers, width 32, 16 tokens, 500 words"
            ),
            "short": Size(
                _transformer(48, 128, 8, 64, 2000), 32, 140 * _MIB,
                "width / 16, 64 tokens, 2,000 words",
            ),
            "full": Size(
                # Half of it in float32 with RMSProp needs 19.5 GiB for a single example.
                _transformer(48, 2048, 32, 512, 32_000), 32, 24 * _GIB,
                "512 instead of 1024 tokens, 24 instead of 16 GiB",
            ),
        },
    ),
}  # fmt: skip
"""Table 2's models, named as in results/paper.csv."""

V1_SUBJECTS: dict[str, Subject] = {
    "resnet101": Subject(
        "ResNet-101",
        "resnet101",
        {
            "smoke": Size({"image_size": 64, "num_classes": 10}, 4, 0, "64 x 64 pixels, 10 classes"),
            "short": Size({"image_size": 64, "num_classes": 100}, 32, 0, "64 x 64 pixels, 100 classes"),
            "full": Size({"image_size": 224, "num_classes": 1000}, 128, 0),
        },
    ),
    "amoebanet": Subject(
        "AmoebaNet-D (4, 512)",  # v1 counts the cells of one stack of three: L = 12 in v5's words
        "amoebanet-d",
        {
            "smoke": Size(
                _amoebanet(6, 16, 32, 10, aux_head=False), 8, 0, "6 cells, 16 filters, 32 x 32 pixels"
            ),
            "short": Size(_amoebanet(12, 128, 80, 100), 32, 0, "filters / 4, 80 x 80 pixels, 100 classes"),
            "full": Size(_amoebanet(12, 512, 224, 1001), 128, 0),
        },
    ),
}
"""The models of v1's figures 3 and 4."""
