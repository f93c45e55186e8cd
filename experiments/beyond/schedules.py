"""Schedules beyond GPipe's: what others published of them, and all of them side by side.

Expected: published bubble rates follow to the last digit from the times that are printed with them; at equal
costs zero bubble in a V needs the least time, V-Min the least memory without recomputation.
The machine should have nothing else to do:

    python -m experiments run schedules

At equal costs a worker's whole share of the model takes one slot forward and two backward, whatever the
number of its stages, and messages take no time: what is compared are the schedules and nothing else.

At measured costs the mini-batch is Table 2's, so its numbers can be read beside those here: with M
micro-batches each has a share of the examples. For each number of stages there are two pipelines, one with
whole backwards and one that splits them, and all of them take turns on one core, so all are timed
under the same conditions. All stages run in one process, and each has everything that belongs to its
actions, the price of a split included; contention between workers is not in it. Steps are replayed over a
free link; the memory of the fullest worker is modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.beyond import published
from gpipe_bench.experiments.beyond.published import alive_by_worker, laid_out
from gpipe_bench.experiments.drawing import COLORS, legend, picture, without_frame
from gpipe_bench.experiments.paper.timed.workloads import TABLE2
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Metric, Record, Scalar, find, frame, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.pipeline.plan.generate import generate
from gpipe_bench.pipeline.plan.links import FREE
from gpipe_bench.pipeline.plan.named import NAMED, named
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.pipeline.plan.vee import vee

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from gpipe_bench.pipeline.memory.profile import ModelProfile

EQUAL, MEASURED = "equal costs", "measured costs"
GENERATED, GENERATED_V = "generated", "generated, V"
NAMES = (*NAMED, GENERATED, GENERATED_V)
"""Names of schedules in the order in which they are shown; generated ones keep within the memory of 1F1B."""
WITHOUT_NAIVE = tuple(name for name in NAMES if name != "naive")
REMATS = ("never", "always")
TIMES = (1, 2, 4)  # M as a multiple of K, at equal costs
CHART_WORKERS = 4  # of the charts that are kept
GRID_S = {2: 0.5, 4: 1.0, 8: 4.0, 16: 15.0}
"""Estimated seconds of a case at equal costs, by K."""
WORKERS = {"smoke": (2,), "short": (2, 4, 8), "full": (2, 4, 8)}
SECONDS = {
    "smoke": {4: 5.0},
    "short": {1: 60.0, 4: 60.0, 32: 45.0},
    "full": {1: 900.0, 4: 900.0, 32: 900.0},
}
"""Estimated seconds of a case at measured costs, by number of micro-batches (those of Table 2)."""
ROUNDS = {"smoke": 1, "short": 1, "full": 4}
MOST_MICROBATCHES = 8
SEED = 1811
MIB = 2**20
OPTIMIZER = "sgd"
"""An optimizer without state, so that memory which all schedules need does not hide their differences."""
KEPT = {"never": "kept", "always": "recomputed"}
SHOWN_WORKERS, SHOWN_MICROBATCHES = 8, 32
"""Workers and micro-batches of the frontier plot: the most that Table 2 has."""
PALETTE = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22",
    "#393b79", "#637939", "#843c39",
)  # fmt: skip
HOW = {"never": "without re-materialization", "always": "every micro-batch recomputed"}


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    models = ("transformer",) if smoke else tuple(TABLE2)
    return [
        *published.cases(smoke),
        *(
            Case({"part": EQUAL, "num_workers": workers}, seconds)
            for workers, seconds in GRID_S.items()
            if not smoke or workers <= 4
        ),
        *(
            Case({"part": MEASURED, "model": model, "num_microbatches": number}, seconds)
            for model in models
            for number, seconds in SECONDS[options.profile].items()
        ),
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    key: dict[str, Any] = case.key
    match key["part"]:
        case published.PART:
            return published.run(key["table"])
        case "measured costs":
            return run_measured(key["model"], options.profile, key["num_microbatches"])
    return run_equal(key["num_workers"])


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


def schedule_of(
    name: str,
    num_workers: int,
    num_microbatches: int,
    remat: str,
    seconds: Mapping[tuple[int, Kind], float] | None = None,
) -> Schedule:
    """Schedule of a name in `NAMES`. The generator has as many graphs as 1F1B; for `seconds` of stages it is
    the shorter one of whole and of split backwards, and without them that of equal costs.
    """
    if name not in (GENERATED, GENERATED_V):
        return named(name, num_workers, num_microbatches, remat=remat)
    place = tuple(range(num_workers)) if name == GENERATED else vee(num_workers)
    make = partial(generate, place, num_microbatches, remat=remat, most_alive=len(place))
    if seconds is None:
        return make({kind: slots * num_workers / len(place) for kind, slots in SLOTS.items()})
    found = [make(seconds, split=split) for split in (True, False)]
    return min(found, key=lambda schedule: replay(schedule, seconds).makespan_s)


def in_slots(schedule: Schedule) -> Timeline:
    """The schedule replayed in slots of a worker's whole share."""
    return laid_out(schedule, dict(SLOTS), FREE)


@dataclass(frozen=True)
class StageCosts:
    """Seconds by (stage, kind) for one micro-batch, and how the layers are cut."""

    partition: Partition
    seconds: Mapping[tuple[int, Kind], float]

    def price_of_split(self) -> float:
        """(I + W) / B of the whole model."""
        total = {kind: sum(s for (_, of), s in self.seconds.items() if of is kind) for kind in Kind}
        return (total[Kind.I] + total[Kind.W]) / total[Kind.B]

    def to_data(self) -> dict[str, Any]:
        """The costs as a record keeps them, in milliseconds."""
        return {
            "partition": [[span.start, span.stop] for span in self.partition],
            "ms": {f"{stage}{kind.value}": 1e3 * s for (stage, kind), s in sorted(self.seconds.items())},
        }


def run_measured(name: str, profile: str, num_microbatches: int) -> Outcome:
    """Times the stages of a model of Table 2 and lays all schedules out."""
    workload = TABLE2[name][profile]
    size = workload.batch_size // num_microbatches
    found = measure(name, profile, size, sorted({k for each in WORKERS[profile] for k in (each, 2 * each)}))
    metrics = [
        Metric("(I + W) / B", costs.price_of_split(), "ratio", "measured", key={"stages": number})
        for number, costs in found.items()
    ]
    profiles = profiles_of(name, profile, size)
    for num_workers in WORKERS[profile]:
        metrics += at_costs(found, profiles, num_workers, num_microbatches)
    details = {
        "title": workload.title, "scale": workload.scale, "batch_size": workload.batch_size,
        "stages": [costs.to_data() for costs in found.values()],
    }  # fmt: skip
    return Outcome(tuple(metrics), details)


def at_costs(
    found: Mapping[int, StageCosts], profiles: ModelProfile, num_workers: int, num_microbatches: int
) -> Iterator[Metric]:
    """Step, bubble and peak of each schedule on so many workers, where its stages have costs."""
    from gpipe_bench.pipeline.memory.workers import bytes_of_stages, peak_bytes

    for name in NAMES:
        turns = {GENERATED: 1, GENERATED_V: 2}.get(name) or NAMED[name].stages_per_worker or 2
        costs = found.get(turns * num_workers)
        if costs is None:
            continue
        footprints = bytes_of_stages(profiles.layers, profiles.loss, costs.partition)
        for remat in REMATS:
            schedule = schedule_of(name, num_workers, num_microbatches, remat, costs.seconds)
            timeline = replay(schedule, costs.seconds)
            peak = max(peak_bytes(footprints, schedule, OPTIMIZER, receive_ahead=1))
            key: dict[str, Scalar] = {
                "schedule": name, "K": num_workers, "M": num_microbatches, "remat": remat,
            }  # fmt: skip
            step_ms = 1e3 * timeline.makespan_s
            yield Metric("step", step_ms, "ms", "replayed", key=key)
            yield Metric("bubble", timeline.bubble, "ratio", "replayed", key=key)
            yield Metric(
                "peak memory", peak / MIB, "MiB", "modelled", key=key, note="of the fullest worker; plain SGD"
            )


def measure(name: str, profile: str, size: int, numbers_of_stages: Sequence[int]) -> dict[int, StageCosts]:
    """Seconds of the stages of a model of Table 2, each kind of action alone (F, R, B, and I and W instead
    of B), with micro-batches of `size` examples, by number of stages; in this process, which uses one core.
    Numbers beyond that of the layers are left out.
    """
    import torch

    from gpipe_bench.experiments.paper.timed.layers import layer_seconds
    from gpipe_bench.experiments.paper.timed.results import samples_of
    from gpipe_bench.harness.rounds import turns
    from gpipe_bench.pipeline import Pipeline
    from gpipe_bench.planner.timing import settle, time_step

    torch.set_num_threads(1)
    workload = TABLE2[name][profile]
    layers = list(workload.build(seed=SEED))
    number = max(1, MOST_MICROBATCHES // size)
    batch, target = workload.example(size * number)
    loss = workload.loss()
    by_layer = layer_seconds(layers, number, loss, batch, target, "never")
    cuts = {count: partition(by_layer, count) for count in numbers_of_stages if count <= len(layers)}
    make = partial(Pipeline, layers, num_microbatches=number, remat="always")
    pipelines = {
        (count, schedule): make(partition=cut, schedule=schedule)
        for count, cut in cuts.items()
        for schedule in ("gpipe", "zb-h1")  # whole backwards, and split ones
    }
    steps = {each: partial(pipeline.step, batch, target, loss) for each, pipeline in pipelines.items()}
    for step in steps.values():
        time_step(step, layers)
    settle()
    found: dict[int, list[Timeline]] = {count: [] for count in cuts}
    for each in turns(list(pipelines), ROUNDS[profile], SEED):
        time_step(steps[each], layers)
        found[each[0]].append(pipelines[each].timeline)
    return {
        count: StageCosts(
            cuts[count], {key: median(samples) for key, samples in samples_of(timelines).items()}
        )
        for count, timelines in found.items()
    }


def profiles_of(name: str, profile: str, size: int) -> ModelProfile:
    """Profile of the layers and the loss for the memory model, for a micro-batch of `size`."""
    from gpipe_bench.pipeline.memory.profile import Profiler

    return TABLE2[name][profile].profile(size, Profiler(split_backward=True))


def tables(records: Sequence[Record]) -> str:
    """The published numbers first, then ours."""
    parts: list[str] = []
    for of_part, table in ((EQUAL, _equal), (MEASURED, _measured)):
        parts += [table(r, remat) for r in of_case(records, "done", part=of_part) for remat in REMATS]
    for model in TABLE2:
        parts += _table2(of_case(records, "done", part=MEASURED, model=model), model)
    return "\n\n".join(parts)


def _by_schedule(title: str, record: Record, remat: str, axis: str, words: str) -> str:
    """A line for each schedule, a column for each number on the axis."""
    data = frame([record])
    data = data[data.remat == remat].assign(
        value=lambda own: own.value.where(own.unit != "ratio", 100 * own.value)
    )
    cells: Any = data.groupby(["schedule", axis])
    found = {place: dict(zip(own.metric, own.value, strict=True)) for place, own in cells}
    numbers = sorted(data[axis].unique())
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
    split: list[Any] = [each.value for each in record.metrics if each.name == "(I + W) / B"]
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
    data = frame(records)
    known = data[data.metric == "step"]
    steps = known.set_index(["M", "K", "remat", "schedule"]).value if len(known) else known.value
    unit = steps.get((1, 2, "always", "gpipe"))
    if unit is None:
        return
    printed = {c.key: c.printed for c in load_paper() if c.source == "paper" and "table2" in c.table}
    lines = []
    for (count, worker), own in steps.groupby(["M", "K"]):
        gpipe = own[count, worker, "always", "gpipe"]
        line = [
            f"K={worker}, M={count}",
            printed.get((f"table2-{model}", f"M={count}", f"K={worker}"), "-"),
            f"{unit / gpipe:.2f}",
        ]
        for remat in REMATS[::-1]:
            best = own.xs(remat, level="remat")
            line += [f"{unit / best.min():.2f}", f"x{gpipe / best.min():.2f}", best.idxmin()[-1]]
        lines.append(line)
    yield numbers_text(
        f"Table 2 with the best schedule, {TABLE2[model]['full'].title}: throughput over GPipe's at K=2, "
        "M=1\n"
        "  (replayed with the stages' measured times; gains over GPipe with every micro-batch recomputed)",
        ["", "paper", "gpipe", "best, recomputed", "gain", "schedule", "best, kept", "gain", "schedule"],
        lines,
    )


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
    values = data[data.schedule != "naive"].set_index(["schedule", "remat", "metric"]).value
    points = values.unstack(sort=False).rename(columns=names).reset_index()
    return points.assign(activations=points.remat.map(KEPT)), *said


def frontier(points: DataFrame) -> DataFrame:
    """The points that no other point beats in both time and memory, the fastest first."""
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


EXPERIMENT = Experiment(
    name="schedules",
    title="Schedules beyond GPipe's: published rates, and all side by side",
    source="beyond the paper; arXiv 2401.10241, 2405.15362",
    describe=(
        "Published bubble rates replayed; length, bubble and memory of all schedules over K and M, at equal "
        "and at measured costs; Table 2 with the best schedule."
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
    paper_tables=tuple(published.SECONDS),
    docs="docs/schedules.md",
)
