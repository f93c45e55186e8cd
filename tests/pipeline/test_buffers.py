"""Layers that change their buffers, or their input, in the forward: they train as in the plain model,
recomputed or not, and what cannot be is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from covering import pairwise
from tiny_models import assert_trains_as_plain, mlp_batch, seeded
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

from gpipe_bench.pipeline import ActionError, Pipeline
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES

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


class OverwritesOne(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        a, b = pair
        return a.mul_(3).sum(1, keepdim=True) * b.square().flatten(1)


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
