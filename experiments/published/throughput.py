"""Predictions of throughput over stages and micro-batches: Tables 2 and 3, Figure 3.

Each table has its own way to choose the mini-batch: Table 2 "adjusted" it in one of three ways, Table 3 has
one for all its entries, Figure 3 the fastest of each column. Everything else is the same walk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.experiments.published import paper_models
from gpipe_bench.experiments.published.accelerators import P100_12, P100_16, TPU_V2, TPUS, Accelerator
from gpipe_bench.experiments.published.full_size import FullSize
from gpipe_bench.experiments.published.walk import Axis, Cell, Walk
from gpipe_bench.harness.judging.unknowns import Settings, Unknown, load_unknowns
from gpipe_bench.harness.records.record import Scalar

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

# Table 2 ----------------------------------------------------------------------------------------------------

TABLE2_STAGES = (2, 4, 8)
TABLE2_MICROBATCHES = (1, 4, 32)
_CONSTANT = "throughput without pipelining, over the accelerators"
TABLE2_TEXT: dict[str, dict[tuple[str, str], tuple[tuple[int, int], tuple[int, int], float]]] = {
    "table2-amoebanet": {
        (_CONSTANT, "AmoebaNet-D (18, 256): K=8 / K=2, M=1"): ((8, 1), (2, 1), 1.0),
        ("AmoebaNet-D: share of a linear speed-up", "K=8 over K=2, M=32"): ((8, 32), (2, 32), 4.0),
    },
    "table2-transformer": {
        (_CONSTANT, "Transformer-48: K=8 / K=2, M=1"): ((8, 1), (2, 1), 1.0),
        ("Transformer-48: speed-up with four times the accelerators", "K=8 / K=2, M=32"): (
            (8, 32), (2, 32), 1.0,
        ),
        ("Transformer-48: share of a linear speed-up at M >> K", "K=8 over K=2, M=32"): (
            (8, 32), (2, 32), 4.0,
        ),
    },
}  # fmt: skip
"""Sentences about Table 2: the (K, M) whose throughput is divided by that of another, and by a number."""

CAPS_OF = {"TPUv2 core": "table2-amoebanet", "TPUv3 core": "table2-transformer"}
"""Where the memory of an accelerator's core stands: a constraint of the unknowns."""

NOTHING_FITS = (
    "No allowed batch fits into the memory of an allowed accelerator in every entry: at the width of Table 1 "
    "parameters, optimizer state and gradients alone take more. So the memory bounds nothing here."
)


def table2(model: str, *, quick: bool = False) -> Prediction:
    """Normalised throughput over K and M; K=2, M=1 is 1."""
    settings = load_unknowns()
    unknowns = Unknowns(f"table2-{model}", settings, quick)
    batch = Axis.of(unknowns.find("batch_size"))  # of the quick walk too: the batch must be at least M
    batches = whole(batch)
    classes = unknowns.axes("num_classes") if model == "amoebanet" else [Axis("", (1000,), (0,))]
    accelerator, activation_format = unknowns.axes("accelerator", "activation_format")
    caps = [
        Axis.of(settings.find(CAPS_OF[name], "memory_cap_bytes"), quick=quick) for name in words(accelerator)
    ]
    cap = Axis("memory_cap_bytes", ("low end", "middle", "high end")[-len(caps[0].values) :], caps[0].ranks)
    if quick:
        cap = Axis("memory_cap_bytes", ("middle",), (0,))
    models = [paper_models.table2(model, number, quick=quick) for number in whole(classes[0])]
    grid = [(k, m) for m in TABLE2_MICROBATCHES for k in TABLE2_STAGES]

    outer = (len(models), len(accelerator.values), len(activation_format.values))
    inner = (len(cap.values), *(len(each.values) for each in (*unknowns.cuts, batch, *unknowns.link)))
    rates: dict[tuple[int, int], Array] = {}
    admitted: dict[tuple[int, int], NDArray[np.bool_]] = {}
    for k, m in grid:
        rates[k, m] = np.empty((*outer, 1, *inner[1:]))
        admitted[k, m] = np.empty((1, *outer[1:], *inner[:4], 1, 1, 1), dtype=bool)
        for place in np.ndindex(outer):
            number, device, kept = place
            rates[k, m][place] = throughput(
                models[number], TPUS[words(accelerator)[device]], words(activation_format)[kept], unknowns,
                batches, k, m,
            )  # fmt: skip
            if number == 0:  # the number of classes makes no difference to what fits
                fits = fitting(
                    models[0], words(activation_format)[kept], unknowns, batches, k, m, numbers(caps[device])
                )
                admitted[k, m][place] = fits[..., None, None, None]
    bounded = any_everywhere(admitted.values())
    if not bounded:
        for (_, m), each in admitted.items():
            each[...] = (np.array(batches) >= m)[:, None, None, None]
    axes = [*classes, accelerator, activation_format, cap, *unknowns.cuts, *unknowns.link]
    return Prediction(
        "AmoebaNet-D (18, 256)" if model == "amoebanet" else "Transformer-48",
        _adjusted(f"table2-{model}", axes, unknowns.find("batch_adjustment"), batch, rates, admitted),
        "" if bounded else NOTHING_FITS,
    )


def any_everywhere(admitted: Iterable[NDArray[np.bool_]]) -> bool:
    """Whether some setting admits a batch in every entry. The batch is the fourth dimension from behind."""
    return bool(np.all([each.any(axis=BATCH_AXIS) for each in admitted], axis=0).any())


def _adjusted(
    table: str,
    axes: Sequence[Axis],
    adjustment: Unknown,
    batch: Axis,
    rates: Mapping[tuple[int, int], Array],
    admitted: Mapping[tuple[int, int], NDArray[np.bool_]],
) -> Walk:
    """The walk with one more axis: which batches, under each way to adjust them.

    One batch for the table: the same in all entries. One for each M: the entry's row and the first row have
    their own. One for each entry: the entry and K=2, M=1 have their own. A batch must fit wherever it is
    used.
    """
    count = len(batch.values)
    rate = {key: np.moveaxis(each, BATCH_AXIS, -1) for key, each in rates.items()}
    fits = {key: np.moveaxis(each, BATCH_AXIS, -1) for key, each in admitted.items()}
    rows = {m: np.all([fits[key] for key in fits if key[1] == m], axis=0) for _, m in fits}
    everywhere = np.all(list(fits.values()), axis=0)
    base = (TABLE2_STAGES[0], TABLE2_MICROBATCHES[0])
    possible = {
        ONE_BATCH: everywhere.any(axis=-1),
        EACH_M: np.all([row.any(axis=-1) for row in rows.values()], axis=0),
        EACH_ENTRY: np.all([each.any(axis=-1) for each in fits.values()], axis=0),
    }
    values: dict[Cell, Array] = {}
    pairs = count * count
    every, diagonal = np.ones((count, count), dtype=bool), np.eye(count, dtype=bool)

    def both(one: NDArray[np.bool_], other: NDArray[np.bool_], only: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return (one[..., :, None] & other[..., None, :] & only).reshape(*one.shape[:-1], pairs)

    for key in rate:
        k, m = key
        same = rate[key] / rate[base]
        crossed = (rate[key][..., :, None] / rate[base][..., None, :]).reshape(*same.shape[:-1], pairs)
        in_row = both(rows[m], rows[base[1]], diagonal if m == base[1] else every)
        in_cell = both(fits[key], fits[base], diagonal if key == base else every)
        parts = [
            np.where(everywhere, same, np.nan),
            np.where(in_row & possible[EACH_M][..., None], crossed, np.nan),
            np.where(in_cell & possible[EACH_ENTRY][..., None], crossed, np.nan),
        ]
        values[table, f"M={m}", f"K={k}"] = np.concatenate(parts, axis=-1)
    for (row, column), (over, under, divisor) in TABLE2_TEXT[table].items():
        same = rate[over] / rate[under] / divisor  # with one batch for the row, which both are in
        crossed = rate[over][..., :, None] / rate[under][..., None, :] / divisor
        row_fits = rows[over[1]][..., :, None] & rows[base[1]][..., None, :]
        row_fits &= diagonal if over[1] == base[1] else every
        in_row = np.where(row_fits & possible[EACH_M][..., None, None], same[..., :, None], np.nan)
        cells_fit = fits[over][..., :, None] & fits[under][..., None, :]
        in_cell = np.where(cells_fit & possible[EACH_ENTRY][..., None, None], crossed, np.nan)
        parts = [
            np.where(everywhere, same, np.nan),
            *(each.reshape(*each.shape[:-2], pairs) for each in (in_row, in_cell)),
        ]
        values["claims-text", row, column] = np.concatenate(parts, axis=-1)
    modes = [str(mode) for mode in adjustment.allowed]
    labels: list[str] = [f"{modes[0]}: {size}" for size in batch.values]
    steps = list(batch.ranks)
    for rank, mode in enumerate(modes[1:], start=1):
        for one in range(count):
            for other in range(count):
                labels.append(f"{mode}: {batch.values[one]}, first {batch.values[other]}")
                steps.append(rank + batch.ranks[one] + batch.ranks[other])
    last = Axis("batch_size", tuple(labels), tuple(steps))
    number = len(axes)
    return Walk.with_rule(
        [*axes, last],
        values,
        [
            *((axis.name, place, tuple(range(len(axis.values)))) for place, axis in enumerate(axes)),
            ("batch_size", number, tuple(range(count))),
            ("batch_adjustment", number, tuple(range(len(labels)))),
        ],
    )


# Table 3 ----------------------------------------------------------------------------------------------------

TABLE3_STAGES = (2, 4, 8)
P100_OF: dict[Scalar, Accelerator] = {12 * 2**30: P100_12, 16 * 2**30: P100_16}


def table3(model: str, *, quick: bool = False) -> Prediction:
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
    for k in TABLE3_STAGES:
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
        (table, f"M={num_microbatches}", f"K={k}"): np.where(
            admitted, rate[k] / rate[TABLE3_STAGES[0]], np.nan
        )
        for k in TABLE3_STAGES
    }
    axes = [*classes, activation_format, cap, *unknowns.cuts, batch, *unknowns.link]
    return Prediction(
        "AmoebaNet-D (18, 128)" if model == "amoebanet" else "Transformer-24",
        Walk.with_rule(axes, values),
        "" if bounded else NOTHING_FITS,
    )


# Figure 3 ---------------------------------------------------------------------------------------------------

FIGURE3_STAGES = {"resnet101": (1, 2, 4, 8), "amoebanet": (2, 4, 8)}
FIGURE3_TITLES = {"resnet101": "ResNet-101", "amoebanet": "AmoebaNet-D (4, 512)"}


def figure3(model: str, *, quick: bool = False) -> Prediction:
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
    stages = FIGURE3_STAGES[model]

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
    return Prediction(FIGURE3_TITLES[model], Walk.with_rule(axes, values))


def largest(values: Array, axis: int) -> Array:
    """The largest along an axis; NaN where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmax(values, axis=axis))


PREDICTIONS: dict[str, Callable[..., Prediction]] = {"table2": table2, "table3": table3, "figure3": figure3}
"""By experiment."""
