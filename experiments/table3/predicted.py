"""Table 3 predicted for P100s over PCI Express: one mini-batch for all its entries, M = 32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.experiments.published.accelerator_steps import paper_models
from gpipe_bench.experiments.published.settings import (
    NOTHING_FITS,
    Prediction,
    Unknowns,
    fitting,
    numbers,
    throughput,
    whole,
    words,
)
from gpipe_bench.experiments.published.walk import Axis, Walk
from gpipe_bench.harness.record import Scalar
from gpipe_bench.harness.unknowns import load_unknowns
from gpipe_bench.planner.accelerators import P100_12, P100_16, Accelerator

Array = NDArray[np.float64]

STAGES = (2, 4, 8)
P100_OF: dict[Scalar, Accelerator] = {12 * 2**30: P100_12, 16 * 2**30: P100_16}


def predict(model: str, *, quick: bool = False) -> Prediction:
    """Normalised throughput over K without a fast link, M = 32; K=2 is 1."""
    settings = load_unknowns()
    table = f"table3-{model}"
    unknowns = Unknowns(table, settings, quick)
    num_microbatches = next(
        int(one.value) for one in settings.stated if table in one.tables and one.setting == "num_microbatches"
    )
    batch, activation_format = Axis.of(unknowns.find("batch_size")), unknowns.axis("activation_format")
    # The quick walk takes both memories, since its batch must fit into one of them.
    cap = Axis.of(unknowns.find("memory_cap_bytes"))
    batches = whole(batch)
    names = ("num_classes",) if model == "amoebanet" else ()
    classes = unknowns.axes(*names) or [Axis("", (1000,), (0,))]
    models = [paper_models.table3(model, number, quick=quick) for number in whole(classes[0])]
    rates: dict[int, list[Array]] = {}
    fits: dict[int, list[NDArray[np.bool_]]] = {}
    for k in STAGES:
        rates[k] = [
            throughput(full, P100_OF[value], kept, unknowns, batches, k, num_microbatches)
            for full in models
            for kept in words(activation_format)
            for value in cap.values
        ]
        fits[k] = [
            each
            for kept in words(activation_format)
            for each in fitting(models[0], kept, unknowns, batches, k, num_microbatches, numbers(cap))
        ]
    outer = (len(models), len(activation_format.values), len(cap.values))
    rate = {k: np.stack(each).reshape(*outer, *each[0].shape) for k, each in rates.items()}
    fit = {k: np.stack(each).reshape(1, *outer[1:], *each[0].shape, 1, 1, 1) for k, each in fits.items()}
    admitted = np.all(list(fit.values()), axis=0)
    bounded = bool(admitted.any())
    if not bounded:
        admitted = np.ones_like(admitted)
    values = {
        (table, f"M={num_microbatches}", f"K={k}"): np.where(admitted, rate[k] / rate[STAGES[0]], np.nan)
        for k in STAGES
    }
    axes = [*classes, activation_format, cap, *unknowns.cuts, batch, *unknowns.link]
    return Prediction(
        "AmoebaNet-D (18, 128)" if model == "amoebanet" else "Transformer-24",
        Walk.with_rule(axes, values),
        "" if bounded else NOTHING_FITS,
    )
