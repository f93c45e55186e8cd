"""When sums over replicas leave, and in which order they add: cases that `test_mesh` runs on four ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

from mesh_grids import on_grid, own_part
from tiny_models import mlp, mlp_batch, seeded
from torch import nn

from gpipe_bench.pipeline.mesh.grid import Collectives
from gpipe_bench.pipeline.mesh.reduce import Buckets

mse_loss = nn.functional.mse_loss


def collectives_of_a_step() -> None:
    """A bucket each, the loss, and where the loss is made the number of examples; none in evaluation."""
    parts = [mlp_batch(4, seed=r) for r in range(2)]
    pipeline = on_grid(2, 2, seeded(mlp), 4, schedule="1f1b", bucket_bytes=2 * 42 * 8)
    with mock.patch.object(Collectives, "sum", autospec=True, side_effect=Collectives.sum) as sums:
        for _ in range(3):
            sums.reset_mock()
            pipeline.step(*own_part(pipeline, parts), mse_loss)
            buckets = 2  # four layers of 42 numbers, two in each
            assert sums.call_count == buckets + 1 + pipeline.stages[0].is_last
        sums.reset_mock()
        pipeline(own_part(pipeline, parts)[0])
        assert not sums.called


def buckets_leave_inside_the_last_backward() -> None:
    """Before the backward is over, where several are full by then."""
    parts = [mlp_batch(4, seed=r) for r in range(2)]
    begun: dict[object, int] = {}  # by stage, when the last backward is over and the rest has not been sent

    def after(*arguments: object, last: bool, of: Buckets, whole: Callable[..., None]) -> None:
        if last:
            begun[of] = sums.call_count - begun["before"]
        whole(*arguments, last=last)
        begun["before"] = sums.call_count

    for schedule in ("gpipe", "1f1b", "zb-h1", "interleaved"):
        pipeline = on_grid(2, 2, seeded(mlp), 2, schedule=schedule, bucket_bytes=42 * 8)
        reductions = [stage.reduction for stage in pipeline.stages]
        for reduction in reductions:
            reduction.after = partial(after, of=reduction, whole=reduction.after)
        for step in range(3):
            begun.clear()
            with mock.patch.object(Collectives, "sum", autospec=True, side_effect=Collectives.sum) as sums:
                pipeline.step(*own_part(pipeline, parts), mse_loss)
            for reduction in reductions:
                assert begun[reduction] > 1, (schedule, step)
        pipeline.close()


CASES = (
    collectives_of_a_step,
    buckets_leave_inside_the_last_backward,
)
