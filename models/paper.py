"""The configurations of Table 1, as the paper and its errata give them (arXiv v5, Table 1 and section 3).

Sizes, memory caps and mini-batches are the paper's; comments mark values that the paper does not state
(micro-batches) and where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Half:
    """One half of Table 1: a model family on one kind of accelerator."""

    model: str
    table: str  # the table's name in results/paper.csv
    cap_gib: int  # memory of one accelerator
    batch_size: int
    num_microbatches: int  # of the pipelined columns
    options: dict[str, Any]  # options of the model's builder, except its size


HALVES: dict[str, Half] = {
    "amoebanet": Half(
        model="amoebanet-d",
        table="table1-amoebanet",
        cap_gib=8,
        batch_size=128,
        num_microbatches=16,  # v1; v5 does not say
        options={"preset": "tf", "num_classes": 1001, "aux_head": True, "image_size": 224},
    ),
    "transformer": Half(
        model="transformer-lm",
        table="table1-transformer",
        cap_gib=16,
        batch_size=32,
        num_microbatches=32,  # Lingvo's published configuration; the paper does not say
        options={"vocab_size": 32_000, "d_model": 2048, "ffn_dim": 8192, "num_heads": 32, "seq_len": 1024},
    ),
}


@dataclass(frozen=True)
class Column:
    """A column of Table 1. ``num_filters`` is 0 for the Transformer."""

    name: str
    num_stages: int
    num_layers: int
    num_filters: int = 0

    @property
    def is_naive(self) -> bool:
        """One device, no micro-batches, no re-materialization."""
        return self.name.startswith("naive")


COLUMNS: dict[str, tuple[Column, ...]] = {
    "amoebanet": (
        Column("naive-1", 1, 18, 208),
        Column("pipeline-1", 1, 18, 416),
        Column("pipeline-2", 2, 18, 544),
        Column("pipeline-4", 4, 36, 544),
        Column("pipeline-8", 8, 72, 512),
    ),
    "transformer": (
        Column("naive-1", 1, 3),
        Column("pipeline-1", 1, 13),
        Column("pipeline-8", 8, 103),
        Column("pipeline-32", 32, 415),
        Column("pipeline-128", 128, 1663),
    ),
}

PAPER_NUM_LAYERS = (18, 36, 72)
"""The depths L of AmoebaNet-D in the paper, in which the largest model is searched."""


def column(half: str, name: str) -> Column:
    return next(each for each in COLUMNS[half] if each.name == name)
