"""Numbers that others published about schedules, each recomputed by replay.

Each is a row of results/published-schedules.csv.

Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), print the seconds of a forward, of both halves
of a backward and of a message for each of their models on A100s, and the share of a worker's time that each
schedule then leaves idle: (cost - m (F + B + W)) / cost. Their cost is the longest span of a worker, from its
first action to its last, and not the makespan: a schedule may keep its skew from step to step. Only ZB-H2 and
ZB-V differ in that. Nothing is unknown, so the replay must come to the same rates; what was found by a search
(ZB-1p, ZB-2p, ZB-V) is the generator's under the same cap of graphs alive, and another search may beat it.

For OLMo-core, torchtitan and Primus, bubbles and numbers of live micro-batches follow from the schedule
alone. Their ratios of speeds also depend on numbers of micro-batches and stages per worker that are not
stated, and on kernels and messages, which equal costs leave out. So each is a range over the former,
and what differs beyond it is put down to the latter.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from itertools import product
from statistics import median_high

import msgspec

from gpipe_bench.harness import PUBLISHED
from gpipe_bench.harness.experiment import Case, Outcome
from gpipe_bench.harness.paper import load_paper
from gpipe_bench.harness.record import Metric, Record, of_case
from gpipe_bench.harness.verdict import Part, Result, Spread
from gpipe_bench.pipeline.plan.generate import generate
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.named import named, vee
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule, most_alive_of
from gpipe_bench.pipeline.plan.simulate import replay
from gpipe_bench.pipeline.plan.timeline import Timeline

PART = "published"
PATH = PUBLISHED / "published-schedules.csv"
SECONDS = {
    "zero-bubble": 30.0, "zero-bubble-v": 4.0, "zero-bubble-speed": 10.0, "schedules-formulas": 1.0,
    "schedules-elsewhere": 1.0,
}  # fmt: skip
"""Estimated seconds of a case, by table of results/paper.csv."""
WHOLE = "theirs is the memory of a GPU, parameters and optimizer included; ours the activations' alone"
OPEN = "micro-batches and stages per worker, where they are not stated"


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published number and the schedule that it is of.

    Args:
        table, row, column: its place in paper.csv
        what: the number, as `value_of` has it
        schedule: a name, or "generated", or "generated, V, whole" (two stages per worker in a V, no split)
        num_workers: K
        num_microbatches, stages_per_worker: several, separated by spaces, where it is not stated
        most_alive: cap of the generator
        forward_ms, input_backward_ms, weight_backward_ms: of one micro-batch in all layers of a worker; equal
            where nothing is given
        message_ms: of each message
        free_messages: which the authors' own simulation leaves out
        note: whatever else is to be known
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
        """Every number of micro-batches with every one of stages per worker."""
        turns: list[int | None] = [*map(int, self.stages_per_worker.split())]
        return list(product(map(int, self.num_microbatches.split()), turns or [None]))

    @property
    def times_ms(self) -> dict[Kind, float]:
        """Milliseconds of all layers of a worker, by kind of action."""
        inputs, weights = self.input_backward_ms, self.weight_backward_ms
        return {Kind.F: self.forward_ms, Kind.B: inputs + weights, Kind.I: inputs, Kind.W: weights}

    @property
    def link(self) -> Link:
        """The link that takes as long."""
        return Link("their messages", self.message_ms)

    def made(self, num_microbatches: int, turns: int | None) -> Schedule:
        """The schedule itself."""
        if not self.schedule.startswith("generated"):
            return named(self.schedule, self.num_workers, num_microbatches, stages_per_worker=turns)
        place = vee(self.num_workers) if "V" in self.schedule else tuple(range(self.num_workers))
        share = self.num_workers / len(place)
        times_ms = {kind: share * ms for kind, ms in self.times_ms.items()}
        split = "whole" not in self.schedule
        return generate(place, num_microbatches, times_ms, self.link, split=split, most_alive=self.most_alive)

    def cost_ms(self, schedule: Schedule) -> float:
        """The longest span of a worker."""
        free_ms = self.free_messages * self.message_ms
        return span(laid_out(schedule, self.times_ms, self.link)) - free_ms


@cache
def load_rows() -> tuple[Row, ...]:
    """The rows of the file. Raises ValueError for other columns than a row has."""
    with PATH.open(encoding="utf-8", newline="") as file:
        given = [{name: text for name, text in row.items() if text} for row in csv.DictReader(file)]
    return tuple(msgspec.convert(given, list[Row], strict=False))


def laid_out(schedule: Schedule, times_ms: dict[Kind, float], link: Link) -> Timeline:
    """The schedule replayed with times of a worker's whole share of the model."""
    share = schedule.num_workers / schedule.num_stages
    return replay(schedule, {kind: share * ms for kind, ms in times_ms.items()}, link)


def span(timeline: Timeline) -> float:
    """The longest time of a worker from its first action to its last."""
    ends = (timeline.of_worker(worker) for worker in range(timeline.num_workers))
    return max(events[-1].end_s - events[0].start_s for events in ends)


def alive_by_worker(schedule: Schedule) -> list[int]:
    """The most graphs that each worker holds at a time."""
    return [most_alive_of(row) for row in schedule.actions]


def value_of(row: Row, num_microbatches: int, turns: int | None) -> float:
    """The number of a row under one setting. Raises ValueError for one that has no rule."""
    schedule = row.made(num_microbatches, turns)
    alive = alive_by_worker(schedule)
    activations = max(alive) * schedule.num_workers / schedule.num_stages
    match row.what.split():
        case ["bubble", "rate"]:
            times_ms = row.times_ms
            whole_ms = num_microbatches * (times_ms[Kind.F] + times_ms[Kind.B])
            return 1 - whole_ms / row.cost_ms(schedule)
        case ["bubble"]:
            return 100 * laid_out(schedule, row.times_ms, row.link).bubble
        case ["speed", "over", "1F1B"]:
            one = laid_out(named("1f1b", row.num_workers, num_microbatches), row.times_ms, row.link)
            return span(one) / row.cost_ms(schedule)
        case ["activations"]:
            return activations
        case ["activations", "over", "1F1B"]:
            return activations / min(row.num_workers, num_microbatches)
        case ["graphs", "alive"]:
            return max(alive)
        case ["graphs", "alive", "on", "worker", worker]:
            return alive[int(worker)]
    raise ValueError(f"{PATH.name}: nothing is known of {row.what!r}; see `value_of`")


def cases(smoke: bool) -> list[Case]:
    tables = [table for table in SECONDS if not smoke or table.startswith("schedules-")]
    return [Case({"part": PART, "table": table}, SECONDS[table]) for table in tables]


def run(table: str) -> Outcome:
    """Our number for each row of a table, and all that it may be."""
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
    """An entry for every number on record."""
    return [
        Result(
            table=str(record.case["table"]), row=metric.name, column=str(metric.key["column"]),
            source="others", question="as published", metric=metric, spread=_spread(tried),
            record=record, note=metric.note,
            not_comparable=WHOLE if metric.name.endswith("over 1F1B, memory") else "",
        )
        for record in of_case(records, "done", part=PART)
        for metric, tried in zip(record.metrics, record.details["tried"], strict=True)
    ]  # fmt: skip


def _spread(tried: Sequence[float]) -> Spread | None:
    if len(tried) == 1:
        return None
    part = Part(what=OPEN, low=min(tried), high=max(tried))
    return Spread(low=part.low, high=part.high, parts=(part,))
