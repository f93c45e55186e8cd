"""All schedules over K and M: at equal costs in slots, and at the costs that their stages were timed to have.

At equal costs a worker's whole share of the model takes one slot forward and two backward, whatever the
number of its stages, and messages take no time: what is compared are the schedules and nothing else.

At measured costs the mini-batch is Table 2's, so its numbers can be read beside those here: with M
micro-batches each has a share of the examples. For each number of stages there are two pipelines, one with
whole backwards and one that splits them, and all of them take turns on one core, so all know one machine.
All stages run in one process and each with everything that belongs to its actions, the price of a split
included; what workers cost each other is not in it. Steps are replayed over a free link; the memory of the
fullest worker is modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.timed.workloads import TABLE2
from gpipe_bench.harness.experiment import Case, Outcome
from gpipe_bench.harness.record import Quantity, Scalar
from gpipe_bench.pipeline.plan.generate import generate, most_alive_of
from gpipe_bench.pipeline.plan.links import Offload
from gpipe_bench.pipeline.plan.named import NAMED, named
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.pipeline.plan.vee import vee

if TYPE_CHECKING:
    from gpipe_bench.pipeline.memory.profile import ModelProfile

EQUAL, MEASURED = "equal costs", "measured costs"
GENERATED, GENERATED_V = "generated", "generated, V"
NAMES = (*NAMED, GENERATED, GENERATED_V)
"""In the order in which they are shown; the generator's within the memory of 1F1B."""
WITHOUT_NAIVE = tuple(name for name in NAMES if name != "naive")
REMATS = ("never", "always")
TIMES = (1, 2, 4)  # M as a multiple of K, at equal costs
CHART_WORKERS = 4  # of the charts that are kept
GRID_S = {2: 0.5, 4: 1.0, 8: 4.0, 16: 15.0}
"""By K: how long a case at equal costs takes."""
WORKERS = {"smoke": (2,), "short": (2, 4, 8), "full": (2, 4, 8)}
SECONDS = {
    "smoke": {4: 5.0},
    "short": {1: 60.0, 4: 60.0, 32: 45.0},
    "full": {1: 900.0, 4: 900.0, 32: 900.0},
}
"""By the number of micro-batches, those of Table 2: how long a case at measured costs takes."""
ROUNDS = {"smoke": 1, "short": 1, "full": 4}
MOST_MICROBATCHES = 8
SEED = 1811
MIB = 2**20
OPTIMIZER = "sgd"
"""Without state, so that what differs between schedules is not drowned in what does not."""


def cases(profile: str) -> list[Case]:
    models = ("transformer",) if profile == "smoke" else tuple(TABLE2)
    equal = [
        Case({"part": EQUAL, "num_workers": workers}, seconds)
        for workers, seconds in GRID_S.items()
        if profile != "smoke" or workers <= 4
    ]
    return equal + [
        Case({"part": MEASURED, "model": model, "num_microbatches": number}, seconds)
        for model in models
        for number, seconds in SECONDS[profile].items()
    ]


def run_equal(num_workers: int) -> Outcome:
    """All schedules on so many workers, and the charts of M = 2K where they are kept."""
    quantities = []
    for number in (times * num_workers for times in TIMES):
        for name in NAMES:
            for remat in REMATS:
                schedule = schedule_of(name, num_workers, number, remat)
                timeline = in_slots(schedule)
                alive = max(alive_by_worker(schedule)) / (schedule.num_stages / num_workers)
                key: dict[str, Scalar] = {"schedule": name, "M": number, "remat": remat}
                quantities += [
                    Quantity(what, value, unit, "replayed", key=key)
                    for what, value, unit in (
                        ("step in slots", float(timeline.makespan_s), "number"),
                        ("bubble", float(timeline.bubble), "ratio"),
                        ("graphs alive", alive, "number"),
                    )
                ]
    charts = {
        remat: {
            name: in_slots(schedule_of(name, num_workers, 2 * num_workers, remat)).to_data()
            for name in WITHOUT_NAIVE
        }
        for remat in REMATS
    }
    return Outcome(tuple(quantities), {"timelines": charts} if num_workers == CHART_WORKERS else {})


def schedule_of(
    name: str,
    num_workers: int,
    num_microbatches: int,
    remat: str,
    seconds: Mapping[tuple[int, Kind], float] | None = None,
) -> Schedule:
    """By a name of `NAMES`. The generator has as many graphs as 1F1B; for `seconds` of stages it is
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


def in_slots(schedule: Schedule, copies: Offload | None = None) -> Timeline:
    """Replayed in slots of a worker's whole share, with copies to the host if there are any."""
    share = schedule.num_workers / schedule.num_stages
    return replay(schedule, {kind: slots * share for kind, slots in SLOTS.items()}, offload=copies)


def span(timeline: Timeline) -> float:
    """The longest time of a worker from its first action to its last."""
    ends = (timeline.of_worker(worker) for worker in range(timeline.num_workers))
    return max(events[-1].end_s - events[0].start_s for events in ends)


def alive_by_worker(schedule: Schedule) -> list[int]:
    """The most graphs that each worker holds at a time."""
    return [most_alive_of(row) for row in schedule.actions]


@dataclass(frozen=True)
class StageCosts:
    """Seconds by (stage, kind) for one micro-batch, and how the layers are cut."""

    partition: Partition
    seconds: Mapping[tuple[int, Kind], float]

    def price_of_split(self) -> float:
        """(I + W) / B of the whole model."""
        total = dict.fromkeys(Kind, 0.0)
        for (_, kind), seconds in self.seconds.items():
            total[kind] += seconds
        return (total[Kind.I] + total[Kind.W]) / total[Kind.B]

    def to_data(self) -> dict[str, Any]:
        """As a record keeps it, in milliseconds."""
        return {
            "partition": [[span.start, span.stop] for span in self.partition],
            "ms": {f"{stage}{kind.value}": 1e3 * s for (stage, kind), s in sorted(self.seconds.items())},
        }


def run_measured(name: str, profile: str, num_microbatches: int) -> Outcome:
    """Times the stages of a model of Table 2 and lays all schedules out."""
    workload = TABLE2[name][profile]
    size = workload.batch_size // num_microbatches
    numbers = sorted({turns * workers for workers in WORKERS[profile] for turns in (1, 2)})
    found = measure(name, profile, size, numbers)
    quantities = [
        Quantity("(I + W) / B", costs.price_of_split(), "ratio", "measured", key={"stages": number})
        for number, costs in found.items()
    ]
    profiles = profiles_of(name, profile, size)
    for num_workers in WORKERS[profile]:
        quantities += at_costs(found, profiles, num_workers, num_microbatches)
    return Outcome(
        tuple(quantities),
        {
            "title": workload.title,
            "scale": workload.scale,
            "batch_size": workload.batch_size,
            "stages": [costs.to_data() for costs in found.values()],
        },
    )


def at_costs(
    found: Mapping[int, StageCosts], profiles: ModelProfile, num_workers: int, num_microbatches: int
) -> Iterator[Quantity]:
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
            yield Quantity("step", step_ms, "ms", "replayed", key=key)
            yield Quantity("bubble", timeline.bubble, "ratio", "replayed", key=key)
            yield Quantity(
                "peak memory", peak / MIB, "MiB", "modelled", key=key, note="of the fullest worker; plain SGD"
            )


def measure(name: str, profile: str, size: int, numbers_of_stages: Sequence[int]) -> dict[int, StageCosts]:
    """What the stages of a model of Table 2 take, each kind of action by itself (F, R, B, and I and W instead
    of B), with micro-batches of `size` examples, by number of stages; in this process, which uses one core.
    Numbers beyond that of the layers are left out.
    """
    import torch

    from gpipe_bench.experiments.timed.results import samples_of
    from gpipe_bench.experiments.timed.steps import layer_seconds
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
    arms = {
        (count, schedule): Pipeline(
            layers,
            partition=cut,
            num_microbatches=number,
            schedule=schedule,
            remat="always",
        )
        for count, cut in cuts.items()
        for schedule in ("gpipe", "zb-h1")  # whole backwards, and split ones
    }
    steps = {arm: partial(pipeline.step, batch, target, loss) for arm, pipeline in arms.items()}
    for step in steps.values():
        time_step(step, layers)
    settle()
    found: dict[int, list[Timeline]] = {count: [] for count in cuts}
    for arm in turns(list(arms), ROUNDS[profile], SEED):
        time_step(steps[arm], layers)
        found[arm[0]].append(arms[arm].timeline)
    return {
        count: StageCosts(
            cuts[count], {key: median(samples) for key, samples in samples_of(timelines).items()}
        )
        for count, timelines in found.items()
    }


def profiles_of(name: str, profile: str, size: int) -> ModelProfile:
    """What the memory model needs to know of the layers and of the loss, for a micro-batch of `size`."""
    from gpipe_bench.pipeline.memory.profile import Profiler

    return TABLE2[name][profile].profile(size, Profiler(split_backward=True))
