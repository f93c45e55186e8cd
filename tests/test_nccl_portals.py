"""Portals over a network with NCCL's rules: exact, and without a wait that never ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from fakes.nccl import FakeNetwork, run
from nccl_cases import WIDTH, assert_as_plain, batch, large_messages, mse_loss, pipeline_on, steps_of
from torch import Tensor, nn

from gpipe_bench.pipeline import (
    NAMED,
    Action,
    Pop,
    PortalSequential,
    Schedule,
    Stash,
    gpipe,
    named,
    one_f_one_b,
)


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


Make = Callable[[int], list[nn.Module]]


def trains_exactly(schedule: Schedule, make: Make, **options: object) -> None:
    data, made = batch(schedule.num_microbatches), (lambda: make(schedule.num_stages))
    found = run(schedule.num_workers, steps_of(schedule, made, data), **options)
    assert_as_plain(found, made, data, PortalSequential)


@pytest.mark.parametrize("make", [skipping, crossing])
@pytest.mark.parametrize("name", NAMED)
def test_gradients_are_exact(name: str, make: Make) -> None:
    for num_workers in (2, 4):
        for num_microbatches, remat in ((1, "always"), (6, "never"), (5, "except_last")):
            trains_exactly(named(name, num_workers, num_microbatches, remat=remat), make)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"])
def test_gradients_are_exact_where_memory_counts(name: str) -> None:
    """Messages in tight rings, and senders that wait for them."""
    with large_messages():
        for remat in ("never", "always"):
            for make in (skipping, crossing):
                trains_exactly(named(name, 3, 7, remat=remat), make)


@pytest.mark.parametrize("choose", [lambda number: number - 1, lambda number: number // 2])
def test_gradients_are_exact_whoever_is_first(choose: Callable[[int], int]) -> None:
    trains_exactly(one_f_one_b(4, 6), crossing, choose=choose)


def waiting(schedule: Schedule, make: Make, rank: int) -> Callable[[FakeNetwork], list[Tensor]]:
    """Steps in each of which `rank` waits for its whole device before another of its actions."""
    row = schedule.actions[rank]

    def take(network: FakeNetwork) -> list[Tensor]:
        data, losses = batch(schedule.num_microbatches), []
        with pipeline_on(network, schedule, make(schedule.num_stages)) as pipeline:
            for i in range(-1, len(row)):  # the outlines are learned in the first step

                @contextmanager
                def observe(action: Action, i: int = i) -> Iterator[None]:
                    if network.rank == rank and i >= 0 and action == row[i]:
                        network.synchronize()
                    yield

                losses.append(pipeline.step(*data, mse_loss, observe=observe))
        return losses

    return take


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_a_wait_for_the_device_ends_at_every_action(
    make: Callable[..., Schedule], tight: bool, rank: int
) -> None:
    schedule = make(4, 8, remat="always")
    with large_messages() if tight else nullcontext():
        found = run(4, waiting(schedule, crossing, rank))
    assert {len(losses) for losses in found} == {8 * 3 + 1}
    assert all(torch.equal(loss, found[0][0]) for losses in found for loss in losses)


@pytest.mark.parametrize("name", ["zb-v", "interleaved"])
def test_a_wait_for_the_device_ends_with_several_stages_per_worker(name: str) -> None:
    schedule = named(name, 2, 4)
    for rank in range(2):
        found = run(2, waiting(schedule, crossing, rank))
        assert all(torch.equal(loss, found[0][0]) for losses in found for loss in losses)


def test_evaluation_and_training_take_turns() -> None:
    schedule, data = one_f_one_b(4, 6), batch(6)

    def take(network: FakeNetwork) -> list[Tensor]:
        found = []
        with pipeline_on(network, schedule, crossing(4)) as pipeline:
            for _ in range(2):
                output = pipeline(data[0] if network.rank == 0 else None)
                found += [] if output is None else [output]
                pipeline.step(*data, mse_loss)
        return found

    wanted = PortalSequential(*crossing(4))(data[0])
    outputs = run(4, take)
    assert outputs[:3] == [[]] * 3
    for output in outputs[3]:
        torch.testing.assert_close(output, wanted.detach(), rtol=1e-12, atol=1e-14)


def test_the_first_message_of_a_step_waits_for_no_host() -> None:
    """All communicators are made when the pipeline is."""

    def take(network: FakeNetwork) -> int:
        def pairs() -> list[object]:
            shared = network.world.shared
            return [pair for key, found in shared.items() if key[0] == "pairs" for pair in found.values()]

        with pipeline_on(network, gpipe(4, 4), crossing(4)) as pipeline:
            made = pairs()
            assert all(len(pair.joined) == 2 for pair in made)
            pipeline.step(*batch(4), mse_loss)
            pipeline(batch(4)[0])
            assert len(pairs()) == len(made)
        return len(made)

    # Three neighbours with activations and gradients, and two lines there and back.
    assert run(4, take) == [3 * 2 + 2 * 2] * 4
