"""At fixed M and schedule, neither the number of stages nor going on from a checkpoint changes a bit."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
from covering import pairwise
from tiny_models import assert_trains_as_plain, everything, everything_batch, mlp, mlp_batch, seeded
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from gpipe_bench import models
from gpipe_bench.models import set_drop_path
from gpipe_bench.pipeline import NAMED, InProcess, Pipeline, checkpoint, run_plain
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.pipeline.stage.layers import mix, stream_key

OPTIONS: dict[str, dict[str, object]] = {
    "amoebanet-d": {
        "num_layers": 3, "num_filters": 16, "num_classes": 10, "image_size": 67, "aux_head": True,
        "dropout": 0.2,
    },
    "transformer-lm": {
        "num_layers": 6, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "vocab_size": 50, "seq_len": 6,
        "dropout": 0.2,
    },
}  # fmt: skip
cross_entropy = nn.functional.cross_entropy


def assert_same_bits(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []


def state_of(pipeline: Pipeline) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in pipeline.state_dict().items()}


def train(
    name: str, num_stages: int, schedule: str, remat: str, device: str = "cpu", bfloat16: bool = False
) -> dict[str, Tensor]:
    """The state of a model of the zoo after three RMSProp steps of uneven micro-batches."""
    torch.manual_seed(0)
    options = OPTIONS[name]
    model = models.MODELS[name](**options)
    set_drop_path(model, 0.7)
    pipeline = Pipeline(
        model, num_stages=num_stages, num_microbatches=3, schedule=schedule, remat=remat,
        cost=[1] * len(model), devices=device,
    )  # fmt: skip
    optimizer = torch.optim.RMSprop(pipeline.parameters(), lr=1e-3, momentum=0.9)
    loss_fn = models.loss_fn(name, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch, target = models.example_batch(name, 7, generator=generator, **options)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bfloat16):
            pipeline.step(batch, target, loss_fn)
        optimizer.step()
        optimizer.zero_grad()
    return state_of(pipeline)


one_stage = functools.cache(lambda name, schedule: train(name, 1, schedule, "always"))


@pytest.mark.parametrize(
    ("name", "schedule", "remat", "num_stages"),
    pairwise(tuple(OPTIONS), ("gpipe", "1f1b"), ("except_last", "never"), (2, 4, 8)),
)
def test_weights_do_not_depend_on_the_number_of_stages(
    name: str, schedule: str, remat: str, num_stages: int
) -> None:
    """Nor, on the way, on re-materialization: the reference recomputes everything."""
    assert_same_bits(train(name, num_stages, schedule, remat), one_stage(name, schedule))


@pytest.mark.gpu
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_nor_do_they_on_a_gpu(name: str, bfloat16: bool, request: pytest.FixtureRequest) -> None:
    """Operations whose result depends on the order in which threads arrive have their deterministic forms,
    where torch has one.
    """
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True, warn_only=True)
    for remat in ("always", "never"):
        wanted = train(name, 1, "gpipe", remat, "cuda", bfloat16)
        for num_stages in (2, 4):
            assert_same_bits(train(name, num_stages, "gpipe", remat, "cuda", bfloat16), wanted)


@pytest.mark.parametrize("cut", range(1, 12))
def test_no_cut_changes_a_bit(cut: int) -> None:
    """Nor the norm by which gradients are clipped. Also behind a layer that gives the same tensor twice,
    and across memory layouts, with copied boundaries.
    """
    batch, target = everything_batch(9, torch.float32)
    found = []
    for partition in ([12], [cut, 12 - cut]):
        pipeline = Pipeline(
            seeded(everything, torch.float32), num_microbatches=4, partition=partition,
            transport=InProcess(copy=True),
        )  # fmt: skip
        pipeline.step(batch, target, cross_entropy)
        norm = pipeline.clip_grad_norm_(0.01)
        found.append({"norm": norm} | {name: p.grad for name, p in pipeline.named_parameters()})
    assert_same_bits(found[1], found[0])
    del found[0]["norm"]
    clipped = torch.linalg.vector_norm(torch.cat([g.flatten() for g in found[0].values()]))
    torch.testing.assert_close(clipped, torch.tensor(0.01), rtol=1e-3, atol=0.0)


def made(num_stages: int, seed: int = 0, **options: object) -> tuple[Pipeline, torch.optim.Optimizer]:
    pipeline = Pipeline(
        seeded(everything, torch.float32, seed), num_stages=num_stages, num_microbatches=4, cost=[1] * 12,
        seed=5, **options,
    )  # fmt: skip
    return pipeline, torch.optim.SGD(pipeline.parameters(), lr=0.05, momentum=0.9)


def trained(pipeline: Pipeline, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    """What the pipeline holds after these steps, and what it answers."""
    for step in steps:
        pipeline.step(*everything_batch(7, torch.float32, seed=step), cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    output = pipeline.eval()(everything_batch(5, torch.float32)[0])
    pipeline.train()
    return state_of(pipeline) | {"output": output}


one_for_all = functools.cache(lambda name: trained(*made(1, schedule=name), range(5)))


@pytest.mark.parametrize("name", [name for name in NAMED if name not in ("naive", "gpipe", "1f1b")])
@pytest.mark.parametrize("remat", ["never", "always"])
def test_every_named_schedule_gives_the_bits_of_one_stage(name: str, remat: str) -> None:
    """Weights' gradients are added in the order of the micro-batches, as by 1F1B; breadth-first drains in
    reverse, as GPipe does.
    """
    pipeline, optimizer = made(2 * (NAMED[name].stages_per_worker or 2), schedule=name, remat=remat)
    found = trained(pipeline, optimizer, range(5))
    assert_same_bits(found, one_for_all("gpipe" if name == "breadth-first" else "1f1b"))
    timeline, num_workers = pipeline.timeline, pipeline.schedule.num_workers
    assert num_workers == 2
    assert sum(len(timeline.of_worker(w)) for w in range(num_workers)) == len(list(pipeline.schedule))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it should be: one process
def test_a_saved_run_continues_with_another_number_of_stages(tmp_path: Path) -> None:
    """With dropout and batch normalization, bit for bit as if it had never stopped; here in a V."""
    wanted = trained(*made(1, schedule="1f1b"), range(3))
    before, after = made(4, schedule="zb-v", remat="never"), made(2, seed=9, schedule="1f1b")
    trained(*before, range(2))
    checkpoint.save(tmp_path, *before)
    checkpoint.load(tmp_path, *after)
    assert_same_bits(trained(*after, range(2, 3)), wanted)


# Random streams


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
