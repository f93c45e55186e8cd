"""Table 1: the largest models that fit, up to the 83.9-billion-parameter Transformer on 128 partitions.

Expected: every parameter count and parameter memory of the paper to the printed digit. No GPU is needed:

    python -m experiments run table1

Each distinct layer runs on fake tensors, and the memory model computes every stage's peak from the profiles
(`modelled`). On a GPU (`full`) every distinct stage at the paper's size runs under the paper's memory cap
(`measured`). Nothing is timed, so cases run in parallel on all cores.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import Metric
from gpipe_bench.harness.report import reproduced
from gpipe_bench.models.paper import COLUMNS, HALVES, column

from .table1_shown import JUDGED_ATTENTION, cells, figures, tables

PRECISIONS = ("float32", "bfloat16")
SMOKE_COLUMNS = {"amoebanet": ("pipeline-1",), "transformer": ("naive-1", "pipeline-8", "pipeline-128")}
FIRST_S = {"amoebanet": 5.0, "transformer": 1.0}
"""Seconds that the first case of a half takes to profile its layers."""


def cases(options: RunOptions) -> list[Case]:
    """Cases of one group share layers, which are profiled once."""
    smoke = options.profile == "smoke"
    found, profiling_s = [], dict(FIRST_S)
    for part, (half, columns) in product(("paper", "largest"), COLUMNS.items()):
        attention = JUDGED_ATTENTION[half]
        for each in columns:
            if smoke and (each.name not in SMOKE_COLUMNS[half] or (part, half) == ("largest", "amoebanet")):
                continue
            key = {"part": part, "half": half, "column": each.name, "attention": attention}
            estimate_s = profiling_s.pop(half, 0.0) + (0.5 if half == "amoebanet" else 0.2)
            found.append(Case({**key, "precision": "float32"}, estimate_s, f"{half} {attention}"))
    found += reproduced.cases("table1", options)
    if options.profile == "full" or (smoke and options.device == "cuda"):
        found += _on_a_gpu(smoke)
    return found


def _on_a_gpu(smoke: bool) -> list[Case]:
    """Cases on a GPU, most important first: models on one device, whose ratios are the paper's 25 and 3.8."""
    every = [
        (half, each)
        for half, columns in COLUMNS.items()
        for each in columns
        if not smoke or each.num_stages == 1 or each.name in SMOKE_COLUMNS[half]
    ]
    runs = [(*of, precision) for precision in PRECISIONS for of in every if of[1].num_stages == 1]
    runs += [(*of, "float32") for of in every if of[1].num_stages > 1]
    return [
        Case({"part": "device", "half": half, "column": each.name, "precision": precision}, 30.0)
        for half, each, precision in runs
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    import torch

    from gpipe_bench.pipeline.plan.simulate import no_collections

    torch.set_num_threads(1)
    if reproduced.is_computed(case):
        from . import reproduction

        return reproduction.run("table1", case)
    key: dict[str, Any] = case.key
    if key["part"] in ("paper", "largest"):
        with no_collections():  # thousands of profiles, and no garbage
            return _run_largest(key) if key["part"] == "largest" else _run_paper(key)
    if options.device != "cuda":
        return Outcome(status="skipped", reason="needs a CUDA device: runs real stages under the paper's cap")
    from .largest import run_column

    smallest = options.profile == "smoke"
    return run_column(key["half"], key["column"], key["precision"], smallest=smallest)


def _run_paper(key: dict[str, Any]) -> Outcome:
    """The paper's own configuration, with its numbers of micro-batches."""
    from .largest import Setting, place_anyhow

    half, size = HALVES[key["half"]], column(key["half"], key["column"])
    setting = Setting.of(key["half"], key["column"], key["precision"], key["attention"])
    given = 1 if size.is_naive else half.num_microbatches
    placed = place_anyhow(setting, size.num_layers, size.num_filters, given)
    held = sum(stage.parameters + stage.optimizer_state for stage in placed.stages)
    working_set = sum(stage.working_set for stage in placed.stages)
    metrics = (
        _modelled("parameters", placed.num_parameters, "parameters"),
        _modelled("parameter memory", held - placed.counter_bytes, "bytes"),
        _modelled("peak activation memory", working_set, "bytes"),
        _modelled("gradients", sum(stage.gradients for stage in placed.stages), "bytes"),
        _modelled("peak per accelerator", placed.peak_bytes, "bytes"),
        _modelled("num_microbatches", given, "micro-batches"),
    )
    return Outcome(metrics, {"cap_gib": half.cap_gib, "placement": placed.describe()})


def _run_largest(key: dict[str, Any]) -> Outcome:
    """The largest model of the family that fits on the same number and kind of accelerators."""
    from .largest import Setting, largest

    cap = {"cap_gib": HALVES[key["half"]].cap_gib}
    setting = Setting.of(key["half"], key["column"], key["precision"], key["attention"])
    try:
        found = largest(setting)
    except ValueError as error:  # nothing fits: a result, not an error
        return Outcome((_modelled("parameters", None, "parameters", note=str(error)),), cap)
    metrics = (
        _modelled("parameters", found.num_parameters, "parameters"),
        _modelled("num_layers", found.num_layers, "layers"),
        _modelled("num_filters", found.num_filters, "filters"),
        _modelled("num_microbatches", found.num_microbatches, "micro-batches"),
        _modelled("peak per accelerator", found.peak_bytes, "bytes"),
    )
    return Outcome(metrics, {**cap, "placement": found.describe()})


_modelled = partial(Metric, provenance="modelled")


EXPERIMENT = Experiment(
    name="table1",
    title="Table 1: maximum model size",
    source="arXiv v5, Table 1",
    describe=(
        "Parameters and memory of the paper's ten models on their accelerators, and the largest models that "
        "fit there with this engine."
    ),
    profiles={
        "smoke": "a few columns; on a GPU stages of the smallest models",
        "short": "all columns at the paper's full size; no GPU needed",
        "full": "the same, and every distinct stage for real on a GPU under the paper's memory cap",
    },
    cases=cases,
    run=run,
    cells=cells,
    reproduction=reproduced.text,
    paper_tables=("table1-amoebanet", "table1-transformer", "claims"),
    tables=tables,
    figures=figures,
    options=("device",),
    untimed=True,
)
