"""`Pipeline.verify`: what trains otherwise than the plain model is named, and asking changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import verify_cases
from case_runner import Outcomes, assert_passed, named
from tiny_models import assert_own_gradients, everything, everything_batch, seeded
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline

mse_loss, cross_entropy = nn.functional.mse_loss, nn.functional.cross_entropy
CASES = named(*verify_cases.CASES)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, outcomes: Outcomes) -> None:
    assert_passed(outcomes, case)


@pytest.mark.parametrize("remat", ["always", "never"])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_step_goes_on_as_if_nobody_had_asked(remat: str, num_stages: int) -> None:
    """Parameters, averages, buffers, gradients that add up, random numbers, the optimizer's own hooks."""
    runs = []
    for asks in (False, True):
        model = seeded(everything)
        model.insert(1, Through())
        pipeline = Pipeline(model, num_stages=num_stages, num_microbatches=3, remat=remat)
        counted: list[Tensor] = []
        next(model.parameters()).register_post_accumulate_grad_hook(counted.append)
        torch.manual_seed(7)
        for step in range(3):
            batch, target = everything_batch(7, seed=step)
            if asks:
                with torch.no_grad():
                    kept = [p.clone() for p in model.parameters()]
                state = copy.deepcopy(model.state_dict())
                assert pipeline.verify(batch, target, cross_entropy) < 1e-12
                assert all(map(torch.equal, kept, model.parameters()))
                assert all(map(torch.equal, state.values(), model.state_dict().values()))
            pipeline.step(batch, target, cross_entropy)
            if step:
                for parameter in model.parameters():
                    parameter.data.add_(parameter.grad, alpha=-0.1)
        runs.append((pipeline, len(counted), torch.rand(3)))
    (plain, before, drawn), (asked, after, redrawn) = runs
    assert_own_gradients(asked, {name: p.grad for name, p in plain.named_parameters()})
    for name, value in plain.state_dict().items():
        assert torch.equal(value, asked.state_dict()[name]), name
    assert (before, asked.num_steps) == (after, plain.num_steps)
    assert torch.equal(drawn, redrawn)


def test_what_the_steps_before_have_found_out_is_not_forgotten() -> None:
    """That the first layer overwrites its input shows in the second micro-batch alone, from then on."""

    class Second(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(0.5) if x[0, 0] > 0 else x)

    pipeline = Pipeline([Second(4, 4), nn.Linear(4, 3)], num_stages=2, num_microbatches=2)
    batch, target = torch.ones(4, 4), torch.randn(4, 3)
    pipeline.step(batch, target, mse_loss)
    batch[:2] = -1
    pipeline.verify(batch, target, mse_loss)
    pipeline.step(batch, target, mse_loss)


def test_a_long_chain_in_a_layer_and_gradients_that_are_disabled_are_nothing_to_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for _ in range(2000):
        model[0].chain = {"next": getattr(model[0], "chain", None)}
    pipeline = Pipeline(model, num_stages=2, num_microbatches=2)
    batch, target = torch.randn(4, 4), torch.randn(4, 3)
    with torch.no_grad():
        assert pipeline.verify(batch, target, mse_loss) < 1e-3
    pipeline.step(batch, target, mse_loss)


def test_what_is_no_number_in_both_is_no_difference() -> None:
    pipeline = Pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), num_stages=2, num_microbatches=2)
    assert pipeline.verify(torch.full((4, 4), torch.nan), torch.randn(4, 3), mse_loss) == 0


class Through(nn.Module):
    """Remembers in a buffer how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, value: Any) -> Any:
        self.calls += 1
        return value
