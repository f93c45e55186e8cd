"""A pipeline computes what the plain model computes: every output element, the gradient of every parameter.

Compared one by one in float64, never as a sum: a sum hides permuted and cancelling errors.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from covering import pairwise
from tiny_models import (
    CapturedLoss,
    Plain,
    copy_of,
    everything,
    everything_batch,
    mlp,
    mlp_batch,
    plain_step,
    seeded,
)
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.named import NAMED, SCHEDULES
from gpipe_bench.pipeline.plan.remat import REMAT_MODES
from gpipe_bench.pipeline.transport import InProcess

TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}
cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss


@functools.cache
def reference(num_microbatches: int, batch_size: int) -> tuple[nn.Sequential, Plain]:
    """The model after a plain step (its batch-normalization buffers must not be looked at) and the step's
    result.
    """
    model = seeded(everything)
    batch, target = everything_batch(batch_size)
    return model, plain_step(model, batch, target, cross_entropy, num_microbatches)


@pytest.mark.parametrize(
    ("num_microbatches", "num_stages", "remat", "schedule"),
    pairwise(
        (1, 2, 4, 7, 8), (1, 2, 3, 4, 8), REMAT_MODES, tuple(SCHEDULES), keep=[(4, 3, "always", "gpipe")]
    ),
)
def test_outputs_and_gradients_equal_the_plain_model(
    num_microbatches: int, num_stages: int, remat: str, schedule: str
) -> None:
    batch_size = 3 + num_microbatches  # never divisible, and with single examples where M > 3
    _, plain = reference(num_microbatches, batch_size)
    batch, target = everything_batch(batch_size)
    pipeline = Pipeline(
        seeded(everything),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule=schedule,
        remat=remat,
        cost=[1] * 12,
    )
    loss_fn = CapturedLoss(cross_entropy)

    loss = pipeline.step(batch, target, loss_fn)

    torch.testing.assert_close(loss, plain.loss, **TOLERANCE)
    for output, wanted in zip(loss_fn.outputs, plain.outputs, strict=True):
        torch.testing.assert_close(output, wanted, **TOLERANCE)
    gradients = {name: p.grad for name, p in pipeline.named_parameters()}
    assert gradients.keys() == plain.gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, plain.gradients[name], **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("schedule", [*NAMED, "auto"])
def test_a_short_mini_batch_goes_in_as_many_micro_batches_as_it_has_examples(schedule: str) -> None:
    """Between others, trained and evaluated; `remat` lists micro-batches that it does not have."""
    num_stages = 2 * (NAMED[schedule].stages_per_worker or 2) if schedule in NAMED else 2
    remat = [*["always"] * (num_stages - 1), (0, 2, 5)]
    pipeline = Pipeline(
        seeded(mlp), num_stages=num_stages, num_microbatches=6, schedule=schedule, remat=remat, cost=[1] * 8
    )
    for step, size in enumerate((7, 5, 1, 4, 6)):
        batch, target = mlp_batch(size, seed=step)
        count = min(size, 6)
        plain = plain_step(seeded(mlp), batch, target, mse_loss, count, step=step)
        torch.testing.assert_close(pipeline.step(batch, target, mse_loss), plain.loss, **TOLERANCE)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.gradients[name], **TOLERANCE)
        assert {event.action.microbatch for event in pipeline.timeline.events} == set(range(count))
        pipeline.zero_grad()
        assert len(pipeline(batch)) == size


@pytest.mark.parametrize("cuts", [*((first, first + 1) for first in range(1, 11)), (1, 11)], ids=str)
def test_cuts_into_three_stages_at_every_layer(cuts: tuple[int, int]) -> None:
    """Every layer's output crosses each of the two boundaries, and every layer is a stage of its own."""
    batch, target = everything_batch(6)
    _, plain = reference(3, 6)
    pipeline = Pipeline(
        seeded(everything),
        num_microbatches=3,
        remat="except_last",
        partition=[len(range(*pair)) for pair in itertools.pairwise((0, *cuts, 12))],
    )
    assert [span.start for span in pipeline.partition] == [0, *cuts]

    pipeline.step(batch, target, cross_entropy)

    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.gradients[name], **TOLERANCE)


@pytest.mark.parametrize("num_microbatches", [1, 3, 4])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_forward_alone_equals_the_plain_model(num_stages: int, num_microbatches: int) -> None:
    model = seeded(everything).eval()
    batch, _ = everything_batch(10)
    with torch.no_grad():
        wanted = model(batch)
    pipeline = Pipeline(
        copy_of(model), num_stages=num_stages, num_microbatches=num_microbatches, cost=[1] * 12
    )

    with torch.inference_mode():
        torch.testing.assert_close(pipeline(batch), wanted, **TOLERANCE)
    output = pipeline(batch)

    torch.testing.assert_close(output, wanted, **TOLERANCE)
    assert not output.requires_grad
    assert all(p.grad is None for p in pipeline.parameters())


@pytest.mark.parametrize("training", [False, True])
def test_training_goes_on_after_a_forward_in_inference_mode(training: bool) -> None:
    """As in the plain model, which keeps nothing of it; here batch normalization's totals are made in it."""
    model, layers = seeded(everything), seeded(everything)
    pipeline = Pipeline(layers, num_stages=3, num_microbatches=2, cost=[1] * 12)
    with torch.inference_mode():
        output = pipeline.train(training)(everything_batch(10)[0])
    assert output.is_inference()
    pipeline.train()
    batch, target = everything_batch(6)
    plain = plain_step(model, batch, target, cross_entropy, 2)
    pipeline.step(batch, target, cross_entropy)
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.gradients[name], **TOLERANCE)


def test_several_steps_before_the_optimizer_add_up() -> None:
    """A step adds the gradient of its own mean: nothing divides what an earlier step left in `.grad`."""
    model, pipeline_model = seeded(mlp), seeded(mlp)
    pipeline = Pipeline(pipeline_model, num_stages=3, num_microbatches=4)
    for step, size in enumerate((9, 4, 6)):
        batch, target = mlp_batch(size, seed=step)
        plain_step(model, batch, target, nn.functional.mse_loss, 4, step=step)
        pipeline.step(batch, target, nn.functional.mse_loss)
    for plain, ours in zip(model.parameters(), pipeline.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, **TOLERANCE)


def test_micro_batches_make_the_mean_over_the_mini_batch() -> None:
    """Without batch normalization and dropout M does not matter: 7 examples in 3 uneven micro-batches too."""
    batch, target = mlp_batch(7)
    model = seeded(lambda: mlp(dropout=0.0))
    loss = nn.functional.mse_loss(model(batch), target)
    loss.backward()
    pipeline = Pipeline(seeded(lambda: mlp(dropout=0.0)), num_stages=2, num_microbatches=3)

    torch.testing.assert_close(
        pipeline.step(batch, target, nn.functional.mse_loss), loss.detach(), **TOLERANCE
    )

    for plain, ours in zip(model.parameters(), pipeline.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, **TOLERANCE)


class _Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def _tied() -> nn.Sequential:
    weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
    return nn.Sequential(_Tied(weight), nn.Linear(6, 6).double(), nn.Tanh(), _Tied(weight))


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_tied_weights_in_two_stages(num_stages: int) -> None:
    model, other = seeded(_tied), seeded(_tied)
    batch, target = mlp_batch(8)
    plain = plain_step(model, batch, target, nn.functional.mse_loss, 4)
    pipeline = Pipeline(other, num_stages=num_stages, num_microbatches=4, cost=[1] * 4)
    pipeline.step(batch, target, nn.functional.mse_loss)
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.gradients[name], **TOLERANCE)
    assert len(list(pipeline.parameters())) == 3


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("frozen", [(0, 1), (0, 1, 2, 3), (3,), (6, 7)])
def test_stages_without_anything_to_train(frozen: tuple[int, ...], remat: str) -> None:
    """Outputs that need no gradient end the backward early; unfreezing later is noticed."""
    model, other = seeded(mlp), seeded(mlp)
    batch, target = mlp_batch(8)
    pipeline = Pipeline(other, num_stages=4, num_microbatches=3, remat=remat)
    for step, trainable in enumerate((False, True)):
        for net in (model, other):
            for index in frozen:
                net[index].requires_grad_(trainable)
        plain_step(model, batch, target, nn.functional.mse_loss, 3, step=step)
        pipeline.step(batch, target, nn.functional.mse_loss)
        for (name, plain), ours in zip(model.named_parameters(), pipeline.parameters(), strict=True):
            assert (plain.grad is None) == (ours.grad is None), name
            if plain.grad is not None:
                torch.testing.assert_close(ours.grad, plain.grad, **TOLERANCE)


class _Detour(nn.Module):
    """Computes a second output that nothing uses, from a weight that therefore gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)


class _First(nn.Module):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return inputs[0]


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_an_unused_output_leaves_its_weights_without_gradient(remat: str) -> None:
    torch.manual_seed(0)
    pipeline = Pipeline(
        nn.Sequential(_Detour(), _First(), nn.Tanh()),
        num_stages=3,
        num_microbatches=2,
        remat=remat,
        cost=[1, 1, 1],
    )
    batch, target = mlp_batch(4)
    pipeline.step(batch, target, nn.functional.mse_loss)
    gradients = {name: p.grad for name, p in pipeline.named_parameters()}
    assert gradients["0.used.weight"] is not None
    assert gradients["0.unused.weight"] is None


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copied_boundaries_change_nothing(schedule: str, remat: str) -> None:
    batch, target = everything_batch(15)
    _, plain = reference(4, 15)
    pipeline = Pipeline(
        seeded(everything), num_stages=4, num_microbatches=4, schedule=schedule, remat=remat,
        cost=[1] * 12, transport=InProcess(copy=True),
    )  # fmt: skip
    pipeline.step(batch, target, cross_entropy)
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.gradients[name], **TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_outputs_and_gradients_on_a_gpu(schedule: str, remat: str, num_stages: int) -> None:
    model = seeded(lambda: mlp(dropout=0.0))
    batch, target = mlp_batch(11)
    plain = plain_step(model, batch, target, nn.functional.mse_loss, 4)
    pipeline = Pipeline(
        seeded(lambda: mlp(dropout=0.0)), num_stages=num_stages, num_microbatches=4,
        schedule=schedule, remat=remat, devices="cuda",
    )  # fmt: skip
    loss = pipeline.step(batch, target, nn.functional.mse_loss)
    torch.testing.assert_close(loss.cpu(), plain.loss, rtol=1e-10, atol=1e-12)
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), plain.gradients[name], rtol=1e-10, atol=1e-12)
