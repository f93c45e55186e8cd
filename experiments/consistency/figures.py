"""The trainings as pictures: learning curves with the baseline's band, distances, gradient norms."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from gpipe_bench.experiments.consistency.cells import METRICS, baseline, score_of, select
from gpipe_bench.experiments.consistency.protocol import load_protocol
from gpipe_bench.experiments.consistency.tables import TITLES, name_of
from gpipe_bench.experiments.report.drawing import paper_style
from gpipe_bench.harness.records.record import Record
from gpipe_bench.harness.shown import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGES = (1, 2, 4, 8)


def figures(records: Sequence[Record]) -> list[Plot]:
    """A picture without records is left out."""
    plots = []
    models = [model for model in TITLES if len(select(records, "baseline", model)) > 1]
    if models:
        plots.append(
            Plot(
                name="consistency",
                caption="Learning curves for every number of stages; final scores against sequential runs",
                alt=(
                    "Above, held-out scores over the steps: the runs with 1 to 8 stages beside the band of "
                    "the sequential runs, and asynchronous pipelines. Below, the distance of each final "
                    "score to the sequential mean in standard deviations, with a band of two."
                ),
                draw=partial(_draw_trainings, records, models),
                style=partial(paper_style, 1.1),
            )
        )
    deep = [r for r in records if r.case.get("part") == "trainability" and r.status == "done"]
    if deep:
        plots.append(
            Plot(
                name="consistency-deep",
                caption="Norm of the gradient of a deep narrow Transformer over the steps",
                alt=(
                    "Lines on a logarithmic axis for each learning rate, with and without the scaled start "
                    "and clipped logits; a step that is not finite leaves a gap."
                ),
                draw=partial(_draw_deep, deep),
                style=partial(paper_style, 1.1),
            )
        )
    return plots


def _draw_trainings(records: Sequence[Record], models: Sequence[str]) -> Figure:
    """Curves above, distances below, a column for each model."""
    import seaborn
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.4 + 4.8 * len(models), 7), layout="constrained")
    axes = figure.subplots(2, len(models), squeeze=False)
    for place, model in enumerate(models):
        _draw_curves(axes[0][place], records, model)
        _draw_distances(axes[1][place], records, model)
    _add_legend(figure, list(axes[0]), "outside right upper")
    _add_legend(figure, list(axes[1]), "outside right lower")
    seaborn.despine(figure)
    return figure


def _draw_deep(deep: Sequence[Record]) -> Figure:
    import seaborn
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(r.case["rate"] for r in deep))
    figure = Figure(figsize=(2.4 + 4.2 * len(rates), 3.6), layout="constrained")
    axes = figure.subplots(1, len(rates), squeeze=False)
    for place, rate in enumerate(rates):
        _draw_norms(axes[0][place], [r for r in deep if r.case["rate"] == rate], float(rate or 0))
    _add_legend(figure, list(axes[0]), "outside right upper")
    seaborn.despine(figure)
    return figure


def _add_legend(
    figure: Figure, several: Sequence[Axes], place: Literal["outside right upper", "outside right lower"]
) -> None:
    """One for all the panels beside each other, outside of them."""
    found: dict[str, Any] = {}
    for axes in several:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(list(found.values()), list(found), loc=place, fontsize="small", frameon=False)


def _points(record: Record) -> tuple[list[float], list[float]]:
    """Steps and scores, without those of a diverged training."""
    known = [(point[0], point[2]) for point in record.details["curve"] if point[2] is not None]
    return [step for step, _ in known], [score for _, score in known]


def _draw_curves(axes: Axes, records: Sequence[Record], model: str) -> None:
    """Mean and band of the sequential runs over the steps, and every other run as a line."""
    import seaborn

    colors = dict(zip(STAGES, seaborn.color_palette("crest", len(STAGES)), strict=True))
    runs = [_points(r)[1] for r in select(records, "baseline", model) if r.status == "done"]
    steps = _points(select(records, "baseline", model)[0])[0]
    length = min(len(steps), *(len(run) for run in runs))
    means = [statistics.fmean(run[i] for run in runs) for i in range(length)]
    margin = load_protocol().margin
    spans = [margin * statistics.stdev(run[i] for run in runs) for i in range(length)]
    axes.fill_between(
        steps[:length],
        [m - s for m, s in zip(means, spans, strict=True)],
        [m + s for m, s in zip(means, spans, strict=True)],
        color="0.8",
        label=f"{len(runs)} sequential runs: mean, {margin:g} sd",
        linewidth=0,
    )
    axes.plot(steps[:length], means, color="0.4")
    for num_stages in STAGES:
        own = [r for r in select(records, "own seeds", model) if r.case["num_stages"] == num_stages]
        for place, record in enumerate(own):
            label = f"K = {num_stages}, own seed" if not place else None
            axes.plot(*_points(record), color=colors[num_stages], marker=".", linewidth=1, label=label)
    for record in select(records, "asynchronous", model):
        if record.status == "done" and _points(record)[0]:
            color = "#c44e52" if record.case["rate"] == 1 else "#8c613c"
            if record.case["num_stages"] == 1:
                color = "0.2"
            style = "--" if record.case["stash"] else ":"
            axes.plot(*_points(record), color=color, linestyle=style, label=name_of(record))
    axes.set(xlabel="step", ylabel=METRICS[model], title=TITLES[model])
    if model == "images":
        axes.set_ylim(0, 1.02)
    else:
        axes.set_yscale("log")


def _draw_distances(axes: Axes, records: Sequence[Record], model: str) -> None:
    """Final scores minus the sequential mean, in standard deviations; one colour per kind of seed."""
    found = baseline(records, model)
    assert found is not None, "drawn only with a baseline"
    deviation = found.deviation or 1.0
    groups = [("all", select(records, "baseline", model), "0.4", "sequential runs")]
    for num_stages in STAGES:
        own = [r for r in select(records, "own seeds", model) if r.case["num_stages"] == num_stages]
        groups.append((f"K={num_stages}", own, "#4c72b0", "own seeds"))
    for record in select(records, "same seed", model):
        name = f"K={record.case['num_stages']}"
        if record.case["processes"] != 1:
            name += f"\n{record.case['processes']} proc."
        groups.append((name, [record], "#dd8452", "the seed of the first K = 1"))
    groups = [group for group in groups if group[1]]
    margin = load_protocol().margin
    axes.axhspan(-margin, margin, color="0.9", zorder=0)
    axes.axhline(0, color="0.4", linewidth=1)
    for place, (_, runs, color, label) in enumerate(groups):
        values = [(score - found.mean) / deviation for r in runs if (score := score_of(r)) is not None]
        axes.scatter([place] * len(values), values, color=color, s=28, zorder=3, label=label)
    axes.set_xticks(range(len(groups)), [name for name, _, _, _ in groups])
    unit = "points" if model == "images" else ""
    size = f"{100 * deviation:.2f} {unit}" if model == "images" else f"{deviation:.3g}"
    axes.set(ylabel=f"difference to the mean / sd ({size})", title="final score; band: the margin")


def _draw_norms(axes: Axes, records: Sequence[Record], rate: float) -> None:
    """The gradient's norm over the steps; a step that is not finite leaves a gap."""
    for record in records:
        scaled, clipped = record.case["deep_init"], record.case["logit_clip"]
        norms = [float("nan") if norm is None else norm for norm in record.details["norms"]]
        words = [word for word, on in (("scaled start", scaled), ("clipped logits", clipped)) if on]
        axes.plot(
            range(1, len(norms) + 1), norms, label=" + ".join(words) or "neither",
            color="#4c72b0" if scaled else "#c44e52", linestyle="--" if clipped else "-",
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="norm of the gradient", title=f"deep narrow Transformer, rate {rate:g}")
