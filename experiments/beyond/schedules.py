"""Schedules beyond GPipe's: others' published numbers, and all schedules side by side.

Expected: published bubble rates follow to the last digit from the times printed with them; at equal costs
zero bubble in a V needs the least time, V-Min the least memory without recomputation.

    python -m experiments run schedules

Published numbers are rows of results/published-schedules.csv. Qi et al. (Zero Bubble Pipeline Parallelism,
arXiv 2401.10241) print the seconds of actions and messages, and the idle share of a worker's time, (cost - m
(F + B + W)) / cost, where cost is the longest span of a worker; the replay should give the same. For
OLMo-core, torchtitan and Primus, bubbles and live micro-batches follow from the schedule alone.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import product
from statistics import median_high
from typing import TYPE_CHECKING, Any

import msgspec

from gpipe_bench.harness import PUBLISHED
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Metric, Record, Scalar, find, frame, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.harness.verdict import Result, Spread
from gpipe_bench.pipeline.plan.generate import generate
from gpipe_bench.pipeline.plan.links import FREE, Link
from gpipe_bench.pipeline.plan.named import NAMED, named, vee
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule, most_alive_of
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.plan.timeline import Timeline

from ..drawing import charts, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PART, EQUAL = "published", "equal costs"
PATH = PUBLISHED / "published-schedules.csv"
SECONDS = {
    "zero-bubble": 30.0, "zero-bubble-v": 4.0, "zero-bubble-speed": 10.0, "schedules-formulas": 1.0,
    "schedules-elsewhere": 1.0,
}  # fmt: skip
"""Estimated seconds of a case, by table of results/paper.csv."""
WHOLE = "theirs is the memory of a GPU, parameters and optimizer included; ours the activations' alone"
OPEN = "micro-batches and stages per worker, where they are not stated"


GENERATED, GENERATED_V = "generated", "generated, V"
NAMES = (*NAMED, GENERATED, GENERATED_V)
"""Names of schedules in display order; generated ones keep to the memory of 1F1B."""
WITHOUT_NAIVE = tuple(name for name in NAMES if name != "naive")
REMATS = ("never", "always")
TIMES = (1, 2, 4)  # M as a multiple of K
CHART_WORKERS = 4  # workers in the charts
GRID_S = {2: 0.5, 4: 1.0, 8: 4.0, 16: 15.0}  # estimated seconds of a case, by K
KEPT = {"never": "kept", "always": "recomputed"}
HOW = {"never": "without re-materialization", "always": "every micro-batch recomputed"}


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    tables = [table for table in SECONDS if not smoke or table.startswith("schedules-")]
    return [
        *(Case({"part": PART, "table": table}, SECONDS[table]) for table in tables),
        *(Case({"part": EQUAL, "num_workers": k}, GRID_S[k]) for k in GRID_S if not smoke or k <= 4),
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    key: dict[str, Any] = case.key
    return run_published(key["table"]) if key["part"] == PART else run_equal(key["num_workers"])


def laid_out(schedule: Schedule, times: Mapping[Kind, float] = SLOTS, link: Link = FREE) -> Timeline:
    """The replay of a schedule, with times for a worker's whole share of the model."""
    share = schedule.num_workers / schedule.num_stages
    return replay(schedule, {kind: share * each for kind, each in times.items()}, link)


def alive_by_worker(schedule: Schedule) -> list[int]:
    """The most graphs that each worker holds at a time."""
    return [most_alive_of(row) for row in schedule.actions]


# Published numbers


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published number and its schedule.

    Args:
        table, row, column: its place in paper.csv
        what: the kind of number (`value_of`)
        schedule: a name, or "generated", or "generated, V, whole" (two stages per worker in a V, no split)
        num_workers: K
        num_microbatches, stages_per_worker: if not stated, several candidates, separated by spaces
        most_alive: the generator's limit of graphs alive
        forward_ms, input_backward_ms, weight_backward_ms: of one micro-batch in all layers of a worker; by
            default equal
        message_ms: milliseconds of each message
        free_messages: number of messages that the authors' own simulation leaves out
        note: a remark
    """

    table: str
    row: str
    column: str
    what: str
    schedule: str
    num_workers: int
    num_microbatches: str
    stages_per_worker: str = ""
    most_alive: int | None = None
    forward_ms: float = 1
    input_backward_ms: float = 1
    weight_backward_ms: float = 1
    message_ms: float = 0
    free_messages: float = 0
    note: str = ""

    @property
    def settings(self) -> list[tuple[int, int | None]]:
        """All combinations of micro-batches and stages per worker."""
        turns: list[int | None] = [*map(int, self.stages_per_worker.split())]
        return list(product(map(int, self.num_microbatches.split()), turns or [None]))

    @property
    def times_ms(self) -> dict[Kind, float]:
        """Milliseconds of a worker's layers together, by kind of action."""
        inputs, weights = self.input_backward_ms, self.weight_backward_ms
        return {Kind.F: self.forward_ms, Kind.B: inputs + weights, Kind.I: inputs, Kind.W: weights}

    def laid_out(self, schedule: Schedule) -> Timeline:
        """The replay of a schedule with these times and messages."""
        return laid_out(schedule, self.times_ms, Link("their messages", self.message_ms))

    def made(self, num_microbatches: int, turns: int | None) -> Schedule:
        if not self.schedule.startswith("generated"):
            return named(self.schedule, self.num_workers, num_microbatches, stages_per_worker=turns)
        place = vee(self.num_workers) if "V" in self.schedule else tuple(range(self.num_workers))
        share = self.num_workers / len(place)
        times_ms = {kind: share * ms for kind, ms in self.times_ms.items()}
        split = "whole" not in self.schedule
        link = Link("their messages", self.message_ms)
        return generate(place, num_microbatches, times_ms, link, split=split, most_alive=self.most_alive)

    def span_ms(self, schedule: Schedule) -> float:
        """The longest time of a worker from its first to its last action. It is shorter than the makespan of
        ZB-H2 and ZB-V, which keep their skew from step to step.
        """
        timeline = self.laid_out(schedule)
        ends = (timeline.of_worker(worker) for worker in range(timeline.num_workers))
        return max(events[-1].end_s - events[0].start_s for events in ends)


@cache
def load_rows() -> tuple[Row, ...]:
    """The rows of the file. Raises ValueError for other columns than a row has."""
    with PATH.open(encoding="utf-8", newline="") as file:
        given = [{name: text for name, text in row.items() if text} for row in csv.DictReader(file)]
    return tuple(msgspec.convert(given, list[Row], strict=False))


def value_of(row: Row, num_microbatches: int, turns: int | None) -> float:
    """The number of a row under one setting. Raises ValueError for an unknown kind of number."""
    schedule = row.made(num_microbatches, turns)
    cost_ms = row.span_ms(schedule) - row.free_messages * row.message_ms
    alive = alive_by_worker(schedule)
    activations = max(alive) * schedule.num_workers / schedule.num_stages
    match row.what.split():
        case ["bubble", "rate"]:
            return 1 - num_microbatches * (row.times_ms[Kind.F] + row.times_ms[Kind.B]) / cost_ms
        case ["bubble"]:
            return 100 * row.laid_out(schedule).bubble
        case ["speed", "over", "1F1B"]:
            return row.span_ms(named("1f1b", row.num_workers, num_microbatches)) / cost_ms
        case ["activations"]:
            return activations
        case ["activations", "over", "1F1B"]:
            return activations / min(row.num_workers, num_microbatches)
        case ["graphs", "alive"]:
            return max(alive)
        case ["graphs", "alive", "on", "worker", worker]:
            return alive[int(worker)]
    raise ValueError(f"{PATH.name}: nothing is known of {row.what!r}; see `value_of`")


def run_published(table: str) -> Outcome:
    """Our number for each row of a table, with the numbers under all its settings."""
    units = {(each.row, each.column): each.unit for each in load_paper() if each.table == table}
    metrics, tried = [], []
    for row in (each for each in load_rows() if each.table == table):
        found = [value_of(row, *setting) for setting in row.settings]
        metrics.append(
            Metric(
                row.row, float(median_high(found)), units[row.row, row.column], "replayed",
                key={"column": row.column}, note=row.note or f"{row.schedule}, replayed",
            )
        )  # fmt: skip
        tried.append([float(each) for each in found])
    return Outcome(tuple(metrics), {"tried": tried})


def cells(records: Sequence[Record]) -> list[Result]:
    return [
        Result(
            table=str(record.case["table"]), row=metric.name, column=str(metric.key["column"]),
            source="others", question="as published", metric=metric, spread=Spread.of(OPEN, tried),
            record=record, note=metric.note,
            not_comparable=WHOLE if metric.name.endswith("over 1F1B, memory") else "",
        )
        for record in of_case(records, "done", part=PART)
        for metric, tried in zip(record.metrics, record.details["tried"], strict=True)
    ]  # fmt: skip


# All schedules at equal costs


def run_equal(num_workers: int) -> Outcome:
    """All schedules on so many workers, and charts for M = 2K."""
    metrics = []
    for times, name, remat in product(TIMES, NAMES, REMATS):
        schedule = schedule_of(name, num_workers, times * num_workers, remat)
        timeline = laid_out(schedule)
        alive = max(alive_by_worker(schedule)) / (schedule.num_stages / num_workers)
        key: dict[str, Scalar] = {"schedule": name, "M": times * num_workers, "remat": remat}
        metrics += [
            Metric("step in slots", float(timeline.makespan_s), "number", "modelled", key=key),
            Metric("bubble", float(timeline.bubble), "ratio", "modelled", key=key),
            Metric("graphs alive", alive, "number", "modelled", key=key),
        ]
    if num_workers != CHART_WORKERS:
        return Outcome(tuple(metrics))
    drawn = {
        remat: {
            name: laid_out(schedule_of(name, num_workers, 2 * num_workers, remat)).to_data()
            for name in WITHOUT_NAIVE
        }
        for remat in REMATS
    }
    return Outcome(tuple(metrics), {"timelines": drawn})


def schedule_of(name: str, num_workers: int, num_microbatches: int, remat: str) -> Schedule:
    """The schedule of a name in `NAMES`. The generator may keep as many graphs as 1F1B."""
    if name not in (GENERATED, GENERATED_V):
        return named(name, num_workers, num_microbatches, remat=remat)
    place = tuple(range(num_workers)) if name == GENERATED else vee(num_workers)
    slots = {kind: each * num_workers / len(place) for kind, each in SLOTS.items()}
    return generate(place, num_microbatches, slots, remat=remat, most_alive=len(place))


def tables(records: Sequence[Record]) -> str:
    return "\n\n".join(
        _table(record, remat) for record in of_case(records, "done", part=EQUAL) for remat in REMATS
    )


def _table(record: Record, remat: str) -> str:
    """A table of schedules by number of micro-batches."""
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
    title = f"K = {workers}, {HOW[remat]}\n  slots of a step, bubble, graphs alive (modelled)"
    return numbers_text(title, ["", *(f"M={each}" for each in numbers)], lines)


def figures(records: Sequence[Record]) -> list[Plot]:
    record = find(records, "done", part=EQUAL, num_workers=CHART_WORKERS)
    if record is None:
        return []
    caption = (
        f"All schedules on {CHART_WORKERS} workers with {2 * CHART_WORKERS} micro-batches, modelled at equal "
        "costs"
    )
    alt = (
        "Gantt charts of every schedule on one time axis, activations kept at the left and recomputed at the "
        "right; zero bubble in a V leaves the least white."
    )
    draw = partial(_charts, record)
    return [picture(name="schedules-charts", caption=caption, alt=alt, draw=draw)]


def _charts(record: Record) -> Figure:
    kept = record.details["timelines"]
    shown = {
        f"{name}, {KEPT[remat]}": Timeline.from_data(kept[remat][name])
        for name, remat in product(WITHOUT_NAIVE, REMATS)
    }
    return charts(shown, "slots", columns=2)


EXPERIMENT = Experiment(
    name="schedules",
    title="Schedules beyond GPipe's: published rates, and all side by side",
    source="beyond the paper; arXiv 2401.10241, 2405.15362",
    describe="Published bubble rates replayed; length, bubble and memory of all schedules over K and M.",
    profiles={
        "smoke": "published rates of one model, K up to 4",
        "short": "everything, K up to 16",
        "full": "the same",
    },
    cases=cases,
    run=run,
    cells=cells,
    tables=tables,
    figures=figures,
    paper_tables=tuple(SECONDS),
    docs="docs/schedules.md",
    untimed=True,
    revision=2,
)
