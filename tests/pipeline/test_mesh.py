"""Pipelines beside each other on grids of four processes: which parameters are summed, what is agreed on, and
when sums leave. Every replica gets a share of the batch of its own; only the first stage's batch and the last
stage's target count. That training is the plain model's is the table of `test_over_processes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from case_runner import Outcomes, assert_passed, named
from odd_layers import Picky
from ranks import (
    PATIENCE_S,
    UNEVEN,
    Part,
    Ranks,
    assert_gradients,
    assert_loss,
    assert_same_weights,
    grid,
    joint_step,
    on,
    own_part,
    raises,
    transformer,
    whole,
    words,
)
from tiny_models import everything, mlp, mlp_batch, seeded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gpipe_bench.models.parallel import tensor_parallel
from gpipe_bench.models.tasks import token_loss
from gpipe_bench.pipeline import Action, Pipeline
from gpipe_bench.pipeline.mesh.grid import Replicas

pytestmark = pytest.mark.processes  # four at a time
cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss


def replicas(layers: Any, num_microbatches: int = 3, **options: Any) -> Pipeline:
    """Two of two stages each."""
    return on(grid(dp=2, pp=2), layers, num_microbatches, **{"timeout_s": PATIENCE_S, **options})


def uneven() -> list[Part]:
    return [mlp_batch(UNEVEN[r], seed=r) for r in range(2)]


# Gradients that are summed, and parameters


def parameters_without_a_gradient() -> None:
    """A gradient on one replica is there on all; where there is none, there is none afterwards."""

    def build() -> nn.Sequential:
        frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        return nn.Sequential(Picky(), frozen, nn.Linear(6, 6), nn.Linear(6, 6))

    for loud in (None, 0, 1):
        parts = [mlp_batch(4, seed=r) for r in range(2)]
        if loud is not None:
            parts[loud] = (parts[loud][0] + 10, parts[loud][1])
        model, pipeline = seeded(build), replicas(seeded(build), 2, schedule="zb-h1")
        for step in range(3):
            wanted = joint_step(model, parts, mse_loss, 2, step=step)
            pipeline.step(*own_part(pipeline, parts), mse_loss)
            assert_gradients(pipeline, wanted)
            assert (wanted.gradients["0.sometimes.weight"] is None) == (loud is None)
            if step == 1:
                for each in (model, pipeline):
                    each.zero_grad()
                    for name, parameter in each.named_parameters():
                        parameter.requires_grad_(not name.startswith("2."))
                pipeline.refresh()


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
    parts, replica = uneven(), grid(dp=2, pp=2).get_local_rank("dp")

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
        pipeline = replicas(layers, schedule=schedule)
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
            wanted = joint_step(model, parts, loss if step else mse_loss, 3, step=step)
            assert_loss(pipeline.step(*own_part(pipeline, parts), ours if step else mse_loss), wanted)
            assert_gradients(pipeline, wanted)
            if step and pipeline.stages[0].is_last:
                for a, b in zip(ours.parameters(), loss.parameters(), strict=True):
                    torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-14)
            for each in (model, pipeline, loss, ours):
                each.zero_grad()


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
        pipeline = on(mesh, layers, 2, num_stages=4, schedule="interleaved")
        change(layers, mesh.get_local_rank(dimension))
        with raises((ValueError, RuntimeError), text):  # where it is found, and of the others
            pipeline.step(*own_part(pipeline, parts), loss_of(layers))

    def later(layers: nn.Sequential, replica: int) -> None:
        for layer in layers:
            layer[0].later = nn.Parameter(torch.zeros(1 + replica, dtype=torch.float64))

    def tied(layers: nn.Sequential, replica: int) -> None:
        layers[-1][0].bias = layers[2][0].bias

    factor = nn.Parameter(torch.ones((), dtype=torch.float64))
    refused("that none of its layers has", lambda _: lambda output, target: mse_loss(output * factor, target))
    refused("has come to another one too", change=tied)
    refused("another process", lambda layers: TrainedLoss(layers[0][0].bias))
    refused("been given different parameters", change=later)
    refused("not divided along 'fsdp'", lambda layers: TrainedLoss(), dimension="fsdp")


# What replicas agree on


def averages_follow_all_replicas() -> None:
    """Batch normalization's, of uneven shares of the batch; and they are the same bits everywhere."""

    def build() -> nn.Sequential:
        first, last = nn.BatchNorm1d(3, momentum=0.5), nn.BatchNorm1d(2, momentum=0.5)
        return nn.Sequential(first, nn.Linear(3, 2), last, nn.Linear(2, 1))

    pipeline = replicas(seeded(build), 2)
    batches = [mlp_batch(size, 3, seed=size)[0] + size for size in (5, 9)]
    own, _ = own_part(pipeline, [(batch, None) for batch in batches])
    pipeline.step(own, None, lambda output, target: output.square().mean())
    norm = next(module for module in pipeline.children() if isinstance(module, nn.BatchNorm1d))
    if pipeline.stages[0].is_first:
        both = torch.cat(batches)
        torch.testing.assert_close(norm.running_mean, both.mean(0) / 2, rtol=1e-11, atol=1e-14)
        torch.testing.assert_close(norm.running_var, (1 + both.var(0)) / 2, rtol=1e-11, atol=1e-14)
    of_ranks = pipeline.gather_all(norm.running_var)
    assert torch.equal(of_ranks[0], of_ranks[2])
    assert torch.equal(of_ranks[1], of_ranks[3])


def replicas_begin_alike() -> None:
    """With the first one's values, whatever they were built with; who builds something else is told."""
    replica = grid(dp=2, pp=2).get_local_rank("dp")
    model = seeded(everything, torch.float32, seed=replica)
    if replica:
        model[1].norm.running_mean.fill_(7.0)
    assert_same_weights(replicas(model, 2), seeded(everything, torch.float32).state_dict())
    for layers, num_microbatches in ((seeded(mlp), 2 + replica), (seeded(lambda: mlp(6 + replica)), 2)):
        with raises(ValueError, "replica 1 builds another pipeline than replica 0"):
            replicas(layers, num_microbatches)


def an_infinite_gradient_on_one_rank_is_seen_by_all() -> None:
    """Nobody takes the step, all have the same scale, the next step is taken: of a pipeline, one of whose
    ranks has nothing to train, of replicas, and of parameters that are divided.
    """

    def linear() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh())

    in_parts = seeded(transformer, torch.float32)
    tensor_parallel(in_parts, grid(pp=2, tp=2)["tp"])
    few, many, of_words = mlp_batch(4, dtype=torch.float32), [words(4)] * 2, token_loss
    for pipeline, parts, loss_fn, culprit in (
        (Ranks().pipeline(seeded(linear, torch.float32)), [few], mse_loss, 1),
        (replicas(seeded(linear, torch.float32)), [few] * 2, mse_loss, 3),
        (on(grid(fsdp=2, pp=2), seeded(transformer, torch.float32)), many, of_words, 0),
        (on(grid(pp=2, tp=2), in_parts), many, of_words, 0),
    ):
        parameters = list(pipeline.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
        scaler = pipeline.scaler(init_scale=8.0)
        for spoils in (True, False):
            before = [whole(parameter).detach().clone() for parameter in parameters]
            spoiled = parameters[0] if spoils and dist.get_rank() == culprit else None
            if spoiled is not None and not isinstance(spoiled, DTensor):
                hook = spoiled.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
            pipeline.step(*own_part(pipeline, parts), loss_fn, scaler=scaler)
            if isinstance(spoiled, DTensor):
                spoiled.grad.to_local()[0] = float("inf")
            elif spoiled is not None:
                hook.remove()
            scaler.step(optimizer)
            scaler.update()
            pipeline.zero_grad()
            same = [torch.equal(a, whole(b)) for a, b in zip(before, parameters, strict=True)]
            assert all(same) == (spoils or not same)
            assert scaler.get_scale() == 4.0
    with raises(ValueError, "make it with pipeline.scaler() on every rank"):
        pipeline.step(*own_part(pipeline, parts), loss_fn, scaler=torch.amp.GradScaler("cpu"))


# Sums over replicas


def collectives_of_a_step() -> None:
    """A bucket each, the loss, and where the loss is made the number of examples; none in evaluation."""
    parts = [mlp_batch(4, seed=r) for r in range(2)]
    pipeline = replicas(seeded(mlp), 4, schedule="1f1b", bucket_bytes=2 * 42 * 8)
    for _ in range(2):
        with mock.patch.object(Replicas, "sum", autospec=True, side_effect=Replicas.sum) as sums:
            pipeline.step(*own_part(pipeline, parts), mse_loss)
        assert sums.call_count == 2 + 1 + pipeline.stages[0].is_last  # four layers of 42 numbers, two in each
    with mock.patch.object(Replicas, "sum", autospec=True) as sums:
        pipeline(own_part(pipeline, parts)[0])
    assert not sums.called


def buckets_leave_inside_the_last_backward() -> None:
    """Several of a stage, before it is over; from the second step on."""
    parts = [mlp_batch(4, seed=r) for r in range(2)]
    for schedule in ("gpipe", "zb-h1", "interleaved"):
        pipeline = replicas(seeded(mlp), 2, schedule=schedule, bucket_bytes=42 * 8)
        left: dict[int, int] = {}  # while each stage's last action is taken

        @contextmanager
        def observe(action: Action, left: dict[int, int] = left) -> Iterator[None]:
            before = sums.call_count
            yield
            left[action.stage] = sums.call_count - before

        for _ in range(2):
            with mock.patch.object(Replicas, "sum", autospec=True, side_effect=Replicas.sum) as sums:
                pipeline.step(*own_part(pipeline, parts), mse_loss, observe=observe)
        assert all(number > 1 for number in left.values()), (schedule, left)


# Failures and the end


def a_replica_that_fails() -> None:
    """The others say which process it was, also one that only waits for another rank of its own pipeline."""
    parts = [mlp_batch(4, seed=r) for r in range(2)]
    pipeline = replicas([nn.Linear(6, 6).double() for _ in range(4)], 2)
    pipeline.step(*own_part(pipeline, parts), mse_loss)
    if dist.get_rank() == 3:

        def broken(*_: object) -> None:
            raise RuntimeError("Connection reset by peer")  # of the user's own, which no rank is to blame for

        next(pipeline.children()).register_forward_pre_hook(broken)
    with raises(RuntimeError, "dp=1 pp=1, action 1F0 on rank 3 failed: RuntimeError: Connection reset"):
        pipeline.step(*own_part(pipeline, parts), mse_loss)
    with raises(RuntimeError, "failed before"):
        pipeline.step(*own_part(pipeline, parts), mse_loss)


def a_replica_that_takes_fewer_steps_ends_the_others() -> None:
    """Long before the pipeline's timeout. The mesh is the pipeline's own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipeline = on(mesh, nn.Sequential(*(nn.Linear(6, 6) for _ in range(2))), 2, timeout_s=600.0)
    for _ in range(2):
        pipeline.step(torch.ones(4, 6), torch.ones(4, 6), mse_loss)
    if pipeline.grid.replica:
        pipeline.close()
    else:
        with raises(RuntimeError, "where no replica has failed, give all of them equally many mini-batches"):
            pipeline.step(torch.ones(4, 6), torch.ones(4, 6), mse_loss)


# Those that leave a mesh with groups that are cut come last.
CASES = named(
    parameters_without_a_gradient, parameters_that_come_later, parameters_that_nobody_would_sum,
    averages_follow_all_replicas, replicas_begin_alike,
    an_infinite_gradient_on_one_rank_is_seen_by_all, collectives_of_a_step,
    buckets_leave_inside_the_last_backward, a_replica_that_fails,
    a_replica_that_takes_fewer_steps_ends_the_others,
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, case)
