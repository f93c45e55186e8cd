"""torchgpipe's published speeds, predicted: batches, micro-batches, cuts and GPUs are stated, so nothing is
left to choose.

What its documentation does not state is what the paper does not state either: the share of the peak, and the
link between GPUs of one host, whose ranges are those of Table 3. Its settings are those of its benchmark
scripts (benchmarks/amoebanetd-speed, resnet101-speed, resnet101-accuracy and unet-speed of version 0.0.7).

Its U-Nets on four and eight GPUs are left out: there a skip goes directly from the stage that makes it to the
one that takes it, past the stages between them, and the steps here have links between neighbours only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.experiments.published.accelerator_steps.full_size import FullSize
from gpipe_bench.experiments.published.settings import LINK, Unknowns, numbers
from gpipe_bench.experiments.published.walk import Axis, Cell, Walk
from gpipe_bench.harness.unknowns import load_unknowns
from gpipe_bench.planner.accelerators import P40

SAME_UNKNOWNS = "table3-amoebanet"
"""The table of the file of unknowns that has GPUs without a fast link, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One published run.

    Args:
        table, row, column: of its throughput in results/paper.csv
        ratio: row of its throughput relative to the first of the table; empty where none is published
        batch_size: examples of the mini-batch
        num_microbatches: as asked for; those there are follow from their size, the next whole number
        balance: layers of every stage
        remat: which micro-batches are recomputed
    """

    table: str
    row: str
    column: str
    ratio: str = ""
    batch_size: int
    num_microbatches: int
    balance: tuple[int, ...]
    remat: str = "except_last"

    @property
    def cut(self) -> tuple[range, ...]:
        """The layers of every stage."""
        ends = np.cumsum([0, *self.balance]).tolist()
        return tuple(range(start, stop) for start, stop in pairwise(ends))


def _amoebanet(m: int, balance: tuple[int, ...], batch_size: int) -> Setting:
    return Setting(
        table="table2-amoebanet", row=f"M={m} throughput", column=f"K={len(balance)}", ratio=f"M={m}",
        batch_size=batch_size, num_microbatches=m, balance=balance,
        remat="always" if m == 1 else "except_last",
    )  # fmt: skip


def _resnet(
    column: str, balance: tuple[int, ...], batch_size: int, m: int, remat: str = "except_last"
) -> Setting:
    return Setting(
        table="figure3-resnet101", row="throughput", column=column, ratio="normalized throughput",
        batch_size=batch_size, num_microbatches=m, balance=balance, remat=remat,
    )  # fmt: skip


def _accuracy(row: str, balance: tuple[int, ...], batch_size: int, m: int) -> Setting:
    return Setting(
        table="resnet101-accuracy", row=row, column="throughput", batch_size=batch_size, num_microbatches=m,
        balance=balance,
    )  # fmt: skip


def _unet(
    column: str, balance: tuple[int, ...], batch_size: int, m: int, remat: str = "except_last"
) -> Setting:
    return Setting(
        table="unet-speed", row="throughput", column=column, ratio="normalized throughput",
        batch_size=batch_size, num_microbatches=m, balance=balance, remat=remat,
    )  # fmt: skip


_EIGHT = (26, 22, 33, 44, 44, 66, 66, 69)
_AMOEBANET_EIGHT = (2, 2, 2, 3, 3, 4, 4, 4)

SETTINGS: dict[str, tuple[Setting, ...]] = {
    "amoebanet": (
        _amoebanet(1, (7, 17), 96),
        _amoebanet(4, (9, 15), 256),
        _amoebanet(32, (9, 15), 1280),
        _amoebanet(1, (3, 4, 5, 12), 160),
        _amoebanet(4, (3, 6, 7, 8), 360),
        _amoebanet(32, (3, 6, 7, 8), 1152),
        _amoebanet(1, (2, 2, 2, 2, 2, 3, 4, 7), 196),
        _amoebanet(4, _AMOEBANET_EIGHT, 480),
        _amoebanet(32, _AMOEBANET_EIGHT, 1280),
    ),
    "resnet101": (
        _resnet("naive-1", (370,), 118, 1, "never"),
        _resnet("pipeline-1", (370,), 220, 2),
        _resnet("pipeline-2", (135, 235), 25_000, 1667),
        _resnet("pipeline-4", (44, 92, 124, 110), 5632, 256),
        _resnet("pipeline-8", _EIGHT, 5400, 150),
    ),
    "resnet101-accuracy": (
        _accuracy("pipeline-256", (140, 230), 256, 4),
        _accuracy("pipeline-1k", _EIGHT, 1024, 64),
        _accuracy("pipeline-4k", _EIGHT, 4096, 64),
    ),
    "unet": (
        _unet("naive-1", (241,), 40, 1, "never"),
        _unet("pipeline-1", (241,), 80, 2),
        _unet("pipeline-2", (104, 137), 512, 32),
    ),
}
"""By model and script; the first of each is what the ratios are relative to."""

TITLES = {
    "amoebanet": "AmoebaNet-D (18, 256) on P40s",
    "resnet101": "ResNet-101 on P40s",
    "resnet101-accuracy": "ResNet-101 on P40s, reading ImageNet",
    "unet": "U-Net (5, 64) on P40s",
}

_RESNET = {"num_classes": 1000, "image_size": 224}
MODELS = {
    "amoebanet": FullSize(
        "amoebanet-d",
        {"num_layers": 18, "num_filters": 256, "image_size": 224, "preset": "torchgpipe", "aux_head": False},
        "sgd",
    ),
    "resnet101": FullSize("resnet101", _RESNET, "sgd"),
    "resnet101-accuracy": FullSize("resnet101", _RESNET, "momentum"),
    "unet": FullSize("unet", {"num_convs": 5, "num_filters": 64}, "sgd"),
}


def predict(model: str, *, quick: bool = False) -> Walk:
    """All published speeds of one script, over what is unknown; `quick` has the middle alone."""
    unknowns = Unknowns(SAME_UNKNOWNS, load_unknowns(), quick)
    axes = unknowns.axes(*LINK)
    rates = {setting: _examples_per_s(MODELS[model], setting, axes) for setting in SETTINGS[model]}
    first = next(iter(rates.values()))
    values: dict[Cell, NDArray[np.float64]] = {}
    for setting, rate in rates.items():
        values[setting.table, setting.row, setting.column] = rate
        if setting.ratio and rate is not first:
            values[setting.table, setting.ratio, setting.column] = rate / first
    return Walk.with_rule(axes, values)


def _examples_per_s(full: FullSize, setting: Setting, axes: Sequence[Axis]) -> NDArray[np.float64]:
    shares, bandwidths, latencies = map(numbers, axes)
    if setting.cut[-1].stop != len(full.work.layers):
        raise ValueError(
            f"{setting.balance} has {setting.cut[-1].stop} layers, the model {len(full.work.layers)}; a "
            "published cut must name them all"
        )
    examples = -(-setting.batch_size // setting.num_microbatches)
    count = -(-setting.batch_size // examples)
    steps = full.steps(
        P40, "float32", [setting.cut], [count * examples], count, remat=setting.remat, shares_of_peak=shares,
        link_bytes_per_s=bandwidths, link_latency_s=latencies,
    )  # fmt: skip
    return np.asarray(count * examples / steps.makespan_s()[0, 0])


def middles() -> list[dict[str, object]]:
    """What the middle of the unknowns gives for every published number, as a record keeps it."""
    found: list[dict[str, object]] = []
    for model in SETTINGS:
        walk = predict(model, quick=True)
        found += [{"cell": list(cell), "value": walk.middle(cell)} for cell in walk.values]
    return found
