"""Predictions tested on numbers they were not made for.

What predicts the paper's tables for accelerators that are not here (experiments/predicted) predicts,
unchanged, what others published with all their settings: torchgpipe's speeds on P40s, and the size of a model
that the paper quotes; and the memory model predicts the U-Nets that torchgpipe fits. Half a minute on any
machine:

    python -m experiments run predictions

Expected: speeds hang on the share of its peak that a GPU reaches, which is unknown; ratios of speeds less so.
What the replay makes of bubble rates that others published stands in the experiment `schedules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from gpipe_bench.experiments.predicted.records import predicted_numbers
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.paper import PaperNumber, load_paper
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.harness.units import show
from gpipe_bench.harness.verdict import Answer

SCRIPTS = ("amoebanet", "resnet101", "resnet101-accuracy", "unet")
"""torchgpipe's benchmark scripts whose speeds are predicted."""
COLUMNS = ("naive-1", "pipeline-1", "pipeline-2", "pipeline-4", "pipeline-8")
"""Of its table of the largest U-Nets."""
COUNTED = ("imagenet-models", "AmoebaNet-C (6, 228)", "parameters")

SOURCES = {"torchgpipe": "torchgpipe", "memory": "torchgpipe", "count": "paper"}
"""Whose numbers a part predicts, as in results/paper.csv."""
NOTES = {
    "torchgpipe": "Predicted for a P40 by its published peaks, with torchgpipe's batches and cuts.",
    "memory": (
        "ours is the sum of the accelerators' peaks in bytes that tensors hold, and nothing in it is open; "
        "the published one is what the allocator had reserved"
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
    return [*(speeds[1:2] if options.profile == "smoke" else speeds + memory), Case({"part": "count"}, 2.0)]


def run(case: Case, options: RunOptions) -> Outcome:
    runs = {"torchgpipe": _speeds, "memory": _memory, "count": _count}
    return runs[str(case.key["part"])](str(case.key.get("script") or case.key.get("column") or ""))


def _speeds(script: str) -> Outcome:
    from gpipe_bench.experiments.predicted.torchgpipe import SETTINGS, predict

    speeds = {setting.cell for setting in SETTINGS[script]}
    quantities, details = predict(script).quantities(lambda cell: "samples/s" if cell in speeds else "ratio")
    return Outcome(tuple(quantities), details)


def _memory(column: str) -> Outcome:
    from gpipe_bench.experiments.predicted.sweep import quantity
    from gpipe_bench.experiments.predicted.torchgpipe import UNETS, unet_memory

    given = UNETS[column]
    num_parameters, peaks = unet_memory(given)
    found = (
        quantity(("unet-memory", "parameters", column), num_parameters, "parameters"),
        quantity(("unet-memory", "memory", column), sum(peaks) / 2**30, "GiB"),
    )
    title = f"U-Net ({given.num_convs}, {given.num_filters})"
    return Outcome(found, {"title": title, "peaks_bytes": list(peaks)})


def _count(_: str) -> Outcome:
    """AmoebaNet-C (6, 228), six cells in each of three stacks; what is unknown of AmoebaNet-B's count is
    unknown of its, too.
    """
    import torch

    from gpipe_bench.experiments.predicted.sweep import Prediction, Sweep
    from gpipe_bench.models import MODELS, count_parameters

    def count(auxiliary_head: bool, num_classes: int) -> int:
        options = {"num_layers": 18, "num_filters": 228, "image_size": 331, "num_classes": num_classes}
        with torch.device("meta"):
            return count_parameters(MODELS["amoebanet-c"](**options, aux_head=auxiliary_head))

    sweep = Sweep.of("amoebanet-b", ("auxiliary_head", "num_classes"))
    counts = sweep.over(count, "auxiliary_head", "num_classes")
    found = Prediction.by_rule("AmoebaNet-C (6, 228)", sweep.axes, {COUNTED: counts})
    quantities, details = found.quantities(lambda cell: "parameters")
    return Outcome(tuple(quantities), details)


def cells(records: Sequence[Record]) -> list[Answer]:
    """An entry for each published number that is predicted, or why it is not."""
    known = [record for record in records if record.status == "done" and record.case["part"] in SOURCES]
    found = []
    for record in known:
        part = str(record.case["part"])
        for (table, row, column), quantity, spread in predicted_numbers(record):
            found.append(
                Answer(
                    table=table, row=row, column=column, source=SOURCES[part], question="as published",
                    quantity=quantity, spread=spread, record=record, note=NOTES[part],
                )
            )  # fmt: skip
    if any(record.case.get("script") == "unet" for record in known):
        found += [
            Answer(
                table="unet-speed", row=row, column=column, source="torchgpipe", question="as published",
                reason=DIRECT_SKIPS,
            )
            for column in ("pipeline-4", "pipeline-8")
            for row in ("throughput", "normalized throughput")
        ]  # fmt: skip
    return found


KINDS = {"ratio": "ratios", "samples/s": "absolute speeds", "GiB": "memory", "parameters": "counts"}
"""Published numbers by their unit."""


def tables(records: Sequence[Record]) -> str:
    """Every number, and the errors by kind."""
    published = {(cell.source, *cell.key): cell for cell in load_paper()}
    by_kind: dict[str, list[tuple[Answer, PaperNumber]]] = {kind: [] for kind in KINDS.values()}
    for entry in cells(records):
        cell = published.get((entry.source, *entry.place))
        if entry.quantity is not None and cell is not None:
            by_kind[KINDS[cell.unit]].append((entry, cell))
    return "\n\n".join(_grid(kind, found) for kind, found in by_kind.items() if found)


def _grid(kind: str, found: Sequence[tuple[Answer, PaperNumber]]) -> str:
    lines, off = [], []
    for entry, cell in found:
        assert entry.range is not None
        assert entry.quantity is not None
        assert entry.quantity.value is not None
        (low, high), value, unit = entry.range, entry.quantity.value, entry.quantity.unit
        off.append(abs(value / cell.value - 1))
        lines.append(
            [
                f"{entry.table}: {entry.row}, {entry.column}",
                cell.printed,
                show(value, unit, 4),
                "-" if low == high else f"{show(low, unit, 3)} to {show(high, unit, 3)}",
                f"{value / cell.value:.3f}",
                "yes" if low <= cell.value + cell.rounding and high >= cell.value - cell.rounding else "no",
            ]
        )
    said = [f"{100 * each:.{1 if each >= 5e-4 else 3}f} %" for each in (median(off), max(off))]
    title = (
        f"{kind.capitalize()}: predicted, in the middle of what is unknown, against published\n"
        f"  the middle is off by {said[0]} in the median, {said[1]} at worst; "
        f"{sum(line[-1] == 'yes' for line in lines)} of {len(lines)} lie in the range"
    )
    headers = ["", "published", "middle", "range", "middle / published", "in the range"]
    return numbers_text(title, headers, lines)


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
