"""Figure 3 predicted for TPUv2 cores: each column with the fastest of the mini-batches that fit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.experiments.published.accelerator_steps import paper_models
from gpipe_bench.experiments.published.settings import (
    Prediction,
    Unknowns,
    fitting,
    largest,
    numbers,
    throughput,
    whole,
    words,
)
from gpipe_bench.experiments.published.walk import Axis, Cell, Walk
from gpipe_bench.harness.unknowns import load_unknowns
from gpipe_bench.planner.accelerators import TPU_V2

Array = NDArray[np.float64]

STAGES = {"resnet101": (1, 2, 4, 8), "amoebanet": (2, 4, 8)}
TITLES = {"resnet101": "ResNet-101", "amoebanet": "AmoebaNet-D (4, 512)"}


def predict(model: str, *, quick: bool = False) -> Prediction:
    """Speed over partitions; the naive split is 1. Each column has the fastest of the batches that fit."""
    settings = load_unknowns()
    table = f"figure3-{model}"
    unknowns = Unknowns(table, settings, quick)
    classes = unknowns.axes("num_classes") if model == "amoebanet" else [Axis("", (1000,), (0,))]
    activation_format, cap, count = unknowns.axes("activation_format", "memory_cap_bytes", "num_microbatches")
    # Of Figure 3(b) the text says that naive-1 is without recomputation.
    naive = unknowns.axis("naive_remat") if model == "amoebanet" else Axis("", ("never",), (0,))
    models = [paper_models.figure3(model, number, quick=quick) for number in whole(classes[0])]
    batches = whole(Axis.of(unknowns.find("batch_size")))
    stages = STAGES[model]

    def fastest(k: int, m: int, remat: str) -> Array:
        """Over (classes, format, cap, cost, rule, share, bandwidth, latency)."""
        found = []
        for full in models:
            for kept in words(activation_format):
                rate = throughput(full, TPU_V2, kept, unknowns, batches, k, m, remat)
                fits = fitting(models[0], kept, unknowns, batches, k, m, numbers(cap), remat)
                found.append(largest(np.where(fits[..., None, None, None], rate[None], np.nan), axis=3))
        return np.stack(found).reshape(len(models), len(activation_format.values), *found[0].shape)

    # (classes, format, cap, M, naive_remat, cost, rule, share, bandwidth, latency)
    base = np.stack([fastest(stages[0], 1, remat) for remat in words(naive)], axis=3)[:, :, :, None]
    values: dict[Cell, Array] = {}
    for k in stages:
        each = np.stack([fastest(k, m, "always") for m in whole(count)], axis=3)[:, :, :, :, None]
        values[table, "normalized throughput", f"pipeline-{k}"] = each / base
    values[table, "normalized throughput", f"naive-{stages[0]}"] = base / base
    if model == "amoebanet":
        most = values[table, "normalized throughput", "pipeline-8"]
        row = "AmoebaNet-D (4, 512): share of a linear speed-up"
        values["claims-text", row, "pipeline-8 over naive-2"] = most / 4
    else:
        one = values[table, "normalized throughput", "pipeline-1"]
        row = "extra time by recomputation"
        values["claims-text", row, "pipeline-1 / naive-1, ResNet-101"] = 100 * (1 / one - 1)
        most = values[table, "normalized throughput", "pipeline-8"]
        values[table, "normalized throughput by the text", "pipeline-8"] = most
    axes = [*classes, activation_format, cap, count, naive, *unknowns.cuts, *unknowns.link]
    return Prediction(TITLES[model], Walk.with_rule(axes, values))
