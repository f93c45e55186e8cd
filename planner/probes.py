"""The measurements behind a model's costs: layers, messages, sums and shards, timed in several processes.

All processes work at the same time, since layers are slower beside a busy neighbour. Round by round they take
steps of three micro-batches of every size, in ways that together have every kind of action:

    fine      in each process, every layer a stage     F, R, B; G, I, W of each layer
    coarse    over all processes, one stage in each    what an action costs beyond its layers, what lies
                                                       between actions, messages, the ends of a step
    whole     in each process, all layers one stage    what replicas take, and the sum of their gradients

A shared machine may run at half its speed a minute later, so before and after each step the same reference
step is taken, and seconds count at the reference's median speed. Replicas sum with the cores that compute;
those that hold parts of the parameters (fsdp) take the same steps at both levels, on layers of their own:

    F0 B0 F1 B1 F2 B2=====       B0 makes gradients, B1 adds to them; F1, B1: a pass as it is, of ZeRO-3 with
    ==                sums       gathers and scatters. Once in a step: F0 over F1, B2 over B1, the ends
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import inf
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.pipeline import Pipeline, devices
from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.timeline import Event
from gpipe_bench.pipeline.plan.walk import transfers
from gpipe_bench.pipeline.stage.trees import flatten, split

from .candidate import LEVELS
from .costs import kinds_of
from .model import Source

NUM_MICROBATCHES = 3  # of a probe: the first makes gradients, two add to them
ALONE = 2  # coarse stages where there is one process
LEARNING_RATE = 1e-6
COPIED_BYTES = 2**25
CPU = torch.device("cpu")
WAYS = (("gpipe", "always"), ("zb-h1", "never"))
"""Schedule and re-materialization of fine and coarse probes."""
WHOLE_WAYS = (("1f1b", "always"), ("1f1b", "never"))

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=LEARNING_RATE, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=LEARNING_RATE),
}


class ProbeJob(NamedTuple):
    """The costs to measure."""

    source: Source
    sizes: tuple[int, ...]  # of micro-batches
    rounds: int
    optimizer: str = "sgd"
    seed: int = 1811
    device: str = "cpu"
    sharded: bool = True  # whether parameters may be divided, too (fsdp)
    shown: bool = False  # whether progress is shown


class Taken(NamedTuple):
    """One action of a probe."""

    stage: int
    kind: str
    seconds: float


class ProbeRun(NamedTuple):
    """One step of a probe; `run` is common to all processes. All seconds are at the reference's median speed.

    Args:
        run: its number
        size: of the micro-batch
        way: "fine", "coarse" or "whole"
        actions: of this process; of a whole without the last backward, which has the sums, and of parts
            without the first forward, which waits for gathers
        level: of parts, as `Candidate.fsdp_level`; 0 for all layers
        gaps_s: between two actions of which the second waited for nobody
        messages: bytes and seconds from the end of an action to the start of one that waited for it
        beyond_s: the step beyond its actions; of a whole also what the actions left out take more than others
        update_s: layer and seconds of the optimizer's step
    """

    run: int
    size: int
    way: str
    actions: tuple[Taken, ...]
    level: int = 0
    gaps_s: tuple[float, ...] = ()
    messages: tuple[tuple[float, float], ...] = ()
    beyond_s: float = 0.0
    update_s: tuple[tuple[int, float], ...] = ()


class Probed(NamedTuple):
    """The measurements of one process."""

    runs: tuple[ProbeRun, ...]
    parameter_bytes: tuple[tuple[int, ...], ...]
    activation_bytes: dict[int, tuple[float, ...]]
    gradient_bytes: dict[int, tuple[float, ...]]


class Trained:
    """Layers, and an optimizer for each that has parameters."""

    def __init__(self, layers: Sequence[nn.Module], optimizer: str) -> None:
        self.layers, make = layers, OPTIMIZERS[optimizer]
        self._optimizers = [
            make(trained) if (trained := [p for p in layer.parameters() if p.requires_grad]) else None
            for layer in layers
        ]

    def update(self, layers: Sequence[int], device: torch.device) -> dict[int, float]:
        """The optimizer's step of these layers, which have gradients; seconds of each."""
        found = {}
        for index in layers:
            if (optimizer := self._optimizers[index]) is not None:
                devices.synchronize(device)
                start_s = perf_counter()
                optimizer.step()
                devices.synchronize(device)
                found[index] = perf_counter() - start_s
        return found


class Bench:
    """The layers in this process, what trains them, and the reference step that tells how fast it is."""

    def __init__(self, job: ProbeJob) -> None:
        self.job = job
        self.device = devices.current(job.device)
        self.layers = self.fresh_layers()
        self.trained = Trained(self.layers, job.optimizer)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.processes = dist.get_world_size() if dist.is_initialized() else 1
        self.size = sorted(job.sizes)[(len(job.sizes) - 1) // 2]
        stages = min(ALONE, len(self.layers))
        even = partition([1.0] * len(self.layers), stages)
        self._reference = self.pipeline(named("gpipe", stages, 2), self.size, even)[1]
        self.references: list[float] = []
        self.reference_s = 0.0  # median over the probes, once there are any

    def fresh_layers(self) -> list[nn.Module]:
        """Layers with the same weights in every process."""
        torch.manual_seed(self.job.seed)
        layers, self.loss = self.job.source.build()
        return [layer.to(self.device) for layer in layers]

    def pipeline(
        self,
        schedule: Schedule,
        size: int,
        cut: Partition,
        *,
        over: Mapping[str, Any] | None = None,
        layers: Sequence[nn.Module] | None = None,
    ) -> tuple[Pipeline, Callable[[], object]]:
        """A pipeline of the layers, or of these, `over` processes as `Pipeline` is told, and its step."""
        number = schedule.num_microbatches
        pipeline = Pipeline(
            layers or self.layers, partition=cut, num_microbatches=number, schedule=schedule, **(over or {})
        )
        return pipeline, self.step(pipeline, size, number)

    def step(self, pipeline: Pipeline, size: int, number: int) -> Callable[[], object]:
        """Returns a function that runs a step of `number` micro-batches of that size."""
        return partial(pipeline.step, *self.job.source.batch(size * number, str(self.device)), self.loss)

    def reference(self) -> int:
        """Runs the reference step in all processes at once. Returns its number."""
        self.references.append(time_step(self._reference, self.layers, device=self.device))
        return len(self.references) - 1

    def speed(self, before: int, reference_s: float) -> float:
        """Mean time of reference `before` and the next reference, relative to `reference_s`."""
        return (self.references[before] + self.references[before + 1]) / 2 / reference_s

    def everyone(self, mine: Any) -> list[Any]:
        """Returns the `mine` of all processes, in their order."""
        found = [mine] * self.processes
        if self.processes > 1:
            dist.all_gather_object(found, mine)
        return found


class _Probe(NamedTuple):
    """A pipeline whose steps are timed; fields as `ProbeRun` has them."""

    size: int
    way: str
    schedule: Schedule
    pipeline: Pipeline
    step: Callable[[], object]
    trained: Trained
    level: int = 0
    boundary_bytes: tuple[float, ...] = ()


class Step(NamedTuple):
    """A step by the clock: the number of the reference before it, events of this process, and of all."""

    before: int
    wall_s: float
    mine: tuple[Event, ...]
    everyone: tuple[Event, ...] = ()
    update_s: Mapping[int, float] = {}


def probe(bench: Bench) -> Probed:
    """Takes all probes of a job. All processes must call."""
    job, layers, start_s = bench.job, bench.layers, perf_counter()

    def tell(what: str) -> None:
        if bench.rank == 0 and job.shown:
            print(f"timing layers: {what}, {perf_counter() - start_s:.0f} s", file=sys.stderr, flush=True)

    tell("warming up")
    inputs = {size: split(job.source.batch(size, str(bench.device))[0], 1)[0] for size in job.sizes}
    boundaries = {size: boundary_bytes(layers, microbatch) for size, microbatch in inputs.items()}
    probes = list[_Probe]()
    cost = [0.0] * len(layers)
    for opened in (_fine, _coarse, _whole):
        new = list(opened(bench, {size: sizes[0] for size, sizes in boundaries.items()}, cost))
        steps = [_take(bench, each) for each in new]  # the first ones warm up
        if opened is _fine:
            for event in (event for step in steps for event in step.mine):
                cost[event.action.stage] += event.duration_s
            cost = [sum(column) for column in zip(*bench.everyone(cost), strict=True)]
        probes += new
    settle()
    first, taken = bench.reference(), list[tuple[_Probe, Step]]()

    generator = random.Random(job.seed)
    for number in range(job.rounds):
        tell(f"round {number + 1} of {job.rounds}, {len(probes)} probes")
        for each in generator.sample(probes, len(probes)):
            taken.append((each, _take(bench, each)))
            bench.reference()
    tell("done")
    for each in probes:
        each.pipeline.close()
    bench.reference_s = median(bench.references[first:])
    return Probed(
        tuple(
            run_of(number, each, step, bench.speed(step.before, bench.reference_s))
            for number, (each, step) in enumerate(taken)
        ),
        tuple(tuple(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in layers),
        {size: ahead for size, (ahead, _) in boundaries.items()},
        {size: back for size, (_, back) in boundaries.items()},
    )


def _fine(
    bench: Bench, sizes: Mapping[int, Sequence[float]], cost: Sequence[float], coarse: int = 0
) -> Iterator[_Probe]:
    """Every layer a stage; or so many stages with even costs, over all processes where there are several."""
    together = coarse and bench.processes > 1
    over = {"group": dist.group.WORLD} if together else None
    cut = partition(cost, coarse) if coarse else partition([1.0] * len(cost), len(cost))
    for size, behind in sizes.items():
        for name, remat in WAYS:
            schedule = named(name, len(cut), NUM_MICROBATCHES, remat=remat)
            pipeline, step = bench.pipeline(schedule, size, cut, over=over)
            between = tuple(behind[span.stop - 1] for span in cut[:-1])
            way = "coarse" if coarse else "fine"
            yield _Probe(size, way, schedule, pipeline, step, bench.trained, boundary_bytes=between)


def _coarse(bench: Bench, sizes: Mapping[int, Sequence[float]], cost: Sequence[float]) -> Iterator[_Probe]:
    stages = max(ALONE, bench.processes)
    return _fine(bench, sizes, cost, stages) if len(cost) > stages else iter(())


def _whole(bench: Bench, sizes: Mapping[int, Sequence[float]], cost: Sequence[float]) -> Iterator[_Probe]:
    """Yields probes with all layers, or a shard of each, in every process; all are replicas."""
    if bench.processes == 1 or bench.device.type != "cpu":
        return
    cut = (range(len(cost)),)
    mesh = init_device_mesh("cpu", (bench.processes, 1), mesh_dim_names=("dp", "pp"))
    for size in sizes:
        for name, remat in WHOLE_WAYS:
            schedule = named(name, 1, NUM_MICROBATCHES, remat=remat)
            pipeline, step = bench.pipeline(schedule, size, cut, over={"mesh": mesh})
            yield _Probe(size, "whole", schedule, pipeline, step, bench.trained)
    for level in LEVELS if bench.job.sharded else ():
        over = sharded_over(bench.processes, level)
        layers = bench.fresh_layers()  # torch divides parameters in place, and for good
        schedule = named("1f1b", 1, NUM_MICROBATCHES)
        pipeline, _ = bench.pipeline(schedule, bench.size, cut, over=over, layers=layers)
        trained = Trained(layers, bench.job.optimizer)
        for size in sizes:
            step = bench.step(pipeline, size, NUM_MICROBATCHES)
            yield _Probe(size, "whole", schedule, pipeline, step, trained, level)


def sharded_over(processes: int, level: int, device_type: str = "cpu") -> dict[str, Any]:
    """Returns the `Pipeline` arguments that shard all parameters; every process must call it."""
    mesh = init_device_mesh(device_type, (processes, 1), mesh_dim_names=("fsdp", "pp"))
    return {"mesh": mesh, "zero": level}


def _take(bench: Bench, each: _Probe) -> Step:
    """Runs one step right after a reference measurement."""
    before = len(bench.references) - 1
    wall_s = time_step(each.step, each.trained.layers, device=bench.device)
    mine = each.pipeline.timeline.events
    shared = each.way == "coarse" and bench.processes > 1
    everyone = each.pipeline.gather_timeline().events if shared else ()
    held = {layer for event in mine for layer in each.pipeline.partition[event.action.stage]}
    return Step(before, wall_s, mine, everyone, each.trained.update(sorted(held), bench.device))


def run_of(number: int, each: Any, step: Step, speed: float) -> ProbeRun:
    """Returns the timings of a step in which everything took `speed` times as long as usual."""
    schedule: Schedule = each.schedule
    kinds, events = kinds_of(schedule), list(step.mine)
    beyond_s = step.wall_s - (events[-1].end_s - events[0].start_s)
    gaps, messages = list[float](), list[tuple[float, float]]()
    if each.way == "whole":
        *events, last = events
        backward_s = [event.duration_s for event in events if event.action.kind is Kind.B][-1]
        beyond_s += last.duration_s - backward_s
        if each.level:
            first, *events = events
            forward_s = median(event.duration_s for event in events if event.action.kind is Kind.F)
            beyond_s += first.duration_s - forward_s
    elif step.everyone:
        receivers = {message.target for message in transfers(schedule)}
        pairs = [pair for pair in pairwise(events) if pair[1].action not in receivers]
        gaps = [after.start_s - event.end_s for event, after in pairs]
        messages = _messages(schedule, step.everyone, each.boundary_bytes)
    else:
        beyond_s = 0.0
    return ProbeRun(
        number,
        each.size,
        each.way,
        tuple(Taken(e.action.stage, kinds[e.action], e.duration_s / speed) for e in events),
        each.level,
        tuple(gap_s / speed for gap_s in gaps),
        tuple((num_bytes, seconds / speed) for num_bytes, seconds in messages),
        max(0.0, beyond_s) / speed,
        tuple((layer, seconds / speed) for layer, seconds in step.update_s.items()),
    )


def _messages(
    schedule: Schedule, events: Sequence[Event], boundary_bytes: Sequence[float]
) -> list[tuple[float, float]]:
    """Bytes and seconds of the messages whose receivers were waiting when they were sent."""
    times, found = {event.action: event for event in events}, []
    pairs = (pair for row in schedule.actions for pair in pairwise(row))
    free_s = {after: times[before].end_s for before, after in pairs}  # when the worker could have begun
    for source, target in transfers(schedule):
        sent_s = times[source].end_s
        if free_s.get(target, -inf) < sent_s:
            found.append((boundary_bytes[min(source.stage, target.stage)], times[target].start_s - sent_s))
    return found


# By the clock: a GPU runs behind the host and another process may still be busy, so both are waited for.


def settle() -> None:
    """Spares collections between samples, a quarter of a second each, what lives by now."""
    gc.collect()
    gc.freeze()


def time_step(
    step: Callable[[], object] | None,
    layers: Iterable[nn.Module],
    *,
    repeats: int = 1,
    device: torch.device = CPU,
) -> float:
    """Seconds of one training step of `layers`, the mean of `repeats` in a row. It leaves their gradients.

    What an earlier step left (gradients, garbage) is cleared first. All processes must call and begin
    together; where `step` is None, this one only waits, which takes 0 s.
    """
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    gc.collect()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    if step is None:
        return 0.0
    devices.synchronize(device)
    start_s = perf_counter()
    for _ in range(repeats):
        step()
    devices.synchronize(device)
    return (perf_counter() - start_s) / repeats


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy in memory, which is what a message between two processes of a host is."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samples = []
    for _ in range(6):
        devices.synchronize(device)
        start_s = perf_counter()
        target.copy_(source)
        devices.synchronize(device)
        samples.append(perf_counter() - start_s)
    return COPIED_BYTES / median(samples[1:])


def boundary_bytes(layers: Sequence[nn.Module], microbatch: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes between each layer and the next: of distinct tensors, and of those that have a gradient."""
    ahead, back = list[int](), list[int]()
    was_training = [layer.training for layer in layers]
    try:
        for layer in layers:
            layer.eval()  # must not move batch normalization's averages
        with torch.no_grad():
            for layer in layers[:-1]:
                microbatch = layer(microbatch)
                tensors = flatten(microbatch)[0]
                ahead.append(sum(t.nbytes for t in tensors))
                back.append(sum(t.nbytes for t in tensors if t.is_floating_point()))
    finally:
        for layer, training in zip(layers, was_training, strict=True):
            layer.train(training)
    return tuple(ahead), tuple(back)
