"""Whether sums over replicas run beside the backward: steps of layers that wait, against their replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench.experiments.schedules.waiting import Waiting, slow_sums
from gpipe_bench.pipeline import Pipeline, devices
from gpipe_bench.pipeline.plan.links import Bucket
from gpipe_bench.pipeline.plan.named import named
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import replay
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.pipeline.ranks.launch import launch

_NUMEL = 1024  # of a layer's parameter; its sum is a bucket
_STEPS_BEFORE = 2


class Case(NamedTuple):
    """Waiting layers on a grid. Times are in seconds: of a layer forward and back, and of the sum of its
    gradient. `schedule` has one stage per worker and does not split the backward. Steps are taken until one
    takes no more than `enough_s`, or `num_steps`: what else the machine does can only make a step slower.
    """

    schedule: str = "gpipe"
    replicas: int = 2
    workers: int = 2
    num_microbatches: int = 2
    layers_per_stage: int = 4
    forward_s: float = 0.02
    backward_s: float = 0.04
    sum_s: float = 0.04
    num_steps: int = 6
    enough_s: float = 0.0

    @property
    def rows(self) -> Schedule:
        """The schedule itself."""
        return named(self.schedule, self.workers, self.num_microbatches)

    def replayed(self, *, overlap: bool = True) -> Timeline:
        """What a step should be, with the sums inside the last backward of a stage, or all behind it."""
        count = self.layers_per_stage
        leaving = [Bucket((i + 1) / count if overlap else 1.0, self.sum_s) for i in range(count)]
        action_s = {Kind.F: count * self.forward_s, Kind.B: count * self.backward_s}
        return replay(self.rows, action_s, reductions=[leaving] * self.workers)


class Found(NamedTuple):
    """One step: seconds from the common begin to the end on the slowest rank, and this replica's timeline."""

    step_s: float
    timeline: Timeline


def timed_steps(
    pipeline: Pipeline, batch: Any, target: Any, loss: Callable[..., torch.Tensor]
) -> Iterator[Found]:
    """Step after step on a grid; all ranks take as many."""
    device = pipeline.stages[0].device
    while True:
        dist.barrier()
        devices.synchronize(device)
        start_s = time.perf_counter()
        pipeline.step(batch, target, loss)
        devices.synchronize(device)
        step_s = torch.tensor(time.perf_counter() - start_s)
        dist.all_reduce(step_s, dist.ReduceOp.MAX)
        found = Found(float(step_s), pipeline.gather_timeline())
        pipeline.zero_grad()
        yield found


def measure(case: Case) -> Found:
    """The fastest step of a process for each worker of each replica, which wait side by side."""
    found: list[Found] = launch(work, case.replicas * case.workers, case, device="cpu", pin=False)
    return found[0]


def work(case: Case) -> Found:
    """What each process does: the fastest step, with the timeline of its replica."""
    mesh = init_device_mesh("cpu", (case.replicas, case.workers), mesh_dim_names=("dp", "pp"))
    layers: list[nn.Module] = [
        Waiting(_NUMEL, case.forward_s, case.backward_s) for _ in range(case.workers * case.layers_per_stage)
    ]
    pipeline = Pipeline(
        layers, mesh=mesh, num_microbatches=case.num_microbatches, schedule=case.rows,
        cost=[1.0] * len(layers), bucket_bytes=1,
    )  # fmt: skip
    batch = torch.ones(case.num_microbatches, 1)
    best: Found | None = None
    with slow_sums(lambda num_bytes: case.sum_s if num_bytes >= 4 * _NUMEL else 0.0):
        steps = timed_steps(pipeline, batch, batch, nn.functional.mse_loss)
        for found in islice(steps, _STEPS_BEFORE, _STEPS_BEFORE + case.num_steps):
            if best is None or found.step_s < best.step_s:
                best = found
                if best.step_s <= case.enough_s:
                    break
    assert best is not None
    return best
