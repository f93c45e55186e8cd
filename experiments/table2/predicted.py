"""Table 2 predicted for the paper's accelerators: throughput over K and M at the full size.

The paper "adjusted" the mini-batch to fit memory, in one of three ways; each of them is a setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.experiments.published.accelerator_steps import paper_models
from gpipe_bench.experiments.published.settings import (
    BATCH_AXIS,
    EACH_ENTRY,
    EACH_M,
    NOTHING_FITS,
    ONE_BATCH,
    Prediction,
    Unknowns,
    fitting,
    numbers,
    throughput,
    whole,
    words,
)
from gpipe_bench.experiments.published.walk import Axis, Cell, Walk
from gpipe_bench.harness.unknowns import Unknown, load_unknowns
from gpipe_bench.planner.accelerators import TPUS

Array = NDArray[np.float64]

STAGES = (2, 4, 8)
MICROBATCHES = (1, 4, 32)
_CONSTANT = "throughput without pipelining, over the accelerators"
TEXT: dict[str, dict[tuple[str, str], tuple[tuple[int, int], tuple[int, int], float]]] = {
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


def predict(model: str, *, quick: bool = False) -> Prediction:
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
    grid = [(k, m) for m in MICROBATCHES for k in STAGES]

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
    base = (STAGES[0], MICROBATCHES[0])
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
    for (row, column), (over, under, divisor) in TEXT[table].items():
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
