"""What processes do so that a model's costs are known: they train it in ways that no plan chooses.

All processes work at the same time, since layers are slower beside a busy neighbour. Each takes, round by
round, steps of pipelines in itself, for every size of a micro-batch:

    fine      every layer a stage, recomputed; and with split backwards    F, R, B; G, I, W of each layer
    coarse    two stages, in the same two ways                             what an action costs beyond its layers

and together they take a naive step, one stage per process, whose gaps are messages and whose ends are what a
step costs beyond its actions. The clock of a core is not to be trusted: on a shared machine it may run at half
its speed a minute later. So before and after each of these steps the same reference step is taken, and what
lies between two of them counts in units of it, at the reference's median speed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn

from gpipe_bench.experiments.measuring.device_timing import settle, time_step
from gpipe_bench.experiments.planning.costs import kinds_of
from gpipe_bench.experiments.planning.subjects import Subject
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.schedules.known import named
from gpipe_bench.pipeline.stage.microbatch import flatten, split

NUM_MICROBATCHES = 3  # of a probe: the first makes gradients, two add to them
COARSE = 2
LEARNING_RATE = 1e-6
WAYS = (("gpipe", "always"), ("zb-h1", "never"))
"""Schedule and re-materialization of the probes: together they have every kind of action."""

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


class Taken(NamedTuple):
    """One action of a probe. `seconds` are at the reference's median speed."""

    stage: int
    kind: str
    microbatch: int
    seconds: float


class ProbeRun(NamedTuple):
    """One step of a probe; `run` is common to all processes."""

    run: int
    size: int
    fine: bool
    actions: tuple[Taken, ...]


class Naive(NamedTuple):
    """A naive step of all processes: what lies between the end of an action and its message's use, by the
    bytes of the message, and the step beyond its actions on the first process.
    """

    gaps: tuple[tuple[float, float], ...]  # bytes, seconds
    beyond_s: float


class Probed(NamedTuple):
    """What one process found."""

    runs: tuple[ProbeRun, ...]
    naive: tuple[Naive, ...]
    update_s: tuple[tuple[float, ...], ...]  # samples of each layer
    parameter_bytes: tuple[tuple[int, ...], ...]
    activation_bytes: dict[int, tuple[float, ...]]
    gradient_bytes: dict[int, tuple[float, ...]]
    reference_s: float  # median over the probes


class Bench:
    """The layers in this process, what trains them, and the reference."""

    def __init__(self, job: ProbeJob) -> None:
        torch.manual_seed(job.seed)  # the same weights in every process
        self.job = job
        self.layers, self.loss = job.subject.build()
        make = OPTIMIZERS[job.optimizer]
        self.optimizers = [
            make(trained) if (trained := [p for p in layer.parameters() if p.requires_grad]) else None
            for layer in self.layers
        ]
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = sorted(job.sizes)[len(job.sizes) // 2]
        stages = min(COARSE, len(self.layers))
        even = partition([1.0] * len(self.layers), stages)
        self._reference = self.pipeline(named("gpipe", stages, 2), self.size, even)[1]
        self.references: list[float] = []
        self.reference_s = 0.0  # once the probes are over

    def pipeline(
        self, schedule: Schedule, size: int, cut: Partition, *, shared: bool = False
    ) -> tuple[Pipeline, Callable[[], object]]:
        """A pipeline of the layers and its step; `shared` over all processes."""
        number = schedule.num_microbatches
        batch, target = self.job.subject.batch(size * number)
        pipeline = Pipeline(
            self.layers,
            num_stages=schedule.num_stages,
            num_microbatches=number,
            schedule=schedule,
            cost=[1 / len(span) for span in cut for _ in span],
            group=dist.group.WORLD if shared else None,
        )
        if pipeline.partition != tuple(cut):
            raise RuntimeError(f"the pipeline was cut into {pipeline.partition} and not into {tuple(cut)}")
        return pipeline, partial(pipeline.step, batch, target, self.loss)

    def reference(self) -> int:
        """Takes the reference step, in all processes at once; its number."""
        self.references.append(time_step(self._reference, self.layers))
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
                start_s = perf_counter()
                optimizer.step()
                found[index] = perf_counter() - start_s
        return found

    def everyone(self, mine: Any) -> list[Any]:
        """What all processes bring, in their order."""
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return [mine]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        return found


class _Probe(NamedTuple):
    size: int
    fine: bool
    pipeline: Pipeline
    kinds: dict[Any, str]
    step: Callable[[], object]


def probe(bench: Bench) -> Probed:
    """Takes all probes of a job. All processes must call."""
    job, layers = bench.job, bench.layers
    every = range(len(layers))
    fine_cut = partition([1.0] * len(layers), len(layers))
    probes = [_probe(bench, size, way, fine_cut, fine=True) for size in job.sizes for way in WAYS]
    bench.reference()
    for each in probes:  # warm up, and find where the coarse ones are cut
        time_step(each.step, layers)
        bench.update(every)
    cost = [0.0] * len(layers)
    for each in probes:
        time_step(each.step, layers)
        for event in each.pipeline.timeline.events:
            cost[event.action.stage] += event.duration_s
    cost = [sum(column) for column in zip(*bench.everyone(cost), strict=True)]
    if len(layers) > COARSE:
        cut = partition(cost, COARSE)
        probes += [_probe(bench, size, way, cut, fine=False) for size in job.sizes for way in WAYS]
    naives = _naive_pipelines(bench, cost)
    for step in [*(each.step for each in probes if not each.fine), *(each[1] for each in naives)]:
        for _ in range(2):
            time_step(step, layers)
    settle()
    first = bench.reference()
    raw: list[tuple[int, int, _Probe, list[tuple[Any, float]]]] = []
    updates: list[tuple[int, dict[int, float]]] = []
    gaps: list[tuple[int, Naive]] = []
    generator = random.Random(job.seed)
    for _ in range(job.rounds):
        for each in generator.sample(probes, len(probes)):
            time_step(each.step, layers)
            taken = [(event.action, event.duration_s) for event in each.pipeline.timeline.events]
            before = len(bench.references) - 1
            raw.append((before, len(raw), each, taken))
            updates.append((before, bench.update(every)))
            bench.reference()
        for each in naives:
            found = _naive(bench, *each)
            gaps.append((len(bench.references) - 1, found))
            bench.reference()
    bench.reference_s = median(bench.references[first:])
    return _probed(bench, raw, updates, gaps)


def _probe(bench: Bench, size: int, way: tuple[str, str], cut: Partition, *, fine: bool) -> _Probe:
    name, remat = way
    schedule = named(name, len(cut), NUM_MICROBATCHES, remat=remat)
    pipeline, step = bench.pipeline(schedule, size, cut)
    return _Probe(size, fine, pipeline, kinds_of(schedule), step)


def _naive_pipelines(
    bench: Bench, cost: Sequence[float]
) -> list[tuple[Pipeline, Callable[[], object], tuple[float, ...]]]:
    """One stage per process, for the smallest and the largest size; with the bytes over each boundary."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not 1 < world <= len(bench.layers):
        return []
    cut = partition(cost, world)
    found = []
    for size in sorted({min(bench.job.sizes), max(bench.job.sizes)}):
        activations, _ = boundaries(bench, size)
        pipeline, step = bench.pipeline(named("naive", world, 2), size, cut, shared=True)
        found.append((pipeline, step, tuple(activations[span.stop - 1] for span in cut[:-1])))
    return found


def _naive(
    bench: Bench, pipeline: Pipeline, step: Callable[[], object], num_bytes: tuple[float, ...]
) -> Naive:
    wall_s = time_step(step, bench.layers)
    timeline = pipeline.timeline
    mine = timeline.events
    beyond_s = wall_s - (mine[-1].end_s - mine[0].start_s)
    whole = pipeline.gather_timeline()
    ends = {str(event.action): event.end_s for event in whole.events}
    starts = {str(event.action): event.start_s for event in whole.events}
    gaps = [
        (num_bytes[stage], starts[f"{stage + 1}F{m}"] - ends[f"{stage}F{m}"])
        for stage in range(len(num_bytes))
        for m in range(2)
    ]
    return Naive(tuple(gaps), max(0.0, beyond_s))


def _probed(
    bench: Bench,
    raw: list[tuple[int, int, _Probe, list[tuple[Any, float]]]],
    updates: list[tuple[int, dict[int, float]]],
    gaps: list[tuple[int, Naive]],
) -> Probed:
    """At the reference's median speed."""
    reference_s, layers = bench.reference_s, range(len(bench.layers))
    runs = [
        ProbeRun(
            run,
            each.size,
            each.fine,
            tuple(
                Taken(
                    action.stage,
                    each.kinds[action],
                    action.microbatch,
                    seconds / bench.speed(before, reference_s),
                )
                for action, seconds in taken
            ),
        )
        for before, run, each, taken in raw
    ]
    sizes = {size: boundaries(bench, size) for size in bench.job.sizes}
    return Probed(
        tuple(runs),
        tuple(
            Naive(
                tuple((size, gap / bench.speed(before, reference_s)) for size, gap in found.gaps),
                found.beyond_s / bench.speed(before, reference_s),
            )
            for before, found in gaps
        ),
        tuple(
            tuple(
                found[layer] / bench.speed(before, reference_s) for before, found in updates if layer in found
            )
            for layer in layers
        ),
        tuple(tuple(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in bench.layers),
        {size: found[0] for size, found in sizes.items()},
        {size: found[1] for size, found in sizes.items()},
        reference_s,
    )


def boundaries(bench: Bench, size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes of one micro-batch behind each layer but the last: distinct tensors, and those with a gradient."""
    value = split(bench.job.subject.batch(size)[0], 1)[0]
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
