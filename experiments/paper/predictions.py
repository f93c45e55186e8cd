"""Predictions tested on numbers they were not made for.

What predicts the paper's tables for accelerators that are not here (`predicted/`) predicts,
unchanged, what others published with all their settings: torchgpipe's speeds on P40s, and the size of a model
that the paper quotes; and the memory model predicts the U-Nets that torchgpipe fits. Half a minute on any
machine:

    python -m experiments run predictions

Expected: speeds hang on the share of its peak that a GPU reaches, which is unknown; ratios of speeds less so.
What the replay makes of bubble rates that others published stands in the experiment `schedules`.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.paper import convert, load_paper, show
from gpipe_bench.harness.record import Metric, Record, Scalar
from gpipe_bench.harness.report.grid import fill, numbers_text
from gpipe_bench.harness.report.reproduced import errors
from gpipe_bench.harness.verdict import Result

SCRIPTS = ("amoebanet", "resnet101", "resnet101-accuracy", "unet")
"""torchgpipe's benchmark scripts whose speeds are predicted."""
COLUMNS = ("naive-1", "pipeline-1", "pipeline-2", "pipeline-4", "pipeline-8")
"""Columns of torchgpipe's table of the largest U-Nets."""
COUNTED = ("imagenet-models", "AmoebaNet-C (6, 228)", "parameters")

SOURCES = {"torchgpipe": "torchgpipe", "memory": "torchgpipe", "activations": "torchgpipe", "count": "paper"}
"""Source of the numbers that a part predicts, as named in results/paper.csv."""
NOTES = {
    "torchgpipe": "Predicted for a P40 by its published peaks, with torchgpipe's batches and cuts.",
    "memory": (
        "ours is the sum of the accelerators' peaks in bytes that tensors hold, and nothing in it is open; "
        "the published one is what the allocator had reserved"
    ),
    "activations": (
        "ours is what comes and goes in a step, in bytes that tensors hold, as Table 1 counts its own; the "
        "published one is of what the allocator had reserved"
    ),
    "count": "Counted on the zoo's AmoebaNet-C.",
}
DIRECT_SKIPS = (
    "over more than two stages torchgpipe sends a skip directly from the stage that makes it to the one "
    "that takes it; predicted steps have links between neighbours only"
)


def cases(options: RunOptions) -> list[Case]:
    speeds = [Case({"part": "torchgpipe", "script": script}, 6.0) for script in SCRIPTS]
    memory = [Case({"part": "memory", "column": column}, 3.0) for column in COLUMNS]
    memory += [Case({"part": "activations", "column": column}, 3.0) for column in COLUMNS[1:]]
    return [*(speeds[1:2] if options.profile == "smoke" else speeds + memory), Case({"part": "count"}, 2.0)]


def run(case: Case, options: RunOptions) -> Outcome:
    runs = {"torchgpipe": _speeds, "memory": _memory, "activations": _activations, "count": _count}
    return runs[str(case.key["part"])](str(case.key.get("script") or case.key.get("column") or ""))


def _speeds(script: str) -> Outcome:
    from gpipe_bench.experiments.paper.torchgpipe import SETTINGS, predict

    speeds = {setting.cell for setting in SETTINGS[script]}
    found = (
        _metric(cell, value, "samples/s" if cell in speeds else "ratio")
        for cell, value in predict(script).items()
    )
    return Outcome(tuple(found))


def _memory(column: str) -> Outcome:
    from gpipe_bench.experiments.paper.torchgpipe import UNETS, unet_memory

    given = UNETS[column]
    num_parameters, peaks = unet_memory(given)
    found = (
        _metric(("unet-memory", "parameters", column), num_parameters, "parameters"),
        _metric(("unet-memory", "memory", column), sum(peaks) / 2**30, "GiB"),
    )
    title = f"U-Net ({given.num_convs}, {given.num_filters})"
    return Outcome(found, {"title": title, "peaks_bytes": list(peaks)})


def _activations(column: str) -> Outcome:
    """Predicted activation memory of torchgpipe's largest AmoebaNets."""
    from gpipe_bench.experiments.paper.reproduction import torchgpipe_memory

    place = ("table1-amoebanet", "peak activation memory", column)
    return Outcome((_metric(place, torchgpipe_memory(column) / 2**30, "GiB"),))


def _count(_: str) -> Outcome:
    """AmoebaNet-C (6, 228), six cells in each of three stacks, without an auxiliary head, as the 557 million
    of AmoebaNet-B are counted.
    """
    import torch

    from gpipe_bench.models import MODELS, count_parameters

    options = {
        "num_layers": 18,
        "num_filters": 228,
        "image_size": 331,
        "num_classes": 1001,
        "aux_head": False,
    }
    with torch.device("meta"):
        return Outcome((_metric(COUNTED, count_parameters(MODELS["amoebanet-c"](**options)), "parameters"),))


def _metric(cell: tuple[str, str, str], value: float, unit: str) -> Metric:
    table, row, column = cell
    key: dict[str, Scalar] = {"table": table, "row": row, "column": column}
    return Metric(name="prediction", key=key, value=value, unit=unit, provenance="modelled")


def cells(records: Sequence[Record]) -> list[Result]:
    """An entry for each published number that is predicted, or why it is not."""
    known = [record for record in records if record.status == "done" and record.case["part"] in SOURCES]
    found = []
    for record in known:
        part = str(record.case["part"])
        for metric in record.metrics:
            table, row, column = (str(metric.key[name]) for name in ("table", "row", "column"))
            found.append(
                Result(
                    table=table, row=row, column=column, source=SOURCES[part], question="as published",
                    metric=metric, record=record, note=NOTES[part],
                )
            )  # fmt: skip
    if any(record.case.get("script") == "unet" for record in known):
        found += [
            Result(
                table="unet-speed", row=row, column=column, source="torchgpipe", question="as published",
                reason=DIRECT_SKIPS,
            )
            for column in ("pipeline-4", "pipeline-8")
            for row in ("throughput", "normalized throughput")
        ]  # fmt: skip
    return found


def tables(records: Sequence[Record]) -> str:
    """Every number beside the published one, and the error of each kind by the rule of the reproduction."""
    published = {(cell.source, *cell.key): cell for cell in load_paper()}
    lines = []
    for entry in cells(records):
        cell, metric = published.get((entry.source, *entry.place)), entry.metric
        if cell is not None and metric is not None and metric.value is not None:
            ours = convert(float(metric.value), metric.unit, cell.unit)
            place = f"{entry.table}: {entry.row}, {entry.column}"
            lines.append([place, cell.printed, show(ours, cell.unit, 4), f"{ours / cell.value:.3f}"])
    title = "Predicted beside what was published"
    known = [fill(f"{kind}: {error}") for kind, error in errors().items()]
    return numbers_text(title, ["", "published", "ours", "ours / published"], lines, *known)


EXPERIMENT = Experiment(
    name="predictions",
    title="Predictions tested on numbers they were not made for",
    source="torchgpipe's documentation; arXiv v1, Table 2",
    describe=(
        "What predicts the paper's tables for accelerators that are not here predicts what others published "
        "with all their settings; its errors stand beside the predictions for the paper."
    ),
    profiles={"smoke": "ResNet-101's speeds and the count", "short": "all", "full": "all"},
    cases=cases,
    run=run,
    cells=cells,
    tables=tables,
    paper_tables=("unet-memory", "unet-speed", "resnet101-accuracy"),
    docs="docs/method.md",
    untimed=True,
)
