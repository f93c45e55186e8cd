"""Predicted against measured, and the step of the largest models over their grids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpipe_bench.experiments.plan import on_paper, steps
from gpipe_bench.experiments.plan.rules import Compared, by_model, order_of, regret
from gpipe_bench.experiments.report.drawing import COLORS, picture
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.pipeline.plan.schedule import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND = 0.12
"""The worst error that was asked for, either way."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Told apart with any eyes (Okabe and Ito)."""
TICKS_MS = (5, 10, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000)
TICKS_S = (1, 2, 3, 5, 7, 10, 15, 20, 25, 30, 35, 40, 50, 60, 70, 80, 100, 150, 200, 300, 500, 1000)


def figures(records: Sequence[Record]) -> list[Plot]:
    """The plots of what is on record."""
    found = [each for r in of_case(records, "done", part=steps.PART) for each in steps.compared(r)]
    scales = of_case(records, "done", part=on_paper.AT_SCALE)
    return [
        picture(
            name="plan-predicted",
            caption="Steps that ran on two processes against their predictions, made before any of them ran",
            alt=(
                "A panel for each model: a point for each configuration near the diagonal, filled for the "
                "plan's best five and square for replicas; the grey band is an error of 12 % either way."
            ),
            draw=partial(_predicted, by_model(found)),
        )
    ][: bool(found)] + [
        picture(
            name="plan-at-scale",
            caption="The step of the largest models over (dp, tp, K), on paper, beside what others did",
            alt=(
                "A panel for each model: seconds of a step over K, a line for each size of tensor "
                "parallelism with the range of the roofline; diamonds are what others did, predicted, "
                "and crosses what they measured."
            ),
            draw=partial(_at_scale, scales),
        )
    ][: bool(scales)]


def _predicted(models: dict[str, list[Compared]]) -> Figure:
    """A panel per model, both axes in milliseconds, logarithmic: shards take several times as long."""
    from matplotlib.figure import Figure

    columns = min(len(models), 2)
    rows = -(-len(models) // columns)
    figure = Figure(figsize=(3.6 * columns, 3.5 * rows), layout="constrained")
    for place, (model, own) in enumerate(models.items()):
        axes = figure.add_subplot(rows, columns, place + 1)
        values = [1e3 * value for each in own for value in (each.predicted_s, each.measured_s)]
        line = [0.9 * min(values), 1.05 * max(values)]
        low, high = ([x * (1 + off) for x in line] for off in (-BAND, BAND))
        axes.fill_between(line, low, high, color="0.92", linewidth=0)
        axes.plot(line, line, color="0.6", linewidth=0.8)
        for chosen, replicas in ((True, False), (True, True), (False, False), (False, True)):
            points = [each for each in own if (each.chosen, each.name.startswith("dp")) == (chosen, replicas)]
            if points or not replicas:
                axes.plot(
                    [1e3 * each.predicted_s for each in points], [1e3 * each.measured_s for each in points],
                    linestyle="none", marker="s" if replicas else "o", markersize=5, color=COLORS[Kind.B],
                    markerfacecolor=COLORS[Kind.B] if chosen else "white",
                    label=("the plan's best" if chosen else "others") + ", replicas" * replicas,
                )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=line, ylim=line)
        axes.set(xlabel="predicted (ms)", ylabel="measured (ms)")
        ticks = [tick for tick in TICKS_MS if line[0] <= tick <= line[1]]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [str(tick) for tick in ticks])
            axis.set_ticks([], minor=True)
        summary = (
            f"\nrank correlation {order_of(own):.2f}, regret {100 * regret(own):.1f} %" if own[1:] else ""
        )
        axes.set_title(model + summary, fontsize="medium")
        axes.legend(loc="upper left", frameon=False, fontsize="small")
    return figure


def _at_scale(records: Sequence[Record]) -> Figure:
    """A panel for each model: the step over K, a line for each size of tensor parallelism."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(records), 3.8), layout="constrained")
    for place, record in enumerate(records):
        _panel(figure.add_subplot(1, len(records), place + 1), record)
    return figure


def _panel(axes: Axes, record: Record) -> None:
    import pandas

    grids, done = (pandas.DataFrame(record.details[what]) for what in ("grids", "done"))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for place, (tp, mine) in enumerate(grids.sort_values("K").groupby("tp")):
        color = COLOURS[place % len(COLOURS)]
        axes.plot(mine.K, mine.step_s, color=color, marker="o", markersize=4, label=f"tp {tp}")
        axes.fill_between(mine.K, mine.low_s, mine.high_s, color=color, alpha=0.12, linewidth=0)
        for row in mine.itertuples():
            axes.annotate(  # of neighbouring lines one has its numbers above, the other one below
                f"{row.dp}", (row.K, row.step_s), xytext=(0, -11 if place % 2 else 5),
                textcoords="offset points", fontsize=6, color=color, ha="center",
            )  # fmt: skip
    axes.plot(
        done.K,
        done.step_s,
        "D",
        markersize=5,
        color="black",
        markerfacecolor="none",
        label="others, predicted",
    )
    measured = done[done.measured_s > 0]
    if len(measured):
        axes.plot(measured.K, measured.measured_s, "x", color="black", label="others, measured")
    low_s, high_s = axes.get_ylim()
    shown_s = [tick for tick in TICKS_S if low_s <= tick <= high_s]
    axes.set_yticks(shown_s, [str(tick) for tick in shown_s])
    axes.set_yticks([], minor=True)
    ticks = sorted({*grids.K, *done.K})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(xlabel="K, workers of a pipeline (small numbers: dp)", ylabel="step (s), modelled")
    axes.set_title(record.details["title"], fontsize="small")
    axes.legend(frameon=False, fontsize="x-small")
