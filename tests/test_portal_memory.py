"""What a pipeline with portals holds: the memory model beside real steps, counted storage by storage."""

from __future__ import annotations

import pytest
import torch
from real_steps import Step, count
from torch import Tensor, nn

from gpipe_bench.models import MODELS
from gpipe_bench.pipeline import Boundary, Pop, PortalSequential, Profiler, Stash, gpipe, portal_memory
from gpipe_bench.pipeline.stage.trees import split

SIZES = {"num_convs": 1, "num_filters": 8, "depth": 2, "dropout": 0.0, "image_size": 32}


def compare(model: nn.Sequential, batch: Tensor, target: Tensor, step: Step) -> None:
    counted, pipeline = count(model, batch, target, nn.functional.mse_loss, step)
    inputs, part = (split(each, step.num_microbatches)[0] for each in (batch, target))
    modelled = portal_memory(
        list(model), nn.functional.mse_loss, Boundary.of(inputs), Boundary.of(part), pipeline.partition,
        pipeline.schedule, step.optimizer, profiler=Profiler(split_backward=step.schedule == "zb-h1"),
    )  # fmt: skip
    for peak, found in zip(counted.peaks, modelled, strict=True):
        assert found.peak == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "remat"), [("gpipe", "always"), ("1f1b", "always"), ("1f1b", "never"), ("zb-h1", "never")]
)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_modelled_peaks_of_a_unet_are_those_of_real_steps(num_stages: int, schedule: str, remat: str) -> None:
    torch.manual_seed(0)
    model = MODELS["unet"](portals=True, **SIZES)
    batch, target = torch.randn(12, 3, 32, 32), torch.rand(12, 1, 32, 32)
    compare(model, batch, target, Step(num_stages, 6, remat, schedule, "sgd"))


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1].sum(dim=1, keepdim=True)


class Wide(nn.Linear):
    stashes = ("wide",)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return value, super().forward(value)


@pytest.mark.parametrize("remat", ["always", "never"])
def test_a_large_portal_waits_where_it_is_popped(remat: str) -> None:
    torch.manual_seed(0)
    pop = Sum()
    pop.pops = ("wide",)  # type: ignore[assignment]
    model = nn.Sequential(Wide(4, 500), *(nn.Linear(4, 4) for _ in range(4)), pop)
    batch, target = torch.randn(48, 4), torch.randn(48, 4)
    compare(model, batch, target, Step(3, 6, remat, "1f1b", "sgd"))


class Product(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


def test_a_portal_is_kept_by_no_stage_that_it_passes() -> None:
    model = PortalSequential(
        nn.Linear(4, 400), Stash("a"), nn.Linear(400, 4), nn.Linear(4, 4), nn.Linear(4, 400),
        Pop("a", Product()),
    )  # fmt: skip
    batch, target = Boundary.of(torch.randn(32, 4)), Boundary.of(torch.randn(32, 400))
    spans = [range(0, 3), range(3, 4), range(4, 6)]
    found = portal_memory(list(model), nn.functional.mse_loss, batch, target, spans, gpipe(3, 4), "sgd")
    assert found[1].peak < 32 * 400 * 4 < found[2].boundary
