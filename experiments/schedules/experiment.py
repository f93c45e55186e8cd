"""Schedules beyond GPipe's: what others published of them, all of them side by side, and timed against torch.

Expected: published bubble rates follow to the last digit from the times that are printed with them; at equal
costs zero bubble in a V needs the least time, V-Min the least memory without recomputation, and
re-materialization with the weights' gradients put off comes near a step without it. The machine should
have nothing else to do:

    python -m experiments run schedules
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.report.drawing import COLORS, legend, picture, without_frame
from gpipe_bench.experiments.schedules import beside, beyond, laid_out, published, recomputing
from gpipe_bench.experiments.schedules.laid_out import (
    CHART_WORKERS,
    EQUAL,
    MEASURED,
    NAMES,
    REMATS,
    WITHOUT_NAIVE,
)
from gpipe_bench.experiments.timed.workloads import TABLE2
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Record, find, frame, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.plan.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

KEPT = {"never": "kept", "always": "recomputed"}
SHOWN_WORKERS, SHOWN_MICROBATCHES = 8, 32
"""Of the frontier: the most that Table 2 has."""
PALETTE = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22",
    "#393b79", "#637939", "#843c39",
)  # fmt: skip


def figures(records: Sequence[Record]) -> list[Plot]:
    """Every figure the records suffice for."""
    found: list[tuple[Any, Any, str, str, str]] = [
        (
            find(records, "done", part=EQUAL, num_workers=CHART_WORKERS),
            _charts,
            "schedules-charts",
            f"All schedules on {CHART_WORKERS} workers with {2 * CHART_WORKERS} micro-batches, "
            "replayed at equal costs",
            "Gantt charts of every schedule on one time axis, activations kept at the left and "
            "recomputed at the right; zero bubble in a V leaves the least white.",
        ),
        (
            [
                *of_case(records, "done", part=EQUAL, num_workers=SHOWN_WORKERS),
                *of_case(records, "done", part=MEASURED, num_microbatches=SHOWN_MICROBATCHES),
            ],
            _frontiers,
            "schedules-frontier",
            "Memory of the fullest worker against the time of a step",
            "A point for each schedule, kept and recomputed; a line joins those that no other beats "
            "in both time and memory.",
        ),
        (
            of_case(records, "done", part=beside.PART, remat="never"),
            _side_by_side,
            "schedules-side-by-side",
            "Steps on two processes over those of our 1F1B, ours and torch's in one run",
            "For each number of micro-batches the ratio of every schedule's step to 1F1B's; those of "
            "zero bubble are the lowest, and ours do not lie above torch's.",
        ),
    ]
    return [
        picture(name=name, caption=caption, alt=alt, draw=partial(draw, shown))
        for shown, draw, name, caption, alt in found
        if shown
    ]


def _charts(record: Record) -> Figure:
    from matplotlib.figure import Figure

    kept = record.details["timelines"]
    drawn = {(n, r): Timeline.from_data(kept[r][n]) for n in WITHOUT_NAIVE for r in REMATS}
    longest = max(timeline.makespan_s for timeline in drawn.values())
    figure = Figure(figsize=(13, 1.02 * len(WITHOUT_NAIVE) + 0.8), layout="constrained")
    grid = figure.subplots(len(WITHOUT_NAIVE), len(REMATS), sharex=True)
    for axes, ((name, remat), timeline) in zip(grid.flat, drawn.items(), strict=True):
        _paint(axes, timeline)
        axes.set_xlim(0, longest)
        axes.grid(visible=False)
        axes.tick_params(labelsize=7)
        facts = f"{timeline.makespan_s:g} slots, {timeline.bubble:.0%} idle"
        axes.set_title(f"{name}, {KEPT[remat]}: {facts}", fontsize=8, loc="left", pad=2)
    for axes in grid[-1]:
        axes.set_xlabel("slots", fontsize=8)
    legend(figure, drawn.values())
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
            if kind is not Kind.F:  # the others follow, and a picture without their numbers is smaller
                continue
            axes.text(
                event.start_s + event.duration_s / 2, worker, str(event.action.microbatch), ha="center",
                va="center", fontsize=5.5 if event.duration_s >= 1 else 4.5,
            )  # fmt: skip
    axes.set_yticks(range(timeline.num_workers))
    axes.set_ylim(timeline.num_workers - 0.5, -0.5)


def _points(record: Record) -> tuple[DataFrame, str, str, str]:
    """Time and memory of all schedules but the naive one, at equal costs or of a model at the most that is
    shown; a title, and the units of both.
    """
    data, number = frame([record]), 2 * SHOWN_WORKERS
    if record.case["part"] == EQUAL:
        data, names = data[number == data.M], {"step in slots": "time", "graphs alive": "memory"}
        said = f"equal costs, K = {SHOWN_WORKERS}, M = {number} (replayed)", "slots", "graphs alive"
    else:
        data, names = data[data.K == SHOWN_WORKERS], {"step": "time", "peak memory": "memory"}
        title = (
            f"{record.details['title']} ({record.details['scale'] or 'full size'}), K = {SHOWN_WORKERS}, "
            f"M = {SHOWN_MICROBATCHES}\nstep replayed with measured times, memory modelled"
        )
        said = title, "ms", "MiB"
    values = data[data.schedule != "naive"].set_index(["schedule", "remat", "quantity"]).value
    points = values.unstack(sort=False).rename(columns=names).reset_index()
    return points.assign(activations=points.remat.map(KEPT)), *said


def frontier(points: DataFrame) -> DataFrame:
    """Those that no other one beats in both, the fastest first."""
    found = points.sort_values(["time", "memory"])
    return found[found.memory < found.memory.cummin().shift(fill_value=inf)]


def _frontiers(records: Sequence[Record]) -> Figure:
    import seaborn
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(8.4, 4.0 * len(records) + 0.5), layout="constrained")
    for number, record in enumerate(records, start=1):
        points, title, time_unit, memory_unit = _points(record)
        axes = figure.add_subplot(len(records), 1, number)
        line = frontier(points)
        axes.step(line.time, line.memory, where="post", color=".6", zorder=1)
        seaborn.scatterplot(
            points,
            x="time", y="memory", hue="schedule", style="activations", s=45, ax=axes,
            hue_order=WITHOUT_NAIVE, palette=PALETTE[: len(WITHOUT_NAIVE)], markers=["o", "X"], zorder=2,
        )  # fmt: skip
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
        axes.set_title(title, fontsize=9)
        axes.set(xlabel=f"step ({time_unit})", ylabel=f"fullest worker ({memory_unit})")
        handles = axes.get_legend_handles_labels()
        axes.legend().remove()
    figure.legend(*handles, loc="outside right upper", frameon=False, fontsize=8)
    without_frame(figure)
    return figure


def _side_by_side(records: Sequence[Record]) -> Figure:
    from matplotlib.figure import Figure

    found = sorted(records, key=lambda record: int(str(record.case["num_microbatches"])))
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    order = list(beside.OURS)
    for number, record in enumerate(found):
        axes = figure.add_subplot(1, len(found), number + 1, sharey=figure.axes[0] if figure.axes else None)
        steps: dict[Any, Any] = {
            each.key["arm"]: each.value for each in record.quantities if each.name == "step"
        }
        ratios: Any = [record.quantity("step over", arm=name, against="1f1b") for name in order]
        ours = [(place, ratio) for place, ratio in enumerate(ratios) if ratio is not None]
        # A single round has no interval.
        below = [0.0 if ratio.low is None else ratio.value - ratio.low for _, ratio in ours]
        above = [0.0 if ratio.high is None else ratio.high - ratio.value for _, ratio in ours]
        axes.errorbar(
            [ratio.value for _, ratio in ours], [place for place, _ in ours], fmt="o", color=PALETTE[0],
            xerr=[below, above], label="ours",
        )  # fmt: skip
        theirs = [place for place, name in enumerate(order) if f"torch's {name}" in steps]
        axes.plot(
            [steps[f"torch's {order[place]}"] / steps["1f1b"] for place in theirs],
            [place + 0.18 for place in theirs],
            "D", color=PALETTE[3], markersize=4.5, label="torch's (of medians)",
        )  # fmt: skip
        axes.axvline(1, color=".5", linewidth=0.8)
        axes.set_title(f"M = {record.case['num_microbatches']}", fontsize=9)
        axes.set_xlabel("step over our 1F1B's", fontsize=8)
        axes.set_yticks(range(len(order)), order)
        axes.tick_params(labelleft=number == 0)
    axes.set_ylim(len(order) - 0.5, -0.5)
    figure.legend(
        *axes.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center", ncols=2
    )
    without_frame(figure)
    return figure


HOW = {"never": "without re-materialization", "always": "every micro-batch recomputed"}


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    again = [
        Case({"part": recomputing.PART, "model": model}, seconds)
        for model, seconds in recomputing.SECONDS.items()
    ]
    again += [
        Case({"part": beyond.PART}, beyond.SECONDS),
        Case({"part": beyond.RESIDUALS}, beyond.RESIDUALS_S),
    ]
    return [
        *published.cases(smoke),
        *laid_out.cases(options.profile),
        *again[: 0 if smoke else None],
        *(Case(key, seconds) for key, seconds in beside.keys(options.profile)),
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    key: dict[str, Any] = case.key
    match key["part"]:
        case published.PART:
            return published.run(key)
        case laid_out.MEASURED:
            return laid_out.run_measured(key["model"], options.profile, key["num_microbatches"])
        case recomputing.PART:
            return recomputing.run(key["model"])
        case beyond.PART:
            return beyond.run()
        case beyond.RESIDUALS:
            return beyond.run_residuals()
        case beside.PART:
            return beside.run(key, options)
    return laid_out.run_equal(key["num_workers"])


def tables(records: Sequence[Record]) -> str:
    """The published numbers first, then ours."""
    parts = beside.tables(records)
    for of_part, table in ((laid_out.EQUAL, _equal), (laid_out.MEASURED, _measured)):
        parts += [table(r, remat) for r in of_case(records, "done", part=of_part) for remat in REMATS]
    for model in TABLE2:
        parts += _table2(of_case(records, "done", part=laid_out.MEASURED, model=model), model)
    parts += [*recomputing.tables(records), *beyond.tables(records)]
    return "\n\n".join(parts)


def _by_schedule(title: str, record: Record, remat: str, axis: str, words: str) -> str:
    """A line for each schedule, a column for each number on the axis."""
    found: dict[Any, dict[str, Any]] = {}
    for each in record.quantities:
        if each.key.get("remat") == remat:
            value = 100 * (each.value or 0.0) if each.name == "bubble" else each.value
            found.setdefault((each.key["schedule"], each.key[axis]), {})[each.name] = value
    numbers = sorted({number for _, number in found})
    lines = [
        [name, *(words.format_map(found[name, each]) if (name, each) in found else "-" for each in numbers)]
        for name in NAMES
    ]
    return numbers_text(title, ["", *(f"{axis}={each}" for each in numbers)], lines)


def _equal(record: Record, remat: str) -> str:
    title = (
        f"K = {record.case['num_workers']}, {HOW[remat]}\n  slots of a step, bubble, graphs alive (replayed)"
    )
    return _by_schedule(title, record, remat, "M", "{step in slots:g}, {bubble:.1f} %, {graphs alive:g}")


def _measured(record: Record, remat: str) -> str:
    split: list[Any] = [each.value for each in record.quantities if each.name == "(I + W) / B"]
    title = (
        f"{record.details['title']} ({record.details['scale'] or 'full size'}), "
        f"M = {record.case['num_microbatches']}\n"
        f"  {HOW[remat]}; step and bubble replayed with the stages' measured times,\n"
        "  MiB of the fullest worker modelled;\n"
        f"  a split backward takes {min(split):.2f} to {max(split):.2f} times a whole one (measured)"
    )
    return _by_schedule(title, record, remat, "K", "{step:.4g} ms, {bubble:.0f} %, {peak memory:.3g}")


def _table2(records: Sequence[Record], model: str) -> Iterator[str]:
    """The paper's Table 2 with GPipe's schedule and with the shortest one."""
    steps: dict[Any, Any] = {
        tuple(each.key[part] for part in ("M", "K", "remat", "schedule")): each.value
        for record in records
        for each in record.quantities
        if each.name == "step"
    }
    unit = steps.get((1, 2, "always", "gpipe"))
    if unit is None:
        return
    printed = {c.key: c.printed for c in load_paper() if c.source == "paper" and "table2" in c.table}
    lines = []
    for count, worker in sorted({key[:2] for key in steps}):
        gpipe = steps[count, worker, "always", "gpipe"]
        line = [
            f"K={worker}, M={count}",
            printed.get((f"table2-{model}", f"M={count}", f"K={worker}"), "-"),
            f"{unit / gpipe:.2f}",
        ]
        for remat in REMATS[::-1]:
            best, name = min(
                ((step, key[3]) for key, step in steps.items() if key[:3] == (count, worker, remat)),
                key=lambda found: found[0],
            )
            line += [f"{unit / best:.2f}", f"x{gpipe / best:.2f}", name]
        lines.append(line)
    yield numbers_text(
        f"Table 2 with the best schedule, {TABLE2[model]['full'].title}: throughput over GPipe's at K=2, "
        "M=1\n"
        "  (replayed with the stages' measured times; gains over GPipe with every micro-batch recomputed)",
        ["", "paper", "gpipe", "best, recomputed", "gain", "schedule", "best, kept", "gain", "schedule"],
        lines,
    )


EXPERIMENT = Experiment(
    name="schedules",
    title="Schedules beyond GPipe's: published rates, all side by side, against torch's",
    source="beyond the paper; arXiv 2401.10241, 2405.15362, 2406.03488, 2503.01328, 2603.15031",
    describe=(
        "Published bubble rates replayed; length, bubble and memory of all schedules over K and M, at equal "
        "and at measured costs; our schedules beside torch's; Table 2 with the best schedule; what must be "
        "recomputed under Table 1's memory; chunks of sequences, activations with the host, attention "
        "residuals."
    ),
    profiles={
        "smoke": "published rates of one model, K up to 4",
        "short": "everything, K up to 16",
        "full": "the same with more rounds",
    },
    cases=cases,
    run=run,
    cells=published.cells,
    tables=tables,
    figures=figures,
    paper_tables=published.PAPER_TABLES,
    docs="docs/schedules.md",
    options=("seed",),
)
