"""What a worker with several stages holds: its stages added up action by action, as counted in real steps."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from real_steps import Step, compare, profiles
from torch import nn

from gpipe_bench.pipeline import (
    NAMED,
    SLOTS,
    Boundary,
    Profiler,
    bytes_of_stages,
    gpipe,
    named,
    one_f_one_b,
    peak_bytes,
    pipeline_memory,
    replay,
)
from gpipe_bench.pipeline.memory.workers import memories
from gpipe_bench.pipeline.plan.schedule import recomputed
from gpipe_bench.planner import adaptive, held_by
from gpipe_bench.planner.recompute import Ledger


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


@pytest.mark.parametrize("name", NAMED)
def test_sums_for_a_search_are_the_modelled_peaks_to_the_byte(name: str) -> None:
    """Of any choice, for every worker, with and without receives that are posted ahead."""
    batch, target = data(1)
    layers, loss = Profiler(split_backward=True).model(
        model(), nn.functional.mse_loss, Boundary.of(batch), Boundary.of(target)
    )
    schedule = named(name, 2, 5)
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    width = 8 // len(stages)
    footprints = bytes_of_stages(layers, loss, [range(s * width, (s + 1) * width) for s in stages])
    generator = random.Random(name)
    for optimizer, ahead in (("sgd", 0), ("adam", 1)):
        held = held_by(footprints, schedule, optimizer, receive_ahead=ahead)
        for _ in range(5):
            again = {(s, m) for s in stages for m in microbatches if generator.random() < 0.5}
            choice = recomputed(schedule, [[m for s, m in again if s == stage] for stage in stages])
            peaks = peak_bytes(footprints, choice, optimizer, receive_ahead=ahead)
            for worker, peak in enumerate(peaks):
                assert Ledger(schedule, worker, held, 0).peak_bytes(again) == peak


def test_a_choice_under_a_cap_keeps_to_it_in_real_steps() -> None:
    batch, target = data(4)
    layers, loss = profiles(model(), batch, target, nn.functional.mse_loss, Step(num_microbatches=4))
    spans = [range(0, 4), range(4, 8)]
    footprints = bytes_of_stages(layers, loss, spans)
    lean, full = (peak_bytes(footprints, gpipe(2, 4, word), receive_ahead=0) for word in ("always", "never"))
    caps = [(a + b) // 2 for a, b in zip(lean, full, strict=True)]
    schedule = gpipe(2, 4, "never")
    found = adaptive(
        schedule, partial(replay, action_s=SLOTS), held_by(footprints, schedule, receive_ahead=0), caps
    ).schedule
    assert all(0 < len(again) < 4 for again in found.recomputed)
    counted, modelled = compare(model(), batch, target, nn.functional.mse_loss, Step(2, 4, "", found))
    for peak, expected, cap, least in zip(counted.peaks, modelled, caps, lean, strict=True):
        assert expected.peak == pytest.approx(peak, rel=0.01)
        assert least < peak <= 1.01 * cap
