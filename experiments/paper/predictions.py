"""Tests the predictor on published numbers it was not fitted to: torchgpipe's, with all settings.

The code that predicts the paper's tables predicts torchgpipe's speeds on P40s and memory (settings:
results/torchgpipe.csv), and the size of a model that the paper quotes. Half a minute on any machine:

    python -m experiments run predictions
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from gpipe_bench.harness import PUBLISHED
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.paper import convert, load_paper, show
from gpipe_bench.harness.record import Metric, Record, Scalar
from gpipe_bench.harness.report.grid import fill, numbers_text
from gpipe_bench.harness.report.reproduced import KINDS, Place, errors, spread
from gpipe_bench.harness.reproduction import load_reproduction
from gpipe_bench.harness.verdict import Result
from gpipe_bench.pipeline.plan.partition import Partition

PATH = PUBLISHED / "torchgpipe.csv"
LIKE = "table3-amoebanet"
"""Declared table whose share of peak and link are used: its GPUs, like P40s, have no fast link."""
_RESNET = {"num_classes": 1000, "image_size": 224}
_AMOEBANET = {"image_size": 224, "preset": "torchgpipe", "aux_head": False}
SPEEDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "amoebanet": ("amoebanet-d", {"num_layers": 18, "num_filters": 256, **_AMOEBANET}, "sgd"),
    "resnet101": ("resnet101", _RESNET, "sgd"),
    "resnet101-accuracy": ("resnet101", _RESNET, "momentum"),
    "unet": ("unet", {"num_convs": 5, "num_filters": 64}, "sgd"),
}
"""Model, options and optimizer of the benchmark scripts to predict."""
COUNTED = ("imagenet-models", "AmoebaNet-C (6, 228)", "parameters")
SIX_228 = {"num_layers": 18, "num_filters": 228, "image_size": 331, "num_classes": 1001, "aux_head": False}
"""Six cells in each of three stacks; no auxiliary head: AmoebaNet-B has its published 557 million without."""

NOTES = {
    "torchgpipe": "predicted for a P40 by its published peaks, with torchgpipe's batches and cuts",
    "memory": (
        "ours is the sum of the accelerators' peaks in bytes that tensors hold, and rests on no open choice; "
        "the published one is what the allocator had reserved"
    ),
    "activations": (
        "ours is what a step allocates and frees, in bytes of tensors, as we count for Table 1; the "
        "published one is of what the allocator had reserved"
    ),
    "count": "Counted on the zoo's AmoebaNet-C.",
}
"""Note beside the results of each part. All but the count are compared with torchgpipe's numbers."""
OWN_ERROR = "the error was measured on these very numbers: it is the scatter of ours divided by theirs"
DIRECT_SKIPS = (
    "over more than two stages torchgpipe sends a skip directly from the stage that makes it to the one "
    "that takes it; predicted steps have links between neighbours only"
)


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of torchgpipe's published runs, from the benchmarks of version 0.0.7.

    Args:
        case: benchmark script of a speed; "memory" or "activations" for bytes
        table, row, column: of the number in results/paper.csv
        ratio: row of its throughput relative to the first of the table; empty where none is published
        layers, filters: size of the AmoebaNet, or the U-Net's num_convs and num_filters; 0: the script's
        balance: layers of every stage; empty for the model as it is
        batch_size: examples of the mini-batch
        num_microbatches: the number in the script; `count` micro-batches of `examples` hold the mini-batch
        remat: which micro-batches are recomputed
    """

    case: str
    table: str
    row: str
    column: str
    batch_size: int
    num_microbatches: int
    remat: str
    ratio: str = ""
    layers: int = 0
    filters: int = 0
    balance: str = ""

    @property
    def examples(self) -> int:
        """Examples of a micro-batch."""
        return -(-self.batch_size // self.num_microbatches)

    @property
    def count(self) -> int:
        """Number of micro-batches of `examples`."""
        return -(-self.batch_size // self.examples)

    def cut(self, num_layers: int) -> Partition:
        """The layers of every stage. Raises ValueError if the balance does not cover all layers."""
        balance = [*map(int, self.balance.split())] or [num_layers]
        if sum(balance) != num_layers:
            raise ValueError(f"{self.table}: {balance} names {sum(balance)} of {num_layers} layers")
        return tuple(range(*ends) for ends in pairwise(accumulate(balance, initial=0)))


@cache
def runs(case: str) -> list[Run]:
    """The published runs of a case, in the order of the file."""
    with PATH.open(encoding="utf-8", newline="") as file:
        lines = [{name: text for name, text in line.items() if text} for line in csv.DictReader(file)]
    return [each for each in msgspec.convert(lines, list[Run], strict=False) if each.case == case]


def cases(options: RunOptions) -> list[Case]:
    speeds = [Case({"part": "torchgpipe", "script": script}, 2.5) for script in SPEEDS]
    sizes = [*runs("memory"), *runs("activations")]
    memory = [Case({"part": each.case, "column": each.column}, 0.5) for each in sizes]
    return [*(speeds[1:2] if options.profile == "smoke" else speeds + memory), Case({"part": "count"}, 1.0)]


def run(case: Case, options: RunOptions) -> Outcome:
    part = str(case.key["part"])
    if part == "torchgpipe":
        return _speeds(str(case.key["script"]))
    if part == "count":
        import torch

        from gpipe_bench.models import MODELS, count_parameters

        with torch.device("meta"):
            count = count_parameters(MODELS["amoebanet-c"](**SIX_228))
        return Outcome((_metric(COUNTED, count, "parameters"),))
    from .profiles import unet_memory

    (wanted,) = [each for each in runs(part) if each.column == case.key["column"]]
    place = wanted.table, wanted.row, wanted.column
    if part == "activations":
        return Outcome((_metric(place, amoebanet_memory(wanted) / 2**30, "GiB"),))
    size = {"num_convs": wanted.layers, "num_filters": wanted.filters, "image_size": 192}
    num_parameters, peaks = unet_memory(size, wanted.cut, wanted.examples, wanted.count, wanted.remat)
    counted = _metric((wanted.table, "parameters", wanted.column), num_parameters, "parameters")
    return Outcome(
        (counted, _metric(place, sum(peaks) / 2**30, "GiB")),
        {"title": f"U-Net ({wanted.layers}, {wanted.filters})", "peaks_bytes": peaks},
    )


def _metric(cell: Place, value: float, unit: str) -> Metric:
    key: dict[str, Scalar] = dict(zip(("table", "row", "column"), cell, strict=True))
    return Metric(name="prediction", key=key, value=value, unit=unit, provenance="modelled")


def _speeds(script: str) -> Outcome:
    """Predicts all published speeds of one script, and their ratios to the first."""
    from gpipe_bench.pipeline.plan.links import Link
    from gpipe_bench.planner.accelerators import P40

    from .full_size import FullSize

    names, choices = ("share_of_peak", "link_bytes_per_s", "link_latency_s"), load_reproduction().of(LIKE)
    share, bandwidth, latency = (float(str(choices[name].value)) for name in names)
    full, found, first = FullSize(*SPEEDS[script]), list[Metric](), 0.0
    for published in runs(script):
        batch = published.count * published.examples
        step = full.step(
            P40, "float32", published.cut(len(full.layers)), batch, published.count,
            share_of_peak=share, link=Link(LIKE, latency, bandwidth), remat=published.remat,
        )  # fmt: skip
        rate = batch / step.makespan_s
        found.append(_metric((published.table, published.row, published.column), rate, "samples/s"))
        if published.ratio and first:
            found.append(_metric((published.table, published.ratio, published.column), rate / first, "ratio"))
        first = first or rate
    return Outcome(tuple(found))


def amoebanet_memory(published: Run) -> float:
    """Bytes of an AmoebaNet-D's peak activation memory, all accelerators, as Table 1 counts its own."""
    from .profiles import Reading, amoebanet, held_in_cut

    sizes = published.layers, published.filters, published.examples, 1000
    layers, loss = amoebanet(Reading(autocast=False), *sizes, auxiliary_head=False)
    return float(sum(held_in_cut(layers, loss, published.cut(len(layers)), published.count, published.remat)))


def cells(records: Sequence[Record]) -> list[Result]:
    """A result for each published number that is predicted, or why it is not."""
    known = [record for record in records if record.status == "done" and record.case["part"] in NOTES]
    found = []
    for record in known:
        part = str(record.case["part"])
        for metric in record.metrics:
            table, row, column = (str(metric.key[name]) for name in ("table", "row", "column"))
            value, kind = float(metric.value or 0.0), KINDS.get(metric.unit)
            error = 0.0 if kind is None else errors()[kind].error
            found.append(
                Result(
                    table=table, row=row, column=column, question="as published",
                    source="paper" if part == "count" else "torchgpipe", metric=metric,
                    spread=spread(row, value, error) if error else None, error=error, record=record,
                    note=f"{NOTES[part]}; {OWN_ERROR}" if error else NOTES[part],
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
    """Every number beside the published one, and the error of each kind by results/reproduction.toml."""
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
        "The code that predicts the paper's tables also predicts torchgpipe's published numbers, whose "
        "settings are all known; how far it is off stands beside every prediction for the paper."
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
