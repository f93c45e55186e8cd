"""What the drawings of several experiments share: a theme, and a timeline as a Gantt chart.

The theme is entered while a plot is drawn and left again, so that none changes another. The chart has stages
from top to bottom and time from left to right, and shows at a glance what a table of seconds hides: where a
stage waits, and for whom. It reads a `Timeline` and nothing else, so measured and replayed steps are drawn
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness.experiment import Drawing, Plot
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.plan.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Seaborn's style "whitegrid" and its sizes for a paper, written out: importing it, pandas and scipy takes
# longer than drawing.
_STYLE: dict[str, Any] = {
    "figure.facecolor": "white", "axes.facecolor": "white", "text.color": ".15", "axes.labelcolor": ".15",
    "axes.edgecolor": ".8", "axes.grid": True, "axes.axisbelow": True, "grid.color": ".8",
    "grid.linestyle": "-",
    "axes.spines.left": True, "axes.spines.bottom": True, "axes.spines.right": True, "axes.spines.top": True,
    "xtick.color": ".15", "xtick.direction": "out", "xtick.top": False, "xtick.bottom": False,
    "ytick.color": ".15", "ytick.direction": "out", "ytick.left": False, "ytick.right": False,
    "xtick.major.size": 4.8, "xtick.major.width": 1.0, "xtick.minor.size": 3.2, "xtick.minor.width": 0.8,
    "ytick.major.size": 4.8, "ytick.major.width": 1.0, "ytick.minor.size": 3.2, "ytick.minor.width": 0.8,
    "axes.linewidth": 1.0, "grid.linewidth": 0.8, "lines.linewidth": 1.2, "lines.markersize": 4.8,
    "lines.solid_capstyle": "round", "patch.edgecolor": "w", "patch.force_edgecolor": True,
    "patch.linewidth": 0.8, "font.family": ["sans-serif"],
    "font.sans-serif": ["Arial", "DejaVu Sans", "Liberation Sans", "Bitstream Vera Sans", "sans-serif"],
}  # fmt: skip
_FONT_SIZES = {
    "font.size": 9.6, "axes.labelsize": 9.6, "axes.titlesize": 9.6, "legend.title_fontsize": 9.6,
    "xtick.labelsize": 8.8, "ytick.labelsize": 8.8, "legend.fontsize": 8.8,
}  # fmt: skip


def without_frame(figure: Figure) -> None:
    """Takes the upper and the right line from all axes."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)


@contextmanager
def paper_style(font_scale: float = 1.0) -> Iterator[None]:
    """White with a grid, in sizes for a page."""
    from matplotlib import rc_context

    sizes = {name: size * font_scale for name, size in _FONT_SIZES.items()}
    with rc_context({**_STYLE, **sizes}):  # type: ignore[dict-item]  # it wants names that it lists
        yield


# Distinguishable in grey print and for colour-blind readers: forward light, backward dark.
COLORS: dict[Kind, str] = {
    Kind.F: "#9ecae1",
    Kind.R: "#fdd49e",
    Kind.B: "#3182bd",
    Kind.I: "#3182bd",
    Kind.W: "#756bb1",
}
NAMES: dict[Kind, str] = {
    Kind.F: "forward",
    Kind.R: "recompute",
    Kind.B: "backward",
    Kind.I: "backward, inputs",
    Kind.W: "backward, weights",
}
RECOMPUTE_HATCH = "////"
WORK_COLORS: dict[str, str] = {"setup": "#bdbdbd", "update": "#636363"}
# A box narrower than this share of the picture has no room for the number of its micro-batch.
NARROWEST_LABEL = 0.012


def gantt(timeline: Timeline, title: str = "") -> Figure:
    """The chart as a matplotlib figure; times in milliseconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.3 + 0.45 * timeline.num_stages), layout="constrained")
    axes = figure.add_subplot()
    makespan_ms = timeline.makespan_s * 1e3
    paint(axes, timeline)
    axes.set_xlim(0, makespan_ms or 1)
    axes.set_xlabel("time (ms)")
    conditions = ", ".join(
        f"{name.replace('_', ' ')}: {value}" for name, value in timeline.conditions.items()
    )
    facts = f"{timeline.provenance}; {makespan_ms:.1f} ms, {timeline.bubble:.0%} idle"
    if conditions:
        facts += f"; {conditions}"
    axes.set_title(f"{title}\n{facts}" if title else facts, fontsize=9)
    legend(figure, [timeline])
    return figure


def paint(axes: Axes, timeline: Timeline, *, unit_s: float = 1e-3, width: float | None = None) -> None:
    """Draws the boxes of a timeline, in units of `unit_s` seconds, on axes that somebody else labels.

    `width` is what the axes show, in units; it decides which boxes have room for a number.
    """
    room = NARROWEST_LABEL * (timeline.makespan_s / unit_s if width is None else width)
    for event in timeline.events:
        start, length = event.start_s / unit_s, event.duration_s / unit_s
        kind, stage = event.action.kind, event.action.stage
        box = axes.broken_barh(
            [(start, length)],
            (stage - 0.42, 0.84),
            facecolors=COLORS[kind],
            edgecolors="white",
            linewidths=0.6,
        )
        if kind is Kind.R:
            box.set_hatch(RECOMPUTE_HATCH)
        if length > room:
            dark = kind in (Kind.B, Kind.I, Kind.W)
            axes.text(
                start + length / 2, stage, str(event.action.microbatch), ha="center", va="center", fontsize=7,
                color="white" if dark else "black",
            )  # fmt: skip
    for span in timeline.work:
        axes.broken_barh(
            [(span.start_s / unit_s, span.duration_s / unit_s)], (span.stage - 0.42, 0.84),
            edgecolors="white", facecolors=WORK_COLORS.get(span.name, "0.5"), linewidths=0.6,
        )  # fmt: skip
    axes.set_yticks(
        range(timeline.num_stages), [_label(timeline, stage) for stage in range(timeline.num_stages)]
    )
    axes.set_ylim(timeline.num_stages - 0.5, -0.5)  # stage 0 on top


def legend(figure: Figure, timelines: Iterable[Timeline]) -> None:
    """One legend below the figure, of what occurs in any of the timelines."""
    from matplotlib.patches import Patch

    shown = list(timelines)
    kinds = sorted({event.action.kind for each in shown for event in each.events}, key=list(Kind).index)
    handles = [
        Patch(
            facecolor=COLORS[kind], edgecolor="white", linewidth=0.6, label=NAMES[kind],
            hatch=RECOMPUTE_HATCH if kind is Kind.R else None,
        )
        for kind in kinds
    ]  # fmt: skip
    work = dict.fromkeys(span.name for each in shown for span in each.work)
    handles += [Patch(color=WORK_COLORS.get(name, "0.5"), label=name) for name in work]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=max(len(handles), 1), fontsize=8, frameon=False
    )


def picture(
    *, name: str, caption: str, alt: str, draw: Callable[[], Drawing], of_timelines: bool = False
) -> Plot:
    """A plot of many points or bars, which is smaller as pixels, in the theme that all share."""
    return Plot(
        name=name, caption=caption, alt=alt, draw=draw,
        suffixes=("png",), style=paper_style, of_timelines=of_timelines,
    )  # fmt: skip


def gantt_plot(name: str, title: str, data: Mapping[str, Any]) -> Plot:
    """The chart of a timeline that a record keeps."""
    return picture(
        name=name,
        caption=title,
        alt="Gantt chart of one step; the same timeline is an interactive chart in this report.",
        draw=lambda: gantt(Timeline.from_data(data), title),
        of_timelines=True,
    )


def _label(timeline: Timeline, stage: int) -> str:
    return f"stage {stage}" + (f" ({timeline.devices[stage]})" if timeline.devices else "")
