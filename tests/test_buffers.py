"""Layers that change their buffers in the forward train as in the plain model, recomputed or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tiny_models import mlp_batch, plain_step
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.errors import ActionError
from gpipe_bench.pipeline.plan.remat import REMAT_MODES
from gpipe_bench.pipeline.stage.buffers import SMALL_BYTES

WIDTH, NUM_MICROBATCHES, NUM_STEPS = 6, 4, 3
EXACT = {"rtol": 1e-12, "atol": 1e-14}
LARGE = SMALL_BYTES // 8 + 1  # numbers


class Changing(nn.Module):
    """A linear layer times what `change` makes of a buffer in every call."""

    def __init__(self, numbers: int = WIDTH, *, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(numbers, dtype=torch.float64), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.change(x.detach().mean(0))
        return self.linear(x) * (1 + self.seen[:WIDTH])

    def change(self, mean: Tensor) -> None:
        raise NotImplementedError


class InPlace(Changing):
    def change(self, mean: Tensor) -> None:
        self.seen[:WIDTH].lerp_(mean, 0.3)


class NotSaved(InPlace):
    def __init__(self) -> None:
        super().__init__(persistent=False)


class Large(InPlace):
    def __init__(self) -> None:
        super().__init__(LARGE)


class Assigned(Changing):
    def change(self, mean: Tensor) -> None:
        self.seen = 0.7 * self.seen + 0.3 * mean


class BehindTorchsBack(Changing):
    def change(self, mean: Tensor) -> None:
        self.seen.data.mul_(0.7).add_(mean, alpha=0.3)


class Counter(Changing):
    """Changes an estimate in every third call, which a count in another buffer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def change(self, mean: Tensor) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            self.seen.data.add_(mean)


class CountsBeside(Changing):
    """Counts in an attribute, which decides what its buffer becomes."""

    calls = 0

    def change(self, mean: Tensor) -> None:
        self.calls += 1
        self.seen = self.seen + self.calls * mean


class Late(Changing):
    """Changes its buffer when a weight is large, which `start` makes it."""

    def change(self, mean: Tensor) -> None:
        if float(self.linear.weight.detach()[0, 0]) > 100:
            self.seen[:WIDTH].lerp_(mean, 0.3)


class LateAssigned(Late):
    def __init__(self) -> None:
        super().__init__(LARGE)

    def change(self, mean: Tensor) -> None:
        if float(self.linear.weight.detach()[0, 0]) > 100:
            self.seen = torch.cat([self.seen[:WIDTH] + mean, self.seen[WIDTH:]])


class Registered(nn.Module):
    """Registers its buffer in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(WIDTH, dtype=x.dtype))
        self.seen += x.detach().mean(0)
        return self.linear(x) * (1 + self.seen)


class Unset(nn.Module):
    """Makes a table in its first call and then uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(LARGE, dtype=x.dtype)
        return self.linear(x) * self.table[:WIDTH]


class TwoNames(Changing):
    """One tensor in two modules: changed under one name, used under both."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Module()
        self.other.register_buffer("same", self.seen)

    def change(self, mean: Tensor) -> None:
        self.other.same.add_(mean)


class Experts(nn.Module):
    """A mixture of experts: how often each was chosen is counted, and decides who is chosen next."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate = nn.Linear(WIDTH, 3)
        self.register_buffer("load", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.register_buffer("bias", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(1)
        chosen = (scores + self.bias).argmax(1)
        self.load += torch.bincount(chosen, minlength=3)
        # No gradient comes through the bias: experts that are chosen too often are put back.
        self.bias = self.bias - 0.2 * (self.load.double() - self.load.double().mean()).sign()
        each = torch.stack([expert(x) for expert in self.experts], 1)
        places = torch.arange(len(x))
        return each[places, chosen] * scores[places, chosen][:, None]


class Observed(nn.Module):
    """What quantization-aware training does: a range is followed, and the input rounded by it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.observe = FakeQuantize(
            observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, averaging_constant=0.1
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.observe(x.float()).double())


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def old_spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


KINDS: tuple[Callable[[], nn.Module], ...] = (
    InPlace, NotSaved, Large, Assigned, BehindTorchsBack, Counter, CountsBeside, Registered, Unset, TwoNames,
    spectral, old_spectral, Experts, Observed,
)  # fmt: skip


def model(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (kind(), nn.Tanh()))).double()


def train_both(
    layers: nn.Sequential,
    num_stages: int,
    remat: str,
    loss_fn: Callable[..., Tensor] = nn.functional.mse_loss,
    *,
    schedule: str = "gpipe",
    between: Callable[[int, nn.Sequential], None] = lambda step, layers: None,
) -> Pipeline:
    """Some steps without an optimizer, against the plain model's; `between` is called before each step."""
    plain, plain_loss = copy.deepcopy(layers), copy.deepcopy(loss_fn)
    pipeline = Pipeline(
        layers, num_stages=num_stages, num_microbatches=NUM_MICROBATCHES, remat=remat, schedule=schedule
    )
    for step in range(NUM_STEPS):
        batch, target = mlp_batch(NUM_MICROBATCHES * 2, seed=step)
        between(step, plain)
        between(step, layers)
        plain.zero_grad()
        pipeline.zero_grad()
        wanted = plain_step(plain, batch, target, plain_loss, NUM_MICROBATCHES, step=step)
        loss = pipeline.step(batch, target, loss_fn)
        torch.testing.assert_close(loss, wanted.loss, **EXACT)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(
                parameter.grad, wanted.gradients[name], **EXACT, msg=lambda t, n=name: f"{n}: {t}"
            )
        found = dict(pipeline.named_buffers())
        assert found.keys() == dict(plain.named_buffers()).keys()
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(found[name], buffer, **EXACT, msg=lambda t, n=name: f"{n}: {t}")
    return pipeline


@pytest.mark.parametrize("remat", REMAT_MODES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_recomputation_sees_what_the_forward_saw(kind: Callable[[], nn.Module], remat: str) -> None:
    train_both(model(kind), 3, remat)


@pytest.mark.parametrize("kind", [InPlace, Assigned, spectral])
def test_in_every_schedule(kind: Callable[[], nn.Module]) -> None:
    for schedule in ("1f1b", "naive"):
        for num_stages in (1, 2):
            train_both(model(kind), num_stages, "always", schedule=schedule)


def start(step: int, layers: nn.Sequential) -> None:
    """From the second step on, layers that begin late do change."""
    for layer in layers:
        if step == 1 and isinstance(layer, Late):
            layer.linear.weight.data[0, 0] = 101


@pytest.mark.parametrize("kind", [Late, LateAssigned])
def test_a_buffer_may_begin_to_change_later(kind: Callable[[], nn.Module]) -> None:
    train_both(model(kind), 3, "always", between=start)


def test_a_large_buffer_that_begins_to_change_in_place_is_refused() -> None:
    with pytest.raises(ActionError, match=r"buffer 'seen' of layer 0 \(Late\) has begun to change.*refresh"):
        train_both(model(lambda: Late(LARGE)), 3, "always", between=start)

    layers = model(lambda: Late(LARGE))
    pipeline = Pipeline(layers, num_stages=3, num_microbatches=NUM_MICROBATCHES)
    for step in range(2):
        start(step, layers)
        pipeline.refresh()
        pipeline.step(*mlp_batch(8), nn.functional.mse_loss)


def test_a_buffer_that_the_user_changes_between_steps() -> None:
    def fill(step: int, layers: nn.Sequential) -> None:
        for name, buffer in layers.named_buffers():
            if name.endswith("seen"):
                buffer.fill_(step)

    for kind in (InPlace, Late, Large, lambda: Late(LARGE)):
        train_both(model(kind), 3, "always", between=fill)


def test_a_layer_that_changes_when_it_is_trained_again() -> None:
    class WhenTraining(InPlace):
        def change(self, mean: Tensor) -> None:
            if self.training:
                super().change(mean)

    def thaw(step: int, layers: nn.Sequential) -> None:
        layers.train(step != 0)

    train_both(model(lambda: WhenTraining()), 3, "always", between=thaw)


def test_a_layer_that_asks_for_gradients_is_refused() -> None:
    class WithGraph(InPlace):
        def change(self, mean: Tensor) -> None:
            if torch.is_grad_enabled():
                super().change(mean)

    pipeline = Pipeline(model(WithGraph), num_stages=3, num_microbatches=NUM_MICROBATCHES)
    with pytest.raises(ActionError, match=r"buffer 'seen' of layer \d \(WithGraph\) changed only in the rec"):
        pipeline.step(*mlp_batch(8), nn.functional.mse_loss)


class LossWithCount(nn.Module):
    """Weighs later micro-batches more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.mse_loss(output, target) * float(self.calls)


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_a_loss_may_have_buffers_too(remat: str) -> None:
    loss_fn = LossWithCount()
    train_both(model(InPlace), 2, remat, loss_fn)
    assert float(loss_fn.calls) == NUM_STEPS * NUM_MICROBATCHES


class GivesItsBuffer(nn.Module):
    """x -> (x, how often it was called): the second is the buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return x, self.calls


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, calls = inputs
        return self.linear(x) * calls


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_a_buffer_may_cross_a_boundary(remat: str) -> None:
    torch.manual_seed(0)
    train_both(nn.Sequential(GivesItsBuffer(), Times()).double(), 2, remat)


def test_only_what_changes_is_kept() -> None:
    """Large constants are not copied from the second step on, nor is a table that was made once."""
    copied: list[int] = []

    class Spied(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
            if function is Tensor.clone:
                copied.append(arguments[0].numel())
            return super().__torch_function__(function, types, arguments, options or {})

    class Constant(InPlace):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(LARGE, dtype=torch.float64).as_subclass(Spied))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.mask[:WIDTH].as_subclass(Tensor)

    layers = model(Constant)
    pipeline = Pipeline(layers, num_stages=3, num_microbatches=NUM_MICROBATCHES)
    batch, target = mlp_batch(8)
    pipeline.step(batch, target, nn.functional.mse_loss)
    assert copied
    copied.clear()
    pipeline.step(batch, target, nn.functional.mse_loss)
    assert LARGE not in copied


class WithTable(nn.Module):
    """A table that does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table


def test_fake_tensors_have_versions_but_no_values(request: pytest.FixtureRequest) -> None:
    """A step of which only shapes are asked: nothing can be compared, and nothing needs to be."""
    request.addfinalizer(partial(torch.set_default_dtype, torch.get_default_dtype()))
    torch.set_default_dtype(torch.float64)
    with FakeTensorMode():
        layers = [kind() for kind in (WithTable, NotSaved, Assigned)]
        table = layers[0].table
        pipeline = Pipeline(layers, num_stages=3, num_microbatches=2, remat="always")
        x = torch.empty(4, WIDTH)
        for _ in range(3):
            loss = pipeline.step(x, torch.empty(4, WIDTH), nn.functional.mse_loss)
    assert isinstance(loss, FakeTensor)
    assert all(isinstance(p.grad, FakeTensor) for p in pipeline.parameters())
    assert layers[0].table is table
