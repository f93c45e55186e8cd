"""What four processes do together on grids of replicas and pipelines; `test_mesh` starts them once and
reports each case as a test.

Every replica gets a share of the batch of its own, and only the first stage's batch and the last stage's
target count.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from mesh_grids import CLOSE, UNEVEN, assert_gradients, assert_steps, grid, joint_step, on_grid, own_part
from odd_layers import Picky
from ranks import TIMEOUT_S, raises
from tiny_models import AMOEBANET, everything, everything_batch, mlp, mlp_batch, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gpipe_bench import models
from gpipe_bench.pipeline import Pipeline

cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss
TRANSFORMER = {
    "num_layers": 4, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "vocab_size": 50, "seq_len": 6,
    "dropout": 0.2,
}  # fmt: skip
HOWS = (
    ("gpipe", "always", None), ("gpipe", "never", None), ("1f1b", "always", None), ("1f1b", "never", None),
    ("zb-h1", "never", None), ("zb-h1", "always", None), ("interleaved", "never", None),
    ("zb-v", "always", None),
)  # fmt: skip


def transparency(dp: int, pp: int) -> None:
    """The first step's buckets leave after the last backward, the second step's within it."""
    parts = [everything_batch(UNEVEN[r], seed=r) for r in range(dp)]
    assert_steps(grid(dp=dp, pp=pp), everything, parts, cross_entropy, HOWS)


def transparency_2_1() -> None:
    transparency(2, 1)


def transparency_1_2() -> None:
    transparency(1, 2)


def transparency_2_2() -> None:
    transparency(2, 2)


def transparency_4_1() -> None:
    transparency(4, 1)


def of_a_model(name: str, options: dict, dtype: torch.dtype, rtol: float) -> None:
    """Normalization begins with the averages of the model."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for size in (5, 3):
        batch, target = models.example_batch(name, size, generator=generator, **options)
        parts.append((batch.to(dtype) if batch.is_floating_point() else batch, target))
    build, loss_fn = (lambda: models.MODELS[name](**options)), models.loss_fn(name, **options)
    hows = (("1f1b", "always", None), ("zb-h1", "never", None))
    assert_steps(
        grid(dp=2, pp=2), build, parts, loss_fn, hows, dtype=dtype, rtol=rtol, num_microbatches=2,
        bucket_bytes=1 << 14,
    )  # fmt: skip


def short_batches() -> None:
    """Shares of fewer examples than micro-batches, on one replica or on both, between others."""
    for schedule in ("1f1b", "dualpipe-v"):
        pipeline = on_grid(2, 2, seeded(mlp), 3, schedule=schedule)
        for step, sizes in enumerate(((5, 4), (2, 5), (1, 2), (4, 3))):
            parts = [mlp_batch(size, seed=r) for r, size in enumerate(sizes)]
            plain = joint_step(seeded(mlp), parts, mse_loss, 3, step=step)
            loss = pipeline.step(*own_part(pipeline, parts), mse_loss)
            torch.testing.assert_close(loss, plain.loss, **CLOSE)
            assert_gradients(pipeline, plain)
            pipeline.zero_grad()
        pipeline.close()


def amoebanet() -> None:
    of_a_model("amoebanet-d", AMOEBANET, torch.float64, 1e-12)


def transformer() -> None:
    of_a_model("transformer-lm", TRANSFORMER, torch.float64, 1e-13)


def transformer_float32() -> None:
    of_a_model("transformer-lm", TRANSFORMER, torch.float32, 1e-5)


def gradients_of_earlier_steps_count_once() -> None:
    """Steps without `zero_grad`."""
    parts = [mlp_batch(UNEVEN[r], seed=r) for r in range(2)]
    model = seeded(mlp)
    pipeline = on_grid(2, 2, seeded(mlp), 3, schedule="1f1b")
    for step in range(3):
        plain = joint_step(model, parts, mse_loss, 3, step=step)
        loss = pipeline.step(*own_part(pipeline, parts), mse_loss)
        torch.testing.assert_close(loss, plain.loss, **CLOSE)  # of all replicas, in any case
    assert_gradients(pipeline, plain)
    pipeline.close()


def parameters_without_a_gradient() -> None:
    """A gradient on one replica is there on all; where there is none, there is none afterwards."""
    for loud in (None, 0, 1):
        parts = [mlp_batch(4, seed=r) for r in range(2)]
        if loud is not None:
            parts[loud] = (parts[loud][0] + 10, parts[loud][1])

        def build() -> nn.Sequential:
            frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
            return nn.Sequential(Picky(), frozen, nn.Linear(6, 6), nn.Linear(6, 6))

        model = seeded(build)
        pipeline = on_grid(2, 2, seeded(build), 2, schedule="zb-h1")
        for step in range(3):
            plain = joint_step(model, parts, mse_loss, 2, step=step)
            pipeline.step(*own_part(pipeline, parts), mse_loss)
            assert_gradients(pipeline, plain)
            assert (plain.gradients["0.sometimes.weight"] is None) == (loud is None)
            if step == 1:
                pipeline.zero_grad(), model.zero_grad()
        for each in (model, pipeline):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(name.startswith("1."))
        pipeline.refresh()
        pipeline.zero_grad(), model.zero_grad()
        pipeline.step(*own_part(pipeline, parts), mse_loss)
        assert_gradients(pipeline, joint_step(model, parts, mse_loss, 2, step=3))
        pipeline.close()


class Adapted(nn.Module):
    """Gets a parameter when it is built already."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * self.factor if hasattr(self, "factor") else y


class TrainedLoss(nn.Module):
    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 1.5, dtype=torch.float64)) if weight is None else weight
        self.shift = nn.Parameter(torch.full((6,), 0.1, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output * self.weight, target) + self.shift.sum()


def parameters_that_come_later() -> None:
    """In a layer, in the place of another one, and with the loss: all begin alike and are summed."""
    parts = [mlp_batch(UNEVEN[r], seed=r) for r in range(2)]
    replica = grid(dp=2, pp=2).get_local_rank("dp")

    def build() -> nn.Sequential:
        return nn.Sequential(Adapted(6), nn.Linear(6, 6), Adapted(6), nn.Linear(6, 6))

    def change(layers: nn.Sequential, step: int, value: float) -> None:
        if step == 1:  # behind another one
            for layer in (layers[0], layers[2]):
                layer.factor = nn.Parameter(torch.full((6,), value, dtype=torch.float64))
        if step == 2:
            layers[1].bias = nn.Parameter(layers[1].bias.detach() + value)

    for schedule in ("1f1b", "zb-h1"):
        model, layers = seeded(build), seeded(build)
        pipeline = on_grid(2, 2, layers, 3, schedule=schedule)
        loss, ours = TrainedLoss(), TrainedLoss()
        with torch.no_grad():
            ours.shift += replica
        for step in range(4):
            change(model, step, 0.5)
            change(layers, step, 0.5 + replica)  # what the first replica has counts
            if step == 3:
                for each in (model, pipeline):
                    values = {name: value + 0.1 for name, value in each.state_dict().items()}
                    each.load_state_dict(values, assign=True)
            plain = joint_step(model, parts, loss if step else mse_loss, 3, step=step)
            found = pipeline.step(*own_part(pipeline, parts), ours if step else mse_loss)
            torch.testing.assert_close(found, plain.loss, **CLOSE)
            assert_gradients(pipeline, plain, rtol=1e-12)
            if step and pipeline.stages[0].is_last:
                for a, b in zip(ours.parameters(), loss.parameters(), strict=True):
                    torch.testing.assert_close(a.grad, b.grad, **CLOSE)
            for each in (model, pipeline, loss, ours):
                each.zero_grad()
            pipeline(own_part(pipeline, parts)[0])
        pipeline.close()


def parameters_that_nobody_would_sum() -> None:
    """Are refused, on every rank. Each mesh is the pipeline's own and ends with the step."""
    parts = [mlp_batch(4, seed=r) for r in range(2)]

    def refused(
        text: str,
        loss_of: Callable[[nn.Sequential], Callable[..., Tensor]] = lambda layers: mse_loss,
        change: Callable[[nn.Sequential, int], object] = lambda layers, replica: None,
        dimension: str = "dp",
    ) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(dimension, "pp"))
        layers = seeded(mlp)
        pipeline = Pipeline(
            layers, mesh=mesh, num_microbatches=2, num_stages=4, schedule="interleaved",
            cost=[1] * len(layers), timeout_s=TIMEOUT_S,
        )  # fmt: skip
        change(layers, mesh.get_local_rank(dimension))
        with raises((ValueError, RuntimeError), text):  # where it is found, and of the others
            pipeline.step(*own_part(pipeline, parts), loss_of(layers))

    def shorter(layers: nn.Sequential, replica: int) -> None:
        for layer in layers:
            layer[0].later = nn.Parameter(torch.zeros(1 + replica, dtype=torch.float64))

    def tied(layers: nn.Sequential, replica: int) -> None:
        layers[-1][0].bias = layers[2][0].bias

    def later(layers: nn.Sequential, replica: int) -> None:
        for layer in layers:
            layer[0].later = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    factor = nn.Parameter(torch.ones((), dtype=torch.float64))
    refused("that none of its layers has", lambda _: lambda output, target: mse_loss(output * factor, target))
    refused("has come to another one too", lambda layers: TrainedLoss(layers[2][0].bias))
    refused("has come to another one too", change=tied)
    refused("another process", lambda layers: TrainedLoss(layers[0][0].bias))
    refused("been given different parameters", change=shorter)
    refused("not divided along 'fsdp'", change=later, dimension="fsdp")
    refused("not divided along 'fsdp'", lambda layers: TrainedLoss(), dimension="fsdp")


def averages_follow_all_replicas() -> None:
    """Batch normalization's, of uneven shares of the batch; and they are the same bits everywhere."""

    def build() -> nn.Sequential:
        return nn.Sequential(
            nn.BatchNorm1d(3, momentum=0.5), nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=0.5), nn.Linear(2, 1)
        )

    pipeline = on_grid(2, 2, seeded(build), 2)
    batches = [torch.randn(size, 3, dtype=torch.float64) + size for size in (5, 9)]
    for batch in batches:
        dist.broadcast(batch, 0)
    own, _ = own_part(pipeline, [(batch, None) for batch in batches])
    pipeline.step(own, None, lambda output, target: output.square().mean())
    if pipeline.stages[0].is_first:
        both = torch.cat(batches)
        norm = pipeline.get_submodule("0")
        torch.testing.assert_close(norm.running_mean, both.mean(0) / 2, **CLOSE)
        torch.testing.assert_close(norm.running_var, (1 + both.var(0)) / 2, **CLOSE)
    norm = next(module for module in pipeline.children() if isinstance(module, nn.BatchNorm1d))
    everywhere: list[Tensor] = [torch.empty_like(norm.running_var) for _ in range(2)]
    dist.all_gather(everywhere, norm.running_var, group=pipeline.grid.batch_group)
    assert torch.equal(*everywhere)


def replicas_begin_alike() -> None:
    """With the first one's values, whatever they were built with; who builds something else is told."""
    replica = grid(dp=2, pp=2).get_local_rank("dp")
    model = seeded(everything, torch.float32, seed=replica)
    if replica:
        model[1].norm.running_mean.fill_(7.0)
    pipeline = on_grid(2, 2, model, 2)
    wanted = seeded(everything, torch.float32).state_dict()
    for name, value in pipeline.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    with raises(ValueError, "replica 1 builds another pipeline than replica 0"):
        on_grid(2, 2, seeded(mlp), 2 + replica)
    with raises(ValueError, "replica 1 builds another pipeline than replica 0"):
        on_grid(2, 2, seeded(lambda: mlp(6 + replica)), 2)


def clipping() -> None:
    parts = [mlp_batch(UNEVEN[r], seed=r) for r in range(2)]
    model, pipeline = seeded(mlp), on_grid(2, 2, seeded(mlp), 3)
    plain = joint_step(model, parts, mse_loss, 3)
    pipeline.step(*own_part(pipeline, parts), mse_loss)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(pipeline.clip_grad_norm_(0.01), norm, **CLOSE)
    plain.gradients = {name: p.grad for name, p in model.named_parameters()}
    assert_gradients(pipeline, plain, rtol=1e-12)


def one_decision_for_all_scalers() -> None:
    """An infinite gradient on one rank of one replica: nobody takes the step, all have the same scale."""
    parts = [mlp_batch(4, seed=r) for r in range(2)]
    pipeline = on_grid(2, 2, seeded(mlp), 2)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    scaler = pipeline.scaler(init_scale=64.0, growth_interval=100)
    for step, culprit in enumerate((None, 1, 2, 3)):
        handle = None
        if dist.get_rank() == culprit:
            broken = next(pipeline.parameters())
            handle = broken.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
        before = [parameter.detach().clone() for parameter in pipeline.parameters()]
        pipeline.step(*own_part(pipeline, parts), mse_loss, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = [not torch.equal(old, new) for old, new in zip(before, pipeline.parameters(), strict=True)]
        assert any(changed) == all(changed) == (culprit is None)
        assert scaler.get_scale() == 64.0 / 2**step
        if handle is not None:
            handle.remove()


def a_replica_that_fails() -> None:
    """The others say which process it was, also one that only waits for another rank of its own pipeline."""
    rank = dist.get_rank()
    layers: list[nn.Module] = [nn.Linear(6, 6).double() for _ in range(4)]
    pipeline = on_grid(2, 2, layers, 2)
    parts = [mlp_batch(4, seed=r) for r in range(2)]
    pipeline.step(*own_part(pipeline, parts), mse_loss)
    if rank == 3:

        def broken(*_: object) -> None:
            raise RuntimeError("Connection reset by peer")  # of the user's own, which no rank is to blame for

        next(pipeline.children()).register_forward_pre_hook(broken)
    with raises(RuntimeError, "dp=1 pp=1, action 1F0 on rank 3 failed: RuntimeError: Connection reset"):
        pipeline.step(*own_part(pipeline, parts), mse_loss)
    with raises(RuntimeError, "failed before"):
        pipeline.step(*own_part(pipeline, parts), mse_loss)


def a_closed_pipeline_leaves_nothing_open() -> None:
    """No sockets of gloo's, however many pipelines a grid has had."""
    open_files = []
    for _ in range(4):
        pipeline = on_grid(2, 2, seeded(mlp), 2)
        pipeline.step(*own_part(pipeline, [mlp_batch(4, seed=r) for r in range(2)]), mse_loss)
        pipeline.gather_all(None)
        pipeline.close()
        pipeline.close()  # as a `with` block does behind it
        del pipeline
        dist.barrier()
        open_files.append(len(list(Path("/proc/self/fd").iterdir())))
    # The first opens what a process has once.
    assert open_files[-1] <= max(open_files[:2]), open_files


CASES = (
    transparency_2_1,
    transparency_1_2,
    transparency_2_2,
    transparency_4_1,
    short_batches,
    amoebanet,
    transformer,
    transformer_float32,
    gradients_of_earlier_steps_count_once,
    parameters_without_a_gradient,
    parameters_that_come_later,
    averages_follow_all_replicas,
    replicas_begin_alike,
    clipping,
    one_decision_for_all_scalers,
    parameters_that_nobody_would_sum,
    a_closed_pipeline_leaves_nothing_open,
    a_replica_that_fails,
)
