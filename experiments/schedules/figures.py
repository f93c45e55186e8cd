"""The schedules as pictures: all charts on one page, memory against time, and what was timed side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gpipe_bench.experiments.measuring.speed_models import SUBJECTS
from gpipe_bench.experiments.report.drawing import COLORS, legend, picture, without_frame
from gpipe_bench.experiments.schedules import at_costs
from gpipe_bench.experiments.schedules.beside import side_by_side
from gpipe_bench.experiments.schedules.grid import CHART_WORKERS, GRID, REMATS, WITHOUT_NAIVE
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import Record, Scalar, find, of_case
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.plan.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {"never": "kept", "always": "recomputed"}
DARK = (Kind.B, Kind.I, Kind.W)
SHOWN_WORKERS, SHOWN_MICROBATCHES = 8, 32
"""Of the frontier: the most that Table 2 has."""


class Point(NamedTuple):
    """A schedule in the plane of time and memory."""

    name: str
    remat: str
    time: float
    memory: float


class Panel(NamedTuple):
    """Schedules that are compared, with the units of both axes."""

    title: str
    time_unit: str
    memory_unit: str
    points: list[Point]


def figures(records: Sequence[Record]) -> list[Plot]:
    """Every figure the records suffice for."""
    plots = []
    if chart_record(records) is not None:
        plots.append(
            picture(
                name="schedules-charts",
                caption=(
                    f"All schedules on {CHART_WORKERS} workers with {2 * CHART_WORKERS} micro-batches, "
                    "replayed at equal costs"
                ),
                alt=(
                    "Gantt charts of every schedule on one time axis, activations kept at the left and "
                    "recomputed at the right; zero bubble in a V leaves the least white."
                ),
                draw=partial(_charts, records),
            )
        )
    if panels(records):
        plots.append(
            picture(
                name="schedules-frontier",
                caption="Memory of the fullest worker against the time of a step",
                alt=(
                    "A point for each schedule, kept and recomputed; a line joins those that no other beats "
                    "in both time and memory."
                ),
                draw=partial(_frontiers, records),
            )
        )
    if timed(records):
        plots.append(
            picture(
                name="schedules-side-by-side",
                caption="Steps on two processes over those of our 1F1B, ours and torch's in one run",
                alt=(
                    "For each number of micro-batches the ratio of every schedule's step to 1F1B's; those of "
                    "zero bubble are the lowest, and ours do not lie above torch's."
                ),
                draw=partial(_side_by_side, records),
            )
        )
    return plots


def chart_record(records: Sequence[Record]) -> Record | None:
    """The record that keeps the timelines."""
    return find(records, "done", part=GRID, num_workers=CHART_WORKERS)


def _charts(records: Sequence[Record]) -> Figure:
    from matplotlib.figure import Figure

    record = chart_record(records)
    assert record is not None, "offered only where there is one"
    drawn = {
        remat: {name: Timeline.from_data(data) for name, data in found.items()}
        for remat, found in record.details["timelines"].items()
    }
    longest = max(timeline.makespan_s for found in drawn.values() for timeline in found.values())
    figure = Figure(figsize=(13, 1.02 * len(WITHOUT_NAIVE) + 0.8), layout="constrained")
    grid = figure.subplots(len(WITHOUT_NAIVE), len(REMATS), squeeze=False)
    for row, name in enumerate(WITHOUT_NAIVE):
        for column, remat in enumerate(REMATS):
            axes, timeline = grid[row][column], drawn[remat][name]
            _paint(axes, timeline)
            axes.set_xlim(0, longest)
            axes.grid(visible=False)
            axes.tick_params(labelsize=7)
            axes.set_title(
                f"{name}, {TITLES[remat]}: {timeline.makespan_s:g} slots, {timeline.bubble:.0%} idle",
                fontsize=8, loc="left", pad=2,
            )  # fmt: skip
            if row + 1 < len(WITHOUT_NAIVE):
                axes.set_xticklabels([])
            else:
                axes.set_xlabel("slots", fontsize=8)
    legend(figure, [timeline for found in drawn.values() for timeline in found.values()])
    return figure


def _paint(axes: Axes, timeline: Timeline) -> None:
    """A row for each worker; a worker's later stages have a dark frame."""
    for worker in range(timeline.num_workers):
        stages = timeline.stages_of(worker)
        for event in timeline.of_worker(worker):
            kind, turn = event.action.kind, stages.index(event.action.stage)
            axes.broken_barh(
                [(event.start_s, event.duration_s)], (worker - 0.42, 0.84), facecolors=COLORS[kind],
                edgecolors="white" if turn == 0 else "black", linewidths=0.5,
            )  # fmt: skip
            axes.text(
                event.start_s + event.duration_s / 2, worker, str(event.action.microbatch), ha="center",
                va="center", fontsize=5.5 if event.duration_s >= 1 else 4.5,
                color="white" if kind in DARK else "black",
            )  # fmt: skip
    axes.set_yticks(range(timeline.num_workers))
    axes.set_ylim(timeline.num_workers - 0.5, -0.5)


def panels(records: Sequence[Record]) -> list[Panel]:
    """The schedules at equal costs, and of each model at the largest K and M that is on record."""
    found = []
    equal = find(records, "done", part=GRID, num_workers=SHOWN_WORKERS)
    if equal is not None:
        number = 2 * SHOWN_WORKERS
        points = [
            point
            for name in WITHOUT_NAIVE
            for remat in REMATS
            for point in _point(
                equal, ("step in slots", "graphs alive"), schedule=name, M=number, remat=remat
            )
        ]
        title = f"equal costs, K = {SHOWN_WORKERS}, M = {number} (replayed)"
        found.append(Panel(title, "slots", "graphs alive", points))
    for model in SUBJECTS:
        record = find(records, "done", part=at_costs.PART, model=model, num_microbatches=SHOWN_MICROBATCHES)
        if record is None:
            continue
        points = [
            point
            for name in WITHOUT_NAIVE
            for remat in REMATS
            for point in _point(
                record, ("step", "peak memory"),
                schedule=name, K=SHOWN_WORKERS, M=SHOWN_MICROBATCHES, remat=remat,
            )
        ]  # fmt: skip
        scale = record.details["scale"] or "full size"
        title = (
            f"{record.details['title']} ({scale}), K = {SHOWN_WORKERS}, M = {SHOWN_MICROBATCHES}\n"
            "step replayed with measured times, memory modelled"
        )
        if points:
            found.append(Panel(title, "ms", "MiB", points))
    return found


def _point(record: Record, names: tuple[str, str], **key: Scalar) -> Iterable[Point]:
    time, memory = (record.quantity(name, **key) for name in names)
    if time is not None and memory is not None and time.value is not None and memory.value is not None:
        yield Point(str(key["schedule"]), str(key["remat"]), time.value, memory.value)


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other one beats in both, the fastest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (each.time, each.memory)):
        if not best or point.memory < best[-1].memory:
            best.append(point)
    return best


def _frontiers(records: Sequence[Record]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import ScalarFormatter

    shown = panels(records)
    figure = Figure(figsize=(8.4, 4.0 * len(shown) + 0.5), layout="constrained")
    names = [name for name in WITHOUT_NAIVE if any(p.name == name for panel in shown for p in panel.points)]
    marks = dict(zip(names, "osD^v<>Ph*XpH8d", strict=False))
    colors = dict(zip(names, _COLORS * 2, strict=False))
    rows = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axes, (title, time_unit, memory_unit, points) in zip(rows, shown, strict=True):
        line = frontier(points)
        axes.step([p.time for p in line], [p.memory for p in line], where="post", color=".6", zorder=1)
        for point in points:
            kept = point.remat == "never"
            axes.scatter(
                point.time, point.memory, marker=marks[point.name], s=42, zorder=2,
                facecolors=colors[point.name] if kept else "none", edgecolors=colors[point.name],
                linewidths=1.2,
            )  # fmt: skip
        axes.set_yscale("log")
        for labelled in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            labelled(ScalarFormatter())
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(f"step ({time_unit})")
        axes.set_ylabel(f"fullest worker ({memory_unit})")
    handles = [
        Line2D([], [], linestyle="none", marker=marks[name], color=colors[name], label=name) for name in names
    ]
    handles.append(Line2D([], [], color=".6", label="no schedule beats these"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8,
        title="filled: activations kept; hollow: recomputed", title_fontsize=8,
    )  # fmt: skip
    without_frame(figure)
    return figure


_COLORS = [
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22",
    "#393b79", "#637939", "#843c39",
]  # fmt: skip


def timed(records: Sequence[Record]) -> list[Record]:
    """The cases without re-materialization, by M."""
    found = of_case(records, "done", part=side_by_side.PART, remat="never")
    return sorted(found, key=lambda record: int(str(record.case["num_microbatches"])))


def _side_by_side(records: Sequence[Record]) -> Figure:
    from matplotlib.figure import Figure

    found = timed(records)
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    all_axes = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    order = list(side_by_side.OURS)
    for axes, record in zip(all_axes, found, strict=True):
        base = record.quantity("step", arm="1f1b")
        assert base is not None, "1F1B has been timed"
        base_ms = base.value or 1.0
        for place, name in enumerate(order):
            ratio = record.quantity("step over", arm=name, against="1f1b")
            if ratio is not None and ratio.value is not None:
                low, high = ratio.low or ratio.value, ratio.high or ratio.value
                axes.errorbar(
                    ratio.value, place, xerr=[[ratio.value - low], [high - ratio.value]], fmt="o",
                    color=_COLORS[0], label="ours" if place == 1 else None,
                )  # fmt: skip
            theirs = record.quantity("step", arm=f"torch's {name}")
            if theirs is not None and theirs.value is not None:
                axes.plot(
                    theirs.value / base_ms, place + 0.18, "D", color=_COLORS[3], markersize=4.5,
                    label="torch's (of medians)" if place == 0 else None,
                )  # fmt: skip
        axes.axvline(1, color=".5", linewidth=0.8)
        axes.set_title(f"M = {record.case['num_microbatches']}", fontsize=9)
        axes.set_xlabel("step over our 1F1B's", fontsize=8)
        axes.set_yticks(range(len(order)), order)
        axes.set_ylim(len(order) - 0.5, -0.5)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, frameon=False, loc="outside lower center", ncols=2)
    without_frame(figure)
    return figure
