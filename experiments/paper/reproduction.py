"""The paper's tables at its own sizes and on its accelerators, under the one declared configuration.

Each operation of the full model takes what the accelerator's published peaks allow, and the step is laid out;
each layer is profiled on fake tensors, and a stage's bytes are added up to their peak (`modelled`). Whatever
the paper leaves open comes from results/reproduction.toml, and from nowhere else. The appendix computes a
table for every combination of the values in results/unknowns.toml; it changes no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from gpipe_bench.harness.experiment import Case, Outcome
from gpipe_bench.harness.paper import SENTENCES, convert, load_paper
from gpipe_bench.harness.record import Metric
from gpipe_bench.harness.report.grid import fill, numbers_text
from gpipe_bench.harness.report.reproduced import BASELINE, CLAIMS, COUNTED, EXTRA, Place, error_of
from gpipe_bench.harness.reproduction import Value, load_reproduction, load_unknowns, points
from gpipe_bench.models.paper import COLUMNS, HALVES, Column
from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.planner.accelerators import P100_16, TPUS

from .evidence import OF_SHARES, SPEED_UPS, Worst, worst
from .full_size import FullSize, Step, of_the_paper
from .largest import largest_size
from .profiles import (
    BYTES_PER_PARAMETER,
    Reading,
    held_by_stages,
    held_in_cut,
    num_parameters,
    profiled_model,
)

if TYPE_CHECKING:
    import pandas as pd

Numbers = dict[Place, float]
"""Number of each table, row and column: NaN if the run does not fit; of a sentence on several K the worst."""

Key = TypeVar("Key")
Rate = TypeVar("Rate", bound=float)

ACCELERATORS = {**TPUS, P100_16.name: P100_16}
MOST_EXAMPLES = 1024
"""Examples of the largest mini-batch that is tried in the search for the fastest."""


class Declared:
    """The declared settings of one table; of several values the first, unless `first` names another."""

    def __init__(self, table: str, **first: Value) -> None:
        self.table = table
        self.choices = load_reproduction().of(table)
        self.first = first

    def __getitem__(self, setting: str) -> Any:
        """The value of a setting. Raises ValueError where the table has no such choice."""
        if setting in self.first:
            return self.first[setting]
        if setting not in self.choices:
            raise ValueError(f"{self.table} has no choice of {setting} in results/reproduction.toml; add one")
        value = self.choices[setting].value
        return value[0] if isinstance(value, tuple) else value


# Speeds -----------------------------------------------------------------------------------------------------


def rate(full: FullSize, declared: Declared, k: int, m: int, batch: int, remat: str = "always") -> float:
    """Examples per second; NaN where the partition rule leaves a stage without a layer."""
    cut = full.cut(declared["partition_cost"], declared["partition_rule"], k)
    if cut is None:
        return math.nan
    return batch / _step(full, declared, cut, batch, m, remat=remat).makespan_s


def _step(full: FullSize, declared: Declared, cut: Partition, batch: int, m: int, **how: str) -> Step:
    link = Link(declared.table, declared["link_latency_s"], declared["link_bytes_per_s"])
    return full.step(
        ACCELERATORS[declared["accelerator"]], declared["activation_format"], cut, batch, m,
        share_of_peak=declared["share_of_peak"], link=link, **how,
    )  # fmt: skip


def fits(full: FullSize, declared: Declared, k: int, m: int, batch: int, remat: str = "always") -> bool:
    """Whether every stage's parameters, optimizer state and activations fit into its accelerator's memory."""
    cut = full.cut(declared["partition_cost"], declared["partition_rule"], k)
    if cut is None or batch < m:
        return False
    *layers, loss = full.profiles(declared["activation_format"], -(-batch // m))
    fixed = [BYTES_PER_PARAMETER * sum(full.parameters[layer] for layer in span) for span in cut]
    moving = held_in_cut(layers, loss, cut, m, remat)
    return bool(max(map(sum, zip(fixed, moving, strict=True))) <= declared["memory_cap_bytes"])


def table2(model: str, **given: Value) -> Numbers:
    """Throughput for each K and M over that of K=2, M=1. A mini-batch that does not fit is halved."""
    table, grid = f"table2-{model}", [(k, m) for m in (1, 4, 32) for k in (2, 4, 8)]

    def rates(declared: Declared, full: FullSize) -> dict[tuple[int, int], Noted]:
        width = f"width {declared['d_model']}, " if model == "transformer" else ""
        found = {}
        for k, m in grid:
            batch = int(declared["batch_size"])
            while batch >= m and not fits(full, declared, k, m, batch):
                batch //= 2
            speed = rate(full, declared, k, m, batch) if batch >= m else math.nan
            found[k, m] = noted(speed, f"computed with {width}mini-batch {batch}")
        return found

    found = _first_that_fits("table2", model, rates, given)
    values: Numbers = {
        (table, f"M={m}", f"K={k}"): noted(speed / found[2, 1], speed.how) for (k, m), speed in found.items()
    }
    row, column, divisor = SPEED_UPS[table]
    return values | {(SENTENCES, row, column): found[8, 32] / found[2, 32] / divisor}


class Noted(float):
    """A number; `how` says with which width and mini-batch it was computed."""

    how: str = ""


def noted(number: float, how: str) -> Noted:
    """The number, with `how` set."""
    found = Noted(number)
    found.how = how
    return found


def table3(model: str, **given: Value) -> Numbers:
    """Throughput for each K over that of K=2, without a fast link; all K take the same mini-batch."""
    table = f"table3-{model}"

    def rates(declared: Declared, full: FullSize) -> dict[int, float]:
        m, batch = int(declared["num_microbatches"]), int(declared["batch_size"])
        return {
            k: rate(full, declared, k, m, batch) if fits(full, declared, k, m, batch) else math.nan
            for k in (2, 4, 8)
        }

    found = _first_that_fits("table3", model, rates, given)
    return {(table, "M=32", f"K={k}"): value / found[2] for k, value in found.items()}


def _first_that_fits(
    experiment: str, model: str, rates: Callable[[Declared, FullSize], Mapping[Key, Rate]],
    given: Mapping[str, Value],
) -> Mapping[Key, Rate]:  # fmt: skip
    """The rates with the first declared width with which every run fits, else with the last width."""
    table = f"{experiment}-{model}"
    widths = Declared(table).choices["d_model"].value if model == "transformer" else 0
    found: Mapping[Key, Rate] = {}
    for width in widths if isinstance(widths, tuple) else (widths,):
        declared = Declared(table, **given, **({"d_model": width} if width else {}))
        found = rates(declared, _model(experiment, model, declared))
        if all(map(math.isfinite, found.values())):
            break
    return found


def _model(experiment: str, model: str, declared: Declared) -> FullSize:
    if model == "transformer":
        return of_the_paper(experiment, model, d_model=declared["d_model"], vocab_size=declared["vocab_size"])
    return of_the_paper(experiment, model, declared["num_classes"])


def figure3(model: str, **given: Value) -> Numbers:
    """Speed on k partitions over the naive split's, each with the fastest mini-batch that fits."""
    table, row = f"figure3-{model}", "normalized throughput"
    declared = Declared(table, **given)
    full = _model("figure3", model, declared)

    stages = (1, 2, 4, 8) if model == "resnet101" else (2, 4, 8)
    base, _ = _fastest(full, declared, stages[0], 1, declared["naive_remat"])
    m = int(declared["num_microbatches"])
    rates = {f"pipeline-{k}": _fastest(full, declared, k, m, "always")[0] for k in stages}
    values: Numbers = {(table, row, f"naive-{stages[0]}"): base / base}
    values |= {(table, row, name): found / base for name, found in rates.items()}
    most = values[table, row, "pipeline-8"]
    if model == "amoebanet":
        share = "AmoebaNet-D (4, 512): share of a linear speed-up"
        return values | {(SENTENCES, share, "pipeline-8 over naive-2"): most / 4}
    one = values[table, row, "pipeline-1"]
    extra = (SENTENCES, EXTRA, "pipeline-1 / naive-1, ResNet-101")
    return values | {extra: 100 * (1 / one - 1), (table, f"{row} by the text", "pipeline-8"): most}


def _fastest(full: FullSize, declared: Declared, k: int, m: int, remat: str) -> tuple[float, int]:
    """Examples per second and the mini-batch; NaN and 0 where none fits."""
    best, batch, size = math.nan, m, 0
    while batch <= MOST_EXAMPLES and fits(full, declared, k, m, batch, remat):
        found = rate(full, declared, k, m, batch, remat)
        if not found <= best:
            best, size = found, batch
        batch *= 2
    return best, size


def table4(model: str = "resnet101", **given: Value) -> Numbers:
    """Shares of ResNet-101's step (Figure 3) in per cent, and what the paper's text says about them."""
    declared = Declared("breakdown-v5", **given)
    full, m = of_the_paper("figure3", model), int(declared["num_microbatches"])
    shares = {}
    for k in (2, 4):
        _, batch = _fastest(full, declared, k, m, "always")
        cut = full.cut(declared["partition_cost"], declared["partition_rule"], k)
        if cut is None or not batch:
            raise ValueError(f"ResNet-101 on {k} stages fits with no mini-batch under the declared choices")
        step = _step(full, declared, cut, batch, m, setup=declared["setup_place"])
        shares[k] = {part: 100 * share for part, share in step.shares.items()}
    two = shares[2]
    printed = ("computation", "recompute", "bubble", "load imbalance", "setup", "weight update")
    values: Numbers = {("breakdown-v5", part, "share of the step"): two[part] for part in printed}
    values["breakdown-v1", "load imbalance", "K=4"] = shares[4]["load imbalance"]
    for row, number in OF_SHARES.items():
        of_each = {f"K={k}": number(k, m, of) for k, of in shares.items()}
        values[SENTENCES, row, "ResNet-101"] = worst(row, "ResNet-101", of_each)
    return values


# Memory -----------------------------------------------------------------------------------------------------


def table1(half: str, **given: Value) -> Numbers:
    """Peak activation memory in bytes of one model, a `half` of Table 1. `given` replaces declared settings;
    without it the parameters of the largest models that fit are computed, too.
    """
    table = HALVES[half].table
    declared = Declared(table, **given)
    if (declared["gradient_copies"], declared["boundary_tensors"]) != (0, "inputs"):
        raise ValueError(f"{table}: declare gradient_copies = 0 and boundary_tensors = 'inputs'")
    names = ("activation_format", "partition_cost", "partition_rule")
    own = ("num_classes", "auxiliary_head") if half == "amoebanet" else ()
    settings = {name: declared[name] for name in (*names, "num_microbatches", *own)}
    values: Numbers = {}
    for column in COLUMNS[half]:
        stages = held_by_stages(half, column, settings)
        values[table, "peak activation memory", column.name] = (
            math.nan if stages is None else float(sum(stage.moving for stage in stages))
        )
    return values if given else values | _capacities(half, declared, settings)


def _capacities(half: str, declared: Declared, settings: dict[str, Any]) -> Numbers:
    """Parameters of the largest models that fit, and the quotients that the paper makes of them."""

    def fits(column: Column, num_layers: int, num_filters: int) -> bool:
        sized = replace(column, num_layers=num_layers, num_filters=num_filters)
        stages = held_by_stages(half, sized, settings)
        return stages is None or all(sum(stage) <= declared["memory_cap_bytes"] for stage in stages)

    values: Numbers = {}
    largest: dict[str, int] = {}
    for column in COLUMNS[half]:
        found = largest_size(
            half,
            partial(fits, column),
            partial(num_parameters, half),
            step=declared["filters_step"] if half == "amoebanet" else 1,
            guess=(column.num_layers, column.num_filters),
            least=max(column.num_stages - 2, 1),  # the embedding and the softmax are layers too
        )
        largest[column.name] = found.num_parameters if found else 0
        values[HALVES[half].table, "maximum parameters", column.name] = largest[column.name] or math.nan
    naive = COLUMNS[half][0]
    fitting = fits(naive, naive.num_layers, naive.num_filters)
    for row, of, over, under in CLAIMS:
        if of == half:
            fair = largest[under] and (under != naive.name or fitting)
            quotient = largest[over] / largest[under] if fair else math.nan
            values["claims", row, f"{over} / {under}"] = quotient
    return values


# The stride control of v1, section 5. The paper moved a stride from the first convolution of AmoebaNet-D
# (2, 256) to the last and says that activations grew fourfold and the model did not grow. Both are counted
# under the declared configuration.

STRIDE_LAYERS, STRIDE_FILTERS = 6, 256  # v1 counts the normal cells of one stack: (2, 256)
STRIDE_EXAMPLES = 2
"""Any number above 1 gives the same quotients; batch normalization treats a single example in another way."""


def stride(table: str, **given: Value) -> Numbers:
    """Activations and parameters of the moved stride over the original's, float32, nothing recomputed."""
    declared = Declared(table, **given)
    sizes = []
    for moved in (declared["moved_stride"], None):
        options = {
            "num_layers": STRIDE_LAYERS, "num_filters": STRIDE_FILTERS, "moved_stride": moved,
            "num_classes": declared["num_classes"], "image_size": declared["image_size"],
            "aux_head": declared["auxiliary_head"],
        }  # fmt: skip
        layers, loss = profiled_model(Reading(), "amoebanet-d", STRIDE_EXAMPLES, **options)
        kept = stage_bytes(layers, loss)
        sizes.append((kept.saved_bytes + kept.input_bytes, sum(layer.num_parameters for layer in layers)))
    rows = ("activation memory over the original's", COUNTED)
    return {
        (table, row, "moved stride"): moved / original
        for row, moved, original in zip(rows, *sizes, strict=True)
    }


# Cases ------------------------------------------------------------------------------------------------------

COMPUTED: dict[str, Callable[..., Numbers]] = {
    "table1": table1, "table2": table2, "table3": table3, "figure3": figure3, "table4": table4,
    "computed": stride,
}  # fmt: skip
"""Functions that compute the numbers of a model, by experiment."""


def run(experiment: str, case: Case) -> Outcome:
    """Computes one model's numbers; what does not fit has none."""
    metrics = []
    for (table, row, column), value in COMPUTED[experiment](str(case.key["model"])).items():
        key = {"table": table, "row": row, "column": column}
        if isinstance(value, Worst):
            key["over"] = value.over
        known = math.isfinite(value)
        metrics.append(
            Metric(
                name="computed", key=key, value=float(value) if known else None, unit=unit_of(table, row),
                provenance="modelled", note=getattr(value, "how", "") if known else BASELINE,
            )
        )  # fmt: skip
    return Outcome(tuple(metrics))


def unit_of(table: str, row: str) -> str:
    """Unit of a computed number."""
    known = {"peak activation memory": "bytes", "maximum parameters": "parameters", EXTRA: "%"}
    return known.get(row, "%" if table.startswith("breakdown") else "ratio")


# The appendix: what the paper leaves open -------------------------------------------------------------------

TABLES = {"table4": "breakdown-v5", "computed": "control-stride"}
"""Table of the unknowns by experiment, where it is not named after the experiment and the model."""
HELD = (
    "num_classes", "memory_cap_bytes", "link_latency_s", "filters_step", "num_layers",
    "gradient_copies", "boundary_tensors", "sequence_length", "vocab_size", "stage_balance", "d_model",
    "kept_by", "tensor_layout", "auxiliary_head",
    "accelerator", "host_bytes_per_s", "model", "update_counts", "batch_choice",
    "averaged_over",
)  # fmt: skip
"""Settings that stay as declared: they hardly move a quotient, have one value, or cannot be computed."""


def settings_of(experiment: str, model: str) -> dict[str, tuple[Value, ...]]:
    """Values that are tried, by setting: the listed ones, or both ends and the middle of a range."""
    searched = ("batch_size",) if experiment in ("figure3", "table4") else ()
    found = _of_several_values(experiment, model)
    return {name: values for name, values in found.items() if name not in (*HELD, *searched)}


def _of_several_values(experiment: str, model: str) -> dict[str, tuple[Value, ...]]:
    unknown = load_unknowns().of(TABLES.get(experiment, f"{experiment}-{model}"))
    return {name: values for name, each in unknown.items() if len(values := points(each)) > 1}


def sweep(experiment: str, model: str) -> pd.DataFrame:
    """Every combination as a row, every printed result as a column, in the paper's units."""
    import pandas as pd

    printed = {
        cell.key: cell
        for cell in load_paper()
        if cell.source == "paper" and cell.kind in ("result", "claim")
        if cell.table != SENTENCES and cell.same_as is None
    }
    settings = settings_of(experiment, model)
    rows, found = list(product(*settings.values())), []
    for values in rows:
        numbers = COMPUTED[experiment](model, **dict(zip(settings, values, strict=True)))
        found.append(
            {
                " | ".join(place): convert(number, unit_of(*place[:2]), printed[place].unit)
                for place, number in numbers.items()
                if place in printed
            }
        )
    return pd.DataFrame(found, index=pd.MultiIndex.from_tuples(rows, names=list(settings)))


def _moved_most(values: pd.Series[float]) -> str:
    """The setting that moves the median most, and its factor: `share_of_peak x1.62`. Where the smallest
    median is 0, both ends stand instead of the factor.
    """
    found = {level: values.groupby(level=level).median() for level in values.index.names}
    moves = {level: (each.min(), each.max()) for level, each in found.items() if len(each)}
    if not moves:
        return ""
    most = max(moves, key=lambda level: _times(*moves[level]))
    (low, high), times = moves[most], _times(*moves[most])
    return f"{most} x{times:.2f}" if math.isfinite(times) else f"{most} {low:.3g} to {high:.3g}"


def _times(low: float, high: float) -> float:
    return 1.0 if low == high else high / low if low else math.inf


def text(experiment: str, model: str) -> str:
    """For each number: the paper's, the range, the share of settings that meet it, and what moves it most."""
    frame = sweep(experiment, model)
    cells = {" | ".join(cell.key): cell for cell in load_paper() if cell.source == "paper"}
    lines, met = [], frame.notna()
    for name in frame:
        cell, values = cells[name], frame[name].dropna()
        error = 1 + error_of(cell.table, cell.row, float(values.median()) if len(values) else None)
        met[name] = (frame[name] * error >= cell.target - cell.target_rounding) & (
            frame[name] / error <= cell.target + cell.target_rounding
        )
        span = f"{values.min():.3g} to {values.max():.3g}" if len(values) else "nothing fits"
        share = f"{100 * met[name].mean():.0f} %"
        lines.append([f"{cell.row}, {cell.column}", cell.printed, span, share, _moved_most(values)])
    whole = f"{int(met.all(axis=1).sum())} of {len(frame):,} combinations give the whole table."
    if held := [name for name in _of_several_values(experiment, model) if name in HELD]:
        whole += f" Kept as declared: {', '.join(held)}."
    whole = fill(whole)
    headers = ["", "paper", "over all settings", "share that agrees", "moved most by"]
    return numbers_text(f"{experiment}, {model}: what the paper leaves open", headers, lines, whole)
