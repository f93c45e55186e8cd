"""What the processes of a side-by-side case do: build every schedule on the same layers, check all gradients,
time the stages so that the generator has measured costs, then let the schedules take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.engines.checks import gradient_error, reference
from gpipe_bench.experiments.engines.setup import LossFn, Setup, clear
from gpipe_bench.experiments.engines.torch_runtime import TorchRuntime
from gpipe_bench.experiments.side_by_side import Found, take_turns
from gpipe_bench.experiments.timed.replay import samples_of
from gpipe_bench.experiments.timed.steps import layer_seconds
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.files import to_csv
from gpipe_bench.pipeline.plan.generate import generate
from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.vee import vee

MODEL = "transformer-lm"
TIMED_STEPS = 4  # of which the first does not count
BORROWED = "interleaved zero bubble"  # the rows are read from torch: they have no name here
CPU = torch.device("cpu")


class Job(NamedTuple):
    """One case as its processes see it. `variants` are those who take turns, each with torch's name of its
    schedule if it is torch's.
    """

    options: dict[str, Any]
    microbatch_size: int
    num_microbatches: int
    remat: str
    variants: dict[str, str]
    seed: int = 1811


def work(job: Job, rounds: int) -> Found:
    """What one process does for a case."""
    bench = Bench(job)
    expected = reference(bench.alone(), bench.batch, bench.target, bench.loss)
    errors = bench.check(expected)
    measured = take_turns(bench.steps, bench.layers, rounds, job.seed)
    bench.check(expected)  # still right after all rounds
    actions_ms = {f"{stage}{kind.value}": 1e3 * s for (stage, kind), s in sorted(bench.times.items())}
    details = {
        "errors": errors,  # of each variant's gradients, relative to the plain model's
        "refused": bench.refused,  # why torch can't run a variant
        "actions_ms": actions_ms,  # what the generator went by
        "generated": to_csv(bench.rows),
    }
    return measured._replace(details=details)


class Bench:
    """The layers, the batch, and a step by every schedule that trains them."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)  # the same weights in every process
        self.num_workers = dist.get_world_size()
        self.remat, self.number = job.remat, job.num_microbatches
        self.layers = list(MODELS[MODEL](**job.options))
        self.batch, self.target = example_batch(MODEL, job.microbatch_size * self.number, **job.options)
        self.loss: LossFn = loss_fn(MODEL, **job.options)
        self.by_layer = layer_seconds(self.layers, self.number, self.loss, self.batch, self.target, "never")
        self.refused: dict[str, str] = {}
        theirs: dict[str, TorchRuntime] = {}
        for variant, name in job.variants.items():
            if name:
                try:
                    theirs[name] = self.torchs(name)
                except ValueError as error:
                    self.refused[variant] = str(error)
        keep = job.remat == "never"
        place = vee(self.num_workers) if keep else tuple(range(self.num_workers))
        self.times = self.times_of(self.ours(self.named("zb-v" if keep else "zb-h1")))
        self.rows = generate(
            place, self.number, self.times, remat=job.remat, most_alive=len(place), name="generated"
        )
        self.steps: dict[str, Callable[[], object] | None] = {}
        for variant, name in job.variants.items():
            if name in theirs:
                self.steps[variant] = partial(theirs[name].step, self.batch, self.target)
            elif variant == BORROWED and variant not in theirs:
                self.refused[variant] = "torch, whose rows it would run, refuses them"
            elif not name:
                pipeline = self.ours(self.rows_of(variant, theirs))
                self.steps[variant] = partial(pipeline.step, self.batch, self.target, self.loss)

    def rows_of(self, name: str, theirs: Mapping[str, TorchRuntime]) -> Schedule:
        """What a variant of ours runs."""
        if name.endswith("generated"):
            return self.rows
        if name == BORROWED:
            return theirs[name].rows(name)
        return put_off(self.number) if name == "gpipe, W put off" else self.named(name)

    def named(self, name: str) -> Schedule:
        return named(name, self.num_workers, self.number, remat=self.remat)

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

    def torchs(self, name: str) -> TorchRuntime:
        cut = self.cut(self.num_workers if name == "1f1b" else 2 * self.num_workers)
        stages = [[self.layers[index] for index in span] for span in cut]
        group = dist.group.WORLD
        assert group is not None, "the processes form one"
        return TorchRuntime(name, stages, self.number, self.loss, group, CPU)

    def alone(self) -> Setup:
        """The whole model in this process."""
        return Setup(self.layers, (range(len(self.layers)),), self.number, "never", CPU)

    def times_of(self, pipeline: Pipeline) -> dict[tuple[int, Kind], float]:
        """Medians of the actions of all stages, those of the other processes too."""
        timelines = []
        for _ in range(TIMED_STEPS):
            clear(self.layers)
            pipeline.step(self.batch, self.target, self.loss)
            timelines.append(pipeline.timeline)
        found = samples_of(timelines[1:])
        return gathered({key: median(samples) for key, samples in found.items()})

    def check(self, expected: Mapping[str, Tensor]) -> dict[str, float]:
        """How far each variant's gradients are off. RuntimeError where it is more than rounding, or where no
        process has one.
        """
        errors = {}
        for name, step in self.steps.items():
            assert step is not None, "every process has a part in every schedule"
            for _ in range(2):  # the first agrees on shapes
                clear(self.layers)
                step()
            found = gradients_of(self.layers)
            errors[name] = gradient_error(found, {key: expected[key] for key in found}, name)
            if missing := expected.keys() - gathered(dict.fromkeys(found)):
                raise RuntimeError(f"{name} left no gradient of {min(missing)} in any process")
            clear(self.layers)
        return errors


def gathered(mine: dict[Any, Any]) -> dict[Any, Any]:
    """What all processes have."""
    everyone: list[dict[Any, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {key: value for each in everyone for key, value in each.items()}


def gradients_of(layers: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Of the parameters that have one, by layer and name."""
    return {
        f"{index}.{name}": parameter.grad.clone()
        for index, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


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
