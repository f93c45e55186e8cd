"""The step of the largest models over K, a line for each size of tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpipe_bench.harness.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Of sizes of tensor parallelism; told apart with any eyes (Okabe and Ito)."""
TICKS_S = (1, 2, 3, 5, 7, 10, 15, 20, 25, 30, 35, 40, 50, 60, 70, 80, 100, 150, 200, 300, 500, 1000)


def draw(records: Sequence[Record]) -> Figure:
    """A panel for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(records), 3.8), layout="constrained")
    for place, record in enumerate(records):
        _panel(figure.add_subplot(1, len(records), place + 1), record)
    return figure


def _panel(axes: Axes, record: Record) -> None:
    rows, done = record.details["grids"], record.details["done"]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for place, tp in enumerate(sorted({row["tp"] for row in rows})):
        mine = sorted((row for row in rows if row["tp"] == tp), key=lambda row: row["K"])
        color = COLOURS[place % len(COLOURS)]
        workers = [row["K"] for row in mine]
        axes.plot(
            workers, [row["step_s"] for row in mine], color=color, marker="o", markersize=4, label=f"tp {tp}"
        )
        axes.fill_between(
            workers, [row["low_s"] for row in mine], [row["high_s"] for row in mine], color=color, alpha=0.12,
            linewidth=0,
        )  # fmt: skip
        for row in mine:
            axes.annotate(  # of neighbouring lines one has its numbers above, the other one below
                f"{row['dp']}", (row["K"], row["step_s"]), xytext=(0, -11 if place % 2 else 5),
                textcoords="offset points", fontsize=6, color=color, ha="center",
            )  # fmt: skip
    places = [row["K"] for row in done]
    axes.plot(
        places, [row["step_s"] for row in done], linestyle="none", marker="D", markersize=5, color="black",
        markerfacecolor="none", label="others, predicted",
    )  # fmt: skip
    measured = [(row["K"], row["measured_s"]) for row in done if row["measured_s"]]
    if measured:
        axes.plot(
            *zip(*measured, strict=True), linestyle="none", marker="x", color="black",
            label="others, measured",
        )  # fmt: skip
    low_s, high_s = axes.get_ylim()
    shown_s = [tick for tick in TICKS_S if low_s <= tick <= high_s]
    axes.set_yticks(shown_s, [str(tick) for tick in shown_s])
    axes.set_yticks([], minor=True)
    ticks = sorted({row["K"] for row in (*rows, *done)})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(xlabel="K, workers of a pipeline (small numbers: dp)", ylabel="step (s), modelled")
    axes.set_title(record.details["title"], fontsize="small")
    axes.legend(frameon=False, fontsize="x-small")
