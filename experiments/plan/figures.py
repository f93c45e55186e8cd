"""Predicted against measured, and the step of the largest models over their grids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from gpipe_bench.experiments.plan.at_scale import case as at_scale
from gpipe_bench.experiments.plan.at_scale import figure as at_scale_figure
from gpipe_bench.experiments.plan.measures import Compared, by_model, rank_correlation, regret
from gpipe_bench.experiments.plan.running import steps
from gpipe_bench.experiments.report.drawing import COLORS, picture
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.pipeline.plan.schedule import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND = 0.12
"""The worst error that was asked for, either way."""


def figures(records: Sequence[Record]) -> list[Plot]:
    """The plots of what is on record."""
    found = [each for r in of_case(records, "done", part=steps.PART) for each in steps.compared(r)]
    scales = of_case(records, "done", part=at_scale.PART)
    plots = [
        picture(
            name="plan-predicted",
            caption="Steps that ran on two processes against their predictions, made before any of them ran",
            alt=(
                "A panel for each model: a point for each configuration near the diagonal, filled for the "
                "plan's best five and square for replicas; the grey band is an error of 12 % either way."
            ),
            draw=partial(draw, found),
        )
    ][: bool(found)]
    if scales:
        plots.append(
            picture(
                name="plan-at-scale",
                caption="The step of the largest models over (dp, tp, K), on paper, beside what others did",
                alt=(
                    "A panel for each model: seconds of a step over K, a line for each size of tensor "
                    "parallelism with the range of the roofline; diamonds are what others did, predicted, "
                    "and crosses what they measured."
                ),
                draw=partial(at_scale_figure.draw, scales),
            )
        )
    return plots


def draw(found: Sequence[Compared]) -> Figure:
    """A panel per model, both axes in milliseconds."""
    from matplotlib.figure import Figure

    models = by_model(found)
    columns = min(len(models), 2)
    rows = -(-len(models) // columns)
    figure = Figure(figsize=(3.6 * columns, 3.5 * rows), layout="constrained")
    for place, (model, own) in enumerate(models.items()):
        axes = figure.add_subplot(rows, columns, place + 1)
        _panel(axes, model, own)
    return figure


def _panel(axes: Axes, model: str, own: Sequence[Compared]) -> None:
    values = [1e3 * value for each in own for value in (each.predicted_s, each.measured_s)]
    low, high = 0.9 * min(values), 1.05 * max(values)
    line = [low, high]
    axes.fill_between(
        line, [x * (1 - BAND) for x in line], [x * (1 + BAND) for x in line], color="0.92", linewidth=0
    )
    axes.plot(line, line, color="0.6", linewidth=0.8)
    color = COLORS[Kind.B]
    kinds = product(
        ((True, "the plan's best"), (False, "others")), ((False, "o", ""), (True, "s", ", replicas"))
    )
    for (chosen, label), (replicas, marker, more) in kinds:
        points = [each for each in own if (each.chosen, each.name.startswith("dp")) == (chosen, replicas)]
        if points or not replicas:
            axes.plot(
                [1e3 * each.predicted_s for each in points], [1e3 * each.measured_s for each in points],
                linestyle="none", marker=marker, markersize=5, color=color,
                markerfacecolor=color if chosen else "white", label=label + more,
            )  # fmt: skip
    axes.set(xlim=line, ylim=line, xlabel="predicted (ms)", ylabel="measured (ms)")
    title = model
    if len(own) > 1:
        rank = rank_correlation([e.predicted_s for e in own], [e.measured_s for e in own])
        title += f"\nrank correlation {rank:.2f}, regret {100 * regret(own):.1f} %"
    axes.set_title(title, fontsize="medium")
    axes.legend(loc="upper left", frameon=False, fontsize="small")
