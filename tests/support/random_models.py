"""Random sequences of layers that pass on, alias, repeat, overwrite and remember, and their gradients.

Every layer takes and gives a tensor or a tuple of tensors, floating-point ones and sometimes integers. The
layers are those with which memory that belongs to something else is easily overwritten.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline import Kind, Schedule
from gpipe_bench.pipeline.stage.trees import Tree, sizes, split


def parts(value: Tree) -> tuple[Tensor, ...]:
    if isinstance(value, dict):  # what `joined_models.Packed` makes
        return (value["x"] * value["scale"], *value["others"])
    return value if isinstance(value, tuple) else (value,)


def joined(values: tuple[Tensor, ...]) -> Tree:
    return values if len(values) > 1 else values[0]


def flat(tensor: Tensor, width: int) -> Tensor:
    """As rows of `width` numbers: of an example, or of each place of its sequence."""
    shape = tensor.shape[:-1] if tensor.shape[-1] == width else tensor.shape[:1]
    return tensor.reshape(*shape, width)


class Layer(nn.Module):
    """Works on the first tensor and passes the others on as they are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, value: Tree) -> Tree:
        first, *others = parts(value)
        return joined((self.change(first), *others))

    def change(self, x: Tensor) -> Tensor:
        return x


class Dense(Layer):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        # A low rank keeps wide layers cheap.
        self.down, self.up = nn.Linear(width, 4), nn.Linear(4, width)

    def change(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(self.down(flat(x, self.width)))) + 0.5 * flat(x, self.width)


class Overwriting(Dense):
    """Changes what it has made itself in place."""

    def change(self, x: Tensor) -> Tensor:
        y = self.up(self.down(flat(x, self.width)))
        return y.mul_(0.7).add_(flat(x, self.width)).relu_()


class Viewed(Layer):
    def change(self, x: Tensor) -> Tensor:
        return x.view(len(x), 2, -1).transpose(1, 2) if x.ndim == 2 else x.transpose(1, 2).flatten(1)


class Flat(Layer):
    def change(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Shift(Layer):
    """Adds a parameter through a view: with one example a gradient of its shape."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.shift = nn.Parameter(torch.randn(width))

    def change(self, x: Tensor) -> Tensor:
        y = flat(x, self.width)
        return (y + self.shift[None]).view(y.shape)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class Returning(Layer):
    """A function of its own whose backward returns the gradient that it was given."""

    def change(self, x: Tensor) -> Tensor:
        return Through.apply(x)


class Busy(Layer):
    """Takes its time, forward and backward."""

    def __init__(self, width: int, rounds: int) -> None:
        super().__init__(width)
        self.rounds = rounds

    def work(self) -> None:
        for _ in range(self.rounds):
            torch.ones(96, 96) @ torch.ones(96, 96)

    def change(self, x: Tensor) -> Tensor:
        self.work()
        return _Busy.apply(x, self)


class _Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, layer: Busy) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layer.work()
        return gradient, None


class Remembering(Dense):
    """Multiplies with a running mean, changed in place."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("mean", torch.zeros(width), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def change(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean.lerp_(flat(x, self.width).detach().mean(0), 0.2)
        return super().change(x) * (1 + self.mean) / (1 + 0.01 * int(self.calls))


class Replacing(Dense):
    """The same with a new tensor in each call."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("mean", torch.zeros(width))

    def change(self, x: Tensor) -> Tensor:
        self.mean = 0.8 * self.mean + 0.2 * flat(x, self.width).detach().mean(0)
        return super().change(x) * (1 + self.mean)


class Skip(Dense):
    """x, ... -> f(x), x, ..."""

    def forward(self, value: Tree) -> Tree:
        first, *others = parts(value)
        return (self.change(first), first, *others)


class Twice(Layer):
    """x, ... -> x, x, ..."""

    def forward(self, value: Tree) -> Tree:
        first, *others = parts(value)
        return (first, first, *others)


class ViewBeside(Layer):
    """x, ... -> x, a view of x, ..."""

    def forward(self, value: Tree) -> Tree:
        first, *others = parts(value)
        return (first, first.flatten(1), *others)


class Turn(Layer):
    """x, y, ... -> y, ..., x"""

    def forward(self, value: Tree) -> Tree:
        first, *others = parts(value)
        return joined((*others, first)) if others and others[0].is_floating_point() else value


class Join(Layer):
    """x, y, ... -> x + y, ..."""

    def forward(self, value: Tree) -> Tree:
        tensors = parts(value)
        if len(tensors) < 2 or not tensors[1].is_floating_point():
            return value
        return joined((flat(tensors[0], self.width) + flat(tensors[1], self.width), *tensors[2:]))


class Counted(Layer):
    """x, ... -> x, ..., integers"""

    def forward(self, value: Tree) -> Tree:
        tensors = parts(value)
        return (*tensors, (tensors[0] > 0).flatten(1).sum(1))


class Head(nn.Module):
    """Everything that arrives, in one number per example."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, 1)

    def forward(self, value: Tree) -> Tensor:
        total = 0.0
        for i, tensor in enumerate(parts(value)):
            if tensor.is_floating_point():
                of_places = self.linear(flat(tensor, self.width)).flatten(1)
                total = total + of_places.mean(1, keepdim=True) * (1 + i)
            else:
                total = total + 0.1 * tensor.double()[:, None]
        return total


KINDS: tuple[Callable[[int], nn.Module], ...] = (
    Layer, Layer, Dense, Dense, Overwriting, Viewed, Flat, Shift, Shift, Returning, Remembering, Replacing,
    Skip, Twice, ViewBeside, Turn, Join, Join, Counted,
)  # fmt: skip
MOST_TENSORS = 4


def random_layers(generator: random.Random, num_layers: int, width: int) -> list[nn.Module]:
    """Layers with parameters that depend on the generator alone; some of them are not trained."""
    torch.manual_seed(generator.randrange(2**32))
    layers: list[nn.Module] = []
    count = 1
    while len(layers) < num_layers - 1:
        kind = generator.choice(KINDS)
        grows = kind in (Skip, Twice, ViewBeside, Counted)
        if grows and count == MOST_TENSORS:
            continue
        count += grows
        layers.append(kind(width))
        if generator.random() < 0.25:
            layers[-1] = nn.Sequential(layers[-1], Busy(width, generator.choice([5, 40])))
    frozen = generator.choice([0, 0, 0, num_layers // 2])
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    return [layer.double() for layer in (*layers, Head(width))]


def plain_gradients(
    layers: list[nn.Module], batch: Tensor, target: Tensor, schedule: Schedule
) -> dict[str, Tensor | None]:
    """Of the mean of squares over the mini-batch, micro-batch by micro-batch in the order of the forwards.

    Summed outside of autograd, whose own sum goes wrong where two gradients share memory.
    """
    model = nn.Sequential(*layers)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums: dict[str, Tensor | None] = dict.fromkeys(name for name, _ in model.named_parameters())
    lengths = sizes(len(batch), schedule.num_microbatches)
    inputs, targets = split(batch, len(lengths)), split(target, len(lengths))
    for m in [action.microbatch for action in schedule.row(0) if action.kind is Kind.F]:
        loss = nn.functional.mse_loss(model(inputs[m]), targets[m]) * (lengths[m] / len(batch))
        found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        for name, gradient in zip(trained, found, strict=True):
            if gradient is not None:
                before = sums[name]
                sums[name] = gradient if before is None else before + gradient
    return sums
