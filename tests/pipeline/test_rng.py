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
from gpipe_bench.pipeline.plan.remat import REMAT_MODES
from gpipe_bench.pipeline.stage.layers import Generators, may_draw, mix, stream_key


class Mask(nn.Module):
    """Adds noise and records it, so that a test sees which draws were made when."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        self.drawn.append(noise)
        return x + noise


def masks(
    num_stages: int,
    num_microbatches: int,
    schedule: str = "gpipe",
    remat: str = "always",
    seed: int = 0,
    steps: int = 1,
) -> list[list[Tensor]]:
    """Everything each of four random layers drew."""
    layers = [layer for _ in range(4) for layer in (Mask(), nn.Linear(6, 6).double())]
    pipeline = Pipeline(
        layers,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule=schedule,
        remat=remat,
        seed=seed,
        cost=[1] * 8,
    )
    batch, target = mlp_batch(8)
    for _ in range(steps):
        pipeline.step(batch, target, nn.functional.mse_loss)
    return [layer.drawn for layer in layers if isinstance(layer, Mask)]


def distinct(drawn: list[Tensor]) -> set[float]:
    return {float(noise[0, 0]) for noise in drawn}


@pytest.mark.parametrize(
    ("schedule", "remat", "num_stages"), pairwise(tuple(SCHEDULES), REMAT_MODES, (1, 2, 4))
)
def test_masks_depend_on_layer_and_micro_batch_alone(schedule: str, remat: str, num_stages: int) -> None:
    torch.manual_seed(num_stages)  # the state of the default generator is of no importance
    wanted = masks(1, 4, remat="never")
    for layer, reference in zip(masks(num_stages, 4, schedule, remat), wanted, strict=True):
        forwards = {"never": 4, "always": 8, "except_last": 7}[remat]
        assert len(layer) == forwards
        assert distinct(layer) == distinct(reference)
        assert len(distinct(layer)) == 4


def test_every_layer_micro_batch_step_and_seed_has_its_own_stream() -> None:
    draws = masks(2, 4, remat="never", steps=3) + masks(2, 4, remat="never", steps=3, seed=1)
    values = [float(noise[0, 0]) for layer in draws for noise in layer]
    assert len(set(values)) == len(values) == 2 * 4 * 4 * 3


def test_the_plain_model_can_be_given_the_same_draws() -> None:
    layers = [Mask(), nn.Linear(6, 6).double(), Mask()]
    batch, _ = mlp_batch(3)
    run_plain(layers, batch, seed=5, step=2, microbatch=1)
    generators = Generators(torch.device("cpu"))
    for index in (0, 2):
        generators.seed(stream_key(5, 2, index, 1))
        assert torch.equal(layers[index].drawn[0], torch.rand_like(batch))


def test_the_users_generator_is_left_alone() -> None:
    batch, target = mlp_batch(8)
    pipeline = Pipeline(seeded(mlp), num_stages=2, num_microbatches=4)
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    pipeline.step(batch, target, nn.functional.mse_loss)
    pipeline(batch)
    run_plain(seeded(mlp).eval(), batch, seed=0, step=0, microbatch=0)
    torch.manual_seed(3)
    run_plain(mlp(), batch.float(), seed=0, step=0, microbatch=0)
    pipeline.step(
        batch, target, lambda output, wanted: nn.functional.mse_loss(torch.dropout(output, 0.5, True), wanted)
    )
    torch.manual_seed(3)
    pipeline(batch)
    assert torch.equal(torch.rand(4), wanted)


def test_the_users_generator_is_given_back_after_an_error() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            raise RuntimeError("broken")

    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    pipeline = Pipeline([Broken()], num_stages=1, num_microbatches=1)
    with pytest.raises(RuntimeError, match="broken"):
        pipeline(torch.zeros(1))
    assert torch.equal(torch.rand(4), wanted)


def test_a_loss_may_draw_too() -> None:
    """The loss is one more layer with a stream of its own: recomputation gives it the same draws."""
    seen: list[float] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        seen.append(float(torch.rand(())))
        return nn.functional.mse_loss(output, target)

    batch, target = mlp_batch(4)
    Pipeline(seeded(mlp), num_stages=2, num_microbatches=2).step(batch, target, loss_fn)
    assert len(seen) == 4
    assert len(set(seen)) == 2


def test_evaluation_between_steps_does_not_change_the_training() -> None:
    batch, target = mlp_batch(4)
    gradients = []
    for evaluate in (False, True):
        pipeline = Pipeline(seeded(mlp), num_stages=2, num_microbatches=2)
        for _ in range(2):
            pipeline.step(batch, target, nn.functional.mse_loss)
            if evaluate:
                pipeline(batch)
        gradients.append([p.grad for p in pipeline.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_keys_are_well_mixed() -> None:
    """No collision in the 32 bits that the CPU generator uses; every bit is set about half of the time."""
    keys = [stream_key(*counters) for counters in itertools.product(range(4), range(8), range(10), range(10))]
    assert len({key & 0xFFFFFFFF for key in keys}) == len(keys) == 3200
    for bit in range(64):
        share = sum(key >> bit & 1 for key in keys) / len(keys)
        assert 0.45 < share < 0.55
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 from state 0


@pytest.mark.parametrize(
    ("layer", "draws"),
    [
        (nn.Linear(2, 2), False),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU(), nn.MaxPool2d(2)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.Dropout(0.0), True),
        (nn.MultiheadAttention(4, 2), True),
        (nn.LSTM(2, 2), True),
        (nn.RReLU(), True),
        (Mask(), True),
    ],
)
def test_which_layers_may_draw(layer: nn.Module, draws: bool) -> None:
    assert may_draw(layer) == draws


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
        assert_trains_as_plain(
            build, lambda step: mlp_batch(8), nn.functional.mse_loss, 4, num_steps=2, between=begin,
            num_stages=2, remat="always",
        )  # fmt: skip
    finally:
        for handle in handles:
            if hasattr(handle, "remove"):
                handle.remove()


def test_forwards_draw_from_streams_of_their_own() -> None:
    """In training mode too, a forward is another sample of the masks than the steps are trained with."""
    batch, _ = mlp_batch(4)
    outputs: list[Tensor] = []

    def loss_fn(output: Tensor, target: None) -> Tensor:
        outputs.append(output.detach().clone())
        return output.square().mean()

    pipeline = Pipeline(seeded(mlp), num_stages=2, num_microbatches=1, remat="never")
    pipeline.step(batch, None, loss_fn)
    forwards = [pipeline(batch), pipeline(batch)]
    samples = [*outputs, *forwards]
    assert len(samples) == 3
    for i in range(3):
        for j in range(i):
            assert not torch.equal(samples[i], samples[j])
