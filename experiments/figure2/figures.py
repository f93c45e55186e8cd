"""Figure 2 as pictures: Gantt charts, bubbles over M, what fills the memory, what travels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpipe_bench.experiments.figure2.schedules import UNIT, VARIANTS
from gpipe_bench.experiments.figure2.tables import GIB, SHOWN_MICROBATCHES, of_part, value
from gpipe_bench.experiments.report.drawing import legend, paint, paper_style
from gpipe_bench.harness.records.record import Record, Scalar, find
from gpipe_bench.harness.shown import KeptTimeline, Plot
from gpipe_bench.pipeline.plan.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_STAGES = 8
"""Bubbles are drawn up to this K, as in the paper's tables; more lines would hide each other."""


def figures(records: Sequence[Record]) -> list[Plot]:
    """Every figure the records suffice for."""
    plots = [
        Plot(
            name=f"figure2-schedules-m{count}",
            caption=f"The schedules of Figure 2 for M = {count}, replayed",
            alt="Gantt charts of the schedules; the same timelines are interactive charts in this report.",
            draw=partial(_charts, records, int(str(count))),
            style=paper_style,
            of_timelines=True,
        )
        for count in dict.fromkeys(record.case["num_microbatches"] for record in of_part(records, "chart"))
    ]
    if of_part(records, "bubble"):
        plots.append(
            Plot(
                name="figure2-bubble",
                caption="Idle share of the device time over the number of micro-batches",
                alt=(
                    "For each K the idle share falls as M grows; replayed marks lie on the lines of the "
                    "closed form, and at M = 4K it is below 20 percent."
                ),
                draw=partial(_bubbles, records),
                style=paper_style,
            )
        )
    if of_part(records, "memory"):
        plots.append(
            Plot(
                name="figure2-memory",
                caption="Activation memory by the paper's formula and by the memory model",
                alt=(
                    "Stacked bars of boundary inputs, saved activations and transients per number of stages, "
                    "formula beside memory model."
                ),
                draw=partial(_memory, records),
                style=paper_style,
            )
        )
    if of_part(records, "traffic"):
        plots.append(
            Plot(
                name="figure2-traffic",
                caption="Bytes sent per step by a pipeline and by data parallelism",
                alt=(
                    "For each model, the bytes that the busiest device sends in one step under either "
                    "scheme, on a logarithmic axis."
                ),
                draw=partial(_traffic, records),
                style=paper_style,
            )
        )
    return plots


def timelines(records: Sequence[Record]) -> list[KeptTimeline]:
    """The replayed schedules, in forwards of one micro-batch, which have no length in seconds."""
    return [
        KeptTimeline(
            record=record,
            data=record.details["timeline"],
            title=f"{VARIANTS[str(record.case['schedule'])].title}, M={record.case['num_microbatches']}",
            unit=UNIT,
        )
        for record in of_part(records, "chart")
    ]


def _charts(records: Sequence[Record], num_microbatches: int) -> Figure:
    """The schedules below each other; the pipelined ones on one time axis."""
    from matplotlib.figure import Figure

    found = {
        name: find(records, "done", part="chart", schedule=name, num_microbatches=num_microbatches)
        for name in VARIANTS
    }
    drawn = {name: record for name, record in found.items() if record is not None}
    timelines = {name: Timeline.from_data(record.details["timeline"]) for name, record in drawn.items()}
    spans = {name: each.makespan_s for name, each in timelines.items()}
    longest = max([spans[name] for name in drawn if not VARIANTS[name].microbatches_at_once], default=0)
    num_stages = max(timeline.num_stages for timeline in timelines.values())
    figure = Figure(figsize=(7.2, 1.28 * len(drawn) + 0.9), layout="constrained")
    rows = figure.subplots(len(drawn), 1, squeeze=False)
    for axes, (name, record) in zip(rows[:, 0], drawn.items(), strict=True):
        own_scale = VARIANTS[name].microbatches_at_once or not longest
        width = spans[name] if own_scale else longest
        paint(axes, timelines[name], unit_s=1, width=width)
        axes.set_xlim(0, width)
        axes.grid(False)
        if not own_scale and axes is not rows[-1, 0]:
            axes.tick_params(labelbottom=False)
        alive = _known(record, "graphs alive on the first stage")
        kept = "1 graph" if alive == 1 else f"{alive:g} graphs"
        facts = f"{spans[name]:g} {UNIT}, {_known(record, 'bubble'):.1%} idle, {kept} on stage 0"
        if own_scale and longest:
            facts += " (own time scale)"
        axes.set_title(VARIANTS[name].title, loc="left", fontsize=8.5, fontweight="bold", pad=3)
        axes.set_title(facts, loc="right", fontsize=8, pad=3)
    rows[-1, 0].set_xlabel(f"time ({UNIT} of one micro-batch on one stage)")
    legend(figure, timelines.values())
    figure.suptitle(
        f"K = {num_stages}, M = {num_microbatches}; replayed: equal stages, free link, "
        "forward : recompute : backward = 1 : 1 : 2",
        fontsize=9,
    )
    return figure


def _known(record: Record, name: str, **key: Scalar) -> float:
    """A number that every finished record of its part has."""
    number = value(record, name, **key)
    assert number is not None
    return number


def _bubbles(records: Sequence[Record]) -> Figure:
    """Closed form as a line, replay as marks, over M for every K."""
    import seaborn
    from matplotlib.figure import Figure

    found = [r for r in of_part(records, "bubble") if int(str(r.case["num_stages"])) <= MOST_STAGES]
    palette = seaborn.color_palette("colorblind", len(found))
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axes = figure.subplots()
    grid = range(1, max(SHOWN_MICROBATCHES) + 1)
    marks = {"gpipe": ("o", "-"), "gpipe-early": ("^", "--")}
    for record, color in zip(found, palette, strict=True):
        num_stages = int(str(record.case["num_stages"]))
        for name, (mark, line) in marks.items():
            closed = [float(VARIANTS[name].closed_form(num_stages, count)) for count in grid]
            axes.plot(grid, closed, line, color=color, linewidth=1.1)
            counts = record.details["num_microbatches"]
            replayed = [_known(record, "bubble", schedule=name, M=count) for count in counts]
            axes.plot(
                counts, replayed, mark, color=color, markersize=4.5, markeredgecolor="white",
                label=f"K = {num_stages}" if name == "gpipe" else None,
            )  # fmt: skip
        at = 4 * num_stages
        axes.plot(
            [at], [_known(record, "bubble", schedule="gpipe", M=at)], "o", markersize=10,
            markerfacecolor="none", markeredgecolor=color, label="M = 4K" if record is found[-1] else None,
        )  # fmt: skip
    axes.plot([], [], "ko-", markersize=4.5, label="no re-materialization")
    axes.plot([], [], "k^--", markersize=4.5, label="recomputing early")
    axes.axhline(0.2, color="0.4", linewidth=0.8, linestyle=":")
    axes.annotate("20 %", (1.02, 0.205), fontsize=7.5, color="0.3", va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64, 128], ["1", "2", "4", "8", "16", "32", "64", "128"])
    axes.set_xlim(0.93, 140)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("micro-batches M")
    axes.set_ylabel("idle share of the device time")
    axes.set_title("Bubble: closed form (lines) and replay (marks)", fontsize=9.5)
    axes.legend(fontsize=8)
    seaborn.despine(figure)
    return figure


def _memory(records: Sequence[Record]) -> Figure:
    """Formula and memory model as stacked bars for every K, at the most micro-batches."""
    import seaborn
    from matplotlib.figure import Figure

    found = of_part(records, "memory")
    models = list(dict.fromkeys(str(record.case["model"]) for record in found))
    figure = Figure(figsize=(3.6 * len(models), 3.3), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)
    for axes, model in zip(panels[0], models, strict=True):
        _draw_memory(axes, [record for record in found if record.case["model"] == model])
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(
        "Activations at the fullest moment of the fullest stage, modelled\n"
        "hatched: O(N + (L/K)(N/M)) with the model's own bytes; plain: memory model",
        fontsize=9 if len(models) > 1 else 7,
    )
    seaborn.despine(figure)
    return figure


def _draw_memory(axes: Axes, records: Sequence[Record]) -> None:
    import seaborn

    colors = seaborn.color_palette("colorblind")
    parts = (
        (-0.2, "formula_boundary", colors[0], "//", "N inputs of the stage"),
        (-0.2, "formula_activations", colors[1], "//", "saved for N/M examples"),
        (0.2, "boundary", colors[0], "", "boundary inputs"),
        (0.2, "activations", colors[1], "", "saved activations"),
        (0.2, "transients", colors[2], "", "transients"),
    )  # fmt: skip
    count = records[0].details["num_microbatches"][-1]
    bases: dict[tuple[int, float], float] = {}
    for place, record in enumerate(records):
        for shift, part, color, hatch, label in parts:
            height = record.details["bytes"][f"M={count}"][part] / GIB
            base = bases.get((place, shift), 0.0)
            axes.bar(
                place + shift, height, 0.38, base, color=color, hatch=hatch, edgecolor="white", linewidth=0.4,
                label=label if place == 0 else None,
            )  # fmt: skip
            bases[place, shift] = base + height
    kept = value(records[0], "kept without re-materialization", M=count)
    details = records[0].details
    against = "" if kept is None else f"; O(N L): {kept / GIB:.0f} GiB"
    axes.set_title(f"{details['title']}\nN = {details['batch_size']}, M = {count}{against}", fontsize=8.5)
    axes.set_xticks(range(len(records)), [f"K={record.case['num_stages']}" for record in records])
    axes.set_ylabel("GiB per device")
    axes.grid(False, axis="x")


def _traffic(records: Sequence[Record]) -> Figure:
    """Bytes of the busiest device, one line per model."""
    import seaborn
    from matplotlib.figure import Figure

    num_stages = max(
        count for record in of_part(records, "traffic") for count in record.details["num_stages"]
    )
    rows = []
    for record in of_part(records, "traffic"):
        ours = value(record, "pipeline, busiest device", K=num_stages)
        theirs = value(record, "data parallelism, each device", K=num_stages)
        size = value(record, "mini-batch")
        if ours is not None and theirs is not None and size is not None:
            rows.append(
                (theirs / ours, f"{record.case['model']} {record.case['size']}, N = {size:g}", ours, theirs)
            )
    rows.sort()
    blue, orange = seaborn.color_palette("colorblind")[:2]
    figure = Figure(figsize=(7.2, 0.27 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    for place, (ratio, _, ours, theirs) in enumerate(rows):
        axes.plot([ours / 1e9, theirs / 1e9], [place, place], color="0.7", linewidth=1.5, zorder=1)
        axes.annotate(
            f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2f}x", (max(ours, theirs) / 1e9, place), (6, 0),
            textcoords="offset points", fontsize=7.5, va="center", color="0.25",
        )  # fmt: skip
    places = range(len(rows))
    axes.scatter(
        [row[2] / 1e9 for row in rows], places, color=blue, marker="o", s=32, label="pipeline", zorder=2
    )
    axes.scatter(
        [row[3] / 1e9 for row in rows],
        places,
        color=orange,
        marker="s",
        s=30,
        label="data parallelism",
        zorder=2,
    )
    axes.set_xscale("log")
    axes.set_yticks(places, [row[1] for row in rows], fontsize=7.5)
    axes.set_ylim(-0.6, len(rows) - 0.3)
    axes.set_xlabel("GB sent by the busiest device in one step (logarithmic)")
    axes.margins(x=0.1)
    figure.suptitle(
        f"K = {num_stages}, modelled: what data parallelism sends in multiples of what a pipeline sends",
        fontsize=9,
    )
    axes.legend(fontsize=8, loc="lower right", frameon=True)
    axes.grid(False, axis="y")
    seaborn.despine(figure)
    return figure
