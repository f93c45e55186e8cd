"""Probes of the whole model in each process, as replicas have it, and of the sum of their gradients.

A stage of all layers takes longer than its layers add up to, and longer than stages of some of them say: the
more there is between two uses of a weight or a gradient, the less of it is still near. And replicas sum over
another way than messages take, with the cores that compute, parameter by parameter. So replicas of the whole
model take steps of three micro-batches, too:

    F0 B0 F1 B1 F2 B2=====       B0 makes gradients, B1 adds to them,
                     sums        B2 adds and has the sums inside and behind it: what is longer than B1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.experiments.measuring.device_timing import time_step
from gpipe_bench.experiments.planning.costs.bench import NUM_MICROBATCHES, Bench
from gpipe_bench.experiments.planning.costs.costs import kinds_of
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.schedules.known import named
from gpipe_bench.pipeline.plan.timeline import Event

WAYS = (("1f1b", "always"), ("1f1b", "never"))


class Whole(NamedTuple):
    """A probe: every process has all layers."""

    size: int
    schedule: Schedule
    pipeline: Pipeline
    step: Callable[[], object]


class WholeRaw(NamedTuple):
    """A step by the clock, and the reference before it."""

    before: int
    probe: Whole
    wall_s: float
    events: tuple[Event, ...]


class WholeRun(NamedTuple):
    """What one step has found, at the reference's median speed.

    `actions` are kinds and seconds, without the backward that has the sums; `sum_s` is what that one takes
    more than the one before, and the step beyond its actions.
    """

    size: int
    actions: tuple[tuple[str, float], ...]
    sum_s: float


def wholes(bench: Bench) -> list[Whole]:
    """The probes, where several processors are replicas of each other."""
    if bench.processes == 1 or bench.device.type != "cpu":
        return []
    mesh = init_device_mesh("cpu", (bench.processes, 1), mesh_dim_names=("dp", "pp"))
    cut = (range(len(bench.layers)),)
    found = []
    for size in bench.job.sizes:
        for name, remat in WAYS:
            schedule = named(name, 1, NUM_MICROBATCHES, remat=remat)
            pipeline, step = bench.pipeline(schedule, size, cut, over={"mesh": mesh})
            found.append(Whole(size, schedule, pipeline, step))
    return found


def take(bench: Bench, each: Whole) -> WholeRaw:
    """One step, behind a reference."""
    before = len(bench.references) - 1
    wall_s = time_step(each.step, bench.layers, device=bench.device)
    events = each.pipeline.timeline.events
    bench.update(range(len(bench.layers)))
    return WholeRaw(before, each, wall_s, tuple(events))


def run_of(bench: Bench, raw: WholeRaw) -> WholeRun:
    """At the reference's median speed."""
    speed, kinds = bench.speed(raw.before, bench.reference_s), kinds_of(raw.probe.schedule)
    *others, last = raw.events
    assert last.action.kind is Kind.B
    before = [event.duration_s for event in others if event.action.kind is Kind.B][-1]
    beyond_s = raw.wall_s - (last.end_s - raw.events[0].start_s)
    return WholeRun(
        raw.probe.size,
        tuple((kinds[event.action], event.duration_s / speed) for event in others),
        max(0.0, last.duration_s - before + beyond_s) / speed,
    )


def whole_s(found: Sequence[WholeRun], size: int) -> dict[str, float]:
    """Of one size, median seconds of each kind."""
    samples: dict[str, list[float]] = {}
    for run in found:
        for kind, seconds in run.actions if run.size == size else ():
            samples.setdefault(kind, []).append(seconds)
    return {kind: median(values) for kind, values in samples.items()}
