"""All schedules over K and M at equal costs: length, bubble and graphs alive, with and without recomputation.

A worker's whole share of the model takes one slot forward and two backward, whatever the number of its
stages, and messages take no time. So what is compared are the schedules and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpipe_bench.harness.record import Quantity, Scalar
from gpipe_bench.pipeline.plan.replay import SLOTS, replay
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.schedules.generator import generate, most_alive_of
from gpipe_bench.pipeline.plan.schedules.known import NAMED, named
from gpipe_bench.pipeline.plan.schedules.placement import vee
from gpipe_bench.pipeline.plan.timeline import Timeline

GRID = "equal costs"
CHART_WORKERS = 4  # of the charts that are kept
REMATS = ("never", "always")
TIMES = (1, 2, 4)  # M as a multiple of K
GENERATED = "generated"
GENERATED_V = "generated, V"
NAMES = (*NAMED, GENERATED, GENERATED_V)
"""In the order in which they are shown; the generator's within the memory of 1F1B."""
WITHOUT_NAIVE = tuple(name for name in NAMES if name != "naive")


@dataclass(frozen=True)
class Laid:
    """A schedule in slots: what the tables say of it."""

    makespan: float
    bubble: float
    alive: float  # graphs on the fullest worker, in whole shares of a worker


def schedule_of(name: str, num_workers: int, num_microbatches: int, remat: str) -> Schedule:
    """By a name of `NAMES`. The generator is capped to as many graphs as 1F1B has."""
    if name == GENERATED:
        place, cap = tuple(range(num_workers)), num_workers
    elif name == GENERATED_V:
        place, cap = vee(num_workers), 2 * num_workers
    else:
        return named(name, num_workers, num_microbatches, remat=remat)
    times = {kind: slots * num_workers / len(place) for kind, slots in SLOTS.items()}
    return generate(place, num_microbatches, times, remat=remat, most_alive=cap)


def in_slots(schedule: Schedule) -> Timeline:
    """Replayed in slots of a worker's whole share."""
    share = schedule.num_workers / schedule.num_stages
    return replay(schedule, {kind: slots * share for kind, slots in SLOTS.items()})


def alive_by_worker(schedule: Schedule) -> list[int]:
    """The most graphs that each worker holds at a time."""
    return [most_alive_of(row) for row in schedule.actions]


def laid_out(name: str, num_workers: int, num_microbatches: int, remat: str) -> Laid:
    """The schedule of that name in slots."""
    schedule = schedule_of(name, num_workers, num_microbatches, remat)
    timeline = in_slots(schedule)
    per_worker = schedule.num_stages / num_workers
    return Laid(
        float(timeline.makespan_s), float(timeline.bubble), max(alive_by_worker(schedule)) / per_worker
    )


def quantities(num_workers: int) -> Iterator[Quantity]:
    """Of all schedules on so many workers."""
    for times in TIMES:
        number = times * num_workers
        for name in NAMES:
            for remat in REMATS:
                found = laid_out(name, num_workers, number, remat)
                key: dict[str, Scalar] = {"schedule": name, "M": number, "remat": remat}
                for what, value, unit in (
                    ("step in slots", found.makespan, "number"),
                    ("bubble", found.bubble, "ratio"),
                    ("graphs alive", found.alive, "number"),
                ):
                    yield Quantity(name=what, key=key, value=value, unit=unit, provenance="replayed")


def charts(num_workers: int) -> dict[str, dict[str, Any]]:
    """Timelines of all schedules for M = 2K, by re-materialization and name."""
    return {
        remat: {
            name: in_slots(schedule_of(name, num_workers, 2 * num_workers, remat)).to_data()
            for name in WITHOUT_NAIVE
        }
        for remat in REMATS
    }
