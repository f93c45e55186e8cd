"""Probes of the whole model in each process, as replicas have it, and of what they exchange.

A stage of all layers takes longer than its layers add up to, and longer than stages of some of them say: the
more there is between two uses of a weight or a gradient, the less of it is still near. And replicas sum over
another way than messages take, with the cores that compute, parameter by parameter. So replicas of the whole
model take steps of three micro-batches, too:

    F0 B0 F1 B1 F2 B2=====       B0 makes gradients, B1 adds to them,
                     sums        B2 adds and has the sums inside and behind it: what is longer than B1

Those that hold parts of the parameters (fsdp) take the same steps at both levels, on layers of their own.
torch's hooks around every layer make each pass longer, gathers and scatters of single layers stand in it
(ZeRO-3) or in the first and the last one (ZeRO-2), and the optimizer's step of parts has a cost for each
operation that says nothing of their size. All of that is timed as it is:

    F0 B0 F1 B1 F2 B2=====       F1, B1: a pass with its hooks, and of ZeRO-3 with its gathers and scatters
    ==                sums       once in a step: F0 over F1, B2 over B1, and what lies around all of them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.schedules.known import named
from gpipe_bench.pipeline.plan.timeline import Event
from gpipe_bench.planner.bench import NUM_MICROBATCHES, Bench, Trained
from gpipe_bench.planner.costs import kinds_of
from gpipe_bench.planner.timing import time_step

WAYS = (("1f1b", "always"), ("1f1b", "never"))
LEVELS = (2, 3)
"""Of parts, as `Candidate.fsdp_level`."""


class Whole(NamedTuple):
    """A probe: every process has all layers, or parts of all of them (`level` 2 or 3)."""

    size: int
    schedule: Schedule
    pipeline: Pipeline
    step: Callable[[], object]
    trained: Trained
    level: int = 0


class WholeRaw(NamedTuple):
    """A step by the clock, and the reference before it."""

    before: int
    probe: Whole
    wall_s: float
    events: tuple[Event, ...]
    update_s: dict[int, float]


class WholeRun(NamedTuple):
    """What one step has found, at the reference's median speed.

    `actions` are kinds and seconds, without the backward that has the sums; `sum_s` is what that one takes
    more than the one before, and the step beyond its actions. Of parts the first forward is left out as well,
    and what it takes more than the others is in `sum_s`; `update_s` is the optimizer's step of each layer.
    """

    size: int
    actions: tuple[tuple[str, float], ...]
    sum_s: float
    level: int = 0
    update_s: tuple[tuple[int, float], ...] = ()


def wholes(bench: Bench, sizes: Sequence[int]) -> list[Whole]:
    """The probes, where several processors are replicas of each other."""
    if bench.processes == 1 or bench.device.type != "cpu":
        return []
    cut = (range(len(bench.layers)),)
    mesh = init_device_mesh("cpu", (bench.processes, 1), mesh_dim_names=("dp", "pp"))
    found = []
    for size in sizes:
        for name, remat in WAYS:
            schedule = named(name, 1, NUM_MICROBATCHES, remat=remat)
            pipeline, step = bench.pipeline(schedule, size, cut, over={"mesh": mesh})
            found.append(Whole(size, schedule, pipeline, step, bench.trained))
    schedule = named("1f1b", 1, NUM_MICROBATCHES)
    for level in LEVELS if bench.job.sharded else ():
        over = sharded_over(bench.processes, level)
        layers = bench.fresh_layers()  # torch divides parameters in place, and for good
        pipeline, _ = bench.pipeline(schedule, bench.size, cut, over=over, layers=layers)
        trained = Trained(layers, bench.job.optimizer)
        for size in sizes:
            step = bench.step(pipeline, size, NUM_MICROBATCHES)
            found.append(Whole(size, schedule, pipeline, step, trained, level))
    return found


def sharded_over(processes: int, level: int, device_type: str = "cpu") -> dict[str, Any]:
    """What a `Pipeline` is given where each process holds a part of everything; all must call."""
    mesh = init_device_mesh(device_type, (processes, 1), mesh_dim_names=("fsdp", "pp"))
    return {"mesh": mesh, "zero": level}


def take(bench: Bench, each: Whole) -> WholeRaw:
    """One step, behind a reference."""
    before = len(bench.references) - 1
    wall_s = time_step(each.step, each.trained.layers, device=bench.device)
    events = each.pipeline.timeline.events
    update_s = each.trained.update(range(len(bench.layers)), bench.device)
    return WholeRaw(before, each, wall_s, tuple(events), update_s)


def run_of(bench: Bench, raw: WholeRaw) -> WholeRun:
    """At the reference's median speed."""
    speed, kinds = bench.speed(raw.before, bench.reference_s), kinds_of(raw.probe.schedule)
    *others, last = raw.events
    assert last.action.kind is Kind.B
    before = [event.duration_s for event in others if event.action.kind is Kind.B][-1]
    once_s = last.duration_s - before + raw.wall_s - (last.end_s - raw.events[0].start_s)
    if raw.probe.level:
        first, *others = others
        once_s += first.duration_s - median(e.duration_s for e in others if e.action.kind is Kind.F)
    return WholeRun(
        raw.probe.size,
        tuple((kinds[event.action], event.duration_s / speed) for event in others),
        max(0.0, once_s) / speed,
        raw.probe.level,
        tuple((layer, seconds / speed) for layer, seconds in raw.update_s.items()),
    )


def whole_s(found: Sequence[WholeRun], size: int, level: int = 0) -> dict[str, float]:
    """Of one size, median seconds of each kind."""
    samples: dict[str, list[float]] = {}
    for run in found:
        for kind, seconds in run.actions if (run.size, run.level) == (size, level) else ():
            samples.setdefault(kind, []).append(seconds)
    return {kind: median(values) for kind, values in samples.items()}
