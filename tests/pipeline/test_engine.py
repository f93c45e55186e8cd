"""The loop and its surroundings: order, errors, thread-local state, scaled gradients, and the user's
interface.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from covering import pairwise
from tiny_models import everything, mlp, mlp_batch, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import Action, ActionError, Kind, Pipeline
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.schedule import REMAT_MODES
from gpipe_bench.pipeline.plan.walk import execution_order

mse_loss = nn.functional.mse_loss


@pytest.mark.parametrize(
    ("schedule", "remat"), pairwise(tuple(SCHEDULES), REMAT_MODES, keep=[("1f1b", "always")])
)
def test_actions_are_taken_in_the_schedules_order(schedule: str, remat: str) -> None:
    pipeline = Pipeline(seeded(mlp), num_stages=4, num_microbatches=4, schedule=schedule, remat=remat)
    taken: list[Action] = []

    @contextlib.contextmanager
    def observe(action: Action) -> Iterator[None]:
        taken.append(action)
        yield

    pipeline.step(*mlp_batch(8), mse_loss, observe=observe)
    assert taken == list(execution_order(pipeline.schedule))
    assert sorted(event.action for event in pipeline.timeline.events) == sorted(pipeline.schedule)


# Errors


class Fuse(nn.Module):
    """Breaks when its fuse is at the given kind of action, on its third micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.blow: Kind | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if (self.blow is Kind.F and self.calls == 3) or (self.blow is Kind.R and self.calls == 6):
            raise ZeroDivisionError("the fuse has blown")
        y = self.linear(x)
        if self.blow is Kind.B and torch.is_grad_enabled():
            y.register_hook(self._break)
        return y

    def _break(self, gradient: Tensor) -> None:
        raise ZeroDivisionError("the fuse has blown")


@pytest.mark.parametrize(("kind", "action"), [(Kind.F, "1F2"), (Kind.R, "1R2"), (Kind.B, "1B3")])
def test_an_exception_names_its_action_and_keeps_its_traceback(kind: Kind, action: str) -> None:
    fuse = Fuse()
    pipeline = Pipeline(
        [nn.Linear(6, 6).double(), fuse, nn.Tanh()], num_stages=3, num_microbatches=4, cost=[1, 1, 1]
    )
    batch, target = mlp_batch(8)
    pipeline.step(batch, target, mse_loss)
    pipeline.zero_grad()
    fuse.blow, fuse.calls = kind, 0
    words = f"action {action} failed: ZeroDivisionError: the fuse has blown"
    with pytest.raises(ActionError, match=words) as caught:
        pipeline.step(batch, target, mse_loss)
    assert str(caught.value.action) == action
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "raise ZeroDivisionError" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("error", [KeyboardInterrupt, FloatingPointError])
def test_an_interrupted_step_leaves_nothing_behind(error: type[BaseException]) -> None:
    """Ctrl-C in the middle of a step: the exception passes, and the next step is like any other."""

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))

    pipeline = Pipeline(seeded(build), num_stages=3, num_microbatches=4)
    calls = iter(range(1000))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if next(calls) == 2:
            raise error
        return mse_loss(output, target)

    with pytest.raises((KeyboardInterrupt, ActionError)):
        pipeline.step(*mlp_batch(8), loss_fn)
    pipeline.zero_grad()
    pipeline.step(*mlp_batch(8), loss_fn)
    other = Pipeline(seeded(build), num_stages=1, num_microbatches=4)
    other.step(*mlp_batch(8), mse_loss)
    for name, value in other.state_dict().items():
        assert torch.equal(pipeline.state_dict()[name], value), name
    for ours, wanted in zip(pipeline.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, wanted.grad)


def test_a_loss_must_be_one_number() -> None:
    pipeline = Pipeline([nn.Linear(6, 6).double()], num_stages=1, num_microbatches=2)
    batch, target = mlp_batch(4)
    for wrong in (lambda output, target: output - target, lambda output, target: 1.0):
        with pytest.raises(RuntimeError, match="action 0F0 failed: ValueError: loss_fn returned"):
            pipeline.step(batch, target, wrong)
    loss = pipeline.step(batch, target, lambda output, target: mse_loss(output, target).reshape(1, 1))
    assert loss.shape == ()
    with pytest.raises(ValueError, match="loss_fn is None; give a function"):
        pipeline.step(batch, target, None)  # type: ignore[arg-type]


def test_nothing_to_train_is_an_error() -> None:
    pipeline = Pipeline([nn.Linear(6, 6).double().requires_grad_(False)], num_stages=1, num_microbatches=2)
    with pytest.raises(RuntimeError, match="action 0B1 failed: RuntimeError: the loss"):
        pipeline.step(*mlp_batch(4), mse_loss)


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> dict[str, object]:
        return {"x": x, "then": [print]}


def test_what_is_no_tensor_and_no_constant_cannot_cross_a_boundary() -> None:
    pipeline = Pipeline([Wrong(), nn.Linear(6, 6).double()], num_stages=2, num_microbatches=1)
    words = r"0F0 failed: TypeError: the output of layer 0 \(Wrong\).* is of type dict and holds a builtin"
    with pytest.raises(RuntimeError, match=words):
        pipeline.step(*mlp_batch(4), mse_loss)


ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"num_microbatches": 2.5}, {"num_microbatches": True}, {"num_stages": 1.0}, {"devices": ["cuda:99"]},
    {"devices": "gpu"}, {"mesh": "pp"}, {"group": "g"}, {"timeout_s": -1},
)  # fmt: skip


@pytest.mark.parametrize("wrong", ARGUMENTS, ids=str)
def test_arguments_of_another_kind_are_named(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=name) as caught:
        Pipeline([nn.Linear(2, 2)], **{"num_stages": 1, "num_microbatches": 2, **wrong})
    assert repr(value[0] if isinstance(value, list) else value) in str(caught.value)


# Waiting


@pytest.mark.gpu
def test_a_step_waits_for_nothing_on_a_gpu() -> None:
    layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.1)) for _ in range(4)]
    pipeline = Pipeline(layers, num_stages=4, num_microbatches=4, devices="cuda")
    batch, target = (t.float().cuda() for t in mlp_batch(16))
    pipeline.step(batch, target, mse_loss)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pipeline.step(batch, target, mse_loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pipeline.timeline.makespan_s > 0


# Thread-local state


class State(nn.Module):
    """Records thread-local state, and does a product in the precision that autocast chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.seen: list[tuple[bool, torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((
            torch.is_autocast_enabled("cpu"), torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
        ))  # fmt: skip
        return x @ self.weight


def test_thread_local_state_reaches_the_stages() -> None:
    layers = [State(), State()]
    pipeline = Pipeline(layers, num_stages=2, num_microbatches=2)
    batch = torch.randn(4, 6)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipeline.step(batch, None, lambda output, target: output.float().square().mean())
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        pipeline(batch)
    wanted = [(True, torch.float64, True)] * 4 + [(False, torch.float32, False)] * 2
    assert [layer.seen for layer in layers] == [wanted, wanted]


# Scaled gradients: they are scaled and the loss is not; over replicas see `test_mesh`


def half_model() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())))


def scaled_batch(step: int) -> tuple[Tensor, Tensor]:
    """The second one makes infinite gradients."""
    batch, target = mlp_batch(4, dtype=torch.float32, seed=step)
    return batch, target * 1e38 if step == 1 else target


def train_scaled(model: nn.Module, scaler: torch.amp.GradScaler, dtype: torch.dtype) -> list[float]:
    """As torch's documentation does; the scale after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scales = []
    for step in range(4):
        batch, target = scaled_batch(step)
        if isinstance(model, Pipeline):
            twin = Pipeline(copy.deepcopy(nn.Sequential(*model.children())), num_stages=3, num_microbatches=2)
            with torch.autocast("cpu", dtype=dtype):
                loss = model.step(batch, target, lambda y, t: mse_loss(y.float(), t), scaler=scaler)
                assert torch.equal(loss, twin.step(batch, target, lambda y, t: mse_loss(y.float(), t)))
        else:
            for x, y in zip(batch.split(2), target.split(2), strict=True):
                with torch.autocast("cpu", dtype=dtype):
                    loss = mse_loss(model(x).float(), y) / 2
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize(("dtype", "own"), [(torch.float16, True), (torch.bfloat16, False)])
def test_a_scaler_works_as_with_the_plain_model(dtype: torch.dtype, own: bool) -> None:
    options = {"init_scale": 2.0**10, "growth_interval": 2}
    plain, layers = (seeded(half_model, torch.float32) for _ in range(2))
    assert train_scaled(plain, torch.amp.GradScaler("cpu", **options), dtype) == [1024, 512, 512, 1024]
    pipeline = Pipeline(layers, num_stages=3, num_microbatches=2)
    scaler = pipeline.scaler(**options) if own else torch.amp.GradScaler("cpu", **options)
    assert train_scaled(pipeline, scaler, dtype) == [1024, 512, 512, 1024]
    for one, other in zip(pipeline.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def test_a_scaler_that_is_switched_off_changes_nothing() -> None:
    pipeline, twin = (Pipeline(seeded(half_model), num_stages=2, num_microbatches=2) for _ in range(2))
    scaler = pipeline.scaler(enabled=False)
    loss = pipeline.step(*mlp_batch(4), mse_loss, scaler=scaler)
    assert torch.equal(loss, twin.step(*mlp_batch(4), mse_loss))
    for one, other in zip(pipeline.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    scaler.step(torch.optim.SGD(pipeline.parameters(), lr=0.1))
    scaler.step(None)
    scaler.update()


# The user's interface


def test_state_dict_has_the_plain_models_keys() -> None:
    model = seeded(everything)
    keys = list(model.state_dict())
    for num_stages in (1, 5):
        assert list(Pipeline(model, num_stages=num_stages, num_microbatches=2).state_dict()) == keys
    named = nn.Sequential()
    named.add_module("stem", nn.Linear(2, 2))
    named.add_module("step", nn.Linear(2, 2))  # also the name of a method
    pipeline = Pipeline(named, num_stages=2, num_microbatches=1)
    assert list(pipeline.state_dict()) == list(named.state_dict())
    assert [name for name, _ in pipeline.named_parameters()] == [name for name, _ in named.named_parameters()]
    pipeline.step(torch.zeros(1, 2), None, lambda output, target: output.sum())
    pipeline.load_state_dict(named.state_dict())


@pytest.mark.parametrize("cost", [None, "parameters", "auto", [1.0] * 8])
def test_ways_to_balance(cost: object) -> None:
    layers = [nn.Linear(64, 64) for _ in range(6)] + [nn.ReLU(), nn.ReLU()]
    example = torch.empty(4, 64, device="meta")
    pipeline = Pipeline(layers, num_stages=3, num_microbatches=1, cost=cost, example=example)
    wanted = [3, 3, 2] if isinstance(cost, list) else [2, 2, 4]
    assert [len(span) for span in pipeline.partition] == wanted


def test_a_partition_and_a_number_of_workers_may_be_given() -> None:
    for partition in ([1, 3, 2], [range(1), range(1, 4), range(4, 6)]):
        pipeline = Pipeline([nn.Linear(4, 4) for _ in range(6)], partition=partition, num_microbatches=1)
        assert pipeline.partition == (range(1), range(1, 4), range(4, 6))
    pipeline = Pipeline(mlp(), num_stages=6, num_microbatches=3, schedule="interleaved", num_workers=2)
    assert pipeline.schedule.placement == (0, 1, 0, 1, 0, 1)


def test_replaced_parameters_are_the_ones_trained() -> None:
    """`load_state_dict(assign=True)` puts new parameters in place of those the stage was built with."""
    layers = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    pipeline = Pipeline(layers, num_stages=2, num_microbatches=2)
    state = {name: value.clone().requires_grad_() for name, value in layers.state_dict().items()}
    pipeline.load_state_dict(state, assign=True)
    layers[0].requires_grad_(False)
    pipeline.step(*mlp_batch(4), mse_loss)
    assert layers[0].weight.grad is None
    layers[0].requires_grad_(True)
    pipeline.step(*mlp_batch(4), mse_loss)
    assert layers[0].weight.grad is not None
