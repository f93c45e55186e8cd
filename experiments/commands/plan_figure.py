"""The frontier of memory against time, as a figure; matplotlib is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path

from gpipe_bench.experiments.commands.plan_text import GIB, title_of
from gpipe_bench.planner.answer import Plan

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Of ways; told apart with any eyes (Okabe and Ito)."""


def draw_frontier(plan: Plan, path: Path) -> None:
    """Writes a PNG, SVG or PDF, as the name says: peaks against seconds, one mark per way that nothing beats.

    Raises:
        ValueError: a folder that is not there, or a kind of file that nobody writes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = plan.frontier
    memory = [point.peak_bytes / GIB for point in points]
    seconds = [point.step_s for point in points]
    axes.step(memory, seconds, where="post", color="0.6", linewidth=1.2, zorder=1)
    names = list(dict.fromkeys(title_of(point.prediction.candidate) for point in points))
    for name, colour in zip(names, COLOURS * (1 + len(names) // len(COLOURS)), strict=False):
        mine = [i for i, point in enumerate(points) if title_of(point.prediction.candidate) == name]
        low = [seconds[i] - points[i].prediction.low_s for i in mine]
        high = [points[i].prediction.high_s - seconds[i] for i in mine]
        axes.errorbar(
            [memory[i] for i in mine], [seconds[i] for i in mine], yerr=(low, high), fmt="o", color=colour,
            markersize=6, elinewidth=1, capsize=2, label=name, zorder=2,
        )  # fmt: skip
    cap = plan.request.usable_bytes / GIB
    axes.axvline(cap, color="0.3", linestyle="--", linewidth=1)
    axes.annotate(
        f"{cap:g} GiB", (cap, 1), xycoords=("data", "axes fraction"), xytext=(-4, -4),
        textcoords="offset points", ha="right", va="top", color="0.3",
    )  # fmt: skip
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("peak of the fullest accelerator, GiB")
    axes.set_ylabel("seconds of a step, predicted")
    axes.set_title(
        f"{plan.model.name} on {plan.request.accelerators} accelerators, mini-batch "
        f"{plan.request.batch_size}\n"
        f"fastest: {title_of(plan.best.candidate)}, M = {plan.best.candidate.num_microbatches}",
        fontsize=10,
    )
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"--frontier {path}: {error}; give a name such as frontier.png") from error
