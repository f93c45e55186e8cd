"""What the processes of a side-by-side case do: build every schedule on the same layers, check all gradients,
time the stages so that the generator has measured costs, then let the schedules take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.engines.checks import gradient_error
from gpipe_bench.experiments.engines.setup import LossFn, clear
from gpipe_bench.experiments.measuring.layer_seconds import layer_seconds
from gpipe_bench.experiments.measuring.timed_actions import samples_of
from gpipe_bench.experiments.measuring.turns import measure
from gpipe_bench.experiments.schedules.torch_engines import SCHEDULES, TorchSchedule
from gpipe_bench.harness.rounds import Usage
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.drawn.table import to_csv
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.schedules.generator import generate
from gpipe_bench.pipeline.plan.schedules.known import named
from gpipe_bench.pipeline.plan.schedules.placement import loop, vee
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.pipeline.stage.microbatch import split
from gpipe_bench.pipeline.times.clock import conditions

NUM_WORKERS = 2
TIMED_STEPS = 4  # of which the first does not count
Times = dict[tuple[int, Kind], float]


class SideJob(NamedTuple):
    """One case as its processes see it. `arms` are the names of those who take turns."""

    model: str
    options: dict[str, Any]
    microbatch_size: int
    num_microbatches: int
    remat: str
    arms: tuple[str, ...]
    rounds: int
    seed: int


class SideResult(NamedTuple):
    """What one process found. Times are seconds per step, two samples per round."""

    errors: dict[str, float]  # of each arm's gradients, relative to the plain model's
    refused: dict[str, str]  # why torch can't run an arm
    actions_ms: dict[str, float]  # what the generator went by, "0F"
    generated: str  # its rows
    conditions: dict[str, str]
    times: dict[str, list[float]]
    usage: Usage


class Bench:
    """The layers, the batch and the schedules that train them."""

    def __init__(self, job: SideJob) -> None:
        torch.manual_seed(job.seed)  # the same weights in every process
        self.job, self.number = job, job.num_microbatches
        self.layers = list(MODELS[job.model](**job.options))
        self.batch, self.target = example_batch(job.model, job.microbatch_size * self.number, **job.options)
        self.loss: LossFn = loss_fn(job.model, **job.options)
        self.by_layer = layer_seconds(self.layers, self.number, self.loss, self.batch, self.target, "never")

    def cut(self, num_stages: int) -> Partition:
        return partition(self.by_layer, num_stages)

    def ours(self, schedule: Schedule) -> Pipeline:
        cut = self.cut(schedule.num_stages)
        return Pipeline(
            self.layers,
            num_stages=schedule.num_stages,
            num_microbatches=self.number,
            schedule=schedule,
            cost=[1 / len(span) for span in cut for _ in span],
            group=dist.group.WORLD,
        )

    def theirs(self, name: str) -> TorchSchedule:
        place = {"1f1b": (0, 1), "zb-v": vee(NUM_WORKERS)}.get(name, loop(NUM_WORKERS, 2))
        return TorchSchedule(SCHEDULES[name], self.layers, self.cut(len(place)), place, self.number)

    def step_of(self, engine: Pipeline | TorchSchedule) -> Callable[[], object]:
        return partial(engine.step, self.batch, self.target, self.loss)

    def times_of(self, pipeline: Pipeline) -> Times:
        """Medians of the actions of all stages, those of the other processes too."""
        found: list[Timeline] = []
        for number in range(TIMED_STEPS):
            clear(self.layers)
            pipeline.step(self.batch, self.target, self.loss)
            if number:
                found.append(pipeline.timeline)
        mine = {key: median(samples) for key, samples in samples_of(found).items()}
        everyone: list[Times] = [{}] * NUM_WORKERS
        dist.all_gather_object(everyone, mine)
        return {key: seconds for each in everyone for key, seconds in each.items()}

    def reference(self) -> dict[str, Tensor]:
        """Gradients of the plain model, micro-batch by micro-batch, by layer and name."""
        clear(self.layers)
        for inputs, wanted in zip(
            split(self.batch, self.number), split(self.target, self.number), strict=True
        ):
            value: Any = inputs
            for layer in self.layers:
                value = layer(value)
            (self.loss(value, wanted) / self.number).backward()  # type: ignore[no-untyped-call]
        found = gradients_of(self.layers)
        clear(self.layers)
        return found


def gradients_of(layers: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Of the parameters that have one, by layer and name."""
    return {
        f"{index}.{name}": parameter.grad.clone()
        for index, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


def work(job: SideJob) -> SideResult:
    """What one process does for a case."""
    bench = Bench(job)
    engines, refused, times, rows = build(bench)
    expected = bench.reference()
    errors = check(bench, engines, expected)
    measured = measure(
        {name: bench.step_of(engine) for name, engine in engines.items()}, bench.layers, job.rounds, job.seed
    )
    check(bench, engines, expected)  # still right after all rounds
    actions_ms = {f"{stage}{kind.value}": 1e3 * s for (stage, kind), s in sorted(times.items())}
    return SideResult(errors, refused, actions_ms, to_csv(rows), conditions(), *measured)


def build(
    bench: Bench,
) -> tuple[dict[str, Pipeline | TorchSchedule], dict[str, str], Times, Schedule]:
    """Every arm, those that torch can't run and why, and what the generator was told and made."""
    number, remat = bench.number, bench.job.remat
    engines: dict[str, Pipeline | TorchSchedule] = {}
    refused: dict[str, str] = {}
    theirs: dict[str, TorchSchedule] = {}
    for arm in bench.job.arms:
        name = arm.removeprefix("torch's ")
        if name != arm:
            try:
                theirs[name] = bench.theirs(name)
            except ValueError as error:
                refused[arm] = str(error)
    place = vee(NUM_WORKERS) if remat == "never" else tuple(range(NUM_WORKERS))
    model = bench.ours(named("zb-v" if remat == "never" else "zb-h1", NUM_WORKERS, number, remat=remat))
    times = bench.times_of(model)
    rows = generate(place, number, times, remat=remat, most_alive=len(place), name="generated")
    for arm in bench.job.arms:
        name = arm.removeprefix("torch's ")
        if name != arm:
            if name in theirs:
                engines[arm] = theirs[name]
        elif arm in ("generated", "zb-v, generated"):
            engines[arm] = bench.ours(rows)
        elif arm == "interleaved zero bubble":
            if arm in theirs:
                engines[arm] = bench.ours(theirs[arm].rows(arm))
        elif arm == "gpipe, W put off":
            engines[arm] = bench.ours(put_off(number))
        else:
            engines[arm] = bench.ours(named(arm, NUM_WORKERS, number, remat=remat))
    return engines, refused, times, rows


def put_off(number: int) -> Schedule:
    """GPipe on two workers with every micro-batch recomputed and W where it delays nobody, for two graphs
    alive on each. M = 2, every action one slot:

        stage 0 | F0 F1 R1 R0 .  I1 W1 I0 W0
        stage 1 | .  F0 F1 R1 I1 R0 I0 W1 W0
    """
    order = list(reversed(range(number)))
    first = [Action(0, Kind.F, m) for m in range(number)]
    first += [Action(0, Kind.R, m) for m in order[:2]]
    last = [Action(1, Kind.F, m) for m in range(number)]
    for place, m in enumerate(order):
        first += [Action(0, Kind.R, m)] if place > 1 else []
        first += [Action(0, Kind.I, m), Action(0, Kind.W, m)]
        last += [Action(1, Kind.R, m), Action(1, Kind.I, m)]
        last += [Action(1, Kind.W, order[place - 1])] if place else []
    last.append(Action(1, Kind.W, order[-1]))
    return Schedule("gpipe, W put off", 2, number, "always", (tuple(first), tuple(last)))


def check(
    bench: Bench, engines: dict[str, Pipeline | TorchSchedule], expected: dict[str, Tensor]
) -> dict[str, float]:
    """How far each arm's gradients are off. RuntimeError where it is more than rounding, or
    where no process has one.
    """
    errors = {}
    for name, engine in engines.items():
        for _ in range(2):  # the first agrees on shapes
            clear(bench.layers)
            bench.step_of(engine)()
        found = gradients_of(bench.layers)
        mine = {key: gradient for key, gradient in expected.items() if key in found}
        errors[name] = gradient_error(found, mine, name)
        everyone: list[set[str]] = [set()] * NUM_WORKERS
        dist.all_gather_object(everyone, set(mine))
        if missing := expected.keys() - set().union(*everyone):
            raise RuntimeError(f"{name} left no gradient of {min(missing)} in any process")
        clear(bench.layers)
    return errors
