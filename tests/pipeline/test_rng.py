"""Random streams: one per (seed, step, layer, micro-batch), whatever runs around them."""

from __future__ import annotations

import itertools

import pytest
import torch
from covering import pairwise
from tiny_models import assert_trains_as_plain, mlp, mlp_batch, seeded
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from gpipe_bench.pipeline import Pipeline, run_plain
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.pipeline.stage.layers import mix, stream_key

mse_loss = nn.functional.mse_loss


class Mask(nn.Module):
    """Adds noise and records it, so that a test sees which draws were made when."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        self.drawn.append(noise)
        return x + noise


def masks(num_stages: int, *, seed: int = 0, steps: int = 1, **options: str) -> list[list[float]]:
    """The first number of everything that each of four random layers drew, of four micro-batches."""
    layers = [layer for _ in range(4) for layer in (Mask(), nn.Linear(6, 6).double())]
    pipeline = Pipeline(layers, num_stages=num_stages, num_microbatches=4, seed=seed, cost=[1] * 8, **options)
    for _ in range(steps):
        pipeline.step(*mlp_batch(8), mse_loss)
    return [[float(noise[0, 0]) for noise in layer.drawn] for layer in layers if isinstance(layer, Mask)]


@pytest.mark.parametrize(
    ("schedule", "remat", "num_stages"), pairwise(tuple(SCHEDULES), REMAT_MODES, (1, 2, 4))
)
def test_masks_depend_on_layer_and_micro_batch_alone(schedule: str, remat: str, num_stages: int) -> None:
    torch.manual_seed(num_stages)  # the state of the default generator is of no importance
    wanted = masks(1, remat="never")
    for layer, reference in zip(masks(num_stages, schedule=schedule, remat=remat), wanted, strict=True):
        assert len(layer) == {"never": 4, "always": 8, "except_last": 7}[remat]
        assert set(layer) == set(reference)
        assert len(set(layer)) == 4


def test_every_layer_micro_batch_step_and_seed_has_its_own_stream() -> None:
    draws = masks(2, remat="never", steps=3) + masks(2, remat="never", steps=3, seed=1)
    values = [value for layer in draws for value in layer]
    assert len(set(values)) == len(values) == 2 * 4 * 4 * 3


def test_keys_are_well_mixed() -> None:
    """No collision in the 32 bits that the CPU generator uses; every bit is set about half of the time."""
    keys = [stream_key(*counters) for counters in itertools.product(range(4), range(8), range(10), range(10))]
    assert len({key & 0xFFFFFFFF for key in keys}) == len(keys) == 3200
    for bit in range(64):
        assert 0.45 < sum(key >> bit & 1 for key in keys) / len(keys) < 0.55
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 from state 0


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        raise RuntimeError("broken")


def test_the_users_generator_is_left_alone() -> None:
    """By steps, forwards, a loss that draws, the plain model, and after an error."""
    batch, target = mlp_batch(8)
    pipeline = Pipeline(seeded(mlp), num_stages=2, num_microbatches=4)
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    pipeline.step(batch, target, lambda y, t: mse_loss(torch.dropout(y, 0.5, True), t))
    pipeline.eval()(batch)
    run_plain(pipeline.children(), batch, seed=0, step=0, microbatch=0)
    with pytest.raises(RuntimeError, match="broken"):
        Pipeline([Broken()], num_stages=1, num_microbatches=1)(torch.zeros(1))
    assert torch.equal(torch.rand(4), wanted)


def test_a_loss_may_draw_too() -> None:
    """The loss is one more layer with a stream of its own: recomputation gives it the same draws."""
    seen: list[float] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(float(torch.rand(())))
        return mse_loss(output, target)

    Pipeline(seeded(mlp), num_stages=2, num_microbatches=2).step(*mlp_batch(4), loss_fn)
    assert len(seen) == 4
    assert len(set(seen)) == 2


def test_forwards_draw_from_streams_of_their_own_and_change_no_training() -> None:
    """In training mode too, a forward is another sample of the masks than the steps are trained with."""
    batch, target = mlp_batch(4)
    gradients, samples = [], []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        samples.append(output.detach().clone())
        return mse_loss(output, target)

    for evaluate in (False, True):
        pipeline = Pipeline(seeded(mlp), num_stages=2, num_microbatches=1, remat="never")
        samples.clear()
        for _ in range(2):
            pipeline.step(batch, target, loss_fn)
            if evaluate:
                samples.append(pipeline(batch))
        gradients.append([p.grad for p in pipeline.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert len(samples) == 4
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(samples, 2))


class Last(nn.Module):
    def forward(self, inputs: tuple[Tensor, object]) -> Tensor:
        return inputs[0]


def noise(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output * torch.rand_like(output) if isinstance(module, nn.Linear) else output


LATE = {
    "a probability is raised": lambda layers: setattr(layers[1], "p", 0.5),
    "that of a recurrent layer": lambda layers: setattr(layers[2], "dropout", 0.5),
    "a hook that draws": lambda layers: layers[0].register_forward_hook(noise),
    "a hook of all modules": lambda layers: register_module_forward_hook(noise),
    "another layer inside": lambda layers: layers[4].append(nn.Dropout(0.5)),
}


@pytest.mark.parametrize("late", LATE)
def test_who_begins_to_draw_later_draws_the_same_in_the_recomputation(late: str) -> None:
    """Progressive dropout and the like: nobody tells the pipeline, which was built when nothing drew."""

    def build() -> nn.Sequential:
        lstm = nn.LSTM(6, 6, num_layers=2)
        return nn.Sequential(
            nn.Linear(6, 6), nn.Dropout(0.0), lstm, Last(), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        )

    handles: list[object] = []

    def begin(step: int, layers: nn.Sequential) -> None:
        if step == 1:
            handles.append(LATE[late](layers))

    try:
        pipeline, _ = assert_trains_as_plain(
            build, lambda step: mlp_batch(8), mse_loss, 4, num_steps=2, between=begin, num_stages=2,
            remat="always",
        )  # fmt: skip
    finally:
        for handle in handles:
            if hasattr(handle, "remove"):
                handle.remove()
    assert pipeline.num_steps == 2
