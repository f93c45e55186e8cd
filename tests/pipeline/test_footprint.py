"""A stage's footprint, action by action, of whole and of split backwards, against real steps that are counted
storage by storage.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import random_placement, random_schedule
from real_steps import Call, Counted, Step, count, profiles
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
from gpipe_bench.pipeline.memory.boundary import TensorSpec
from gpipe_bench.pipeline.memory.stage_bytes import StageBytes, stage_bytes
from gpipe_bench.pipeline.memory.trace import Received
from gpipe_bench.pipeline.memory.workers import action_bytes, stage_memory
from gpipe_bench.pipeline.plan.partition import Partition

N, C, SIDE = 4, 8, 8
NUM_MICROBATCHES = 2
IMAGE = N // NUM_MICROBATCHES * C * SIDE * SIDE * 4  # bytes of an activation of one micro-batch


def conv(in_channels: int = C, out_channels: int = C) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, padding=1)


def loss_of_first(output: Any, target: Tensor) -> Tensor:
    first = output if isinstance(output, Tensor) else output[0]
    return (first - target).square().mean()


def of_pixels() -> nn.Linear:
    return nn.Linear(SIDE * SIDE, SIDE * SIDE)


STACKS: dict[str, Callable[[], list[nn.Module]]] = {
    "in place": lambda: [
        conv(),
        Call(lambda x, f: f(x).relu_(), conv()),
        Call(lambda x, f: f(x).add_(1), conv()),
        nn.Sequential(conv(), nn.BatchNorm2d(C), nn.LeakyReLU(inplace=True)),
    ],
    "frozen in between": lambda: [conv(), nn.Tanh(), conv().requires_grad_(False), nn.Tanh(), conv(), conv()],
    "skips": lambda: [
        Call(lambda x, f: (f(x), x), conv()),
        Call(lambda v, f: (f(v[0]).tanh(), v[1]), conv()),
        Call(lambda v: v[0] + v[1]),
        Call(lambda x: (x, x)),
        Call(lambda v, f: f(v[0]) * v[1], conv()),
        conv(),
    ],
    "a join that passes one gradient to both": lambda: [
        Call(lambda x, f: (f(x), x.tanh()), conv()),
        Call(lambda v, f: (f(v[0]), v[1]), conv()),
        Call(lambda v: v[0] + v[1]),
        Call(lambda x, f: (f(x), x.tanh()), conv()),
        Call(lambda v, f: (f(v[0]), v[1]), conv()),
        Call(lambda v: v[0] + v[1]),
    ],
    "slices of one storage": lambda: [
        Call(lambda x, f: f(x).chunk(3, 1), conv(C, 3 * C)),
        Call(lambda v: v[0] * v[1].sigmoid() * v[2]),
        Call(lambda x, f: f(x)[:, :C], conv(C, 4 * C)),
        conv(),
        Call(lambda x, f: f(x).chunk(3, 1), conv(C, 3 * C)),
        Call(lambda v: v[0] * v[1] * v[2]),
    ],
    "a piece of a concatenation": lambda: [
        conv(C, 4),
        Call(lambda x: torch.cat([x, torch.zeros(len(x), 4 * C - 4, SIDE, SIDE)], 1)),
        conv(4 * C, 4),
        conv(4, C),
    ],
    "layouts": lambda: [
        Call(lambda x, f: f(x.flatten(2)).transpose(1, 2), of_pixels()),
        Call(lambda x, f: f(x.contiguous()), nn.GELU()),
        Call(lambda x: x.transpose(1, 2).reshape(len(x), C, SIDE, SIDE)),
        Call(lambda x, f: f(x).to(memory_format=torch.channels_last), conv()),
        nn.BatchNorm2d(C),
        Call(lambda x: x.flatten(2).view(len(x), C, SIDE, SIDE)),
    ],
    "expanded gradients": lambda: [
        conv(), nn.Tanh(), Call(lambda x: x.sum((2, 3), keepdim=True)),
        Call(lambda x: x.expand(-1, -1, SIDE, SIDE)), conv(), conv(),
    ],
    "integers and a mask without gradient": lambda: [
        Call(lambda x, f: (f(x), (x > 0).float(), torch.ones(x.shape, dtype=torch.int64)), conv()),
        Call(lambda v, f: (f(v[0]) * v[1], v[1], v[2]), conv()),
        Call(lambda v, f: (f(v[0]), v[1], v[2]), conv()),
        Call(lambda v, f: f(v[0]) * (v[1] + v[2]), conv()),
    ],
    "weights joined": lambda: [
        Call(lambda x, a, b: nn.functional.linear(x, torch.cat([a.weight, b.weight])), nn.Linear(SIDE, 3),
             nn.Linear(SIDE, 5)),
        conv(), conv(),
    ],
    "unused outputs": lambda: [
        conv(), Call(lambda x, f, g: (f(x), g(x)), conv(), conv()), Call(lambda v, f: f(v[0]), conv()),
        Call(lambda x, f: (x, f(x)), conv()),
    ],
}  # fmt: skip


def build(name: str) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*STACKS[name]())
    x = torch.randn(N, C, SIDE, SIDE)
    return model, x, torch.randn(N, C, SIDE, SIDE)


@pytest.mark.parametrize("name", STACKS)
def test_every_action_holds_what_is_modelled(name: str) -> None:
    """F without a graph, R, the first B and a later one; F with a graph; of the whole, and between others."""
    for num_stages, remat in ((3, "always"), (3, "never"), (1, "always")):
        model, x, target = build(name)
        step = Step(num_stages, NUM_MICROBATCHES, remat)
        counted, pipeline = count(model, x, target, loss_of_first, step)
        layers, loss = profiles(model, x, target, loss_of_first, step)
        for index, span in enumerate(pipeline.partition):
            is_last = index == num_stages - 1
            stage = stage_bytes([layers[i] for i in span], loss if is_last else None)
            state = 2 * sum(stage.trained_sizes) + 4 * len(stage.trained_sizes)
            data = (index == 0) * x.nbytes + is_last * target.nbytes
            fixed = stage.parameter_bytes + stage.buffer_bytes + state + data
            whole, kept = (0, 0) if index == 0 else (stage.input_bytes, stage.kept_input_bytes)
            graph = stage.saved_bytes + kept
            arrived = stage.output_gradient_bytes  # waits, in one process, while the stage recomputes
            if remat == "always":
                expected = {
                    (Kind.F, 0): whole + stage.free.total,
                    (Kind.F, 1): 2 * whole + stage.free.total,
                    (Kind.R, 1): 2 * whole + stage.forward.total + arrived,
                    (Kind.B, 1): whole + kept + stage.backward_first.total,
                    (Kind.R, 0): whole + stage.gradient_bytes + stage.forward.total + arrived,
                    (Kind.B, 0): kept + stage.gradient_bytes + stage.backward.total,
                }
            else:
                expected = {
                    (Kind.F, 0): whole + stage.forward.total,
                    (Kind.F, 1): graph + whole + stage.forward.total,
                    (Kind.B, 1): graph + kept + stage.backward_first.total,
                    (Kind.B, 0): kept + stage.gradient_bytes + stage.backward.total,
                }
            found = {(a.kind, a.microbatch): size for a, size in counted.actions.items() if a.stage == index}
            for key, size in expected.items():
                # The last stage also collects a loss value per micro-batch, and after a forward the
                # statistics of batch normalization are merged, which takes less than they have.
                slack = 4 * 2 * NUM_MICROBATCHES + stage.buffer_bytes
                assert found[key] == pytest.approx(fixed + size, abs=slack), (key, index, remat)


def test_a_storage_is_freed_by_the_earliest_layer_that_holds_it() -> None:
    """conv - ReLU - conv: the second convolution and the ReLU share a storage."""
    layers = Profiler().chain([conv(), nn.ReLU(), conv()], of_a_microbatch())
    stage = stage_bytes(layers)
    assert stage.saved_bytes == 2 * IMAGE - IMAGE  # the input is the boundary's; ReLU's result once
    # While the last convolution works both its output's and its input's gradients exist beside ReLU's result;
    # ReLU's own backward still needs it, so nothing is free before.
    weights = layers[0].gradient_bytes
    assert stage.backward_first.activations == IMAGE
    assert stage.backward_first.transients == 3 * IMAGE  # held by the caller, of ReLU's result, of its input
    assert stage.backward_first.gradients == weights
    assert stage.backward.transients >= 3 * IMAGE


def of_a_microbatch() -> Boundary:
    return Boundary((TensorSpec((N // NUM_MICROBATCHES, C, SIDE, SIDE), torch.float32, True),), (0,), False)


def test_one_gradient_for_two_outputs_goes_with_the_last_that_needs_it() -> None:
    trace = Profiler().layer(Call(lambda x: (x.tanh(), x.sigmoid())), of_a_microbatch()).first

    def left(*received: Received) -> int:
        """Bytes of gradients more at the end of the backward pass than at its begin."""
        return sum(segment.other for segment in trace.segments(received))

    one, other = Received(0, IMAGE, is_held=False), Received(1, IMAGE, is_held=False)
    held = Received(2, IMAGE, is_held=True)
    # The gradient of the input appears; of those of the outputs two go, or the one that both got, or none.
    assert left(one, other) == IMAGE - 2 * IMAGE
    assert left(one, one) == IMAGE - IMAGE
    assert left(held, held) == IMAGE
    assert left(one, held) == IMAGE - IMAGE


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


@pytest.mark.parametrize(("name", "num_workers"), [("awkward", 3), ("many bytes", 1), ("tied", 3)])
def test_every_action_of_a_split_backward_holds_what_is_modelled(name: str, num_workers: int) -> None:
    schedule = named("zb-h2", num_workers, 3)
    counted, _, modelled = compared(name, schedule)
    assert {action.kind.value for action in modelled} == {"F", "I", "W"}
    for action, held in modelled.items():
        # Beside the model: a loss value per micro-batch, and the weight that it enters with.
        assert held == pytest.approx(counted.actions[action], abs=4 * 2 * 4), str(action)


@pytest.mark.parametrize("remat", ["never", "always"])
@pytest.mark.parametrize("name", NAMED)
def test_peaks_under_every_named_schedule_are_those_of_real_steps(name: str, remat: str) -> None:
    schedule = named(name, 2, 4, remat=remat)
    counted, modelled, actions = compared("awkward", schedule)
    assert modelled == pytest.approx(counted.peaks, rel=0.001)
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
    assert modelled == pytest.approx(counted.peaks, rel=0.01)


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
    both = Call(lambda x, f, g: (f(x), g(x)), linear(), linear())  # what waits for both waits once
    assert (halves(both).kept_input_bytes, halves(both).saved_bytes) == (X, 2 * X)
    assert (
        halves(both, Call(lambda v: v[0] + v[1])).saved_bytes == X
    )  # the gradient of the sum is that of both


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
    unsplit = stage_bytes(Profiler().chain([linear()], image()))
    with pytest.raises(ValueError, match=r"say nothing of; profile with Profiler\(split_backward=True\)"):
        stage_memory(unsplit, tuple(map(Action.parse, ("0F0", "0I0", "0W0"))), is_first=True)
