"""When sums over replicas leave, and in which order they add: cases that `test_mesh` runs on four ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from mesh_cases import HOWS
from mesh_grids import UNEVEN, assert_gradients, joint_step, on_grid, own_part
from odd_layers import Picky, TwiceCheckpointed
from ranks import raises
from tiny_models import mlp, mlp_batch, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import Kind, Pipeline
from gpipe_bench.pipeline.mesh.collectives import Collectives
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
        pipeline.step(*own_part(pipeline, parts), mse_loss, sync=False)
        assert sums.call_count == 1 + pipeline.stages[0].is_last
        sums.reset_mock()
        pipeline(own_part(pipeline, parts)[0])
        assert not sums.called


def buckets_leave_inside_the_last_backward() -> None:
    """From the second step on before the backward is over; the timeline of all ranks shows it."""
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
            timeline = pipeline.gather_timeline()
            for stage in range(pipeline.schedule.num_stages):
                spans = [span for span in timeline.collectives if span.stage == stage]
                assert [span.name for span in spans] == [f"reduce {i}" for i in range(len(spans))]
                assert len(spans) > 1
                of_kind = [e for e in timeline.of_stage(stage) if e.action.kind in (Kind.B, Kind.W)]
                for span in spans:
                    assert of_kind[-1].start_s <= span.start_s <= of_kind[-1].end_s
                    assert span.start_s <= span.end_s
                starts_s = [span.start_s for span in spans]
                assert starts_s == sorted(starts_s)
            for stage, reduction in zip(pipeline.stages, reductions, strict=True):
                own = sum(span.stage == stage.index for span in timeline.collectives)
                assert begun[reduction] == (own if step else 0), (schedule, step, stage.index)
        pipeline.close()


def a_tree_gives_the_same_bits_on_every_grid() -> None:
    """Float32 weights after five steps of eight micro-batches, with dropout and normalization."""

    def build() -> nn.Sequential:
        return nn.Sequential(*(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 6))
            for _ in range(4)
        ))  # fmt: skip

    def trained(pipeline: Pipeline) -> dict[str, Tensor]:
        optimizer = torch.optim.RMSprop(pipeline.parameters(), lr=1e-2, momentum=0.9)
        grid = pipeline.grid
        for step in range(5):
            batch, target = mlp_batch(24, dtype=torch.float32, seed=step)
            dp = 1 if grid is None else grid.size("dp")
            parts = list(zip(batch.chunk(dp), target.chunk(dp), strict=True))
            own = (batch, target) if grid is None else own_part(pipeline, parts)
            pipeline.step(*own, mse_loss)
            if step != 2:  # two steps add up
                optimizer.step()
                optimizer.zero_grad()
        pipeline.close()
        return dict(pipeline.named_parameters())

    alone = trained(
        Pipeline(seeded(build, torch.float32), num_stages=1, num_microbatches=8, reduction="tree")
    )
    usual = trained(Pipeline(seeded(build, torch.float32), num_stages=1, num_microbatches=8))
    assert any(not torch.equal(alone[name], usual[name]) for name in alone)  # there is something to see
    for dp, pp in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1)):
        for schedule, remat in (("gpipe", "always"), ("1f1b", "never"), ("zb-h1", "never")):
            layers = seeded(build, torch.float32)
            pipeline = on_grid(dp, pp, layers, 8 // dp, schedule=schedule, remat=remat, reduction="tree")
            for name, parameter in trained(pipeline).items():
                assert torch.equal(parameter, alone[name]), (dp, pp, schedule, name)


def a_tree_is_transparent() -> None:
    """Uneven shares, parameters without a gradient, weights that cannot wait for W."""

    def build() -> nn.Sequential:
        return nn.Sequential(Picky(), TwiceCheckpointed(), nn.Linear(6, 6), Picky(), nn.Linear(6, 6))

    parts = [mlp_batch(UNEVEN[r], seed=r) for r in range(2)]
    parts[1] = (parts[1][0] + 10, parts[1][1])
    for schedule, remat, _ in HOWS:
        model = seeded(build)
        pipeline = on_grid(2, 2, seeded(build), 3, schedule=schedule, remat=remat, reduction="tree")
        for step in range(2):
            plain = joint_step(model, parts, mse_loss, 3, step=step)
            pipeline.step(*own_part(pipeline, parts), mse_loss)
            assert_gradients(pipeline, plain)
        with raises(ValueError, "reduction='tree' sums in every step"):
            pipeline.step(*own_part(pipeline, parts), mse_loss, sync=False)
        pipeline.close()


CASES = (
    collectives_of_a_step,
    buckets_leave_inside_the_last_backward,
    a_tree_gives_the_same_bits_on_every_grid,
    a_tree_is_transparent,
)
