"""A pipeline computes what the plain model computes: every output element, the gradient of every parameter.

Compared one by one in float64, never as a sum: a sum hides permuted and cancelling errors. In one process;
over several see `test_over_processes`, and `test_joined` for all options together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import pairwise
from random_schedules import random_placement, random_schedule
from tiny_models import (
    EXACT,
    CapturedLoss,
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

from gpipe_bench.pipeline import NAMED, InProcess, Pipeline, run_plain
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.pipeline.stage.trees import Tree, change

cross_entropy, mse_loss = nn.functional.cross_entropy, nn.functional.mse_loss


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


def tied() -> nn.Sequential:
    weight = nn.Parameter(torch.randn(6, 6))
    return nn.Sequential(WithWeight(weight), nn.Linear(6, 6), nn.Tanh(), WithWeight(weight))


def in_place() -> nn.Sequential:
    kinds = lambda: (nn.Linear(6, 6), nn.Identity(), nn.ReLU(inplace=True), nn.Dropout(0.3))  # noqa: E731
    return nn.Sequential(Doubles(), *(layer for _ in range(3) for layer in kinds()))


def other_keys(call: int) -> dict[str, Any]:
    return {"left" if call % 3 else "right": Tensor, "factor": call}


def frozen(*indices: int) -> Callable[[], nn.Sequential]:
    def build() -> nn.Sequential:
        model = mlp()
        for index in indices:
            model[index].requires_grad_(False)
        return model

    return build


Data = Callable[[int, int], tuple[Tree, Tree]]  # of so many examples, in a step
rows: Data = lambda size, step: mlp_batch(size, seed=step)  # noqa: E731

# Model, what it is given, loss.
MODELS: dict[str, tuple[Callable[[], nn.Sequential], Data, Callable[..., Tensor]]] = {
    "everything": (everything, lambda size, step: everything_batch(size, seed=step), cross_entropy),
    "any tree": (
        tree_model, lambda size, step: tree_batch(size, step, scale=1 / (1 + step)), tree_loss,
    ),
    "keys that change": (lambda: nn.Sequential(Keyed(other_keys), ByKey()), rows, mse_loss),
    "in place": (in_place, rows, mse_loss),
    "tied weights": (tied, rows, mse_loss),
    "an unused output": (lambda: nn.Sequential(Detour(), First(), nn.Tanh()), rows, mse_loss),
    "frozen at the beginning": (frozen(0, 1, 2, 3), rows, mse_loss),
    "frozen in the middle": (frozen(3), rows, mse_loss),
    "frozen at the end": (frozen(6, 7), rows, mse_loss),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "schedule", "remat", "num_workers", "num_microbatches", "copy"),
    pairwise(
        tuple(MODELS), tuple(NAMED), (*REMAT_MODES, "except the last"), (1, 2, 3, 13), (1, 3, 4),
        (False, True),
        keep=[("everything", "gpipe", "always", 3, 4, False), ("everything", "zb-v", "always", 1, 1, False)],
    ),
)  # fmt: skip
def test_it_trains_as_the_plain_model(
    name: str, schedule: str, remat: str, num_workers: int, num_microbatches: int, copy: bool
) -> None:
    """Three steps, of uneven micro-batches, of single examples, and of one example, and then evaluated."""
    build, data, loss_fn = MODELS[name]
    num_layers, per_worker = len(build()), NAMED[schedule].stages_per_worker or 2
    num_stages = per_worker * max(1, min(num_workers, num_layers // per_worker))
    lengths = (2 * num_microbatches + 1, num_microbatches, 1)
    by_stage = [*["always"] * (num_stages - 1), "except_last"]
    pipeline, plain = assert_trains_as_plain(
        build, lambda step: data(lengths[step], step), loss_fn, num_microbatches, num_steps=3,
        num_stages=num_stages, schedule=schedule, remat=by_stage if remat == "except the last" else remat,
        transport=InProcess(copy=copy),
    )  # fmt: skip
    if name in ("everything", "keys that change"):  # whose averages and counts are the mini-batch's
        return
    batch, _ = data(5, 0)
    found = pipeline.eval()(change(batch, Tensor.clone, "it"))
    wanted = run_plain(plain.eval(), batch, seed=0, step=0, microbatch=0)
    torch.testing.assert_close(found, wanted, **EXACT)
    if name == "any tree":
        assert list(found) == list(wanted)
        assert (found["temperature"], found["nothing"]) == (0.5, None)
        assert found["both"][0] is found["logits"]
        assert torch.equal(found["both"][1], batch["more"][1])


@pytest.mark.parametrize("seed", range(12))
def test_random_rows_on_random_placements(seed: int) -> None:
    """Single examples beside larger micro-batches; every output, too."""
    generator = random.Random(seed)
    num_stages = generator.randint(1, 6)
    placement = random_placement(generator, num_stages)
    schedule = random_schedule(generator, num_stages, generator.randint(1, 5), placement=placement)
    count = schedule.num_microbatches
    batch, target = everything_batch(3 + count)
    plain = plain_step(seeded(everything), batch, target, cross_entropy, count)
    pipeline = Pipeline(
        seeded(everything), num_stages=num_stages, num_microbatches=count, schedule=schedule, cost=[1] * 12
    )
    loss_fn = CapturedLoss(cross_entropy)
    torch.testing.assert_close(pipeline.step(batch, target, loss_fn), plain.loss, **EXACT)
    for output, wanted in zip(loss_fn.outputs, plain.outputs, strict=True):
        torch.testing.assert_close(output, wanted, **EXACT)
    assert {name for name, _ in pipeline.named_parameters()} == plain.gradients.keys()
    assert_own_gradients(pipeline, plain.gradients, **EXACT)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (3, 4)])
def test_a_forward_alone_and_training_behind_it(
    num_stages: int, num_microbatches: int, training: bool
) -> None:
    """As in the plain model, which keeps nothing of it."""
    model, layers = seeded(everything).eval(), seeded(everything).eval()
    batch, target = everything_batch(10)
    with torch.no_grad():
        wanted = model(batch)
    pipeline = Pipeline(layers, num_stages=num_stages, num_microbatches=num_microbatches, cost=[1] * 12)
    output = pipeline(batch)
    torch.testing.assert_close(output, wanted, **EXACT)
    assert not output.requires_grad
    assert all(p.grad is None for p in pipeline.parameters())
    with torch.inference_mode():
        assert len(pipeline.train(training)(batch)) == len(target)
    plain = plain_step(seeded(everything), batch, target, cross_entropy, num_microbatches)
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
def test_what_is_unfrozen_later_is_trained(remat: str) -> None:
    def freeze(step: int, model: nn.Sequential) -> None:
        for index in (0, 1, 3, 7):
            model[index].requires_grad_(bool(step))

    pipeline, _ = assert_trains_as_plain(
        mlp, lambda step: mlp_batch(8), mse_loss, 3, num_steps=2, between=freeze, num_stages=4, remat=remat
    )
    assert all(p.grad is not None for p in pipeline.parameters())


@pytest.mark.parametrize(("num_stages", "remat"), [(1, "always"), (4, "always"), (4, "except_last")])
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
@pytest.mark.parametrize(
    ("remat", "num_stages", "schedule"), pairwise(REMAT_MODES, (1, 2, 4), ("naive", "gpipe", "1f1b"))
)
def test_outputs_and_gradients_on_gpus(remat: str, num_stages: int, schedule: str) -> None:
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
