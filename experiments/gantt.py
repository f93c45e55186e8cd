"""A timeline as a Gantt chart: stages from top to bottom, time from left to right.

Shows at a glance what a table of seconds hides: where a stage waits, and for whom. It reads a `Timeline` and
nothing else, so measured and replayed steps are drawn alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.schedule import Kind
from pipeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
# A box narrower than this share of the picture has no room for the number of its micro-batch.
NARROWEST_LABEL = 0.012


def gantt(timeline: Timeline, title: str = "") -> Figure:
    """The chart as a matplotlib figure; times in milliseconds."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.3 + 0.45 * timeline.num_stages), layout="constrained")
    axes = figure.add_subplot()
    makespan_ms = timeline.makespan_s * 1e3
    for event in timeline.events:
        start_ms, length_ms = event.start_s * 1e3, event.duration_s * 1e3
        kind, stage = event.action.kind, event.action.stage
        axes.broken_barh(
            [(start_ms, length_ms)], (stage - 0.42, 0.84), facecolors=COLORS[kind], edgecolors="white"
        )
        if length_ms > NARROWEST_LABEL * makespan_ms:
            dark = kind in (Kind.B, Kind.I, Kind.W)
            axes.text(
                start_ms + length_ms / 2, stage, str(event.action.microbatch), ha="center", va="center", fontsize=7,
                color="white" if dark else "black",
            )  # fmt: skip
    axes.set_yticks(
        range(timeline.num_stages), [_label(timeline, stage) for stage in range(timeline.num_stages)]
    )
    axes.invert_yaxis()
    axes.set_xlim(0, makespan_ms or 1)
    axes.set_xlabel("time (ms)")
    conditions = ", ".join(
        f"{name.replace('_', ' ')}: {value}" for name, value in timeline.conditions.items()
    )
    facts = f"{timeline.provenance}; {makespan_ms:.1f} ms, {timeline.bubble:.0%} idle"
    if conditions:
        facts += f"; {conditions}"
    axes.set_title(f"{title}\n{facts}" if title else facts, fontsize=9)
    kinds = sorted({event.action.kind for event in timeline.events}, key=list(Kind).index)
    handles = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in kinds]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=max(len(handles), 1), fontsize=8, frameon=False
    )
    return figure


def save_gantt(timeline: Timeline, path: Path | str, title: str = "") -> None:
    """Writes the chart; the ending of `path` chooses the format (.png, .svg, .pdf)."""
    gantt(timeline, title).savefig(path, dpi=150)


def _label(timeline: Timeline, stage: int) -> str:
    return f"stage {stage}" + (f" ({timeline.devices[stage]})" if timeline.devices else "")
