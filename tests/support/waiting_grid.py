"""A grid on two cores: two replicas of two stages whose layers wait and whose sums take a fixed time, since
there is nothing to compute with on four processes.
"""

from __future__ import annotations

from typing import NamedTuple

from gpipe_bench.pipeline import Kind, Schedule, Timeline, named, replay
from gpipe_bench.pipeline.plan.links import Bucket

LAYERS, SUMMED = 4, 1024  # that wait, on a worker; numbers of a layer's parameter, whose sum is a bucket
FORWARD_S, BACKWARD_S, SUM_S = 0.02, 0.04, 0.04
"""Of a layer that waits, forward and back, and of the sum of its gradient."""


class Waits(NamedTuple):
    """Layers that wait, on two replicas of two workers with four layers each, in a schedule of one stage per
    worker and whole backwards. Steps are taken until one takes no more than `enough_s`, or `num_steps`: what
    else the machine does can only make a step slower.
    """

    schedule: str = "1f1b"
    num_steps: int = 6
    enough_s: float = 0.0

    @property
    def rows(self) -> Schedule:
        """Of two micro-batches."""
        return named(self.schedule, 2, 2)

    def replayed(self, *, overlap: bool = True) -> Timeline:
        """What a step should be, with the sums inside the last backward of a stage, or all behind it."""
        leaving = [Bucket((i + 1) / LAYERS if overlap else 1.0, SUM_S) for i in range(LAYERS)]
        action_s = {Kind.F: LAYERS * FORWARD_S, Kind.B: LAYERS * BACKWARD_S}
        return replay(self.rows, action_s, reductions=[leaving] * 2)

    def measure(self) -> tuple[float, Timeline]:
        """The fastest step of a process for each worker of each replica, which wait side by side: seconds on
        the slowest rank, and the timeline of the first replica.
        """
        from gpipe_bench.pipeline.ranks.launch import launch

        found: list[tuple[float, Timeline]] = launch(wait, 4, self, device="cpu", pin=False)
        return found[0]


def wait(case: Waits) -> tuple[float, Timeline]:
    """What each process does: the fastest step, with the timeline of its replica."""
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.functional import mse_loss

    from gpipe_bench.experiments.paper.timed.engine_turns import Waiting, slow_sums
    from gpipe_bench.pipeline import Pipeline
    from gpipe_bench.planner.timing import time_step

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    layers = [Waiting(SUMMED, FORWARD_S, BACKWARD_S) for _ in range(2 * LAYERS)]
    even = [1.0] * len(layers)
    pipeline = Pipeline(layers, mesh=mesh, num_microbatches=2, schedule=case.rows, cost=even, bucket_bytes=1)
    batch, found = torch.ones(2, 1), list[tuple[float, Timeline]]()
    with slow_sums(lambda num_bytes: SUM_S if num_bytes >= 4 * SUMMED else 0.0):
        for number in range(2 + case.num_steps):
            step_s = torch.tensor(time_step(lambda: pipeline.step(batch, batch, mse_loss), [pipeline]))
            dist.all_reduce(step_s, dist.ReduceOp.MAX)
            step = float(step_s), pipeline.gather_timeline()
            if number >= 2:
                found.append(step)
                if step[0] <= case.enough_s:
                    break
    return min(found, key=lambda step: step[0])
