"""Predictions of where the time of a step goes: Table 4 and the first version's Figure 4.

The step is ResNet-101's of Figure 3, with the batch that is fastest; the same share of it is asked for with
two and with four partitions. Where the set-up is done and over what the shares are averaged is not stated.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.experiments.figure3.predicted import TITLES
from gpipe_bench.experiments.published.accelerator_steps import paper_models
from gpipe_bench.experiments.published.accelerator_steps.full_size import FullSize, Setup
from gpipe_bench.experiments.published.settings import (
    Prediction,
    Unknowns,
    fitting,
    numbers,
    whole,
    words,
)
from gpipe_bench.experiments.published.walk import Axis, Cell, Walk
from gpipe_bench.harness.unknowns import load_unknowns
from gpipe_bench.planner.accelerators import TPU_V2

Array = NDArray[np.float64]

STAGES = (2, 4)
PRINTED = ("computation", "recompute", "bubble", "load imbalance", "setup", "weight update")
"""The slices of v5's chart."""


def predict(model: str = "resnet101", *, quick: bool = False) -> Prediction:
    """Shares of the step in per cent, and the ratios that the text makes of them."""
    unknowns = Unknowns("breakdown-v5", load_unknowns(), quick)
    names = ("activation_format", "memory_cap_bytes", "num_microbatches", "setup_place", "averaged_over")
    activation_format, cap, count, place, over = unknowns.axes(*names)
    full = paper_models.figure3(model, quick=quick)
    shape = (
        len(activation_format.values), len(cap.values), len(count.values), len(place.values),
        *(len(axis.values) for axis in (*unknowns.cuts, *unknowns.link, over)),
    )  # fmt: skip
    values: dict[Cell, Array] = {}
    for k in STAGES:
        found: dict[str, Array] = {}
        for number, kept in enumerate(words(activation_format)):
            for column, m in enumerate(whole(count)):
                for third, where in enumerate(words(place)):
                    for part, share in _shares(full, unknowns, kept, cap, k, m, where, words(over)).items():
                        found.setdefault(part, np.empty(shape))[number, :, column, third] = 100 * share
        m_of = np.array(whole(count), dtype=float)[:, None, None, None, None, None, None, None]
        if k == 2:
            values |= {("breakdown-v5", part, "share of the step"): found[part] for part in PRINTED}
            rest = np.max(
                [each for part, each in found.items() if part not in ("computation", "recompute")], axis=0
            )
            values["claims-text", "bubble observed over (K-1)/(M+K-1)", "ResNet-101"] = (
                found["bubble"] / 100 / ((k - 1) / (m_of + k - 1))
            )
            values["claims-text", "recomputation over the next largest overhead", "ResNet-101"] = (
                found["recompute"] / rest
            )
        else:
            values["breakdown-v1", "load imbalance", f"K={k}"] = found["load imbalance"]
    axes = [activation_format, cap, count, place, *unknowns.cuts, *unknowns.link, over]
    return Prediction(TITLES[model], Walk.with_rule(axes, values))


def _shares(
    full: FullSize,
    unknowns: Unknowns,
    activation_format: str,
    cap: Axis,
    num_stages: int,
    num_microbatches: int,
    place: str,
    averaged_over: list[str],
) -> dict[str, Array]:
    """By part, over (cap, cost, rule, share, bandwidth, latency, averaged over), of the fastest batch."""
    cost, rule = unknowns.cuts
    cuts = [full.cut(c, r, num_stages) for c in words(cost) for r in words(rule)]
    batches = whole(Axis.of(unknowns.find("batch_size")))
    shares, bandwidths, latencies = map(numbers, unknowns.link)
    steps = full.steps(
        TPU_V2, activation_format, cuts, batches, num_microbatches, shares_of_peak=shares,
        link_bytes_per_s=bandwidths, link_latency_s=latencies, setup=cast(Setup, place),
    )  # fmt: skip
    rates = np.array(batches, dtype=float)[:, None, None, None] / steps.makespan_s()
    cut_shape = (len(cost.values), len(rule.values))
    rates = rates.reshape(*cut_shape, *rates.shape[1:])
    fits = fitting(full, activation_format, unknowns, batches, num_stages, num_microbatches, numbers(cap))
    allowed = np.where(fits[..., None, None, None], rates[None], -np.inf)
    allowed = np.where(np.isfinite(allowed), allowed, -np.inf)
    best = allowed.argmax(axis=3)  # (cap, cost, rule, share, bandwidth, latency)
    nothing = ~np.isfinite(allowed.max(axis=3))
    by_average = steps.shares()
    found = {}
    for part in by_average[averaged_over[0]]:
        columns = []
        for over in averaged_over:
            each = by_average[over][part]
            each = np.broadcast_to(each, (len(cuts), *rates.shape[2:])).reshape(rates.shape)
            each = np.broadcast_to(each, (len(cap.values), *each.shape))
            chosen = np.take_along_axis(each, best[:, :, :, None], axis=3)[:, :, :, 0]
            columns.append(np.where(nothing, np.nan, chosen))
        found[part] = np.stack(columns, axis=-1)
    return found
