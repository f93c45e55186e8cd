"""What a worker with several stages holds: its stages added up action by action, as counted in real steps."""

from __future__ import annotations

import pytest
import torch
from real_steps import Step, compare, profiles
from torch import nn

from gpipe_bench.pipeline import (
    bytes_of_stages,
    gpipe,
    named,
    one_f_one_b,
    pipeline_memory,
)
from gpipe_bench.pipeline.memory.workers import memories


def model() -> nn.Sequential:
    """Layers of different sizes, of which some keep their input, some their output and one neither."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 32), nn.GELU(), nn.Linear(32, 160), nn.Identity(),
        nn.Linear(160, 24), nn.Linear(24, 4),
    )  # fmt: skip


def data(num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64 * num_microbatches, 8), torch.randn(64 * num_microbatches, 4)


@pytest.mark.parametrize("remat", ["never", "always"])
def test_modelled_peaks_are_those_of_real_steps(remat: str) -> None:
    schedule = named("breadth-first", 2, 4, remat=remat)
    batch, target = data(4)
    counted, modelled = compare(model(), batch, target, nn.functional.mse_loss, Step(4, 4, remat, schedule))
    assert len(modelled) == schedule.num_workers
    for peak, found in zip(counted.peaks, modelled, strict=True):
        assert found.peak == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("remat", ["never", "always"])
def test_messages_wait_from_when_they_are_sent(remat: str) -> None:
    """In one process an interleaved worker's messages wait for it, as many as could have been posted."""
    schedule = named("interleaved", 2, 4, remat=remat)
    batch, target = data(4)
    counted, modelled = compare(model(), batch, target, nn.functional.mse_loss, Step(4, 4, remat, schedule))
    layers, loss = profiles(model(), batch, target, nn.functional.mse_loss, Step(num_microbatches=4))
    spans = [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    least, most = (pipeline_memory(layers, loss, spans, schedule, receive_ahead=ahead) for ahead in (0, 4))
    for peak, found, low, high in zip(counted.peaks, modelled, least, most, strict=True):
        assert found.peak == pytest.approx(peak, rel=0.01)
        assert low.peak <= found.peak <= high.peak


def test_one_stage_per_worker_is_the_same_model() -> None:
    batch, target = data(3)
    layers, loss = profiles(model(), batch, target, nn.functional.mse_loss, Step(num_microbatches=3))
    spans = [range(0, 3), range(3, 8)]
    for schedule in (gpipe(2, 3), gpipe(2, 3, "never"), one_f_one_b(2, 3, "except_last")):
        for optimizer in ("sgd", "adam"):
            footprints = bytes_of_stages(layers, loss, spans)
            assert memories(footprints, schedule, optimizer, 0) == pipeline_memory(
                layers, loss, spans, schedule, optimizer
            )


def test_the_stages_of_a_worker_are_not_full_at_the_same_time() -> None:
    batch, target = data(4)
    layers, loss = profiles(model(), batch, target, nn.functional.mse_loss, Step(num_microbatches=4))
    spans = [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    schedule = named("interleaved", 2, 4)
    apart = one_f_one_b(4, 4)
    rows = tuple(schedule.row(stage) for stage in range(4))
    alone = pipeline_memory(layers, loss, spans, type(apart)("alone", 4, 4, "never", rows))
    together = pipeline_memory(layers, loss, spans, schedule)
    for worker, found in enumerate(together):
        mine = [alone[stage] for stage in schedule.stages_of(worker)]
        assert max(each.peak for each in mine) < found.peak < sum(each.peak for each in mine)
        assert found.parameters == sum(each.parameters for each in mine)
