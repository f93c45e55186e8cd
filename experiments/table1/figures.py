"""Table 1 as pictures: how large the models are, and what fills one accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpipe_bench.experiments.paper_models import COLUMNS, GIB, HALVES
from gpipe_bench.experiments.report.drawing import paper_style, without_frame
from gpipe_bench.experiments.table1.cells import JUDGED_ATTENTION
from gpipe_bench.harness.judging.paper import PaperCell, load_paper
from gpipe_bench.harness.judging.units import convert
from gpipe_bench.harness.records.record import Record, find
from gpipe_bench.harness.shown import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STACK = ("parameters", "optimizer_state", "gradients", "boundary", "activations", "transients")
STACK_COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")
MODEL_COLORS = ("#999999", "#5875a4", "#5f9e6e")  # printed, counted, largest
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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_parameters(left, records, half)
    _draw_memory(right, records, half)
    without_frame(figure)
    figure.tight_layout()
    return figure


def _paper(half: str, row: str) -> dict[str, PaperCell]:
    table = HALVES[half].table
    return {c.column: c for c in load_paper() if (c.table, c.row, c.source) == (table, row, "paper")}


def _draw_parameters(axes: Axes, records: Sequence[Record], half: str) -> None:
    """Printed, counted and largest parameters per column, on a logarithmic scale."""
    columns, printed = COLUMNS[half], _paper(half, "parameters")
    key = {"half": half, "attention": JUDGED_ATTENTION[half], "precision": "float32"}
    counted = [find(records, part="paper", column=each.name, **key) for each in columns]
    largest = [find(records, part="largest", column=each.name, **key) for each in columns]
    bars: dict[str, list[float | None]] = {
        "paper": [printed[each.name].value for each in columns],
        "same model, counted": [_parameters(record) for record in counted],
        "largest that fits here": [_parameters(record) for record in largest],
    }
    width = 0.8 / len(bars)
    for index, (label, heights) in enumerate(bars.items()):
        shown = [(place, height) for place, height in enumerate(heights) if height is not None]
        edges = [place - 0.4 + index * width for place, _ in shown]
        axes.bar(
            edges,
            [height for _, height in shown],
            width,
            align="edge",
            color=MODEL_COLORS[index],
            label=label,
        )
    axes.set_yscale("log")
    bottom = axes.get_ylim()[0]
    for place, height in enumerate(bars["largest that fits here"]):
        if height is None:
            axes.text(
                place + 0.27,
                bottom * 1.15,
                "nothing fits",
                rotation=90,
                ha="center",
                va="bottom",
                size="small",
            )
    axes.set_xticks(range(len(columns)), [each.name for each in columns])
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.xaxis.grid(visible=False)
    axes.set(xlabel="", ylabel="parameters (logarithmic)", title=f"{HALVES[half].model}: model size")
    axes.legend(title=None, loc="upper left", frameon=True)
    axes.tick_params(axis="x", rotation=20)


def _parameters(record: Record | None) -> float | None:
    quantity = record.quantity("parameters") if record is not None else None
    return quantity.value if quantity is not None else None


def _draw_memory(axes: Axes, records: Sequence[Record], half: str) -> None:
    """Mean bytes per accelerator with the paper's models: the paper's two bars beside our finer stack."""
    colors = dict(zip(STACK, STACK_COLORS, strict=True))
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
