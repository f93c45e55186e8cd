"""A stage's footprint, action by action, against real steps counted storage by storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from real_steps import Call, Step, count, profiles
from torch import Tensor, nn

from gpipe_bench.pipeline import Boundary, Kind, Profiler
from gpipe_bench.pipeline.memory.boundary import TensorSpec
from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
from gpipe_bench.pipeline.memory.trace import Received

N, C, SIDE = 4, 8, 8
NUM_MICROBATCHES = 2
X = N // NUM_MICROBATCHES * C * SIDE * SIDE * 4  # bytes of an activation of one micro-batch


def conv(in_channels: int = C, out_channels: int = C) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, padding=1)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def loss_of_first(output: Any, target: Tensor) -> Tensor:
    first = output if isinstance(output, Tensor) else output[0]
    return (first - target).square().mean()


def linear() -> nn.Linear:
    return nn.Linear(SIDE * SIDE, SIDE * SIDE)


STACKS: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: [conv(), nn.ReLU(), conv(), nn.ReLU(), conv(), nn.Tanh()],
    "in place": lambda: [
        conv(),
        Call(lambda x, f: f(x).relu_(), conv()),
        Call(lambda x, f: f(x).add_(1), conv()),
        nn.Sequential(conv(), nn.BatchNorm2d(C), nn.LeakyReLU(inplace=True)),
    ],
    "in place on the result of the layer before": lambda: [  # never on what a stage received
        conv(), nn.ReLU(inplace=True), conv(), conv(),
        conv(), nn.ReLU(inplace=True), conv(), nn.ReLU(inplace=True),
    ],
    "pools": lambda: [
        conv(), nn.MaxPool2d(3, 1, 1), conv(), nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1), conv(),
    ],
    "batch normalization": lambda: [
        nn.Sequential(conv(), nn.BatchNorm2d(C), nn.ReLU(inplace=True)) for _ in range(4)
    ],
    "dropout": lambda: [conv(), nn.Dropout(0.3), nn.GELU(), conv(), nn.Dropout(0.3), conv()],
    "frozen first": lambda: [frozen(conv()), nn.ReLU(), frozen(conv()), nn.Tanh(), conv(), conv()],
    "frozen in between": lambda: [conv(), nn.Tanh(), frozen(conv()), nn.Tanh(), conv(), conv()],
    "skips": lambda: [
        Call(lambda x, f: (f(x), x), conv()),
        Call(lambda v, f: (f(v[0]).tanh(), v[1]), conv()),
        Call(lambda v: v[0] + v[1]),
        Call(lambda x: (x, x)),
        Call(lambda v, f: f(v[0]) * v[1], conv()),
        conv(),
    ],
    "residuals": lambda: [Call(lambda x, f: x + f(x).relu(), conv()) for _ in range(4)],
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
        Call(lambda x, f: f(x.flatten(2)).transpose(1, 2), linear()),
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
    "parameters used twice": lambda: [Call(lambda x, f: f(f(x).tanh()), conv()) for _ in range(4)],
    "weights joined": lambda: [
        Call(lambda x, a, b: nn.functional.linear(x, torch.cat([a.weight, b.weight])), nn.Linear(SIDE, 3),
             nn.Linear(SIDE, 5)),
        conv(), conv(),
    ],
    "unused outputs": lambda: [
        conv(), Call(lambda x, f, g: (f(x), g(x)), conv(), conv()), Call(lambda v, f: f(v[0]), conv()),
        Call(lambda x, f: (x, f(x)), conv()),
    ],
    "a detached part": lambda: [conv(), Call(lambda x: x.detach()), conv(), conv()],
    "without parameters": lambda: [
        conv(), nn.Tanh(), nn.Identity(), nn.Flatten(), nn.Unflatten(1, (C, SIDE, SIDE)),
    ],
}  # fmt: skip


def build(name: str) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*STACKS[name]())
    x = torch.randn(N, C, SIDE, SIDE)
    return model, x, torch.randn(N, C, SIDE, SIDE)


# Stages with others on both sides for each stack, and now and then one that has the whole.
CUTS = [(name, 3) for name in STACKS] + [(name, number % 2 + 1) for number, name in enumerate([*STACKS][::3])]


@pytest.mark.parametrize(("name", "num_stages"), CUTS)
def test_every_action_holds_what_is_modelled(name: str, num_stages: int) -> None:
    """F without a graph, R, the first B and a later one; F with a graph."""
    for remat in ("always", "never"):
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
    layers = Profiler().chain([conv(), nn.ReLU(), conv()], image())
    stage = stage_bytes(layers)
    assert stage.saved_bytes == 2 * X - X  # the input is the boundary's; ReLU's result once
    # While the last convolution works both its output's and its input's gradients exist beside ReLU's result;
    # ReLU's own backward still needs it, so nothing is free before.
    weights = layers[0].gradient_bytes
    assert stage.backward_first.activations == X
    assert stage.backward_first.transients == 3 * X  # held by the caller, of ReLU's result, of its input
    assert stage.backward_first.gradients == weights
    assert stage.backward.transients >= 3 * X


def image() -> Boundary:
    return Boundary((TensorSpec((N // NUM_MICROBATCHES, C, SIDE, SIDE), torch.float32, True),), (0,), False)


def test_a_tensor_passed_on_is_counted_once() -> None:
    skip = Call(lambda x, f: (f(x), x), conv())
    keep = Call(lambda v, f: (f(v[0]), v[1]), conv())
    same = Call(lambda v, f: (f(v[0]), v[1]), conv())
    layers = Profiler().chain([nn.Tanh(), skip, keep, same], image())
    stage = stage_bytes(layers)
    # tanh's result (the skip), and the results of two convolutions.
    assert stage.saved_bytes == 3 * X
    assert stage.free.total == 3 * X  # skip, a convolution's input and its output


def test_footprints_of_equal_layers_add_up() -> None:
    layer = Profiler().chain([Call(lambda x, f: f(x).tanh(), conv())], image())[0]
    one, three = stage_bytes([layer]), stage_bytes([layer] * 3)
    assert three.parameter_bytes == 3 * one.parameter_bytes
    assert three.trained_sizes == 3 * one.trained_sizes
    assert three.gradient_bytes == 3 * one.gradient_bytes
    assert one.saved_bytes == X  # tanh's result
    assert three.saved_bytes == 3 * X
    assert (three.input_bytes, three.kept_input_bytes, three.output_gradient_bytes) == (X, X, X)


def test_one_gradient_for_two_outputs_goes_with_the_last_that_needs_it() -> None:
    trace = Profiler().layer(Call(lambda x: (x.tanh(), x.sigmoid())), image()).first

    def left(*received: Received) -> int:
        """Bytes of gradients more at the end of the backward pass than at its begin."""
        return sum(segment.other for segment in trace.segments(received))

    one, other = Received(0, X, is_held=False), Received(1, X, is_held=False)
    held = Received(2, X, is_held=True)
    # The gradient of the input appears; of those of the outputs two go, or the one that both got, or none.
    assert left(one, other) == X - 2 * X
    assert left(one, one) == X - X
    assert left(held, held) == X
    assert left(one, held) == X - X
