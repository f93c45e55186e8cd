"""A pipeline computes what the plain model computes: every output element, the gradient of every parameter.

Compared one by one in float64, never as a sum: a sum hides permuted and cancelling errors. In one process;
over several see `distributed_cases`, and `joined_cases` for all options together.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import pairwise
from property_cases import Example
from random_models import plain_gradients
from random_schedules import random_placement, random_remat, random_schedule
from tiny_models import (
    EXACT,
    CapturedLoss,
    Data,
    assert_own_gradients,
    assert_trains_as_plain,
    everything,
    everything_batch,
    mlp,
    mlp_batch,
    plain_step,
    seeded,
)
from torch import Tensor, nn
from tree_models import ByKey, Keyed, tree_batch, tree_loss, tree_model

from gpipe_bench.pipeline import NAMED, Action, InProcess, Pipeline, Schedule, from_csv, named, run_plain
from gpipe_bench.pipeline.plan.remat import REMAT_MODES

cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss


def check(schedule: Schedule, *, copy: bool = False) -> None:
    """One step of the model that has everything; single examples beside larger micro-batches."""
    count = schedule.num_microbatches
    batch, target = everything_batch(3 + count)
    plain = plain_step(seeded(everything), batch, target, cross_entropy, count)
    pipeline = Pipeline(
        seeded(everything), num_stages=schedule.num_stages, num_microbatches=count, schedule=schedule,
        cost=[1] * 12, transport=InProcess(copy=copy),
    )  # fmt: skip
    loss_fn = CapturedLoss(cross_entropy)
    torch.testing.assert_close(pipeline.step(batch, target, loss_fn), plain.loss, **EXACT)
    for output, wanted in zip(loss_fn.outputs, plain.outputs, strict=True):
        torch.testing.assert_close(output, wanted, **EXACT)
    assert {name for name, _ in pipeline.named_parameters()} == plain.gradients.keys()
    assert_own_gradients(pipeline, plain.gradients, **EXACT)


@pytest.mark.parametrize(
    ("num_microbatches", "num_workers", "remat", "name", "copy"),
    pairwise(
        (1, 2, 4, 7), (1, 2, 3, 4), REMAT_MODES, tuple(NAMED), (False, True),
        keep=[(4, 3, "always", "gpipe", False), (1, 1, "always", "zb-v", False)],
    ),
)  # fmt: skip
def test_outputs_and_gradients_equal_the_plain_model(
    num_microbatches: int, num_workers: int, remat: str, name: str, copy: bool
) -> None:
    check(named(name, num_workers, num_microbatches, remat=remat), copy=copy)


@pytest.mark.parametrize("seed", range(12))
def test_random_rows_on_random_placements(seed: int) -> None:
    generator = random.Random(seed)
    num_stages = generator.randint(1, 6)
    placement = random_placement(generator, num_stages)
    check(random_schedule(generator, num_stages, generator.randint(1, 5), placement=placement))


@pytest.mark.parametrize("name", NAMED)
def test_every_named_schedule_with_any_choice_of_what_to_recompute(name: str) -> None:
    """Batch normalization, dropout-like draws, frozen and in-place layers."""
    per_worker = NAMED[name].stages_per_worker or 2
    for seed in range(3):
        example = Example(seed, 7919)
        if per_worker == 2:
            example.num_stages = 2
        generator = random.Random(f"{name} {seed}")
        remat = random_remat(generator, example.num_stages)
        example.schedule = named(
            name, example.num_stages // per_worker, example.num_microbatches, remat=remat,
            stages_per_worker=per_worker,
        )  # fmt: skip
        assert not example.problems(None), f"{example}"


@pytest.mark.parametrize("cuts", [*((first, first + 1) for first in range(1, 11)), (1, 11)], ids=str)
def test_cuts_into_three_stages_at_every_layer(cuts: tuple[int, int]) -> None:
    """Every layer's output crosses each of the two boundaries, and every layer is a stage of its own."""
    partition = [len(range(*pair)) for pair in itertools.pairwise((0, *cuts, 12))]
    pipeline, _ = assert_trains_as_plain(
        everything, lambda step: everything_batch(6), cross_entropy, 3, remat="except_last", cost=None,
        partition=partition,
    )  # fmt: skip
    assert [span.start for span in pipeline.partition] == [0, *cuts]


class Position(nn.Module):
    """Adds a parameter, seen through a view: torch then takes its gradient for `.grad` without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.position[None]).view(1, 6)


class Doubles(nn.Module):
    """In place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class WithWeight(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def tied() -> nn.Sequential:
    weight = nn.Parameter(torch.randn(6, 6))
    return nn.Sequential(WithWeight(weight), nn.Linear(6, 6), nn.Tanh(), WithWeight(weight))


def in_place() -> nn.Sequential:
    kinds = lambda: (nn.Linear(6, 6), nn.Identity(), nn.ReLU(inplace=True), nn.Dropout(0.3))  # noqa: E731
    return nn.Sequential(Doubles(), *(layer for _ in range(3) for layer in kinds()))


def other_keys(call: int) -> dict[str, Any]:
    return {"left" if call % 3 else "right": Tensor, "factor": call}


# Model, what it is given in a step, loss, and into how many stages it is cut at most.
MODELS: dict[str, tuple[Callable[[], nn.Sequential], Data, Callable[..., Tensor], int]] = {
    "any tree": (tree_model, lambda step: tree_batch(8, step, scale=1 / (1 + step)), tree_loss, 4),
    "keys that change": (
        lambda: nn.Sequential(Keyed(other_keys), ByKey()), lambda step: mlp_batch(5, seed=step), mse_loss, 2,
    ),
    "in place": (in_place, lambda step: mlp_batch(7, seed=step), mse_loss, 13),
    "tied weights": (tied, lambda step: mlp_batch(8, seed=step), mse_loss, 4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "remat", "schedule", "cut", "copy"),
    pairwise(tuple(MODELS), REMAT_MODES, ("gpipe", "1f1b", "zb-h1", "naive"), (1, 2, 13), (False, True)),
)
def test_models_that_pass_and_keep_all_kinds_of_things(
    name: str, remat: str, schedule: str, cut: int, copy: bool
) -> None:
    """Cut into one stage, into two and as finely as it goes; and evaluated."""
    build, data, loss_fn, most = MODELS[name]
    pipeline, plain = assert_trains_as_plain(
        build, data, loss_fn, 3, num_steps=3, num_stages=min(cut, most), remat=remat, schedule=schedule,
        transport=InProcess(copy=copy),
    )  # fmt: skip
    batch = data(2)[0]
    if name == "any tree":
        output = pipeline.eval()(batch)
        whole = run_plain(plain.eval(), batch, seed=0, step=0, microbatch=0)
        torch.testing.assert_close(output, whole, **EXACT)
        assert list(output) == list(whole)
        assert (output["temperature"], output["nothing"]) == (0.5, None)
        assert output["both"][0] is output["logits"]
        assert torch.equal(output["both"][1], batch["more"][1])


def late_weights(num_stages: int) -> Schedule:
    """All weight gradients after all input gradients."""
    rows = [
        [Action.parse(f"{stage}{kind}{m}") for kind in "FIW" for m in range(4)] for stage in range(num_stages)
    ]
    return Schedule("late weights", num_stages, 4, "never", tuple(map(tuple, rows)))


@pytest.mark.parametrize("num_stages", [1, 2, 6])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "late weights"])
def test_no_parameters_gradient_is_another_tensors_memory(num_stages: int, schedule: str) -> None:
    """Micro-batches of one example, whose gradients have the shapes of the parameters; over two steps."""
    layers = seeded(lambda: nn.Sequential(*(nn.Linear(6, 6) if i == 1 else Position() for i in range(6))))
    batch, target = mlp_batch(4)
    pipeline = Pipeline(
        layers, num_stages=num_stages, num_microbatches=4, remat="never", cost=[1] * 6,
        schedule=late_weights(num_stages) if schedule == "late weights" else schedule,
    )  # fmt: skip
    wanted = plain_gradients(list(layers), batch, target, pipeline.schedule)
    for _ in range(2):
        pipeline.step(batch, target, mse_loss)
    assert_own_gradients(pipeline, {name: 2 * gradient for name, gradient in wanted.items()}, **EXACT)


def test_a_loss_that_is_a_view_does_not_share_its_gradient_with_a_parameter() -> None:
    """The gradient of the loss is made once for all micro-batches of one size."""

    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(()).view(1, 1) + self.offset.view(1, 1)

    pipeline = Pipeline([Offset()], num_stages=1, num_microbatches=4, remat="never")
    pipeline.step(torch.ones(4, 1, dtype=torch.float64), None, lambda output, target: output.view(()))
    (offset,) = pipeline.parameters()
    assert float(offset.grad) == 1


@pytest.mark.parametrize("schedule", NAMED)
def test_a_short_mini_batch_goes_in_as_many_micro_batches_as_it_has_examples(schedule: str) -> None:
    """Between others, trained and evaluated; the last stage keeps what the last micro-batch needs."""
    num_stages = 2 * (NAMED[schedule].stages_per_worker or 2)
    remat = [*["always"] * (num_stages - 1), "except_last"]
    pipeline = Pipeline(
        seeded(mlp), num_stages=num_stages, num_microbatches=6, schedule=schedule, remat=remat, cost=[1] * 8
    )
    for step, size in enumerate((7, 5, 1, 4, 6)):
        batch, target = mlp_batch(size, seed=step)
        count = min(size, 6)
        plain = plain_step(seeded(mlp), batch, target, mse_loss, count, step=step)
        torch.testing.assert_close(pipeline.step(batch, target, mse_loss), plain.loss, **EXACT)
        assert_own_gradients(pipeline, plain.gradients, **EXACT)
        assert {event.action.microbatch for event in pipeline.timeline.events} == set(range(count))
        pipeline.zero_grad()
        assert len(pipeline(batch)) == size


@pytest.mark.parametrize("num_microbatches", [1, 3, 4])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_forward_alone_equals_the_plain_model(num_stages: int, num_microbatches: int) -> None:
    model, layers = seeded(everything).eval(), seeded(everything).eval()
    batch, _ = everything_batch(10)
    with torch.no_grad():
        wanted = model(batch)
    pipeline = Pipeline(layers, num_stages=num_stages, num_microbatches=num_microbatches, cost=[1] * 12)
    with torch.inference_mode():
        torch.testing.assert_close(pipeline(batch), wanted, **EXACT)
    output = pipeline(batch)
    torch.testing.assert_close(output, wanted, **EXACT)
    assert not output.requires_grad
    assert all(p.grad is None for p in pipeline.parameters())


@pytest.mark.parametrize("training", [False, True])
def test_training_goes_on_after_a_forward_in_inference_mode(training: bool) -> None:
    """As in the plain model, which keeps nothing of it; here batch normalization's totals are made in it."""
    pipeline = Pipeline(seeded(everything), num_stages=3, num_microbatches=2, cost=[1] * 12)
    with torch.inference_mode():
        output = pipeline.train(training)(everything_batch(10)[0])
    assert output.is_inference()
    batch, target = everything_batch(6)
    plain = plain_step(seeded(everything), batch, target, cross_entropy, 2)
    pipeline.train().step(batch, target, cross_entropy)
    assert_own_gradients(pipeline, plain.gradients, **EXACT)


def test_several_steps_before_the_optimizer_add_up() -> None:
    """A step adds the gradient of its own mean: nothing divides what an earlier step left in `.grad`."""
    model, pipeline = seeded(mlp), Pipeline(seeded(mlp), num_stages=3, num_microbatches=4)
    for step, size in enumerate((9, 4, 6)):
        batch, target = mlp_batch(size, seed=step)
        plain = plain_step(model, batch, target, mse_loss, 4, step=step)
        pipeline.step(batch, target, mse_loss)
    assert_own_gradients(pipeline, plain.gradients, **EXACT)


def test_micro_batches_make_the_mean_over_the_mini_batch() -> None:
    """Without batch normalization and dropout M does not matter: 7 examples in 3 uneven micro-batches too."""
    batch, target = mlp_batch(7)
    model, layers = (seeded(lambda: mlp(dropout=0.0)) for _ in range(2))
    loss = mse_loss(model(batch), target)
    loss.backward()
    pipeline = Pipeline(layers, num_stages=2, num_microbatches=3)
    torch.testing.assert_close(pipeline.step(batch, target, mse_loss), loss.detach(), **EXACT)
    assert_own_gradients(pipeline, {name: p.grad for name, p in model.named_parameters()}, **EXACT)


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("frozen", [(0, 1), (0, 1, 2, 3), (3,), (6, 7)])
def test_stages_without_anything_to_train(frozen: tuple[int, ...], remat: str) -> None:
    """Outputs that need no gradient end the backward early; unfreezing later is noticed."""

    def freeze(step: int, model: nn.Sequential) -> None:
        for index in frozen:
            model[index].requires_grad_(bool(step))

    assert_trains_as_plain(
        mlp, lambda step: mlp_batch(8), mse_loss, 3, num_steps=2, between=freeze, num_stages=4, remat=remat
    )


class Detour(nn.Module):
    """Computes a second output that nothing uses, from a weight that therefore gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)


class First(nn.Module):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return inputs[0]


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_an_unused_output_leaves_its_weights_without_gradient(remat: str) -> None:
    pipeline, _ = assert_trains_as_plain(
        lambda: nn.Sequential(Detour(), First(), nn.Tanh()), lambda step: mlp_batch(4), mse_loss, 2,
        num_stages=3, remat=remat,
    )  # fmt: skip
    assert pipeline.get_parameter("0.unused.weight").grad is None


def test_a_split_backward_computes_the_same() -> None:
    """I and W need nothing from the engine but a schedule that has them."""
    rows = "0F0,0F1,0I1,0R0,0I0,0W1,0W0\n1F0,1F1,1I1,1W1,1R0,1I0,1W0\n"
    schedule = from_csv(rows, remat="except_last")
    assert_trains_as_plain(mlp, lambda step: mlp_batch(6), mse_loss, 2, num_stages=2, schedule=schedule)


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("num_stages", [1, 4])
def test_autocast_trains_like_the_plain_model(num_stages: int, remat: str) -> None:
    """Weights are cast with and without a graph in one step; a cast without must not serve one with."""
    model, other = (seeded(lambda: mlp(dropout=0.0), torch.float32) for _ in range(2))
    batch, target = mlp_batch(8, dtype=torch.float32)
    for inputs, wanted in zip(batch.split(2), target.split(2), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            loss = mse_loss(model(inputs).float(), wanted)
        (loss / 4).backward()
    pipeline = Pipeline(other, num_stages=num_stages, num_microbatches=4, remat=remat)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipeline.step(batch, target, lambda output, wanted: mse_loss(output.float(), wanted))
    for plain, ours in zip(model.parameters(), other.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        # Micro-batches are added up in another order; each one's gradient is made of bfloat16 products.
        torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize(("remat", "num_stages"), pairwise(REMAT_MODES, (1, 2, 4)))
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
def test_outputs_and_gradients_on_gpus(schedule: str, remat: str, num_stages: int) -> None:
    """All stages on one, and each on one of its own as far as there are."""
    batch, target = mlp_batch(11)
    plain = plain_step(seeded(lambda: mlp(dropout=0.0)), batch, target, mse_loss, 4)
    apart = [f"cuda:{i % torch.cuda.device_count()}" for i in range(num_stages)]
    for devices in ("cuda", apart):
        pipeline = Pipeline(
            seeded(lambda: mlp(dropout=0.0)), num_stages=num_stages, num_microbatches=4, schedule=schedule,
            remat=remat, devices=devices,
        )  # fmt: skip
        loss = pipeline.step(batch, target, mse_loss)
        torch.testing.assert_close(loss.cpu(), plain.loss, rtol=1e-10, atol=1e-12)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad.cpu(), plain.gradients[name], rtol=1e-10, atol=1e-12)
