"""The layers of a model in one process, what trains them, and the reference that tells how fast it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn

from gpipe_bench.pipeline import Pipeline, devices
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.schedules.known import named
from gpipe_bench.planner.model import Subject
from gpipe_bench.planner.spending import About, Budget
from gpipe_bench.planner.timing import time_step

NUM_MICROBATCHES = 3  # of a probe: the first makes gradients, two add to them
ALONE = 2  # coarse stages where there is one process
LEARNING_RATE = 1e-6

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
    sharded: bool = True  # whether parameters may be divided, too (fsdp)
    budget: Budget = Budget()
    matters: Callable[[Sequence[Any]], set[About]] | None = None  # what is timed again; of all `Probed`


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
            optimizer = self._optimizers[index]
            if optimizer is not None:
                devices.synchronize(device)
                start_s = perf_counter()
                optimizer.step()
                devices.synchronize(device)
                found[index] = perf_counter() - start_s
        return found


class Bench:
    """The layers in this process, what trains them, and the reference."""

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
        self.reference_s = 0.0  # once the probes are over

    def fresh_layers(self) -> list[nn.Module]:
        """Layers with the same weights in every process."""
        torch.manual_seed(self.job.seed)
        layers, self.loss = self.job.subject.build()
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
        """A pipeline of the layers, or of these, and its step, `over` a group or a mesh of processes, as
        `Pipeline` has them; in this one alone if not given. Each replica has a mini-batch of its own.
        """
        number = schedule.num_microbatches
        pipeline = Pipeline(
            layers or self.layers,
            num_stages=schedule.num_stages,
            num_microbatches=number,
            schedule=schedule,
            cost=[1 / len(span) for span in cut for _ in span],
            **(over or {}),
        )
        if pipeline.partition != tuple(cut):
            raise RuntimeError(f"the pipeline was cut into {pipeline.partition} and not into {tuple(cut)}")
        return pipeline, self.step(pipeline, size, number)

    def step(self, pipeline: Pipeline, size: int, number: int) -> Callable[[], object]:
        """A step of it, with so many micro-batches of that size."""
        batch, target = self.job.subject.batch(size * number, str(self.device))
        return partial(pipeline.step, batch, target, self.loss)

    def reference(self) -> int:
        """Takes the reference step, in all processes at once; its number."""
        self.references.append(time_step(self._reference, self.layers, device=self.device))
        return len(self.references) - 1

    def speed(self, before: int, reference_s: float) -> float:
        """How many times as long the reference took around what followed number `before`."""
        return (self.references[before] + self.references[before + 1]) / 2 / reference_s

    def everyone(self, mine: Any) -> list[Any]:
        """What all processes bring, in their order."""
        if self.processes == 1:
            return [mine]
        found: list[Any] = [None] * self.processes
        dist.all_gather_object(found, mine)
        return found
