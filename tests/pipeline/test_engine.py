"""The loop and its surroundings: order, errors, thread-local state, the user's interface."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from tiny_models import everything, mlp, mlp_batch, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import (
    NAMED,
    SLOTS,
    Action,
    ActionError,
    InProcess,
    Kind,
    Pipeline,
    named,
    replay,
)
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.remat import REMAT_MODES
from gpipe_bench.pipeline.plan.schedule import dependencies, execution_order
from gpipe_bench.pipeline.step import prepare

mse_loss = nn.functional.mse_loss


def observed(pipeline: Pipeline, batch_size: int = 8) -> list[Action]:
    """The actions of one step, in the order in which they were taken."""
    taken: list[Action] = []

    @contextlib.contextmanager
    def observe(action: Action) -> Iterator[None]:
        taken.append(action)
        yield

    pipeline.step(*mlp_batch(batch_size), mse_loss, observe=observe)
    return taken


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("remat", REMAT_MODES)
def test_actions_are_taken_in_the_schedules_order(schedule: str, remat: str) -> None:
    pipeline = Pipeline(seeded(mlp), num_stages=4, num_microbatches=4, schedule=schedule, remat=remat)
    assert observed(pipeline) == list(execution_order(pipeline.schedule))
    assert sorted(e.action for e in pipeline.timeline.events) == sorted(pipeline.schedule)


@pytest.mark.parametrize("make", SCHEDULES.values())
@pytest.mark.parametrize("remat", REMAT_MODES)
def test_devices_that_work_side_by_side_are_served_as_they_become_free(make, remat: str) -> None:
    """From one thread, so an action that could start early must not be issued behind one that has to wait."""
    schedule = make(3, 4, remat=remat)
    stages = {k: SimpleNamespace(device=torch.device("cuda", k)) for k in range(3)}
    order = [step.action for step in prepare(schedule, stages)]
    start_s = {event.action: event.start_s for event in replay(schedule, SLOTS).events}
    assert [start_s[action] for action in order] == sorted(start_s.values())
    position = {action: i for i, action in enumerate(order)}
    assert sorted(order) == sorted(schedule)
    for action, needs in dependencies(schedule).items():
        assert all(position[need] < position[action] for need in needs)


def test_gradients_arrive_in_reverse_order_of_the_micro_batches() -> None:
    """Seen from inside the layers, by what distinguishes the micro-batches, not from the schedule."""
    seen: list[tuple[int, float]] = []

    class Spy(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage, self.weight = stage, nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.weight
            if torch.is_grad_enabled():
                key = float(x.detach()[0, 0])
                y.register_hook(lambda gradient: seen.append((self.stage, key)))
            return y

    batch = torch.arange(1.0, 7.0, dtype=torch.float64).view(3, 2)
    Pipeline([Spy(0), Spy(1)], num_stages=2, num_microbatches=3, remat="always").step(
        batch, None, lambda output, target: output.mean()
    )
    assert [key for stage, key in seen if stage == 1] == [5.0, 3.0, 1.0]
    assert [key for stage, key in seen if stage == 0] == [5.0, 3.0, 1.0]
    assert [stage for stage, _ in seen] == [1, 0, 1, 0, 1, 0]


class Told(InProcess):
    """Notes after how many actions the loss was told."""

    def __init__(self, taken: list[Action]) -> None:
        super().__init__()
        self.taken, self.after = taken, -1

    def send_loss(self, loss: Tensor) -> None:
        self.after = len(self.taken)
        super().send_loss(loss)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_the_loss_is_told_after_the_last_forward(name: str) -> None:
    """Whatever the worker of the last stage has still to do then."""
    taken: list[Action] = []
    schedule = named(name, 2, 4)
    told = Told(taken)
    pipeline = Pipeline(
        seeded(mlp), num_stages=schedule.num_stages, num_microbatches=4, schedule=schedule, transport=told
    )

    @contextlib.contextmanager
    def observe(action: Action) -> Iterator[None]:
        taken.append(action)
        yield

    pipeline.step(*mlp_batch(8), mse_loss, observe=observe)
    last = max(i for i, a in enumerate(taken) if (a.stage, a.kind) == (schedule.num_stages - 1, Kind.F))
    assert told.after == last + 1 < len(taken)


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
    with pytest.raises(
        ActionError, match=f"action {action} failed: ZeroDivisionError: the fuse has blown"
    ) as caught:
        pipeline.step(batch, target, mse_loss)
    assert str(caught.value.action) == action
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "raise ZeroDivisionError" in "".join(traceback.format_exception(caught.value))

    # The next step starts clean.
    fuse.blow = None
    pipeline.zero_grad()
    pipeline.num_steps = 0
    pipeline.step(batch, target, mse_loss)
    again = [p.grad.clone() for p in pipeline.parameters()]
    pipeline.zero_grad()
    pipeline.step(batch, target, mse_loss)
    assert all(torch.equal(a, p.grad) for a, p in zip(again, pipeline.parameters(), strict=True))


def test_an_interrupted_step_leaves_nothing_behind() -> None:
    """Ctrl-C in the middle of a step: the exception passes, and the next step is like any other."""
    layers = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)))
    pipeline = Pipeline(layers, num_stages=3, num_microbatches=4)
    calls = iter(range(1000))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return mse_loss(output, target)

    with pytest.raises(KeyboardInterrupt):
        pipeline.step(*mlp_batch(8), loss_fn)
    pipeline.zero_grad()
    pipeline.step(*mlp_batch(8), loss_fn)
    other = Pipeline(
        seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))),
        num_stages=1,
        num_microbatches=4,
    )
    other.step(*mlp_batch(8), mse_loss)
    for name, value in other.state_dict().items():
        assert torch.equal(pipeline.state_dict()[name], value), name
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(pipeline.parameters(), other.parameters(), strict=True)
    )


class State(nn.Module):
    """Records thread-local state, and does a product in the precision that autocast chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.seen: list[tuple[bool, torch.dtype, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(
            (
                torch.is_autocast_enabled("cpu"),
                torch.get_default_dtype(),
                torch.is_inference_mode_enabled(),
                torch.are_deterministic_algorithms_enabled(),
            )
        )
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
    for layer in layers:
        assert (
            layer.seen
            == [(True, torch.float64, False, True)] * 4 + [(False, torch.float32, False, False)] * 2
        )


def test_bfloat16_weights() -> None:
    batch, target = mlp_batch(8, dtype=torch.bfloat16)
    gradients = []
    for num_stages in (1, 4):
        pipeline = Pipeline(seeded(mlp, torch.bfloat16), num_stages=num_stages, num_microbatches=4)
        pipeline.step(batch, target, mse_loss)
        gradients.append([p.grad for p in pipeline.parameters()])
    assert all(a.dtype == torch.bfloat16 and torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_copies_belong_to_their_receiver() -> None:
    """Each stage owns its copy of every boundary tensor, made while the receiver is being charged."""
    receivers: list[int] = []

    @contextlib.contextmanager
    def observe_transfer(stage: int) -> Iterator[None]:
        receivers.append(stage)
        yield

    transport = InProcess(copy=True, observe_transfer=observe_transfer)
    pipeline = Pipeline(seeded(mlp), num_stages=3, num_microbatches=2, transport=transport)
    pipeline.step(*mlp_batch(4), mse_loss)
    assert receivers == [1, 2, 1, 2, 1, 0, 1, 0]


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


def test_one_batch_normalization_may_stand_twice_in_a_stage() -> None:
    norm = nn.BatchNorm1d(6)
    pipeline = Pipeline([nn.Linear(6, 6), norm, nn.Linear(6, 6), norm], num_stages=1, num_microbatches=2)
    assert sum(parameter is norm.weight for parameter in pipeline.parameters()) == 1


@pytest.mark.parametrize("cost", [None, "parameters", "auto", [1.0] * 8])
def test_ways_to_balance(cost: object) -> None:
    layers = [nn.Linear(64, 64) for _ in range(6)] + [nn.ReLU(), nn.ReLU()]
    example = torch.empty(4, 64, device="meta")
    pipeline = Pipeline(layers, num_stages=3, num_microbatches=1, cost=cost, example=example)
    wanted = [3, 3, 2] if isinstance(cost, list) else [2, 2, 4]
    assert [len(span) for span in pipeline.partition] == wanted


def test_a_partition_may_be_given() -> None:
    for partition in ([1, 3, 2], [range(1), range(1, 4), range(4, 6)]):
        pipeline = Pipeline([nn.Linear(4, 4) for _ in range(6)], partition=partition, num_microbatches=1)
        assert pipeline.partition == (range(1), range(1, 4), range(4, 6))


def test_interleaving_shares_the_stages_among_the_workers() -> None:
    pipeline = Pipeline(mlp(), num_stages=6, num_microbatches=3, schedule="interleaved", num_workers=2)
    assert pipeline.schedule.placement == (0, 1, 0, 1, 0, 1)


def test_two_pipelines_over_one_model_share_its_weights() -> None:
    model = seeded(mlp)
    first = Pipeline(model, num_stages=2, num_microbatches=2)
    second = Pipeline(model, num_stages=4, num_microbatches=4)
    first.step(*mlp_batch(4), mse_loss)
    before = [p.grad.clone() for p in model.parameters()]
    second.step(*mlp_batch(4), mse_loss)
    assert any(not torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))


class Watcher(torch.autograd.Function):
    """The identity; its backward notes whether autocast is on."""

    @staticmethod
    def forward(ctx, x: Tensor, seen: list[bool]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.seen.append(torch.is_autocast_enabled("cpu"))
        return gradient, None


class Watched(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        return Watcher.apply(super().forward(x), self.seen)


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_autocast_is_over_when_the_backward_runs(remat: str) -> None:
    """Torch's rule: the context around the forward chooses the precisions, the backward repeats them."""
    layers = [Watched(), Watched()]
    pipeline = Pipeline(layers, num_stages=2, num_microbatches=2, remat=remat)
    batch, _ = mlp_batch(4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipeline.step(batch, None, lambda output, target: output.float().square().mean())
    assert [layer.seen for layer in layers] == [[False, False]] * 2


class Strides(nn.Module):
    """A convolution that notes the strides of what comes in with a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.seen: set[tuple[int, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.seen.add(x.stride())
        return self.conv(x)


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_strides_of_single_examples_survive_a_boundary(remat: str) -> None:
    """Dimensions of length 1 have strides too, and kernels choose layouts by them."""
    seen = []
    for num_stages in (1, 2):
        torch.manual_seed(0)
        last = Strides()
        layers = [nn.Sequential(nn.Conv2d(2, 4, 1), ChannelsLast()), last]
        pipeline = Pipeline(
            layers, num_stages=num_stages, num_microbatches=2, remat=remat, transport=InProcess(copy=True)
        )
        for _ in range(2):
            pipeline.step(torch.randn(2, 2, 3, 1), None, lambda output, target: output.square().mean())
        seen.append(last.seen)
    assert len(seen[0]) == 1
    assert seen[1] == seen[0]
