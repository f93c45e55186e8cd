"""The settings of one table that the paper leaves open, and rates over all of them at once.

What the predictions of single tables share: which settings are walked over, what fits into which memory, and
how fast it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.experiments.published.accelerator_steps.full_size import FullSize
from gpipe_bench.experiments.published.walk import Axis, Walk
from gpipe_bench.harness.unknowns import Settings, Unknown
from gpipe_bench.planner.accelerators import Accelerator

Array = NDArray[np.float64]

LINK = ("share_of_peak", "link_bytes_per_s", "link_latency_s")
"""The settings over which steps are laid out at once, last in every walk."""


@dataclass(frozen=True)
class Prediction:
    """A walk, and what has to be said of it. `title` names the model and its size."""

    title: str
    walk: Walk
    note: str = ""


@dataclass(frozen=True)
class Unknowns:
    """The unknown settings of one table; `quick` takes the middle of each."""

    table: str
    settings: Settings
    quick: bool = False

    def find(self, name: str) -> Unknown:
        return self.settings.find(self.table, name)

    def axis(self, name: str) -> Axis:
        return Axis.of(self.find(name), quick=self.quick)

    def axes(self, *names: str) -> list[Axis]:
        return [self.axis(name) for name in names]

    @property
    def cuts(self) -> list[Axis]:
        return self.axes("partition_cost", "partition_rule")

    @property
    def link(self) -> list[Axis]:
        return self.axes(*LINK)


def numbers(axis: Axis) -> list[float]:
    """An axis of numbers."""
    return [float(value) for value in axis.values if isinstance(value, int | float)]


def whole(axis: Axis) -> list[int]:
    """An axis of whole numbers."""
    return [int(value) for value in numbers(axis)]


def words(axis: Axis) -> list[str]:
    """An axis of words."""
    return [str(value) for value in axis.values]


def throughput(
    full: FullSize,
    accelerator: Accelerator,
    activation_format: str,
    unknowns: Unknowns,
    batches: Sequence[int],
    num_stages: int,
    num_microbatches: int,
    remat: str = "always",
) -> Array:
    """Examples per second over (cost, rule, batch, share of the peak, bandwidth, latency)."""
    cost, rule = unknowns.cuts
    cuts = [full.cut(c, r, num_stages) for c in words(cost) for r in words(rule)]
    shares, bandwidths, latencies = map(numbers, unknowns.link)
    steps = full.steps(
        accelerator, activation_format, cuts, batches, num_microbatches, remat=remat,
        shares_of_peak=shares, link_bytes_per_s=bandwidths, link_latency_s=latencies,
    )  # fmt: skip
    found = np.array(batches, dtype=float)[:, None, None, None] / steps.makespan_s()
    return found.reshape(len(cost.values), len(rule.values), *found.shape[1:])


def fitting(
    full: FullSize,
    activation_format: str,
    unknowns: Unknowns,
    batches: Sequence[int],
    num_stages: int,
    num_microbatches: int,
    caps: Sequence[float],
    remat: str = "always",
) -> NDArray[np.bool_]:
    """What fits, over (cap, cost, rule, batch)."""
    cost, rule = unknowns.cuts
    cuts = [full.cut(c, r, num_stages) for c in words(cost) for r in words(rule)]
    found = full.fits(activation_format, cuts, batches, num_microbatches, caps, remat=remat)
    return np.moveaxis(found.reshape(len(cost.values), len(rule.values), len(batches), len(caps)), -1, 0)


ONE_BATCH, EACH_M, EACH_ENTRY = (
    "one batch for the table",
    "one batch for each M",
    "one batch for each entry",
)
"""Ways to adjust the batch, as in results/unknowns.toml."""

BATCH_AXIS = -4
"""Of rates and of what fits: (..., cost, rule, batch, share, bandwidth, latency)."""

NOTHING_FITS = (
    "No allowed batch fits into the memory of an allowed accelerator in every entry: at the width of Table 1 "
    "parameters, optimizer state and gradients alone take more. So the memory bounds nothing here."
)


def largest(values: Array, axis: int) -> Array:
    """The largest along an axis; NaN where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmax(values, axis=axis))
