"""Schedules beyond GPipe's: what others published of them, and all of them side by side.

Expected: published bubble rates follow to the last digit from the times that are printed with them; at equal
costs zero bubble in a V needs the least time, V-Min the least memory without recomputation.

    python -m experiments run schedules

At equal costs a worker's whole share of the model takes one slot forward and two backward, whatever the
number of its stages, and messages take no time: what is compared are the schedules and nothing else. What
they take of a real model is for `engines`, which times them, and for `plan`, which chooses one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.beyond import published
from gpipe_bench.experiments.beyond.published import alive_by_worker, laid_out
from gpipe_bench.experiments.drawing import COLORS, legend, picture
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.record import Metric, Record, Scalar, find, frame, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.pipeline.plan.generate import generate
from gpipe_bench.pipeline.plan.links import FREE
from gpipe_bench.pipeline.plan.named import NAMED, named, vee
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import SLOTS
from gpipe_bench.pipeline.plan.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EQUAL = "equal costs"
GENERATED, GENERATED_V = "generated", "generated, V"
NAMES = (*NAMED, GENERATED, GENERATED_V)
"""Names of schedules in the order in which they are shown; generated ones keep within the memory of 1F1B."""
WITHOUT_NAIVE = tuple(name for name in NAMES if name != "naive")
REMATS = ("never", "always")
TIMES = (1, 2, 4)  # M as a multiple of K
CHART_WORKERS = 4  # of the charts that are kept
GRID_S = {2: 0.5, 4: 1.0, 8: 4.0, 16: 15.0}
"""Estimated seconds of a case, by K."""
KEPT = {"never": "kept", "always": "recomputed"}
HOW = {"never": "without re-materialization", "always": "every micro-batch recomputed"}


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    numbers = [k for k in GRID_S if not smoke or k <= 4]
    return [
        *published.cases(smoke),
        *(Case({"part": EQUAL, "num_workers": number}, GRID_S[number]) for number in numbers),
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    key: dict[str, Any] = case.key
    return published.run(key["table"]) if key["part"] == published.PART else run_equal(key["num_workers"])


def run_equal(num_workers: int) -> Outcome:
    """All schedules on so many workers, and the charts of M = 2K where they are kept."""
    metrics = []
    for number in (times * num_workers for times in TIMES):
        for name in NAMES:
            for remat in REMATS:
                schedule = schedule_of(name, num_workers, number, remat)
                timeline = in_slots(schedule)
                alive = max(alive_by_worker(schedule)) / (schedule.num_stages / num_workers)
                key: dict[str, Scalar] = {"schedule": name, "M": number, "remat": remat}
                metrics += [
                    Metric(what, value, unit, "replayed", key=key)
                    for what, value, unit in (
                        ("step in slots", float(timeline.makespan_s), "number"),
                        ("bubble", float(timeline.bubble), "ratio"),
                        ("graphs alive", alive, "number"),
                    )
                ]
    if num_workers != CHART_WORKERS:
        return Outcome(tuple(metrics))

    def chart(name: str, remat: str) -> dict[str, Any]:
        return in_slots(schedule_of(name, num_workers, 2 * num_workers, remat)).to_data()

    charts = {remat: {name: chart(name, remat) for name in WITHOUT_NAIVE} for remat in REMATS}
    return Outcome(tuple(metrics), {"timelines": charts})


def schedule_of(name: str, num_workers: int, num_microbatches: int, remat: str) -> Schedule:
    """Schedule of a name in `NAMES`. The generator has as many graphs as 1F1B."""
    if name not in (GENERATED, GENERATED_V):
        return named(name, num_workers, num_microbatches, remat=remat)
    place = tuple(range(num_workers)) if name == GENERATED else vee(num_workers)
    slots = {kind: each * num_workers / len(place) for kind, each in SLOTS.items()}
    return generate(place, num_microbatches, slots, remat=remat, most_alive=len(place))


def in_slots(schedule: Schedule) -> Timeline:
    """The schedule replayed in slots of a worker's whole share."""
    return laid_out(schedule, dict(SLOTS), FREE)


def tables(records: Sequence[Record]) -> str:
    return "\n\n".join(
        _table(record, remat) for record in of_case(records, "done", part=EQUAL) for remat in REMATS
    )


def _table(record: Record, remat: str) -> str:
    """A line for each schedule, a column for each number of micro-batches."""
    data = frame([record])
    found = data[data.remat == remat].set_index(["metric", "schedule", "M"]).value
    numbers = sorted(data.M.unique())
    lines = [
        [
            name,
            *(
                f"{found['step in slots', name, number]:g}, {found['bubble', name, number]:.1%}, "
                f"{found['graphs alive', name, number]:g}".replace("%", " %")
                for number in numbers
            ),
        ]
        for name in NAMES
    ]
    workers = record.case["num_workers"]
    title = f"K = {workers}, {HOW[remat]}\n  slots of a step, bubble, graphs alive (replayed)"
    return numbers_text(title, ["", *(f"M={each}" for each in numbers)], lines)


def figures(records: Sequence[Record]) -> list[Plot]:
    """The charts, where they are on record."""
    record = find(records, "done", part=EQUAL, num_workers=CHART_WORKERS)
    if record is None:
        return []
    caption = (
        f"All schedules on {CHART_WORKERS} workers with {2 * CHART_WORKERS} micro-batches, replayed at equal "
        "costs"
    )
    alt = (
        "Gantt charts of every schedule on one time axis, activations kept at the left and recomputed at the "
        "right; zero bubble in a V leaves the least white."
    )
    draw = partial(_charts, record)
    return [picture(name="schedules-charts", caption=caption, alt=alt, draw=draw)]


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


EXPERIMENT = Experiment(
    name="schedules",
    title="Schedules beyond GPipe's: published rates, and all side by side",
    source="beyond the paper; arXiv 2401.10241, 2405.15362",
    describe=("Published bubble rates replayed; length, bubble and memory of all schedules over K and M."),
    profiles={
        "smoke": "published rates of one model, K up to 4",
        "short": "everything, K up to 16",
        "full": "the same",
    },
    cases=cases,
    run=run,
    cells=published.cells,
    tables=tables,
    figures=figures,
    paper_tables=tuple(published.SECONDS),
    docs="docs/schedules.md",
    untimed=True,
)
