"""Table 1 as pictures: how large the models are, and what fills one accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.report.drawing import paper_style
from gpipe_bench.experiments.table1.cells import JUDGED_ATTENTION
from gpipe_bench.experiments.table1.paper_models import COLUMNS, GIB, HALVES
from gpipe_bench.harness.judging.paper import PaperCell, load_paper
from gpipe_bench.harness.judging.units import convert
from gpipe_bench.harness.records.record import Record, find
from gpipe_bench.harness.shown import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STACK = ("parameters", "optimizer_state", "gradients", "boundary", "activations", "transients")
LABELS = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "gradients": "gradients",
    "boundary": "boundary inputs",
    "activations": "saved activations",
    "transients": "transients",
}


def figures(records: Sequence[Record]) -> list[Plot]:
    """One per half of the table. Halves without records are left out."""
    return [
        Plot(
            name=f"table1-{half}",
            caption=f"Table 1, {half}: parameters and memory of the paper's models, ours beside the paper's",
            alt=(
                "Bars of parameters and memory per column of Table 1; every number stands in the table above."
            ),
            draw=partial(_draw, records, half),
            style=partial(paper_style, 1.1),
        )
        for half in HALVES
        if any(r.case.get("part") == "paper" and r.case["half"] == half for r in records)
    ]


def _draw(records: Sequence[Record], half: str) -> Figure:
    """Model sizes on the left, memory on the right."""
    import seaborn
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_parameters(left, records, half)
    _draw_memory(right, records, half)
    seaborn.despine(figure)
    figure.tight_layout()
    return figure


def _paper(half: str, row: str) -> dict[str, PaperCell]:
    table = HALVES[half].table
    return {c.column: c for c in load_paper() if (c.table, c.row, c.source) == (table, row, "paper")}


def _draw_parameters(axes: Axes, records: Sequence[Record], half: str) -> None:
    """Printed, counted and largest parameters per column, on a logarithmic scale."""
    import pandas
    import seaborn

    printed, key = _paper(half, "parameters"), {"half": half, "attention": JUDGED_ATTENTION[half]}
    rows: list[dict[str, Any]] = []
    for column in COLUMNS[half]:
        rows.append({"column": column.name, "what": "paper", "parameters": printed[column.name].value})
        for part, what in (("paper", "same model, counted"), ("largest", "largest that fits here")):
            record = find(records, part=part, column=column.name, precision="float32", **key)
            quantity = record.quantity("parameters") if record is not None else None
            value = quantity.value if quantity is not None else None
            rows.append({"column": column.name, "what": what, "parameters": value})
    palette = {"paper": "0.6", "same model, counted": "#4c72b0", "largest that fits here": "#55a868"}
    seaborn.barplot(
        pandas.DataFrame(rows),
        x="column",
        y="parameters",
        hue="what",
        palette=palette,
        ax=axes,
        errorbar=None,
    )
    axes.set_yscale("log")
    bottom = axes.get_ylim()[0]
    for place, row in enumerate(row for row in rows if row["what"] == "largest that fits here"):
        if row["parameters"] is None:
            axes.text(
                place + 0.27,
                bottom * 1.15,
                "nothing fits",
                rotation=90,
                ha="center",
                va="bottom",
                size="small",
            )
    axes.set(xlabel="", ylabel="parameters (logarithmic)", title=f"{HALVES[half].model}: model size")
    axes.legend(title=None, loc="upper left", frameon=True)
    axes.tick_params(axis="x", rotation=20)


def _draw_memory(axes: Axes, records: Sequence[Record], half: str) -> None:
    """Mean bytes per accelerator with the paper's models: the paper's two bars beside our finer stack."""
    import seaborn

    colors = dict(zip(STACK, seaborn.color_palette("deep", len(STACK)), strict=True))
    fixed, moving = _paper(half, "parameter memory"), _paper(half, "peak activation memory")
    width, drawn = 0.38, set[str]()
    for place, column in enumerate(COLUMNS[half]):
        base = 0.0
        for cells, color, label in (
            (fixed, "0.45", "paper: parameters"),
            (moving, "0.75", "paper: activations"),
        ):
            cell = cells[column.name]
            height = convert(cell.target, cell.unit, "GiB") / column.num_stages
            axes.bar(
                place - width / 2, height, width, base, color=color, label=None if label in drawn else label
            )
            drawn.add(label)
            base += height
        record = find(records, part="paper", half=half, column=column.name, attention=JUDGED_ATTENTION[half])
        if record is None or record.status != "done":
            continue
        base = 0.0
        for part in STACK:
            total = sum(stage[part] for stage in record.details["placement"]["stages"])
            height, label = total / GIB / column.num_stages, LABELS[part]
            axes.bar(
                place + width / 2, height, width, base, color=colors[part],
                label=None if label in drawn else label, edgecolor="white", linewidth=0.3,
            )  # fmt: skip
            drawn.add(label)
            base += height
    cap = HALVES[half].cap_gib
    axes.axhline(cap, color="#c44e52", linestyle="--", linewidth=1.2, label=f"cap, {cap} GiB")
    count = HALVES[half].num_microbatches
    axes.set_xticks(range(len(COLUMNS[half])), [column.name for column in COLUMNS[half]], rotation=20)
    axes.set(
        ylabel="GiB per accelerator (mean)",
        title=f"memory of the paper's models: paper (grey), ours modelled at M = {count}",
    )
    axes.legend(fontsize="small", ncols=2, loc="upper right", frameon=True)
