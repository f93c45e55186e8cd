"""What processes do so that a model's costs are known.

All processes work at the same time, since layers are slower beside a busy neighbour. Round by round they take
steps of three micro-batches of every size, in two ways that together have every kind of action: GPipe with
re-materialization, and zero bubble.

    fine      in each process, every layer a stage     F, R, B; G, I, W of each layer
    coarse    over all processes, one stage in each    what an action costs beyond its layers, what lies
                                                       between actions, messages, the ends of a step
    whole     in each process, all layers one stage    what replicas take, and the sum of their gradients

Nothing is fitted to steps: seconds of a step are used for nothing but its ends. The clock of a core is not to
be trusted: on a shared machine it may run at half its speed a minute later. So before and after each of these
steps the same reference step is taken, and what lies between two of them counts in units of it, at the
reference's median speed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from statistics import median
from time import perf_counter
from typing import NamedTuple

from torch import distributed as dist

from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.schedules.known import named
from gpipe_bench.pipeline.plan.timeline import Event
from gpipe_bench.planner.bench import ALONE, NUM_MICROBATCHES, Bench
from gpipe_bench.planner.boundaries import boundaries, messages, receives
from gpipe_bench.planner.costs import kinds_of
from gpipe_bench.planner.spending import About, affordable
from gpipe_bench.planner.timing import settle, time_step
from gpipe_bench.planner.wholes import Whole, WholeRaw, WholeRun, run_of, take, wholes

WAYS = (("gpipe", "always"), ("zb-h1", "never"))
"""Schedule and re-materialization of the probes."""


class Taken(NamedTuple):
    """One action of a probe. `seconds` are at the reference's median speed."""

    stage: int
    kind: str
    microbatch: int
    seconds: float


class ProbeRun(NamedTuple):
    """One step of a probe; `run` is common to all processes. All seconds are at the reference's median speed.

    `gaps_s` lie between two actions of which the second waited for nobody; `messages` are (bytes, seconds)
    from the end of an action to the start of one that waited for it; `beyond_s` is the step beyond its
    actions.
    """

    run: int
    size: int
    fine: bool
    actions: tuple[Taken, ...]
    gaps_s: tuple[float, ...] = ()
    messages: tuple[tuple[float, float], ...] = ()
    beyond_s: float = 0.0


class Probed(NamedTuple):
    """What one process found."""

    runs: tuple[ProbeRun, ...]
    update_s: tuple[tuple[float, ...], ...]  # samples of each layer
    parameter_bytes: tuple[tuple[int, ...], ...]
    activation_bytes: dict[int, tuple[float, ...]]
    gradient_bytes: dict[int, tuple[float, ...]]
    reference_s: float  # median over the probes
    wholes: tuple[WholeRun, ...] = ()


class _Probe(NamedTuple):
    size: int
    fine: bool
    schedule: Schedule
    pipeline: Pipeline
    step: Callable[[], object]
    boundary_bytes: tuple[float, ...]


class _Raw(NamedTuple):
    """A step by the clock, and the reference before it."""

    before: int
    probe: _Probe
    wall_s: float
    mine: tuple[Event, ...]
    whole: tuple[Event, ...]  # of all processes, of a coarse one
    update_s: dict[int, float]


def probe(bench: Bench) -> Probed:
    """Takes all probes of a job. All processes must call."""
    job, layers, start_s = bench.job, bench.layers, perf_counter()
    limited = job.budget.seconds < inf

    def tell(what: str) -> None:
        if bench.rank == 0:
            job.budget.tell(what, perf_counter() - start_s)

    tell("warming up")
    chosen = list(job.sizes)
    if limited:
        reference_s = min(bench.references[bench.reference()] for _ in range(4))  # the first ones warm up
        example_s = reference_s / (2 * bench.size)
        mine = affordable(chosen, example_s, reference_s, NUM_MICROBATCHES, job.budget.seconds)
        chosen = bench.everyone(mine)[0]  # the first process decides for all
    warm = 1 if limited else 2
    sizes = {size: boundaries(bench, size) for size in chosen}
    fine_cut = partition([1.0] * len(layers), len(layers))
    probes = [
        _probe(bench, size, way, fine_cut, sizes[size][0], fine=True) for size in chosen for way in WAYS
    ]
    opened: list[_Probe | Whole] = list(probes)
    cost = [0.0] * len(layers)
    for number in range(warm * len(probes)):  # the first ones warm up
        each = probes[number % len(probes)]
        time_step(each.step, layers, device=bench.device)
        bench.trained.update(range(len(layers)), bench.device)
        for event in each.pipeline.timeline.events if number >= (warm - 1) * len(probes) else ():
            cost[event.action.stage] += event.duration_s
    cost = [sum(column) for column in zip(*bench.everyone(cost), strict=True)]
    stages = max(ALONE, bench.processes)
    if len(layers) > stages:
        cut = partition(cost, stages)
        coarse = [
            _probe(bench, size, way, cut, sizes[size][0], fine=False) for size in chosen for way in WAYS
        ]
        for each in coarse * warm:
            time_step(each.step, layers, device=bench.device)
        probes += coarse
        opened += coarse
    whole = wholes(bench, chosen)
    opened += whole
    for replica in whole * warm:
        time_step(replica.step, replica.trained.layers, device=bench.device)
        replica.trained.update(range(len(layers)), bench.device)  # the first one makes its state
    settle()
    first = bench.reference()
    raw: list[_Raw] = []
    raw_wholes: list[WholeRaw] = []
    everything: list[_Probe | Whole] = [*probes, *whole]
    turns = everything
    generator = random.Random(job.seed)

    def found() -> Probed:
        bench.reference_s = median(bench.references[first:])
        return Probed(
            tuple(_run(bench, number, each) for number, each in enumerate(raw)),
            tuple(
                tuple(
                    each.update_s[layer] / bench.speed(each.before, bench.reference_s)
                    for each in raw
                    if layer in each.update_s
                )
                for layer in range(len(layers))
            ),
            tuple(tuple(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in layers),
            {size: sizes[size][0] for size in chosen},
            {size: sizes[size][1] for size in chosen},
            bench.reference_s,
            tuple(run_of(bench, each) for each in raw_wholes),
        )

    for number in range(job.rounds):
        before_s = perf_counter()
        tell(f"round {number + 1}, {len(turns)} of {len(everything)} probes")
        order = generator.sample(turns, len(turns))
        if limited and number == 0:  # the smallest first: a size that there is no time for is left out
            order.sort(key=lambda each: each.size)
        for place, turn in enumerate(order):
            if limited and number == 0 and place and turn.size != order[place - 1].size:
                now_s = perf_counter()
                next_s = (now_s - before_s) / sum(each.size for each in order[:place])
                next_s *= sum(each.size for each in order if each.size == turn.size)
                if not bench.everyone(job.budget.lasts(now_s - start_s, next_s))[0]:
                    chosen = [size for size in chosen if size < turn.size]
                    everything = turns = [each for each in everything if each.size in chosen]
                    break
            if isinstance(turn, _Probe):
                raw.append(_take(bench, turn))
            else:
                raw_wholes.append(take(bench, turn))
            bench.reference()
        if limited and number + 1 < job.rounds:
            turns = _again(bench, found(), everything, number, start_s, before_s)
            if not turns:
                break
    tell("done")
    for each_opened in opened:
        each_opened.pipeline.close()
    return found()


def _again(
    bench: Bench,
    found: Probed,
    everything: Sequence[_Probe | Whole],
    number: int,
    start_s: float,
    before_s: float,
) -> list[_Probe | Whole]:
    """What is timed in the next round: what the best ways depend on, if there is time for it. The first
    process decides for all.
    """
    job, everyone = bench.job, bench.everyone(found)
    places: list[int] = []
    if bench.rank == 0:
        now_s = perf_counter()
        matters = job.matters(everyone) if job.matters is not None else None
        places = [
            place for place, each in enumerate(everything) if matters is None or _about(each) in matters
        ]
        taken = len(everything) if number == 0 else len(places)
        round_s = (now_s - before_s) * len(places) / max(1, taken)
        if not job.budget.lasts(perf_counter() - start_s, round_s):
            places = []
    return [everything[place] for place in bench.everyone(places)[0]]


def _about(each: _Probe | Whole) -> About:
    return About(each.size, "layers" if isinstance(each, _Probe) else each.level)


def _probe(
    bench: Bench, size: int, way: tuple[str, str], cut: Partition, num_bytes: Sequence[float], *, fine: bool
) -> _Probe:
    name, remat = way
    schedule = named(name, len(cut), NUM_MICROBATCHES, remat=remat)
    together = not fine and bench.processes > 1
    over = {"group": dist.group.WORLD} if together else None
    pipeline, step = bench.pipeline(schedule, size, cut, over=over)
    return _Probe(size, fine, schedule, pipeline, step, tuple(num_bytes[span.stop - 1] for span in cut[:-1]))


def _take(bench: Bench, each: _Probe) -> _Raw:
    before = len(bench.references) - 1
    wall_s = time_step(each.step, bench.layers, device=bench.device)
    mine = each.pipeline.timeline
    shared = not each.fine and bench.processes > 1
    held = {layer for event in mine.events for layer in each.pipeline.partition[event.action.stage]}
    return _Raw(
        before,
        each,
        wall_s,
        mine.events,
        each.pipeline.gather_timeline().events if shared else (),
        bench.trained.update(sorted(held), bench.device),
    )


def _run(bench: Bench, number: int, raw: _Raw) -> ProbeRun:
    """At the reference's median speed."""
    speed, each = bench.speed(raw.before, bench.reference_s), raw.probe
    kinds = kinds_of(each.schedule)
    actions = tuple(
        Taken(e.action.stage, kinds[e.action], e.action.microbatch, e.duration_s / speed) for e in raw.mine
    )
    if not raw.whole:
        return ProbeRun(number, each.size, each.fine, actions)
    last = each.schedule.num_stages - 1
    return ProbeRun(
        number,
        each.size,
        each.fine,
        actions,
        tuple(
            (after.start_s - event.end_s) / speed
            for event, after in pairwise(raw.mine)
            if not receives(after.action, last)
        ),
        tuple(
            (num_bytes, seconds / speed)
            for num_bytes, seconds in messages(each.schedule, raw.whole, each.boundary_bytes)
        ),
        max(0.0, raw.wall_s - (raw.mine[-1].end_s - raw.mine[0].start_s)) / speed,
    )
