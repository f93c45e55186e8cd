"""A grid on two cores: two replicas of two stages whose layers wait and whose sums take a fixed time, since
there is nothing to compute with on four processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from gpipe_bench.experiments.beyond import engine_turns
from gpipe_bench.pipeline import Kind, Schedule, Timeline, named, replay
from gpipe_bench.pipeline.mesh.grid import Replicas
from gpipe_bench.pipeline.plan.links import Bucket
from gpipe_bench.pipeline.ranks.wire import Transit

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


class _Late:
    """A sum that is not over before the link has carried it."""

    def __init__(self, work: Any, end_s: float) -> None:
        self._work, self._end_s = work, end_s

    def wait(self) -> object:
        self._work.wait()
        engine_turns.wait_until(self._end_s)
        return True


@contextmanager
def slow_sums(seconds: Callable[[int], float]) -> Iterator[None]:
    """Within it, a sum over replicas takes `seconds` of its bytes on a link that carries one at a time."""
    free_s = 0.0
    at_once = Replicas.sum

    def late(self: Replicas, numbers: Tensor) -> Transit:
        nonlocal free_s
        free_s = max(free_s, time.perf_counter()) + seconds(numbers.nbytes)
        return _Late(at_once(self, numbers), free_s)

    with mock.patch.object(Replicas, "sum", late):
        yield


def wait(case: Waits) -> tuple[float, Timeline]:
    """What each process does: the fastest step, with the timeline of its replica."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.functional import mse_loss

    from gpipe_bench.experiments.beyond.engine_turns import Waiting
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
