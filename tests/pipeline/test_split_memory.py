"""What I leaves for W, and when W lets it go: the model beside real steps, counted storage by storage."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import random_placement, random_schedule
from real_steps import Call, Counted, Step, count
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_bench.pipeline import (
    NAMED,
    Action,
    Boundary,
    Kind,
    Profiler,
    Schedule,
    bytes_of_stages,
    named,
    peak_bytes,
)
from gpipe_bench.pipeline.memory.stage_bytes import StageBytes, stage_bytes
from gpipe_bench.pipeline.memory.workers import action_bytes, stage_memory
from gpipe_bench.pipeline.plan.partition import Partition

WIDTH, LENGTH, EXAMPLES = 48, 12, 8  # of a micro-batch
X = EXAMPLES * LENGTH * WIDTH * 4  # bytes of an activation


def square_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def linear(inputs: int = WIDTH, outputs: int = WIDTH, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias)


def tied() -> nn.Module:
    layer = linear()
    return nn.Sequential(layer, nn.ReLU(inplace=True), layer)


def awkward() -> nn.Sequential:
    """Each kind of thing that a split treats in its own way, on both sides of boundaries."""
    return nn.Sequential(
        nn.Embedding(100, WIDTH),
        tied(),
        Call(lambda x, f: (f(x), x), linear()),  # passed through
        Call(lambda v, f: (f(v[0]), v[1]), nn.LayerNorm(WIDTH)),
        Call(lambda v: v[0].tanh() + v[1]),  # one gradient for two
        nn.LayerNorm(WIDTH),
        Call(lambda x, f, g: x + g(f(x).relu_()), linear(WIDTH, 96), linear(96)),
        nn.Sequential(linear(bias=False), nn.Dropout(0.1)),
        Call(lambda x, f: f(x).chunk(2, -1), linear(WIDTH, 2 * WIDTH)),  # slices of one storage
        Call(lambda v: v[0] * v[1].sigmoid()),
        Call(lambda x, f: f(x.transpose(1, 2)).transpose(1, 2), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
        linear(WIDTH, 7),
    )


def of_many_bytes() -> nn.Sequential:
    """The engine adds up in the middle of W."""
    wide = 400
    layers = [layer for _ in range(4) for layer in (linear(wide, wide), nn.ReLU())]
    return nn.Sequential(nn.Embedding(100, wide), *layers, linear(wide, 7))


def tied_again_and_again() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(100, WIDTH), tied(), tied(), tied(), linear(WIDTH, 7))


MODELS = {"awkward": awkward, "many bytes": of_many_bytes, "tied": tied_again_and_again}


@cache
def built(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return MODELS[name]()


@cache
def profiler() -> Profiler:
    return Profiler(split_backward=True)


def footprints(name: str, partition: Partition) -> tuple[StageBytes, ...]:
    inputs, target = data(1)
    layers, loss = profiler().model(built(name), square_error, Boundary.of(inputs), Boundary.of(target))
    return bytes_of_stages(layers, loss, partition)


def data(num_microbatches: int) -> tuple[Tensor, Tensor]:
    size = EXAMPLES * num_microbatches
    return torch.randint(0, 100, (size, LENGTH)), torch.randn(size, LENGTH, 7)


def compared(name: str, schedule: Schedule) -> tuple[Counted, tuple[int, ...], dict[Action, int]]:
    batch, target = data(schedule.num_microbatches)
    step = Step(schedule.num_stages, schedule.num_microbatches, schedule.remat, schedule, "sgd")
    counted, pipeline = count(built(name), batch, target, square_error, step)
    stages = footprints(name, pipeline.partition)
    return counted, peak_bytes(stages, schedule, "sgd"), action_bytes(stages, schedule, "sgd")


def assert_bounds(modelled: Sequence[int], counted: Sequence[int]) -> None:
    """What W holds is an upper estimate, all else is to the byte."""
    for mine, real in zip(modelled, counted, strict=True):
        assert 0.99 * real <= mine <= 1.5 * real


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_every_action_holds_what_is_modelled(name: str, num_workers: int) -> None:
    schedule = named("zb-h2", num_workers, 3)
    counted, _, modelled = compared(name, schedule)
    assert {action.kind.value for action in modelled} == {"F", "I", "W"}
    for action, held in modelled.items():
        # Beside the model: a loss value per micro-batch, and the weight that it enters with.
        if action.kind is Kind.W:
            assert counted.actions[action] - 4 * 2 * 4 <= held <= 1.5 * counted.actions[action], str(action)
        else:
            assert held == pytest.approx(counted.actions[action], abs=4 * 2 * 4), str(action)


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("name", NAMED)
def test_peaks_under_every_named_schedule_are_those_of_real_steps(name: str, remat: str) -> None:
    schedule = named(name, 2, 4, remat=remat)
    counted, modelled, actions = compared("awkward", schedule)
    assert_bounds(modelled, counted.peaks)
    for worker, row in enumerate(schedule.actions):
        assert max(actions[action] for action in row) <= modelled[worker]


@settings(max_examples=15, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32))
def test_and_under_schedules_that_nobody_would_write(
    num_stages: int, num_microbatches: int, seed: int
) -> None:
    generator = random.Random(seed)
    placement = random_placement(generator, num_stages)
    schedule = random_schedule(generator, num_stages, num_microbatches, placement=placement)
    counted, modelled, _ = compared("awkward", schedule)
    assert_bounds(modelled, counted.peaks)


def image(length: int = WIDTH, *, grad: bool = True) -> Boundary:
    return Boundary.of(torch.empty(EXAMPLES, LENGTH, length).requires_grad_(grad))


def halves(*layers: nn.Module, inputs: Boundary | None = None) -> Any:
    found = stage_bytes(profiler().chain(layers, inputs or image())).halves
    assert found is not None
    return found


def test_what_waits_between_the_halves() -> None:
    one = halves(linear())
    assert (one.kept_input_bytes, one.saved_bytes) == (X, X)  # the input; the gradient of the output
    # The gradient that the second leaves for its bias is what the first is given.
    assert halves(linear(), linear()).saved_bytes == X + X + X
    # A normalization computes the gradients of its weights at once, and ReLU's result waits for the linear
    # layer alone.
    assert halves(nn.LayerNorm(WIDTH)).saved_bytes == 2 * WIDTH * 4
    assert halves(nn.LayerNorm(WIDTH)).kept_input_bytes == 0
    assert halves(nn.ReLU(), linear()).saved_bytes == X + X
    assert halves(linear(), nn.ReLU()).saved_bytes == X  # and not its result
    assert halves(nn.Tanh()).saved_bytes == 0


def test_a_storage_that_waits_for_two_operations_waits_once() -> None:
    both = Call(lambda x, f, g: (f(x), g(x)), linear(), linear())
    assert (halves(both).kept_input_bytes, halves(both).saved_bytes) == (X, 2 * X)
    assert halves(nn.ReLU(), both).saved_bytes == 3 * X
    joined = Call(lambda v: v[0] + v[1])
    assert halves(both, joined).saved_bytes == X  # the gradient of the sum is that of both


def test_the_batch_waits_for_nobody() -> None:
    """The first stage's inputs are the user's: W lets go of them in vain."""
    stage = stage_bytes(profiler().chain([linear()], image(grad=False)))
    assert stage.halves is not None
    received, own = (stage.halves.weights(first=False, own=own).total for own in (False, True))
    assert received == own + X
    row = tuple(map(Action.parse, ("0F0", "0I0", "0W0")))
    first, other = (stage_memory(stage, row, "sgd", is_first=is_first) for is_first in (True, False))
    assert first.peak == other.peak


def test_a_layer_that_cannot_be_split_does_it_all_in_I() -> None:  # noqa: N802
    stuck = Call(lambda x, f: checkpoint(f, x, use_reentrant=True), linear())
    stage = stage_bytes(profiler().chain([linear(), stuck], image()))
    assert stage.halves is not None
    assert stage.halves.whole
    whole, split_up = (
        stage_memory(stage, tuple(map(Action.parse, row.split())), is_first=False)
        for row in ("0F0 0F1 0B0 0B1", "0F0 0F1 0I0 0I1 0W0 0W1")
    )
    assert (whole.peak, whole.gradients) == (split_up.peak, split_up.gradients)


def test_profiles_without_halves_are_enough_for_whole_backwards() -> None:
    layers = Profiler().chain([linear()], image())
    stage = stage_bytes(layers)
    assert stage.halves is None
    row = tuple(map(Action.parse, ("0F0", "0I0", "0W0")))
    with pytest.raises(ValueError, match=r"say nothing of; profile with Profiler\(split_backward=True\)"):
        stage_memory(stage, row, is_first=True)
