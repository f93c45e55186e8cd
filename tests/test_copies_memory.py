"""What re-materialization copies, overwritten inputs and changing buffers: the model beside counted steps."""

from __future__ import annotations

import pytest
import torch
from real_steps import Step, compare, count, profiles
from torch import Tensor, nn

from gpipe_bench.pipeline import Action, bytes_of_stages
from gpipe_bench.pipeline.memory.trace import BufferRole
from gpipe_bench.pipeline.memory.workers import action_bytes

WIDTH, ROWS = 64, 128  # a boundary is 32 KiB, a buffer of its size is small


def in_place() -> nn.Sequential:
    """Each stage of two layers begins with one that overwrites its input, the second behind a view."""
    return nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH),
        nn.Flatten(), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
        nn.ReLU(inplace=True), nn.Linear(WIDTH, 4),
    )  # fmt: skip


class Follow(nn.Module):
    """Follows its input in a buffer, in place or by another tensor, beside a small buffer and a large one."""

    def __init__(self, rows: int, *, replaced: bool) -> None:
        super().__init__()
        self.replaced = replaced
        self.register_buffer("average", torch.zeros(rows, WIDTH))
        self.register_buffer("scale", torch.ones(1000))
        self.register_buffer("table", torch.zeros(400, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.replaced:
                self.average = self.average * 0.9
            else:
                self.average.mul_(0.9)
            self.average[0] += x.mean(dim=0)
        return x + self.average[0].detach().clone()


class Still(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.zeros(250, WIDTH))
        self.register_buffer("large", torch.zeros(400, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def check(model: nn.Sequential, step: Step) -> None:
    torch.manual_seed(0)
    batch, target = torch.randn(4 * ROWS, WIDTH), torch.randn(4 * ROWS, 4)
    counted, modelled = compare(model, batch, target, nn.functional.mse_loss, step)
    for peak, found in zip(counted.peaks, modelled, strict=True):
        assert found.peak == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_stages_that_overwrite_their_input(num_stages: int, remat: str, schedule: str) -> None:
    check(in_place(), Step(num_stages, 4, remat, schedule, "sgd"))


@pytest.mark.parametrize("rows", [100, 500])
@pytest.mark.parametrize(("remat", "replaced"), [("always", False), ("always", True), ("never", False)])
def test_buffers_that_change_in_the_forward(remat: str, replaced: bool, rows: int) -> None:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), Follow(rows, replaced=replaced),
        Still(), nn.Linear(WIDTH, WIDTH), Follow(rows, replaced=replaced), nn.Linear(WIDTH, 4),
    )  # fmt: skip
    check(model, Step(3, 4, remat, "1f1b", "sgd"))


def test_a_copy_is_held_while_a_forward_runs() -> None:
    """A stage whose F is its fullest moment: it has no parameters, so that little is left for R and B."""
    wide = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten())
    batch, target = torch.randn(2 * ROWS, WIDTH), torch.randn(2 * ROWS, 4)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), wide, nn.Linear(WIDTH, 4))
    step = Step(3, 2, "always", "gpipe", "sgd")
    counted, pipeline = count(model, batch, target, nn.functional.mse_loss, step)
    layers, loss = profiles(model, batch, target, nn.functional.mse_loss, step)
    held = action_bytes(bytes_of_stages(layers, loss, pipeline.partition), pipeline.schedule, "sgd")
    for action in (Action.parse("1F0"), Action.parse("1F1")):
        assert held[action] == pytest.approx(counted.actions[action], rel=0.01)


def test_what_is_found_of_a_layer() -> None:
    batch, target = torch.randn(8, WIDTH), torch.randn(8, 4)
    model = nn.Sequential(*in_place(), Follow(4, replaced=True), nn.BatchNorm1d(4), Still())
    model[6].average = torch.zeros(1, 4)
    layers, _ = profiles(model, batch, target, nn.functional.mse_loss, Step())
    assert [layer.overwritten for layer in layers] == [
        {0}, set(), set(), {0}, {0}, set(), set(), set(), set()
    ]  # fmt: skip
    assert layers[6].buffer_roles == (BufferRole.REPLACED, BufferRole.BESIDE, BufferRole.BESIDE)
    assert set(layers[7].buffer_roles) == {BufferRole.STATISTICS}
    assert layers[8].buffer_roles == (BufferRole.STILL, BufferRole.STILL)
