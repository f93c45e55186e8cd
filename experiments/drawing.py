"""Figures: how those of an experiment are drawn, kept and put on a page, and what the drawings of several
share: a theme, and Gantt charts of timelines.

Drawing is slow and reading is fast, so a page takes the pictures that a run left behind. A picture of other
records would be a lie, so beside each experiment's figures lies a digest of the records they were drawn from.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe_bench.harness.experiment import Experiment, Plot
from gpipe_bench.harness.record import Record, encode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gpipe_bench.pipeline.plan.timeline import Timeline

# Distinguishable in grey print and for colour-blind readers: forward light, backward dark.
COLORS = {"F": "#9ecae1", "R": "#fdd49e", "B": "#3182bd", "I": "#08306b", "W": "#756bb1"}
NAMES = {
    "F": "forward", "R": "recompute", "B": "backward", "I": "backward, inputs", "W": "backward, weights",
}  # fmt: skip
"""Names of the kinds of action, in order."""
# A box narrower than this share of the picture has no room for the number of its micro-batch.
NARROWEST_LABEL = 0.01


@contextmanager
def paper_style(font_scale: float = 1.0) -> Iterator[None]:
    """White with a grid, in sizes for a page."""
    import seaborn

    with seaborn.axes_style("whitegrid"), seaborn.plotting_context("paper", font_scale=font_scale):
        yield


def picture(*, name: str, caption: str, alt: str, draw: Callable[[], Figure]) -> Plot:
    """A plot of many points or bars, which is smaller as pixels, in the theme that all share."""
    return Plot(name=name, caption=caption, alt=alt, draw=draw, suffix="png", style=paper_style)


def charts(shown: Mapping[str, Timeline], unit: str, columns: int = 1) -> Figure:
    """Gantt charts of timelines in whole units, by their titles, on one time axis: a row of boxes for each
    worker, whose later stages have a dark frame.
    """
    from matplotlib.figure import Figure

    longest = max(timeline.makespan_s for timeline in shown.values())
    rows, workers = -(-len(shown) // columns), max(timeline.num_workers for timeline in shown.values())
    size = 6 + 3 * columns, 0.28 * workers * rows + 0.8
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
    for axes, (title, timeline) in zip(grid.flat, shown.items(), strict=True):
        _paint(axes, timeline, NARROWEST_LABEL * columns * longest)
        axes.set_xlim(0, longest)
        axes.grid(visible=False)
        axes.tick_params(labelsize=7)
        facts = f"{timeline.makespan_s:g} {unit}, {timeline.bubble:.1%} idle"
        axes.set_title(f"{title}: {facts}", fontsize=8, loc="left", pad=2)
    for axes in grid[-1]:
        axes.set_xlabel(unit, fontsize=8)
    _legend(figure, shown.values())
    return figure


def _paint(axes: Axes, timeline: Timeline, room: float) -> None:
    """Draws the boxes of a timeline; those longer than `room` have the number of their micro-batch."""
    for worker in range(timeline.num_workers):
        stages = timeline.stages_of(worker)
        for action, start, end in timeline.of_worker(worker):
            kind, is_first = action.kind, action.stage == stages[0]
            axes.broken_barh(
                [(start, end - start)], (worker - 0.42, 0.84), facecolors=COLORS[kind], linewidths=0.6,
                hatch="////" if kind == "R" else None, edgecolors="white" if is_first else "black",
            )  # fmt: skip
            if end - start > room:
                axes.text(
                    (start + end) / 2, worker, str(action.microbatch), ha="center", va="center", fontsize=7,
                    color="black" if kind in ("F", "R") else "white",
                )  # fmt: skip
    axes.set_yticks(range(timeline.num_workers))
    axes.set_ylim(timeline.num_workers - 0.5, -0.5)  # the first on top


def _legend(figure: Figure, timelines: Iterable[Timeline]) -> None:
    """One legend below the figure, of what occurs in any of the timelines."""
    from matplotlib.patches import Patch

    kinds = sorted({event.action.kind for each in timelines for event in each.events}, key=[*NAMES].index)
    handles = [
        Patch(
            facecolor=COLORS[kind], edgecolor="white", linewidth=0.6, label=NAMES[kind],
            hatch="////" if kind == "R" else None,
        )
        for kind in kinds
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


# Figures as files, and on a page

DOTS_PER_INCH = 150
COLOURS = 32
"""Colours of a picture on the page: drawings have few, and a page is sent by mail."""


def plots_of(experiment: Experiment, records: Sequence[Record]) -> list[Plot]:
    """Plots that the experiment can draw from the records."""
    return experiment.figures(records) if experiment.figures is not None and records else []


def draw(experiment: Experiment, records: Sequence[Record], folder: Path) -> list[Path]:
    """Draws the figures of the records into the folder; the same records give the same bytes.

    Raises OSError where the folder can't be written.
    """
    plots = plots_of(experiment, records)
    if not plots:
        return []
    import matplotlib

    note = folder / f"{experiment.name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)  # half a figure must not pass for a whole one
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # matplotlib writes the date into an SVG otherwise
    paths = []
    for plot in plots:
        # fonts are looked up when a drawing is saved, not when it is made
        with matplotlib.rc_context({"svg.hashsalt": experiment.name}), plot.style():
            drawing = plot.draw()
            paths.append(folder / f"{plot.name}.{plot.suffix}")
            drawing.savefig(paths[-1], dpi=DOTS_PER_INCH)
    found = {"records_sha256": digest(records), "files": [path.name for path in paths]}
    note.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return paths


def drawn(experiment: Experiment, records: Sequence[Record], folder: Path) -> list[Path] | None:
    """The figures in the folder if they are all of these records, none missing, else None."""
    try:
        note = json.loads((folder / f"{experiment.name}.json").read_text(encoding="utf-8"))
        files = [folder / Path(str(file)).name for file in note["files"]]
        fits = note["records_sha256"] == digest(records)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = [path for path in files if path.is_file()]
    complete = {path.stem for path in found} == {plot.name for plot in plots_of(experiment, records)}
    return found if fits and complete else None


def digest(records: Sequence[Record]) -> str:
    """A digest of the records, whatever their order."""
    lines = sorted(hashlib.sha256(encode(record)).digest() for record in records)
    return hashlib.sha256(b"".join(lines)).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A figure as the page needs it; `width` and `height` in pixels of the page, 0 where it knows its own."""

    plot: Plot
    machine: str
    url: str
    width: int = 0
    height: int = 0


def pictures_of(
    experiment: Experiment, records: Sequence[Record], folder: Path, machine: str
) -> list[Picture]:
    """The figures of the records of a machine, made small.

    Figures that lie in the folder and show exactly these records are taken as they are; others are drawn for
    the page alone.
    """
    with tempfile.TemporaryDirectory() as scratch:
        paths = drawn(experiment, records, folder)
        if paths is None:
            paths = draw(experiment, records, Path(scratch))
        by_name = {path.stem: path for path in paths}
        return [
            _picture(by_name[plot.name], plot, machine)
            for plot in plots_of(experiment, records)
            if plot.name in by_name
        ]


def _picture(path: Path, plot: Plot, machine: str) -> Picture:
    """An SVG as it is; the pixels of a PNG with fewer colours, a fifth of the bytes."""
    from gpipe_bench.harness.report.page import data_url

    if path.suffix == ".svg":
        return Picture(plot=plot, machine=machine, url=data_url(path.read_bytes(), "image/svg+xml"))
    from PIL import Image

    png, small = Image.open(path).convert("RGB"), io.BytesIO()
    few = png.quantize(COLOURS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.convert("RGB").save(small, "WEBP", lossless=True, method=1, quality=30)
    width, height = (round(side * 96 / DOTS_PER_INCH) for side in png.size)
    url = data_url(small.getvalue(), "image/webp")
    return Picture(plot=plot, machine=machine, url=url, width=width, height=height)
