"""Table 2 drawn: throughput over M with bound and paper, efficiency as a map, and steps behind it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.report.drawing import gantt_plot, picture
from gpipe_bench.experiments.table2.tables import TABLES, configurations, facts_of
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Record, find

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figures(records: Sequence[Record]) -> list[Plot]:
    """All there are records for."""
    plots = [
        picture(
            name=f"table2-throughput-{batch}",
            caption=f"Table 2: throughput over the number of micro-batches, {batch} batch",
            alt=(
                "Lines over M for each K: ours, the bound of balanced stages and the paper's points, "
                "relative to K=2, M=1; every number stands in the table above."
            ),
            draw=partial(_throughput, found, batch),
        )
        for batch in ("fixed", "fitted")
        if (found := _of_models(records, batch))
    ]
    if found := _of_models(records, "fixed"):
        plots.append(
            picture(
                name="table2-efficiency",
                caption="Table 2: throughput per device as a share of what balanced stages allow",
                alt=(
                    "A grid of stages by micro-batches with the efficiency of each; it grows with M and "
                    "falls with K."
                ),
                draw=partial(_efficiency, found),
            )
        )
        plots += _charts(found)
    return plots


def _of_models(records: Sequence[Record], batch: str) -> dict[str, Record]:
    """The finished record of each model that has one with that choice of mini-batch."""
    found = {model: find(records, "done", model=model, batch=batch) for model in TABLES}
    return {model: record for model, record in found.items() if record is not None}


def _throughput(found: dict[str, Record], batch: str) -> Figure:
    import seaborn
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(4.6 * len(found) + 0.4, 4.2), layout="constrained")
    every = figure.subplots(1, len(found), squeeze=False)[0]
    printed = {(c.table, c.row, c.column): c.value for c in load_paper() if c.source == "paper"}
    for axes, (model, record) in zip(every, found.items(), strict=True):
        stages = sorted({k for k, _ in configurations(record)})
        counts = sorted({m for _, m in configurations(record)})
        colors = seaborn.color_palette("viridis", len(stages))
        for color, k in zip(colors, stages, strict=True):
            ours = [_value(record, "normalised throughput", k, m) for m in counts]
            limit = [_value(record, "normalised bound throughput", k, m) for m in counts]
            paper = [printed.get((TABLES[model], f"M={m}", f"K={k}")) for m in counts]
            ran = [_value(record, "normalised real throughput", k, m) for m in counts]
            _line(axes, counts, ours, color=color, marker="o", label=f"K = {k}")
            _line(axes, counts, limit, color=color, linestyle=":", linewidth=1.2)
            _line(axes, counts, paper, color=color, linestyle="none", marker="x", markersize=7)
            _line(
                axes, counts, ran, color=color, linestyle="none", marker="s", markersize=9, fillstyle="none"
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(m) for m in counts])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("micro-batches M")
        axes.set_ylabel("throughput, K = 2, M = 1 is 1")
        scale = record.details["scale"]
        axes.set_title(record.details["title"] + (f"\nscaled: {scale}" if scale else ""), fontsize=9)
        axes.legend(loc="upper left", fontsize=8)
    marks = [
        Line2D([], [], color="0.3", marker="o", label="ours, replayed"),
        Line2D([], [], color="0.3", marker="s", linestyle="none", fillstyle="none", label="ours, measured"),
        Line2D([], [], color="0.3", linestyle=":", label="bound: even stages"),
        Line2D([], [], color="0.3", marker="x", linestyle="none", label="paper (TPU)"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    what = "the same mini-batch everywhere" if batch == "fixed" else "mini-batch fitted to memory"
    figure.suptitle(f"Table 2: throughput over micro-batches, {what}", fontsize=11)
    return figure


def _efficiency(found: dict[str, Record]) -> Figure:
    """Throughput over K times what one device would do: how much of the devices is used."""
    import seaborn
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.9 * len(found) + 0.4, 3.2), layout="constrained")
    every = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, record in zip(every, found.values(), strict=True):
        stages = sorted({k for k, _ in configurations(record)})
        counts = sorted({m for _, m in configurations(record)})
        shares = [[_busy(record, k, m) for m in counts] for k in stages]
        seaborn.heatmap(
            shares, ax=axes, vmin=0, vmax=100, annot=True, fmt=".0f", cmap="viridis", cbar=False,
            xticklabels=[str(m) for m in counts], yticklabels=[str(k) for k in stages],
        )  # fmt: skip
        axes.set_xlabel("micro-batches M")
        axes.set_ylabel("stages K")
        axes.set_title(record.details["title"], fontsize=9)
    figure.suptitle("Share of the device time that is filled (%), replayed, fixed mini-batch", fontsize=10)
    return figure


def _busy(record: Record, num_stages: int, num_microbatches: int) -> float:
    from gpipe_bench.experiments.measuring.timed_actions import TimedActions, lay_out

    facts = facts_of(record, num_stages, num_microbatches)
    if "actions" not in facts:
        return float("nan")
    return 100 * (1 - lay_out(TimedActions.from_data(facts["actions"])).bubble)


def _charts(found: dict[str, Record]) -> list[Plot]:
    """The step of the largest K with four micro-batches, as it is laid out."""
    plots = []
    for model, record in found.items():
        drawn = [
            (k, m) for k, m in configurations(record) if m == 4 and facts_of(record, k, m).get("timeline")
        ]
        if drawn:
            k, m = drawn[-1]
            title = f"{record.details['title']}, K={k} M={m}"
            plots.append(gantt_plot(f"table2-step-{model}", title, facts_of(record, k, m)["timeline"]))
    return plots


def _line(axes: Any, x: Sequence[float], y: Sequence[float | None], **style: Any) -> None:
    points = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def _value(record: Record, name: str, num_stages: int, num_microbatches: int) -> float | None:
    quantity = record.quantity(name, K=num_stages, M=num_microbatches)
    return None if quantity is None else quantity.value
