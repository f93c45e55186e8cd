"""A stage keeps what the memory model says it keeps, and frees it at the earliest action."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import mlp_batch, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import SLOTS, Action, InProcess, Kind, Pipeline, Schedule, replay
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.remat import REMAT_MODES

mse_loss = nn.functional.mse_loss


class Saved(torch.autograd.Function):
    """The identity, saving a tensor of its own for the backward, whose lifetime is the graph's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, registry: list[weakref.ref[Tensor]] | None) -> Tensor:
        memory = torch.ones(1)
        if registry is not None:
            registry.append(weakref.ref(memory))
        ctx.memory = memory
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.memory, None


class Watched(nn.Module):
    """tanh(Linear), counting its calls and watching its inputs, outputs and graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.inputs: list[weakref.ref[Tensor]] = []
        self.outputs: list[weakref.ref[Tensor]] = []
        self.graphs: list[weakref.ref[Tensor]] = []
        self.calls: list[bool] = []  # with a graph or without

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(torch.is_grad_enabled())
        self.inputs.append(weakref.ref(x))
        output = Saved.apply(self.linear(x), self.graphs if torch.is_grad_enabled() else None)
        self.outputs.append(weakref.ref(output))
        return output


def alive(references: list[weakref.ref[Tensor]]) -> int:
    return sum(reference() is not None for reference in references)


def watched(num_stages: int, **options: Any) -> tuple[Pipeline, list[Watched]]:
    layers = [Watched().double() for _ in range(num_stages)]
    pipeline = Pipeline(layers, num_stages=num_stages, num_microbatches=5, **options)
    pipeline.step(*mlp_batch(10), mse_loss)  # the first step finds out what needs a gradient
    for layer in layers:
        for seen in (layer.inputs, layer.outputs, layer.graphs, layer.calls):
            seen.clear()
    return pipeline, layers


def held_after(schedule: Schedule, stage: int, action: Action) -> int:
    """Graphs that the schedule says are alive on a stage once it has taken `action`."""
    count = 0
    for done in schedule.actions[stage]:
        count += done.kind is (Kind.R if schedule.recomputes(done.microbatch, stage) else Kind.F)
        count -= done.kind is Kind.B
        if done == action:
            return count
    raise AssertionError(f"{action} is not on stage {stage}")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("remat", REMAT_MODES)
def test_graphs_and_inputs_alive_at_every_action(schedule: str, remat: str) -> None:
    pipeline, layers = watched(3, schedule=schedule, remat=remat, transport=InProcess(copy=True))
    in_flight = [0] * 3

    @contextlib.contextmanager
    def observe(action: Action) -> Iterator[None]:
        yield
        layer, stage = layers[action.stage], action.stage
        assert alive(layer.graphs) == held_after(pipeline.schedule, stage, action), str(action)
        in_flight[stage] += (action.kind is Kind.F) - (action.kind is Kind.B)
        # Kept inputs: one per micro-batch in flight, as boundary inputs or as leaves of a graph. The layer
        # saw each once or, when recomputed, twice, and the first stage's are views of the user's batch.
        kept = sum(bool(microbatch.inputs) for microbatch in pipeline.stages[stage]._microbatches.values())
        with_graph = held_after(pipeline.schedule, stage, action)
        assert kept == (in_flight[stage] if stage else in_flight[stage] - with_graph), str(action)
        if layer is not layers[-1]:  # there the loss saves it
            assert alive(layer.outputs) == 0, f"an output is alive after {action}"

    pipeline.step(*mlp_batch(10), mse_loss, observe=observe)
    assert in_flight == [0, 0, 0]
    for layer in layers:
        assert alive(layer.inputs) == alive(layer.graphs) == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("remat", REMAT_MODES)
def test_number_of_forwards(schedule: str, remat: str) -> None:
    """Under re-materialization every forward is without a graph, and exactly one recomputation follows."""
    pipeline, layers = watched(3, schedule=schedule, remat=remat)
    pipeline.step(*mlp_batch(10), mse_loss)
    again = {"never": 0, "always": 5, "except_last": 4}[remat]
    for layer in layers:
        assert layer.calls.count(False) == again
        assert layer.calls.count(True) == 5


def test_the_first_step_makes_no_extra_forward() -> None:
    """What the stages must know of each other is learnt from the first real micro-batch, never from made-up
    data.
    """
    layers = [Watched().double() for _ in range(3)]
    pipeline = Pipeline(layers, num_stages=3, num_microbatches=5, remat="always")
    pipeline.step(*mlp_batch(10), mse_loss)
    assert [len(layer.calls) for layer in layers] == [10, 10, 10]


@pytest.mark.parametrize("remat", REMAT_MODES)
def test_live_graphs_are_what_the_timeline_says(remat: str) -> None:
    pipeline, _ = watched(3, remat=remat)
    pipeline.step(*mlp_batch(10), mse_loss)
    for stage in range(3):
        measured = pipeline.timeline.live_activations(stage)
        laid_out = replay(pipeline.schedule, SLOTS).live_activations(stage)
        assert [count for _, count in measured] == [count for _, count in laid_out]


def test_a_loss_must_be_one_number() -> None:
    pipeline = Pipeline([nn.Linear(6, 6).double()], num_stages=1, num_microbatches=2)
    batch, target = mlp_batch(4)
    with pytest.raises(RuntimeError, match="action 0F0 failed: ValueError: loss_fn returned"):
        pipeline.step(batch, target, lambda output, target: output - target)
    with pytest.raises(RuntimeError, match="action 0F0 failed: ValueError: loss_fn returned"):
        pipeline.step(batch, target, lambda output, target: 1.0)
    pipeline.step(batch, target, lambda output, target: mse_loss(output, target).reshape(1, 1))


def test_nothing_to_train_is_an_error() -> None:
    pipeline = Pipeline([nn.Linear(6, 6).double().requires_grad_(False)], num_stages=1, num_microbatches=2)
    with pytest.raises(RuntimeError, match="action 0B1 failed: RuntimeError: the loss"):
        pipeline.step(*mlp_batch(4), mse_loss)


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


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> dict[str, object]:
        return {"x": x, "then": [print]}


def test_what_is_no_tensor_and_no_constant_cannot_cross_a_boundary() -> None:
    pipeline = Pipeline([Wrong(), nn.Linear(6, 6).double()], num_stages=2, num_microbatches=1)
    with pytest.raises(
        RuntimeError,
        match=r"0F0 failed: TypeError: the output of layer 0 \(Wrong\).* is of type dict and holds a builtin",
    ):
        pipeline.step(*mlp_batch(4), mse_loss)


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
