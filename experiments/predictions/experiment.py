"""Predictions tested on numbers they were not made for.

What predicts the paper's tables for accelerators that are not here (experiments/published) predicts,
unchanged, what others published with all their settings: torchgpipe's speeds on P40s, and the size of a model
that the paper quotes; and the memory model predicts the U-Nets that torchgpipe fits. Half a minute on any
machine:

    python -m experiments run predictions

Expected: speeds hang on the share of its peak that a GPU reaches, which is unknown; ratios of speeds less so.
What the replay makes of bubble rates that others published stands in the experiment `schedules`.
"""

from __future__ import annotations

from gpipe_bench.experiments.predictions.tables import TORCHGPIPE, UNETS, cells, tables
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, PaperTable, RunOptions
from gpipe_bench.harness.record import Quantity
from gpipe_bench.harness.unknowns import load_unknowns

COUNTED = ("imagenet-models", "AmoebaNet-C (6, 228)", "parameters")


def cases(options: RunOptions) -> list[Case]:
    speeds = [Case({"part": "torchgpipe", "script": script}, 6.0) for script in TORCHGPIPE]
    smoke = options.profile == "smoke"
    return [
        *(speeds[1:2] if smoke else speeds),
        *([] if smoke else [Case({"part": "memory", "column": column}, 3.0) for column in UNETS]),
        Case({"part": "count"}, 2.0),
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    match case.key["part"]:
        case "torchgpipe":
            return _speeds(str(case.key["script"]))
        case "memory":
            return _memory(str(case.key["column"]))
    return _count()


def _speeds(script: str) -> Outcome:
    from gpipe_bench.experiments.published.torchgpipe import SETTINGS, TITLES, predict

    walk = predict(script)
    speeds = {(setting.table, setting.row, setting.column) for setting in SETTINGS[script]}
    quantities, predicted = [], []
    for cell in walk.values:
        quantities.append(_quantity(cell, walk.middle(cell), "samples/s" if cell in speeds else "ratio"))
        predicted.append({"cell": list(cell), "spread": walk.spread(cell).to_data()})
    return Outcome(
        tuple(quantities), {"title": TITLES[script], "reference": walk.settings, "predicted": predicted}
    )


def _memory(column: str) -> Outcome:
    from gpipe_bench.experiments.published.torchgpipe_memory import PUBLISHED, TABLE, predict

    given = next(each for each in PUBLISHED if each.column == column)
    found = predict(given)
    return Outcome(
        (
            _quantity((TABLE, "parameters", column), found.num_parameters, "parameters"),
            _quantity((TABLE, "memory", column), sum(found.peaks) / 2**30, "GiB"),
        ),
        {"title": f"U-Net ({given.num_convs}, {given.num_filters})", "peaks_bytes": list(found.peaks)},
    )


def _count() -> Outcome:
    """AmoebaNet-C (6, 228), six cells in each of three stacks; what is unknown of AmoebaNet-B's count is
    unknown of its, too.
    """
    import numpy as np
    import torch

    from gpipe_bench.experiments.published.settings import Unknowns, whole
    from gpipe_bench.experiments.published.walk import Walk
    from gpipe_bench.models import MODELS

    unknowns = Unknowns("amoebanet-b", load_unknowns())
    head, classes = unknowns.axes("auxiliary_head", "num_classes")
    counts = np.empty((len(head.values), len(classes.values)))
    for i, has_head in enumerate(head.values):
        for j, number in enumerate(whole(classes)):
            with torch.device("meta"):
                model = MODELS["amoebanet-c"](
                    num_layers=18,
                    num_filters=228,
                    image_size=331,
                    num_classes=number,
                    aux_head=bool(has_head),
                )
            counts[i, j] = sum(parameter.numel() for parameter in model.parameters())
    walk = Walk.with_rule([head, classes], {COUNTED: counts})
    return Outcome(
        (_quantity(COUNTED, int(walk.middle(COUNTED)), "parameters"),),
        {
            "title": "AmoebaNet-C (6, 228)",
            "reference": walk.settings,
            "predicted": [{"cell": list(COUNTED), "spread": walk.spread(COUNTED).to_data()}],
        },
    )


def _quantity(cell: tuple[str, str, str], value: float, unit: str) -> Quantity:
    table, row, column = cell
    return Quantity(
        name="prediction", key={"table": table, "row": row, "column": column}, value=value, unit=unit,
        provenance="modelled",
    )  # fmt: skip


PAPER_TABLES = {
    "unet-memory": PaperTable(
        title="torchgpipe's largest U-Nets",
        short="torchgpipe, U-Net memory",
        about="Counted on the zoo's U-Net; memory by the memory model, with torchgpipe's batches and cuts.",
    ),
    "unet-speed": PaperTable(
        title="torchgpipe's U-Net speeds",
        short="torchgpipe, U-Net speed",
        about="torchgpipe's own numbers; predicted where a skip goes to the next stage only.",
    ),
    "resnet101-accuracy": PaperTable(
        title="torchgpipe's ResNet-101 accuracy and throughput",
        short="torchgpipe, ResNet-101",
        about="torchgpipe's own numbers, with real images; its speeds are predicted, its accuracies are not.",
    ),
}


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
    paper_tables=PAPER_TABLES,
    docs="docs/method.md",
    options=(),
    untimed=True,
)
