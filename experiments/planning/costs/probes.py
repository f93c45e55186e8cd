"""What processes do so that a model's costs are known.

All processes work at the same time, since layers are slower beside a busy neighbour. Round by round they take
steps of three micro-batches of every size, in two ways that together have every kind of action: GPipe with
re-materialization, and zero bubble.

    fine      in each process, every layer a stage     F, R, B; G, I, W of each layer
    coarse    over all processes, one stage in each    what an action costs beyond its layers, what lies
                                                       between actions, messages, the ends of a step

Nothing is fitted to steps: seconds of a step are used for nothing but its ends. The clock of a core is not to
be trusted: on a shared machine it may run at half its speed a minute later. So before and after each of these
steps the same reference step is taken, and what lies between two of them counts in units of it, at the
reference's median speed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import inf
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn

from gpipe_bench.experiments.measuring.device_timing import settle, time_step
from gpipe_bench.experiments.planning.costs.costs import kinds_of
from gpipe_bench.experiments.planning.costs.sums import sums_s
from gpipe_bench.experiments.planning.subjects import Subject
from gpipe_bench.pipeline import Pipeline, devices
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule, transfers
from gpipe_bench.pipeline.plan.schedules.known import named
from gpipe_bench.pipeline.plan.timeline import Event
from gpipe_bench.pipeline.stage.microbatch import flatten, split

NUM_MICROBATCHES = 3  # of a probe: the first makes gradients, two add to them
ALONE = 2  # coarse stages where there is one process
LEARNING_RATE = 1e-6
WAYS = (("gpipe", "always"), ("zb-h1", "never"))
"""Schedule and re-materialization of the probes."""

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=LEARNING_RATE, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=LEARNING_RATE),
}


class ProbeJob(NamedTuple):
    """What is to be found out."""

    subject: Subject
    sizes: tuple[int, ...]  # of micro-batches
    rounds: int
    optimizer: str = "sgd"
    seed: int = 1811
    device: str = "cpu"


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
    sums_s: tuple[float, ...] = ()  # of `SUM_BYTES` over two processes or more, where processors sum


class Bench:
    """The layers in this process, what trains them, and the reference."""

    def __init__(self, job: ProbeJob) -> None:
        torch.manual_seed(job.seed)  # the same weights in every process
        self.job = job
        self.device = devices.current(job.device)
        layers, self.loss = job.subject.build()
        self.layers = [layer.to(self.device) for layer in layers]
        make = OPTIMIZERS[job.optimizer]
        self.optimizers = [
            make(trained) if (trained := [p for p in layer.parameters() if p.requires_grad]) else None
            for layer in self.layers
        ]
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.processes = dist.get_world_size() if dist.is_initialized() else 1
        self.size = sorted(job.sizes)[len(job.sizes) // 2]
        stages = min(ALONE, len(self.layers))
        even = partition([1.0] * len(self.layers), stages)
        self._reference = self.pipeline(named("gpipe", stages, 2), self.size, even)[1]
        self.references: list[float] = []
        self.reference_s = 0.0  # once the probes are over

    def pipeline(
        self, schedule: Schedule, size: int, cut: Partition, *, over: Mapping[str, Any] | None = None
    ) -> tuple[Pipeline, Callable[[], object]]:
        """A pipeline of the layers and its step, `over` a group or a mesh of processes, as `Pipeline` has
        them; in this one alone if not given. Each replica has a mini-batch of its own.
        """
        number = schedule.num_microbatches
        batch, target = self.job.subject.batch(size * number, str(self.device))
        pipeline = Pipeline(
            self.layers,
            num_stages=schedule.num_stages,
            num_microbatches=number,
            schedule=schedule,
            cost=[1 / len(span) for span in cut for _ in span],
            **(over or {}),
        )
        if pipeline.partition != tuple(cut):
            raise RuntimeError(f"the pipeline was cut into {pipeline.partition} and not into {tuple(cut)}")
        return pipeline, partial(pipeline.step, batch, target, self.loss)

    def reference(self) -> int:
        """Takes the reference step, in all processes at once; its number."""
        self.references.append(time_step(self._reference, self.layers, device=self.device))
        return len(self.references) - 1

    def speed(self, before: int, reference_s: float) -> float:
        """How many times as long the reference took around what followed number `before`."""
        return (self.references[before] + self.references[before + 1]) / 2 / reference_s

    def update(self, layers: Sequence[int]) -> dict[int, float]:
        """The optimizer's step of these layers, which have gradients; seconds of each."""
        found = {}
        for index in layers:
            optimizer = self.optimizers[index]
            if optimizer is not None:
                devices.synchronize(self.device)
                start_s = perf_counter()
                optimizer.step()
                devices.synchronize(self.device)
                found[index] = perf_counter() - start_s
        return found

    def everyone(self, mine: Any) -> list[Any]:
        """What all processes bring, in their order."""
        if self.processes == 1:
            return [mine]
        found: list[Any] = [None] * self.processes
        dist.all_gather_object(found, mine)
        return found


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
    job, layers = bench.job, bench.layers
    sizes = {size: boundaries(bench, size) for size in job.sizes}
    fine_cut = partition([1.0] * len(layers), len(layers))
    probes = [
        _probe(bench, size, way, fine_cut, sizes[size][0], fine=True) for size in job.sizes for way in WAYS
    ]
    cost = [0.0] * len(layers)
    for number in range(2 * len(probes)):  # the first ones warm up
        each = probes[number % len(probes)]
        time_step(each.step, layers, device=bench.device)
        bench.update(range(len(layers)))
        for event in each.pipeline.timeline.events if number >= len(probes) else ():
            cost[event.action.stage] += event.duration_s
    cost = [sum(column) for column in zip(*bench.everyone(cost), strict=True)]
    stages = max(ALONE, bench.processes)
    if len(layers) > stages:
        cut = partition(cost, stages)
        coarse = [
            _probe(bench, size, way, cut, sizes[size][0], fine=False) for size in job.sizes for way in WAYS
        ]
        for each in (*coarse, *coarse):
            time_step(each.step, layers, device=bench.device)
        probes += coarse
    settle()
    sums = sums_s() if bench.processes > 1 and bench.device.type == "cpu" else ()
    first = bench.reference()
    raw: list[_Raw] = []
    generator = random.Random(job.seed)
    for _ in range(job.rounds):
        for each in generator.sample(probes, len(probes)):
            raw.append(_take(bench, each))
            bench.reference()
    bench.reference_s = median(bench.references[first:])
    for each in probes:
        each.pipeline.close()
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
        {size: found[0] for size, found in sizes.items()},
        {size: found[1] for size, found in sizes.items()},
        bench.reference_s,
        sums,
    )


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
        bench.update(sorted(held)),
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
            if not _receives(after.action, last)
        ),
        tuple(
            (num_bytes, seconds / speed)
            for num_bytes, seconds in _messages(each.schedule, raw.whole, each.boundary_bytes)
        ),
        max(0.0, raw.wall_s - (raw.mine[-1].end_s - raw.mine[0].start_s)) / speed,
    )


def _receives(action: Action, last: int) -> bool:
    """Whether an action waits for another stage."""
    if action.kind is Kind.F:
        return action.stage > 0
    return action.kind in (Kind.B, Kind.I) and action.stage < last


def _messages(
    schedule: Schedule, events: Sequence[Event], boundary_bytes: Sequence[float]
) -> list[tuple[float, float]]:
    """Bytes and seconds of the messages whose receivers were waiting when they were sent."""
    times = {event.action: event for event in events}
    free_s = {
        after: times[before].end_s for row in schedule.actions for before, after in pairwise(row)
    }  # when the worker could have begun
    return [
        (
            boundary_bytes[min(message.source.stage, message.target.stage)],
            times[message.target].start_s - times[message.source].end_s,
        )
        for message in transfers(schedule)
        if free_s.get(message.target, -inf) < times[message.source].end_s
    ]


def boundaries(bench: Bench, size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes of one micro-batch behind each layer but the last: distinct tensors; those with a gradient."""
    value = split(bench.job.subject.batch(size, str(bench.device))[0], 1)[0]
    forward, back = [], []
    was_training = [layer.training for layer in bench.layers]
    try:
        for layer in bench.layers:
            layer.eval()  # must not move batch normalization's averages
        with torch.no_grad():
            for layer in bench.layers[:-1]:
                value = layer(value)
                tensors, _ = flatten(value)
                forward.append(float(sum(tensor.nbytes for tensor in tensors)))
                back.append(float(sum(t.nbytes for t in tensors if t.is_floating_point())))
    finally:
        for layer, training in zip(bench.layers, was_training, strict=True):
            layer.train(training)
    return tuple(forward), tuple(back)
