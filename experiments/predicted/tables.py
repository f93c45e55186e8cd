"""The paper's performance tables predicted for its accelerators, at its sizes.

Every operation of the full model takes what the accelerator's published peaks allow, and the step is laid out
as the replay does it, over everything that the paper leaves open (results/unknowns.toml).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from gpipe_bench.experiments.predicted import SENTENCES
from gpipe_bench.experiments.predicted.sizes import FullSize, of_the_paper
from gpipe_bench.experiments.predicted.sweep import (
    CUT,
    LINK,
    Array,
    Axis,
    Cell,
    Prediction,
    Sweep,
)
from gpipe_bench.harness.unknowns import Value, load_unknowns
from gpipe_bench.planner.accelerators import P100_12, P100_16, TPU_V2, TPUS, Accelerator
from gpipe_bench.planner.breakdown import PARTS

TITLES = {
    ("table2", "amoebanet"): "AmoebaNet-D (18, 256)", ("table2", "transformer"): "Transformer-48",
    ("table3", "amoebanet"): "AmoebaNet-D (18, 128)", ("table3", "transformer"): "Transformer-24",
    ("figure3", "resnet101"): "ResNet-101", ("figure3", "amoebanet"): "AmoebaNet-D (4, 512)",
    ("table4", "resnet101"): "ResNet-101",
}  # fmt: skip
"""By experiment and model: what is predicted."""

NOTHING_FITS = (
    "At the width of Table 1 no batch fits into the memory of an accelerator in every entry: parameters, "
    "optimizer state and gradients alone take more. The paper's own run is impossible there, so the range is "
    "over a width of {later}, which was thought of after looking."
)
MODEL = ("num_classes", "accelerator", "activation_format")


Given = Mapping[str, Value]
"""Settings of a hypothesis: later values of the file of unknowns."""
NOTHING: Given = MappingProxyType({})


def predict(experiment: str, model: str, *, quick: bool = False, given: Given = NOTHING) -> Prediction:
    """All numbers of an experiment's tables for one model; `quick` is of a tiny one, the middle alone.

    Where the paper's own run is possible under no allowed width, it is over the first later one.
    """
    make = {"table2": table2, "table3": table3, "figure3": figure3, "table4": table4}[experiment]
    try:
        return make(model, quick=quick, given=given)
    except ImpossibleError:
        width = load_unknowns().of(f"{experiment}-{model}").get(WIDTH)
        later = () if width is None else width.later
        if WIDTH in given or not later:
            raise
        found = make(model, quick=quick, given={**given, WIDTH: later[0]})
        return replace(found, note=NOTHING_FITS.format(later=later[0]))


def reasons(experiment: str, model: str) -> dict[str, Prediction]:
    """The same numbers under each hypothesis of the file of unknowns, by name; without those under which
    the paper's own run is impossible.
    """
    found = {}
    for reason in load_unknowns().reasons(TABLES.get((experiment, model), f"{experiment}-{model}")):
        with suppress(ImpossibleError):
            found[reason.name] = predict(experiment, model, given=reason.settings)
    return found


class ImpossibleError(ValueError):
    """No setting under which the paper's own run is possible."""


WIDTH = "d_model"
TABLES = {("table4", "resnet101"): "breakdown-v5"}
"""By experiment and model, the table of the file of unknowns where it is not called after both."""


def _model(experiment: str, model: str, table: str, given: Given, *, quick: bool) -> Callable[..., FullSize]:
    """A model of the paper by its number of classes, with what is not stated of its size."""
    unknown = load_unknowns().of(table)
    sizes: dict[str, Any] = {
        name: given.get(name, unknown[name].allowed[0]) for name in (WIDTH, "vocab_size") if name in unknown
    }
    return partial(of_the_paper, experiment, model, quick=quick, **sizes)


def _rates(
    sweep: Sweep,
    make: Callable[[int], FullSize],
    num_stages: int,
    num_microbatches: int,
    *,
    remat: str = "always",
    hardware: str = "accelerator",
    accelerators: Mapping[Any, Accelerator] = TPUS,
    even: bool = False,
) -> Array:
    """Examples per second over a sweep; NaN where layers cannot be cut. `make` has the model by its number of
    classes, `accelerators` what each value of a setting stands for; `even` stages all take their mean.
    """
    batches, links = sweep["batch_size"], [sweep[name] for name in LINK]
    shape = (len(batches), *map(len, links))

    def rate(**given: Any) -> Array:
        full = make(given["num_classes"])
        cut = full.cut(given["partition_cost"], given["partition_rule"], num_stages, _cut_on(accelerators))
        if cut is None:
            return np.full(shape, np.nan)
        device, kept = accelerators[given[hardware]], given["activation_format"]
        steps = full.steps(device, kept, cut, batches, num_microbatches, links=links, remat=remat)
        steps = steps.balanced() if even else steps
        found = np.array(batches, dtype=float)[:, None, None, None] / steps.makespan_s()
        return np.broadcast_to(found, shape)  # a single stage has no links

    names = dict.fromkeys(("num_classes", hardware, "activation_format", *CUT))
    return sweep.over(rate, *names, gives=("batch_size", *LINK))


def _cut_on(accelerators: Mapping[Any, Accelerator]) -> Accelerator:
    """Whose seconds stages are cut by: one partition for all that may have run it."""
    return next(iter(accelerators.values()))


def _fits(
    sweep: Sweep,
    full: FullSize,
    num_stages: int,
    num_microbatches: int,
    *,
    remat: str = "always",
    caps: Array | None = None,
    accelerators: Mapping[Any, Accelerator] = TPUS,
) -> Array:
    """Whether a step stays under the memory of an accelerator. The number of classes makes no difference."""
    caps = sweep.values("memory_cap_bytes") if caps is None else caps

    def peaks(activation_format: str, partition_cost: str, partition_rule: str) -> list[float]:
        cut = full.cut(partition_cost, partition_rule, num_stages, _cut_on(accelerators))
        return full.peaks(
            activation_format, cut, sweep["batch_size"], num_microbatches, remat, float(caps.max())
        )

    return sweep.over(peaks, "activation_format", *CUT, gives=("batch_size",)) <= caps


# Table 2 ----------------------------------------------------------------------------------------------------

CAPS_OF = {"TPUv2 core": "table2-amoebanet", "TPUv3 core": "table2-transformer"}
"""Where the memory of an accelerator's core stands: a constraint of the unknowns."""


def table2(model: str, *, quick: bool = False, given: Given = NOTHING) -> Prediction:
    """Normalised throughput over K and M; K=2, M=1 is 1. One nominal mini-batch, "adjusted to fit memory":
    an entry in which it does not fit has the largest one that does.
    """
    table, unknowns = f"table2-{model}", load_unknowns()
    known = Sweep.of(table, (*MODEL, *CUT, *LINK, "batch_size"), quick=quick, whole=("batch_size",),
                     given=given, num_classes=1000)  # fmt: skip
    cap_of = {name: unknowns.find(CAPS_OF[name], "memory_cap_bytes") for name in known["accelerator"]}
    cap = Axis.of(next(iter(cap_of.values())), quick=quick)
    ends = ("middle",) if quick else ("low end", "middle", "high end")[-len(cap.values) :]
    sweep = Sweep((*known.axes[:3], Axis("memory_cap_bytes", ends, cap.ranks), *known.axes[3:]))
    caps_of = {
        name: dict(zip(ends, Axis.of(one, quick=quick).values, strict=True)) for name, one in cap_of.items()
    }
    caps = sweep.over(
        lambda accelerator, memory_cap_bytes: caps_of[accelerator][memory_cap_bytes],
        "accelerator", "memory_cap_bytes",
    )  # fmt: skip
    make = _model("table2", model, table, given, quick=quick)
    grid = [(k, m) for m in (1, 4, 32) for k in (2, 4, 8)]
    even = given.get("stage_balance") == "even"
    rates = {(k, m): _rates(sweep, make, k, m, even=even) for k, m in grid}
    fits = {(k, m): _fits(sweep, make(), k, m, caps=caps) for k, m in grid}
    rates = {key: adjusted(rates[key], fits[key]) for key in grid}
    values: dict[Cell, Array] = {(table, f"M={m}", f"K={k}"): rates[k, m] / rates[grid[0]] for k, m in grid}
    values |= {
        ("claims-text", *place): rates[8, m] / rates[2, m] / divisor
        for place, (m, divisor) in SENTENCES[table].items()
    }
    return _prediction(TITLES["table2", model], sweep, values)


def _prediction(title: str, sweep: Sweep, values: Mapping[Cell, Array]) -> Prediction:
    """Raises ImpossibleError where nothing is admitted."""
    if not np.all([np.isfinite(value) for value in np.broadcast_arrays(*values.values())], axis=0).any():
        raise ImpossibleError(f"{title}: the paper's own run is possible under no combination")
    return Prediction.by_rule(title, sweep.axes, values)


def adjusted(rates: Array, fits: Array) -> Array:
    """The rates by nominal batch, the last dimension: that of the largest batch up to it that
    fits, NaN where none does.
    """
    rates, fits = np.broadcast_arrays(rates, fits)
    found, best = [], np.full(rates[..., 0].shape, np.nan)
    for batch in range(rates.shape[-1]):
        best = np.where(fits[..., batch] & np.isfinite(rates[..., batch]), rates[..., batch], best)
        found.append(best)
    return np.stack(found, axis=-1)


# Table 3 ----------------------------------------------------------------------------------------------------

P100_OF = {12 * 2**30: P100_12, 16 * 2**30: P100_16}


def table3(model: str, *, quick: bool = False, given: Given = NOTHING) -> Prediction:
    """Normalised throughput over K without a fast link, on P100s over PCI Express; K=2 is 1. All entries have
    one mini-batch and the stated M.
    """
    table = f"table3-{model}"
    m = next(
        int(one.value)
        for one in load_unknowns().stated
        if table in one.tables and one.setting == "num_microbatches"
    )
    names = ("num_classes", "activation_format", "memory_cap_bytes", *CUT, "batch_size", *LINK)
    # A quick sweep takes both memories, since its batch must fit into one of them.
    sweep = Sweep.of(table, names, quick=quick, whole=("batch_size", "memory_cap_bytes"),
                     given=given, num_classes=1000)  # fmt: skip
    make = _model("table3", model, table, given, quick=quick)
    stages = (2, 4, 8)
    device: dict[str, Any] = {"accelerators": P100_OF}
    even = given.get("stage_balance") == "even"
    rates = {k: _rates(sweep, make, k, m, hardware="memory_cap_bytes", even=even, **device) for k in stages}
    admitted = np.all([_fits(sweep, make(), k, m, **device) for k in stages], axis=0)
    values = {(table, f"M={m}", f"K={k}"): np.where(admitted, rates[k] / rates[2], np.nan) for k in stages}
    return _prediction(TITLES["table3", model], sweep, values)


# Figure 3 ---------------------------------------------------------------------------------------------------


def figure3(model: str, *, quick: bool = False, given: Given = NOTHING) -> Prediction:
    """Speed over partitions of TPUv2 cores; the naive split is 1. Each column has the fastest of the batches
    that fit.
    """
    table = f"figure3-{model}"
    sweep = Sweep.of(
        table,
        (*MODEL, "memory_cap_bytes", "num_microbatches", "naive_remat", *CUT, "batch_size", *LINK),
        quick=quick,
        whole=("batch_size",),
        chosen="batch_size",
        given=given,
        num_classes=1000,
        accelerator=TPU_V2.name,
        naive_remat="never",  # the text says so of ResNet-101's
    )
    make = _model("figure3", model, table, given, quick=quick)

    def fastest(k: int, m: int, remat: str) -> Array:
        """Of the batches that fit."""
        fits = _fits(sweep, make(), k, m, remat=remat)
        rates = np.where(fits, _rates(sweep, make, k, m, remat=remat), np.nan)
        return np.asarray(np.fmax.reduce(rates, axis=sweep.place("batch_size"), keepdims=True))

    stages = (1, 2, 4, 8) if model == "resnet101" else (2, 4, 8)
    base = sweep.along("naive_remat", lambda remat: fastest(stages[0], 1, remat))
    row = "normalized throughput"
    values: dict[Cell, Array] = {}
    for k in stages:
        each = sweep.along("num_microbatches", partial(fastest, k, remat="always"))
        values[table, row, f"pipeline-{k}"] = each / base
    values[table, row, f"naive-{stages[0]}"] = base / base
    most = values[table, row, "pipeline-8"]
    if model == "amoebanet":
        share = "AmoebaNet-D (4, 512): share of a linear speed-up"
        values["claims-text", share, "pipeline-8 over naive-2"] = most / 4
    else:
        one = values[table, row, "pipeline-1"]
        extra = "extra time by recomputation"
        values["claims-text", extra, "pipeline-1 / naive-1, ResNet-101"] = 100 * (1 / one - 1)
        values[table, f"{row} by the text", "pipeline-8"] = most
    return Prediction.by_rule(TITLES["figure3", model], sweep.axes, values)


# Table 4 ----------------------------------------------------------------------------------------------------

TABLE_1S_BATCH = 128
PRINTED = ("computation", "recompute", "bubble", "load imbalance", "setup", "weight update")
"""The slices of v5's chart."""


def table4(model: str = "resnet101", *, quick: bool = False, given: Given = NOTHING) -> Prediction:
    """Shares of the step in per cent, and the ratios that the text makes of them: Table 4 and the first
    version's Figure 4. The step is ResNet-101's of Figure 3, with the batch that is fastest; where the set-up
    is done and over what the shares are averaged is not stated.
    """
    own = ("activation_format", "memory_cap_bytes", "num_microbatches", "setup_place")
    names = (*own, *CUT, "batch_size", *LINK, "averaged_over")
    if given.get("batch_choice") == "Table 1's":
        given = {**given, "batch_size": TABLE_1S_BATCH}
    sweep = Sweep.of(
        "breakdown-v5", names, quick=quick, whole=("batch_size",), chosen="batch_size", given=given
    )
    full = of_the_paper("figure3", model, quick=quick)
    unknown = load_unknowns().of("breakdown-v5")
    host = given.get("host_bytes_per_s", unknown["host_bytes_per_s"].allowed[0])
    sums = given.get("update_counts", unknown["update_counts"].allowed[0]) in unknown["update_counts"].later
    two, four = (_shares(sweep, full, k, host_bytes_per_s=float(host), counts_sums=sums) for k in (2, 4))
    values: dict[Cell, Array] = {("breakdown-v5", part, "share of the step"): two[part] for part in PRINTED}
    rest = np.max([each for part, each in two.items() if part not in ("computation", "recompute")], axis=0)
    m_of = sweep.values("num_microbatches").astype(float)
    bubble, again = "bubble observed over (K-1)/(M+K-1)", "recomputation over the next largest overhead"
    values["claims-text", bubble, "ResNet-101"] = two["bubble"] / 100 / (1 / (m_of + 1))
    values["claims-text", again, "ResNet-101"] = two["recompute"] / rest
    values["breakdown-v1", "load imbalance", "K=4"] = four["load imbalance"]
    return Prediction.by_rule(TITLES["table4", model], sweep.axes, values)


def _shares(sweep: Sweep, full: FullSize, num_stages: int, **what: Any) -> dict[str, Array]:
    """By part, the shares of the step of the fastest batch, in per cent. `what` counts: see
    `FullSize.steps`.
    """
    batches, links, averages = sweep["batch_size"], [sweep[name] for name in LINK], sweep["averaged_over"]

    @cache
    def laid(
        activation_format: str,
        num_microbatches: int,
        setup_place: str,
        partition_cost: str,
        partition_rule: str,
    ) -> tuple[Array, Mapping[str, Array]]:
        """Rates over (batch, *LINK), and shares over these and the averages."""
        cut = full.cut(partition_cost, partition_rule, num_stages)
        if cut is None:
            nothing = np.full((len(batches), *map(len, links), len(averages)), np.nan)
            return nothing[..., 0], dict.fromkeys(PARTS, nothing)
        steps = full.steps(
            TPU_V2, activation_format, cut, batches, num_microbatches, links=links, setup=setup_place,
            **what,
        )  # fmt: skip
        shares = steps.shares()
        return (
            np.array(batches, dtype=float)[:, None, None, None] / steps.makespan_s(),
            {part: np.stack([shares[over][part] for over in averages], axis=-1) for part in PARTS},
        )

    names = ("activation_format", "num_microbatches", "setup_place", *CUT)
    rates = sweep.over(lambda **given: laid(**given)[0], *names, gives=("batch_size", *LINK))
    batch = sweep.place("batch_size")
    fits = sweep.along("num_microbatches", partial(_fits, sweep, full, num_stages))
    allowed = np.where(fits & np.isfinite(rates), rates, -np.inf)
    best = allowed.argmax(axis=batch, keepdims=True)
    fitting = np.isfinite(allowed.max(axis=batch, keepdims=True))
    found = {}
    for part in PARTS:
        every = sweep.over(
            lambda part=part, **given: laid(**given)[1][part],
            *names, gives=("batch_size", *LINK, "averaged_over"),
        )  # fmt: skip
        found[part] = 100 * np.where(fitting, np.take_along_axis(every, best, axis=batch), np.nan)
    return found
