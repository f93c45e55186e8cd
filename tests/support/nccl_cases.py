"""What the tests over the fake network share: small models, one step after another on every rank, and the
plain model's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from fakes.nccl import FakeNetwork, run
from torch import Tensor, nn

from gpipe_bench.pipeline import Action, Pipeline, Pop, PortalSequential, Schedule, Stash
from gpipe_bench.pipeline.ranks import ends

WIDTH = 3
mse_loss = nn.functional.mse_loss
Observe = Callable[[FakeNetwork, Pipeline], Callable[[Action], AbstractContextManager[None]] | None]


def layers(num_stages: int) -> list[nn.Module]:
    """One for each stage, float64."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(num_stages)]


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(pair[0]).tanh() + pair[1] * pair[0]


def skipping(num_stages: int) -> list[nn.Module]:
    """A layer for each stage: the first one's output goes to all others, and each skips one, too."""
    torch.manual_seed(0)
    first: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return [Stash("first", first).double(), *(Pop("first", Add()).double() for _ in range(num_stages - 1))]


def crossing(num_stages: int) -> list[nn.Module]:
    """Skips one within the other, as in a U-Net: from stage k to the one as far from the end."""
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for stage in range(num_stages):
        mirrored = num_stages - 1 - stage
        layer: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        if stage < mirrored:
            layer = Stash(f"skip {stage}", layer)
        elif stage > mirrored:
            layer = Pop(f"skip {mirrored}", Add())
        made.append(layer.double())
    return made


class Through(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


class Turn(nn.Module):
    """To complex numbers and back, and numbers of a type that NCCL has no name for."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.back = back
        self.weight = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, inputs: Any) -> Any:
        if self.back:
            turned, small = inputs
            return turned.real * self.weight + turned.imag * small
        return torch.complex(inputs, inputs * self.weight).conj(), torch.ones(len(inputs), 1).to(torch.int16)


def batch(num_microbatches: int, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(2, 2 * num_microbatches, width, generator=generator, dtype=torch.float64)
    return made[0], made[1]


def large_messages() -> AbstractContextManager[Any]:
    """Makes every message one whose memory counts, so that rings are tight and senders wait."""
    return mock.patch.object(ends, "SMALL_BYTES", 0)


def steps_of(
    schedule: Schedule,
    make: Callable[[], Sequence[nn.Module]],
    data: tuple[Tensor, Tensor],
    *,
    num_steps: int = 2,
    observe: Observe = lambda network, pipeline: None,
) -> Callable[[FakeNetwork], tuple[Tensor, dict[str, Tensor | None]]]:
    """What one rank does: some steps, the last of them with `observe`; gives its loss and gradients."""

    def take(network: FakeNetwork) -> tuple[Tensor, dict[str, Tensor | None]]:
        with pipeline_on(network, schedule, make()) as pipeline:
            for step in range(num_steps):
                pipeline.zero_grad()
                watched = observe(network, pipeline) if step == num_steps - 1 else None
                loss = pipeline.step(*data, mse_loss, observe=watched)
        return loss, {name: parameter.grad for name, parameter in pipeline.named_parameters()}

    return take


def pipeline_on(
    network: FakeNetwork, schedule: Schedule, made: Sequence[nn.Module], **options: Any
) -> Pipeline:
    options = {"cost": [1] * len(made), "timeout_s": 100.0, **options}
    return Pipeline(
        made,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule,
        group=network,
        **options,
    )


def assert_as_plain(
    found: Sequence[Any],
    make: Callable[[], Sequence[nn.Module]],
    data: tuple[Tensor, Tensor],
    sequence: Callable[..., nn.Module] = nn.Sequential,
) -> None:
    """Every parameter's gradient, and the loss on every rank, equal the plain model's."""
    plain = sequence(*make())
    loss = mse_loss(plain(data[0]), data[1])
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    seen = set()
    for each in found:
        if isinstance(each, BaseException):
            raise each
        torch.testing.assert_close(each[0], loss.detach(), rtol=1e-12, atol=1e-14)
        for name, gradient in each[1].items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-14)
            seen.add(name)
    assert seen == set(wanted)


def trains_exactly(schedule: Schedule, make: Callable[[int], list[nn.Module]], **options: Any) -> None:
    data, made = batch(schedule.num_microbatches), (lambda: make(schedule.num_stages))
    found = run(schedule.num_workers, steps_of(schedule, made, data), **options)
    assert_as_plain(found, made, data, PortalSequential)
