"""Layers that change their buffers or their input in the forward train as in the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from covering import pairwise
from odd_layers import OverwritesOne
from tiny_models import assert_trains_as_plain, mlp_batch, seeded
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.utils.checkpoint import checkpoint

from gpipe_bench.pipeline import ActionError, Pipeline
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.pipeline.stage.trees import split

WIDTH = 6
mse_loss = nn.functional.mse_loss


class Changing(nn.Module):
    """A linear layer times what `change` makes of the buffer `seen` in every call."""

    def __init__(self, change: Callable[[Changing, Tensor], None], *, persistent: bool = True) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(WIDTH, WIDTH), change
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x.detach().mean(0))
        return self.linear(x) * (1 + self.seen)

    @property
    def has_begun(self) -> bool:
        """A weight is large, which `begin` makes it."""
        return float(self.linear.weight.detach()[0, 0]) > 100


def in_place(layer: Changing, mean: Tensor) -> None:
    layer.seen.lerp_(mean, 0.3)


def assigned(layer: Changing, mean: Tensor) -> None:
    layer.seen = 0.7 * layer.seen + 0.3 * mean


def late(layer: Changing, mean: Tensor) -> None:
    if layer.has_begun:
        in_place(layer, mean)


def with_graph(layer: Changing, mean: Tensor) -> None:
    if torch.is_grad_enabled():
        in_place(layer, mean)


def other_name(layer: Changing, mean: Tensor) -> None:
    layer.other.same.add_(mean)


def two_names() -> Changing:
    """One tensor in two modules: changed under one name, used under both."""
    layer = Changing(other_name)
    layer.other = nn.Module()
    layer.other.register_buffer("same", layer.seen)
    return layer


class Unset(nn.Linear):
    """Makes a table in its first call and then uses it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("table", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH, dtype=x.dtype)
        return super().forward(x) * self.table


class Observed(nn.Linear):
    """What quantization-aware training does: a range is followed, and the input rounded by it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.observe = FakeQuantize(
            observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, averaging_constant=0.1
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.observe(x.float()).double())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: Changing(in_place),
    "not saved": lambda: Changing(in_place, persistent=False),
    "assigned": lambda: Changing(assigned),
    "unset": Unset,
    "two names": two_names,
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "observed": Observed,
}


def model(kind: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(3) for layer in (kind(), nn.Tanh())))


def trains(
    kind: Callable[[], nn.Module], num_stages: int = 3, remat: str = "always", **options: object
) -> None:
    """Three steps against the plain model's."""
    assert_trains_as_plain(
        lambda: model(kind), lambda step: mlp_batch(8, seed=step), options.pop("loss_fn", mse_loss), 4,
        num_steps=3, num_stages=num_stages, remat=remat, cost=None, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "remat", "schedule", "num_stages"),
    pairwise(tuple(KINDS), REMAT_MODES, ("gpipe", "1f1b", "naive"), (1, 2, 3)),
)
def test_a_recomputation_sees_what_the_forward_saw(
    kind: str, remat: str, schedule: str, num_stages: int
) -> None:
    trains(KINDS[kind], num_stages, remat, schedule=schedule)


def test_a_buffer_may_begin_to_change_later() -> None:
    def begin(step: int, layers: nn.Sequential) -> None:
        for layer in layers:
            if step == 1 and isinstance(layer, Changing):
                layer.linear.weight.data[0, 0] = 101

    trains(lambda: Changing(late), between=begin)


def test_a_buffer_that_the_user_changes_between_steps() -> None:
    def fill(step: int, layers: nn.Sequential) -> None:
        for name, buffer in layers.named_buffers():
            if name.endswith("seen"):
                buffer.fill_(step)

    for change in (in_place, late):
        trains(lambda change=change: Changing(change), between=fill)


def test_a_layer_that_asks_for_gradients_is_refused() -> None:
    pipeline = Pipeline(seeded(lambda: model(lambda: Changing(with_graph))), num_stages=3, num_microbatches=4)
    with pytest.raises(ActionError, match="action 2R3 failed: RuntimeError: buffer 'seen'"):
        pipeline.step(*mlp_batch(8), mse_loss)


class LossWithCount(nn.Module):
    """Weighs later micro-batches more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return mse_loss(output, target) * float(self.calls)


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_a_loss_may_have_buffers_too(remat: str) -> None:
    loss_fn = LossWithCount()
    trains(KINDS["in place"], 2, remat, loss_fn=loss_fn)
    assert float(loss_fn.calls) == 3 * 4


class GivesItsBuffer(nn.Module):
    """x -> (x, how often it was called): the second is the buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return x, self.calls


class Times(nn.Linear):
    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, calls = inputs
        return super().forward(x) * calls


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_a_buffer_may_cross_a_boundary(remat: str) -> None:
    assert_trains_as_plain(
        lambda: nn.Sequential(GivesItsBuffer(), Times(WIDTH, WIDTH)), lambda step: mlp_batch(8, seed=step),
        mse_loss, 4, num_steps=3, num_stages=2, remat=remat,
    )  # fmt: skip


# Layers that overwrite their input; that it trains exactly is seen in `test_transparency`


def test_a_layer_that_begins_to_overwrite_the_stage_input_is_refused_not_silently_wrong() -> None:
    class Late(nn.Module):
        late = False

        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2) if self.late else x * 2

    batch, target = mlp_batch(4)
    kept = batch.clone()
    layers = seeded(lambda: nn.Sequential(Late(), nn.Linear(WIDTH, WIDTH)))
    pipeline = Pipeline(layers, num_stages=1, num_microbatches=2, remat="always")
    pipeline.step(batch, target, mse_loss)
    layers[0].late = True
    with pytest.raises(RuntimeError, match=r"it cannot be recomputed; call Pipeline\.refresh\(\)"):
        pipeline.step(batch.clone(), target, mse_loss)
    pipeline.refresh()
    pipeline.step(batch, target, mse_loss)
    assert torch.equal(batch, kept)  # the user's is left alone


class Views(nn.Linear):
    """Two tensors in one memory: the whole and its rows' halves, in another shape, or half a row each."""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = super().forward(x)
        if self.kind == "overlapping":
            return h, h.view(-1, 2, 3)
        if self.kind == "without a gradient":
            return h, h.detach().view(-1, 2, 3)
        return h[:, :3], h[:, 3:].view(-1, 1, 3)


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("kind", ["overlapping", "without a gradient", "beside each other"])
def test_an_input_that_shares_memory_is_not_silently_overwritten(kind: str, remat: str) -> None:
    """Without a cut, what is changed in one tensor shows in the other, and in its gradients."""
    build = lambda: nn.Sequential(Views(kind), OverwritesOne())  # noqa: E731
    loss_fn = lambda output, target: output.square().mean()  # noqa: E731
    options = {"num_microbatches": 2, "remat": remat}
    assert_trains_as_plain(build, lambda step: mlp_batch(4), loss_fn, num_stages=1, **options)
    pipeline = Pipeline(seeded(build), num_stages=2, cost=[1, 1], **options)
    with pytest.raises(RuntimeError, match=r"out-of-place form of the operation \(inplace=False\),"):
        pipeline.step(*mlp_batch(4), loss_fn)
    with pytest.raises(RuntimeError, match=r"out-of-place form of the operation \(inplace=False\),"):
        pipeline(mlp_batch(4)[0])


# Batch normalization


TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}


def norms(momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm2d(3, momentum=momentum), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum),
        nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5, momentum=momentum, affine=False),
    ).double()  # fmt: skip


def images(batch_size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 + 2 * torch.randn(batch_size, 3, 4, 4, generator=generator, dtype=torch.float64)


def square(output: Tensor, target: None) -> Tensor:
    return output.square().sum(1).mean()


def averages(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def expected(model: nn.Sequential, batches: list[Tensor], num_microbatches: int) -> dict[str, Tensor]:
    """Micro-batch by micro-batch through the plain model, the averages from each module's inputs taken
    together.
    """
    seen: dict[nn.Module, list[Tensor]] = {}
    for module in model:
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.register_forward_pre_hook(
                lambda m, inputs: seen.setdefault(m, []).append(inputs[0].detach())
            )
    buffers = averages(model)
    for count, batch in enumerate(batches, start=1):
        seen.clear()
        for part in split(batch, num_microbatches):
            model(part)
        for name, module in model.named_children():
            if module in seen:
                values = torch.cat(seen[module]).transpose(0, 1).flatten(1)
                factor = module.momentum if module.momentum is not None else 1 / count
                for kind, statistic in (("mean", values.mean(1)), ("var", values.var(1))):
                    buffers[f"{name}.running_{kind}"].lerp_(statistic, factor)
                buffers[f"{name}.num_batches_tracked"].add_(1)
    return buffers


def assert_same(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    for name, buffer in wanted.items():
        torch.testing.assert_close(ours[name], buffer, **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("momentum", "num_microbatches", "num_stages", "remat", "schedule"),
    pairwise(
        (0.1, None), (1, 2, 4), (1, 3), REMAT_MODES, tuple(SCHEDULES), keep=[(0.1, 4, 3, "always", "gpipe")]
    ),
)
def test_averages_move_once_by_the_whole_mini_batch(
    momentum: float | None, num_microbatches: int, num_stages: int, remat: str, schedule: str
) -> None:
    batches = [images(11, seed) for seed in range(3)]
    wanted = expected(norms(momentum), batches, num_microbatches)
    pipeline = Pipeline(
        norms(momentum),
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule=schedule,
        remat=remat,
    )
    for batch in batches:
        pipeline.step(batch, None, square)
    assert_same(averages(pipeline), wanted)


def test_evaluation_uses_the_averages_and_keeps_them() -> None:
    pipeline = Pipeline(norms(), num_stages=2, num_microbatches=4)
    pipeline.step(images(8), None, square)
    before = averages(pipeline)
    pipeline.eval()
    plain = norms()
    plain.load_state_dict(pipeline.state_dict())
    batch = images(8, seed=1)
    torch.testing.assert_close(pipeline(batch), plain.eval()(batch), **TOLERANCE)
    assert_same(averages(pipeline), before)


def test_a_frozen_module_trains_with_its_averages() -> None:
    pipeline = Pipeline(norms(), num_stages=2, num_microbatches=4)
    pipeline.get_submodule("2").eval()
    before = averages(pipeline)
    pipeline.step(images(8), None, square)
    after = averages(pipeline)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        f"{module}.{buffer}"
        for module in (0, 5)
        for buffer in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_a_forward_in_training_mode_counts_as_one_mini_batch() -> None:
    wanted = expected(norms(), [images(9)], 4)
    pipeline = Pipeline(norms(), num_stages=3, num_microbatches=4)
    pipeline(images(9))
    assert_same(averages(pipeline), wanted)


def test_a_failed_step_leaves_neither_statistics_nor_changed_modules() -> None:
    model, untouched = norms(), norms()
    pipelines = [Pipeline(each, num_stages=2, num_microbatches=2) for each in (model, untouched)]

    def broken(output: Tensor, target: None) -> Tensor:
        raise RuntimeError("broken loss")

    for pipeline in pipelines:
        pipeline.step(images(4), None, square)
    before = averages(model)
    with pytest.raises(RuntimeError, match="broken loss"):
        pipelines[0].step(images(4) + 1, None, broken)
    assert_same(averages(model), before)
    for pipeline in pipelines:
        pipeline.step(images(4, seed=1), None, square)
    for name, buffer in untouched.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert not any("forward" in module.__dict__ for module in model.modules())
    model(images(4))  # the plain model again: its averages move at every forward
    assert int(model[0].num_batches_tracked) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_are_in_the_precision_of_the_layer_and_large_means_cancel_nothing(
    dtype: torch.dtype,
) -> None:
    """Sums of squares would lose a variance of 1 beside a mean of 1e6 in float32."""
    torch.manual_seed(0)
    batch = (torch.randn(4096, 2) + (1e6 if dtype == torch.float32 else 0)).to(dtype)
    layers = [nn.BatchNorm1d(2, momentum=1.0), nn.Linear(2, 1)]
    pipeline = Pipeline(layers, num_stages=1, num_microbatches=16).to(dtype)
    pipeline.step(batch, None, square)
    found = pipeline.get_submodule("0").running_var
    torch.testing.assert_close(found, batch.double().var(0).to(dtype), rtol=5e-2, atol=0.0)


class Twice(nn.Module):
    """One norm twice, and one of another type and momentum; the whole runs again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, momentum=1.0).double()
        self.single = nn.BatchNorm1d(2, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.do, x, use_reentrant=False)

    def do(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x) + self.norm(3 * x) + self.single(x.float()).double())


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_norms_used_twice_of_several_precisions_and_checkpointed(remat: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 2, dtype=torch.float64)
    pipeline = Pipeline([Twice()], num_stages=1, num_microbatches=2, remat=remat)
    pipeline.step(batch, None, square)
    found = dict(pipeline.named_buffers())
    torch.testing.assert_close(found["0.norm.running_var"], torch.cat([batch, 3 * batch]).var(0), **TOLERANCE)
    torch.testing.assert_close(found["0.single.running_var"], batch.float().var(0))
    assert int(found["0.single.num_batches_tracked"]) == 1


class InPlace(nn.BatchNorm2d):
    """Moves its averages by ordinary in-place operations, as a subclass may."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.running_mean.lerp_(inputs.mean((0, 2, 3)), self.momentum)
            self.running_var.lerp_(inputs.var((0, 2, 3)), self.momentum)
        return nn.functional.batch_norm(inputs, None, None, self.weight, self.bias, training=True)


def test_a_module_that_moves_averages_in_place_leaves_its_neighbours_graphs_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), InPlace(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Flatten()
    ).double()
    wanted = expected(copy.deepcopy(model), [images(4)], 2)
    Pipeline(model, num_stages=1, num_microbatches=2, remat="always").step(images(4), None, square)
    assert_same(averages(model), wanted)


def test_norms_without_statistics_are_taken_and_instance_norms_with_them_refused() -> None:
    with pytest.raises(ValueError, match="track_running_stats=False"):
        Pipeline([nn.InstanceNorm2d(3, track_running_stats=True)], num_stages=1, num_microbatches=1)
    layers = [nn.InstanceNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False)]
    assert len(Pipeline(layers, num_stages=1, num_microbatches=1).stages) == 1
