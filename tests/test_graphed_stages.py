"""Stages that run as graphs of a device, with a graph that is none: it runs what was recorded again and puts
the results where the graph would have left them, over whatever is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import copy_of, mlp_batch, plain_step, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.stage.running import graphed
from gpipe_bench.pipeline.stage.running.graphed import Tensors

mse_loss = nn.functional.mse_loss


class FakeRecorder:
    """Recording computes nothing, as on a device: what is read before a replay is not a number."""

    recorded = 0
    replayed = 0

    def warm_up(self, call: Callable[[], object]) -> None:
        call()

    def record(self, call: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        FakeRecorder.recorded += 1
        static = tuple(None if t is None else t.detach().clone().fill_(float("nan")) for t in call())

        def replay() -> None:
            FakeRecorder.replayed += 1
            with torch.enable_grad():
                for memory, tensor in zip(static, call(), strict=True):
                    if memory is not None and tensor is not None:
                        memory.data.copy_(tensor)

        return static, replay


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "recorder", lambda device: FakeRecorder())
    FakeRecorder.recorded = FakeRecorder.replayed = 0


class Counting(nn.Module):
    """A buffer that counts the forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x.tanh()


def model() -> nn.Sequential:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(6, 6), Counting(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6)
        ).double()
    )


def pipelined(layers: nn.Sequential, num_stages: int, **options: Any) -> Pipeline:
    given = {"remat": "never", "cost": [1] * len(layers), **options}
    return Pipeline(layers, num_stages=num_stages, num_microbatches=3, compile="graphs", **given)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_gradients_are_the_plain_models_over_steps_and_uneven_micro_batches(
    num_stages: int, schedule: str
) -> None:
    layers = model()
    pipeline = pipelined(layers, num_stages, schedule=schedule)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for step in range(3):
        batch, target = mlp_batch(7)
        plain = plain_step(copy_of(layers), batch + step, target, mse_loss, 3)
        pipeline.zero_grad(set_to_none=step != 2)  # gradients in place, too
        loss = pipeline.step(batch + step, target, mse_loss)
        torch.testing.assert_close(loss, plain.loss)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.gradients[name], rtol=1e-12, atol=1e-14)
        optimizer.step()
    made = FakeRecorder.recorded
    pipeline.step(*mlp_batch(7), mse_loss)
    assert FakeRecorder.recorded == made  # once for all steps


def test_as_many_slots_as_micro_batches_are_in_flight() -> None:
    """GPipe holds all of a size before the first backward, 1F1B on the last stage one."""
    pipelined(model(), 1).step(*mlp_batch(6), mse_loss)
    assert (FakeRecorder.recorded, FakeRecorder.replayed) == (2 * 3, 2 * 3)
    FakeRecorder.recorded = 0
    pipelined(model(), 1, schedule="1f1b").step(*mlp_batch(6), mse_loss)
    assert FakeRecorder.recorded == 2


def test_recording_does_not_count_as_a_forward() -> None:
    """The fake counts in its replays; a device would count once per replay, too."""
    layers = model()
    pipelined(layers, 2).step(*mlp_batch(6), mse_loss)
    after_first = float(layers[1].count)
    pipelined(layers, 2).step(*mlp_batch(6), mse_loss)
    assert float(layers[1].count) == 2 * after_first == 6


def test_other_weights_and_another_mode_are_recorded_anew() -> None:
    layers = model()
    pipeline = pipelined(layers, 1)
    pipeline.step(*mlp_batch(6), mse_loss)
    made = FakeRecorder.recorded
    layers[0].weight.data = layers[0].weight.data.clone()
    pipeline.step(*mlp_batch(6), mse_loss)
    assert FakeRecorder.recorded == 2 * made
    layers.eval()
    pipeline.step(*mlp_batch(6), mse_loss)
    assert FakeRecorder.recorded == 3 * made


def test_a_step_after_a_failed_one_finds_its_slots_free() -> None:
    pipeline = pipelined(model(), 1)
    batch, target = mlp_batch(6)
    pipeline.step(batch, target, mse_loss)
    made = FakeRecorder.recorded
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        pipeline.step(batch, target, lambda output, target: 1 / 0)
    pipeline.zero_grad()
    pipeline.step(batch, target, mse_loss)
    assert FakeRecorder.recorded == made


def test_a_layer_that_draws_after_all_runs_as_it_is_with_its_masks() -> None:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.3)

    layers = nn.Sequential(seeded(lambda: nn.Linear(6, 6).double()), Draws())
    plain = plain_step(layers, *mlp_batch(6), mse_loss, 3)
    with pytest.warns(UserWarning, match="draw random numbers, .* the stage runs as it is"):
        loss = pipelined(layers, 1).step(*mlp_batch(6), mse_loss)
    torch.testing.assert_close(loss, plain.loss)
    assert FakeRecorder.recorded == 0


def test_evaluation_runs_the_layers_as_they_are() -> None:
    layers = model()
    batch, _ = mlp_batch(6)
    torch.testing.assert_close(pipelined(layers, 2)(batch), layers(batch).detach())
    assert FakeRecorder.recorded == 0


@pytest.mark.parametrize(
    ("layer", "options", "words"),
    [
        (nn.Identity(), {"remat": "always"}, "a recomputation would save nothing; use remat='never'"),
        (nn.Identity(), {"remat": "except_last"}, "use remat='never'"),
        (nn.BatchNorm1d(6), {}, "layer 1 has batch normalization, .* use compile=True"),
        (nn.Sequential(nn.Dropout(0.1)), {}, "layer 1 draws random numbers, .* use compile=True"),
    ],
)
def test_what_no_graph_can_hold_is_refused(layer: nn.Module, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pipelined(nn.Sequential(nn.Linear(6, 6), layer), 1, **options)


def test_a_cpu_has_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ValueError, match="which cpu does not have; use devices='cuda', or compile=True"):
        pipelined(model(), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_graphs_of_a_gpu_give_the_same_gradients(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = []
    for compile in ("graphs", False):
        layers = model()
        pipeline = Pipeline(
            layers, num_stages=2, num_microbatches=3, remat="never", schedule=schedule, devices="cuda",
            compile=compile,
        )  # fmt: skip
        for step in range(3):
            pipeline.zero_grad()
            pipeline.step(*(t.cuda() + step for t in mlp_batch(7)), mse_loss)
        found.append([p.grad for p in pipeline.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
