"""I and W together are B, bit for bit, and I lets go of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.pipeline.plan.schedule import Kind
from gpipe_bench.pipeline.stage.stage import Stage
from gpipe_bench.pipeline.stage.trees import Message, Tree, flatten

NUM_MICROBATCHES = 3

# Layers, each with something that a split can get wrong


class Call(nn.Module):
    """`parts` and parameters of the given shapes, and what is done with them: `do(self, *inputs)`."""

    def __init__(self, do: Callable[..., Tensor], *parts: nn.Module, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.do = do
        self.parts = nn.ModuleList(parts)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, inputs: Tree) -> Tensor:
        result: Tensor = self.do(self, *(inputs if isinstance(inputs, tuple) else (inputs,)))
        return result

    def hooked(self, x: Tensor) -> Tensor:
        """A gradient that a hook changes, at an operation behind which the graph goes on or not."""
        for part in self.parts:
            x = part(x)
            x.register_hook(lambda gradient: gradient * 0.5 + 1)
        return x

    def penalized(self, x: Tensor) -> Tensor:
        """The gradient of the gradient: the weight is used in the forward, and again in its backward."""
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(torch.tanh(self.parts[0](x)).sum(), x, create_graph=True)
        return gradient

    def precise(self, x: Tensor) -> Tensor:
        """What is left out of autocast."""
        with torch.autocast("cpu", enabled=False):
            y: Tensor = self.parts[0](x)
        return y

    def functional(self, x: Tensor) -> Tensor:
        """Once with the parameters as they are, once with some that are computed."""
        (part,) = self.parts
        as_they_are = dict(part.named_parameters())
        y = torch.func.functional_call(part, as_they_are, (x,))
        return torch.func.functional_call(part, {k: v * 2 for k, v in as_they_are.items()}, (y,))


def frozen(layer: nn.Module, *names: str) -> nn.Module:
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
    return layer


def reals(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def ids(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 50, shape)


def image(channels: int = 8) -> Callable[[], Tensor]:
    return reals(4, channels, 9, 9)


def _with_parts(do: Callable[..., Tensor], *parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Call(do, *(part() for part in parts))


def _in_place_on_a_view(layer: Call, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :4].addmm_(x, layer.w)
    return y


def _many_times(layer: Call, x: Tensor) -> Tensor:
    for _ in range(6):
        x = torch.tanh(layer.parts[0](x))
    return x


def _kept_transpose(layer: Call, x: Tensor) -> Tensor:
    w = layer.w.t()
    return torch.tanh(torch.tanh(x @ w) @ w) @ w


def _heads_of_one_weight(layer: Call, x: Tensor) -> Tensor:
    query, key = layer.w.split([8, 24])
    return F.linear(F.linear(x, query).repeat(1, 3), layer.w[:24, :24]) + F.linear(x, key)


# Name: how the layer is built, and what goes in.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tree]]] = {
    "linear": (lambda: nn.Linear(32, 16), reals(8, 32)),
    "large linear": (lambda: nn.Linear(600, 600), reals(2, 600)),  # more than W collects before it adds
    "linear, transposed input": (lambda: nn.Linear(32, 16), lambda: torch.randn(7, 4, 32).transpose(0, 1)),
    "linear, frozen weight": (lambda: frozen(nn.Linear(32, 16), "weight"), reals(8, 32)),
    "all frozen but the last": (
        lambda: nn.Sequential(frozen(nn.Linear(32, 32), "weight", "bias"), nn.Linear(32, 8)),
        reals(8, 32),
    ),
    "matrix product": (lambda: Call(lambda s, x: x @ s.w, w=(32, 16)), reals(4, 32)),
    "weight on the left": (lambda: Call(lambda s, x: s.w @ x, w=(16, 4)), reals(4, 32)),
    "weight by itself": (lambda: Call(lambda s, x: x @ (s.w @ s.w), w=(32, 32)), reals(4, 32)),
    "addmm with factors": (
        lambda: Call(lambda s, x: torch.addmm(s.b, x, s.w, alpha=0.5, beta=2), w=(32, 8), b=(8,)),
        reals(4, 32),
    ),
    "experts": (lambda: Call(lambda s, x: x.bmm(s.w), w=(4, 32, 8)), reals(4, 7, 32)),
    "embedding": (lambda: nn.Embedding(50, 32), ids(4, 7)),
    "embedding, sparse": (lambda: nn.Embedding(50, 32, sparse=True), ids(4, 7)),
    "convolution": (lambda: nn.Conv2d(8, 12, 3, padding=1), image()),
    "convolution in groups": (
        lambda: nn.Conv2d(8, 16, 3, groups=4, stride=2, dilation=2, padding=2), image(),
    ),
    "convolution, transposed": (
        lambda: nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1), image(),
    ),
    "convolution, channels last": (
        lambda: nn.Conv2d(8, 12, 3, padding=1),
        lambda: torch.randn(4, 8, 9, 9).to(memory_format=torch.channels_last),
    ),
    "batch normalization": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        image(),
    ),
    "layer normalization": (lambda: nn.LayerNorm(32), reals(4, 7, 32)),
    "attention of a learnt query": (
        lambda: Call(
            lambda s, x: s.parts[0](s.q.expand(4, -1, -1), x, x, need_weights=False)[0],
            nn.MultiheadAttention(32, 4, batch_first=True),
            q=(1, 3, 32),
        ),
        reals(4, 7, 32),
    ),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.1), reals(7, 4, 32)),
    "parts of one weight": (lambda: Call(_heads_of_one_weight, w=(32, 32)), reals(4, 32)),
    "scale": (lambda: Call(lambda s, x: x * s.w, w=(32,)), reals(4, 32)),
    "bilinear": (
        _with_parts(lambda s, x, y: s.parts[0](x, y), lambda: nn.Bilinear(32, 32, 8)),
        lambda: (torch.randn(4, 32), torch.randn(4, 32)),
    ),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(32, 16)), reals(4, 32)),
    "left out of autocast": (_with_parts(Call.precise, lambda: nn.Linear(32, 16)), reals(8, 32)),
    "functional call": (_with_parts(Call.functional, lambda: nn.Linear(32, 32)), reals(4, 32)),
    "in place on a view": (lambda: Call(_in_place_on_a_view, w=(32, 4)), reals(4, 32)),
    "used twice": (
        _with_parts(lambda s, x: s.parts[0](torch.tanh(s.parts[0](x))), lambda: nn.Linear(32, 32)),
        reals(4, 32),
    ),
    "transposed once, used three times": (lambda: Call(_kept_transpose, w=(32, 32)), reals(4, 32)),
    "used many times": (_with_parts(_many_times, lambda: nn.Linear(32, 32)), reals(4, 32)),
    "used and scaled": (
        lambda: Call(lambda s, x: F.linear(x, s.w) + x * s.w[0] + F.linear(x * 2, s.w), w=(32, 32)),
        reals(4, 32),
    ),
    "tied": (
        _with_parts(
            lambda s, i: F.linear(s.parts[1](s.parts[0](i)), s.parts[0].weight),
            lambda: nn.Embedding(50, 32, padding_idx=0), lambda: nn.Linear(32, 32),
        ),
        ids(4, 7),
    ),
    "tied to two heads": (
        _with_parts(
            lambda s, i: F.linear(s.parts[0](i) * 2, s.parts[0].weight)
            + F.linear(torch.tanh(s.parts[0](i)), s.parts[0].weight),
            lambda: nn.Embedding(50, 32),
        ),
        ids(4, 7),
    ),
    "hooks on activations": (
        _with_parts(Call.hooked, lambda: nn.Linear(32, 32), lambda: nn.Linear(32, 8)), reals(4, 32),
    ),
    "gradient penalty": (_with_parts(Call.penalized, lambda: nn.Linear(32, 32)), reals(4, 32)),
    "a view of a parameter in the sum": (
        lambda: Call(lambda s, x: x + s.w.view(4, 32) + s.v, w=(128,), v=(4, 32)), reals(4, 32),
    ),
    "checkpointed": (
        _with_parts(
            lambda s, x: s.parts[1](checkpoint(s.parts[0], x, use_reentrant=False)),
            lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.BatchNorm1d(32)),
            lambda: nn.Linear(32, 8),
        ),
        reals(4, 32),
    ),
    "checkpointed, reentrant": (
        _with_parts(
            lambda s, x: s.parts[1](checkpoint(s.parts[0], x, use_reentrant=True)),
            lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.BatchNorm1d(32)),
            lambda: nn.Linear(32, 8),
        ),
        reals(4, 32),
    ),
}  # fmt: skip


# The halves beside the whole


class Alone:
    """A stage in the middle of a pipeline that is not there: one layer, the same micro-batches every time."""

    def __init__(self, layer: nn.Module, inputs: Tree) -> None:
        self.layer = layer
        self.inputs, self.structure = flatten(inputs)
        self.stage = Stage(1, [self.layer], 1, device=torch.device("cpu"), is_last=False)
        self.stage.begin(0, NUM_MICROBATCHES, training=True)

    def forward(self, m: int = 0) -> tuple[Tensor, ...]:
        """F; returns a gradient for each output."""
        needs_grad = tuple([t.is_floating_point() for t in self.inputs])
        inputs = tuple([t.clone(memory_format=torch.preserve_format) for t in self.inputs])
        message = self.stage.forward(m, Message(inputs, self.structure, needs_grad), graph=True)
        assert message is not None
        generator = torch.Generator().manual_seed(m)
        return tuple([torch.randn(t.shape, generator=generator).to(t) for t in message.tensors])

    def whole(self, m: int = 0) -> tuple[Tensor | None, ...]:
        return self.stage.backward(m, self.forward(m))

    def halves(self, m: int = 0) -> tuple[Tensor | None, ...]:
        gradients = self.stage.backward(m, self.forward(m), Kind.I)
        self.stage.backward_weights(m)
        return gradients

    def gradients(self, backward: Callable[[int], tuple[Tensor | None, ...]]) -> list[Tensor | None]:
        """Of the inputs of each micro-batch, and the sums of the parameters'."""
        self.layer.zero_grad()
        of_inputs = [gradient for m in range(NUM_MICROBATCHES) for gradient in backward(m)]
        return [*of_inputs, *(p.grad for p in self.layer.parameters())]


def assert_same(ours: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    assert len(ours) == len(wanted)
    for a, b in zip(ours, wanted, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert (a.dtype, a.layout, a.shape) == (b.dtype, b.layout, b.shape)
        if a.is_sparse:
            a, b = a.to_dense(), b.to_dense()
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


# Without a product that is counted, or with one that cannot wait.
IN_THE_FIRST_HALF = {
    "linear, frozen weight", "weight on the left", "weight by itself", "addmm with factors", "embedding",
    "embedding, sparse", "layer normalization", "scale", "bilinear", "weight norm", "functional call",
    "in place on a view", "used twice", "used many times", "used and scaled",
    "transposed once, used three times", "tied to two heads", "parts of one weight",
    "a view of a parameter in the sum", "checkpointed, reentrant", "gradient penalty",
}  # fmt: skip


def flops(do: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        do()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("case", CASES)
def test_the_halves_give_the_bits_of_the_whole_and_do_its_work(case: str) -> None:
    """Gradients that go out are no parameter's memory. Products are counted: none is done twice, and those of
    known weights are done by W.
    """
    build, inputs = CASES[case]
    torch.manual_seed(0)
    alone = Alone(build(), inputs())
    wanted = alone.gradients(alone.whole)
    assert any(gradient is not None for gradient in wanted)
    found = alone.gradients(alone.halves)
    assert_same(found, wanted)
    storages = [t.untyped_storage().data_ptr() for t in found if t is not None and not t.is_sparse]
    assert len(set(storages)) == len(storages)
    assert not any(t.requires_grad for t in found if t is not None)
    gradients = alone.forward()
    work = flops(lambda: alone.stage.backward(0, gradients))
    gradients = alone.forward()
    first = flops(lambda: alone.stage.backward(0, gradients, Kind.I))
    second = flops(lambda: alone.stage.backward_weights(0))
    assert first + second == work
    assert (second == 0) == (case in IN_THE_FIRST_HALF), (first, second)


@pytest.mark.parametrize(
    "case",
    ["linear", "convolution", "used twice", "layer normalization", "encoder layer", "left out of autocast"],
)
def test_autocast_gives_the_same_bits_too(case: str) -> None:
    """In the types that it chose, and with its cache of casts, which several micro-batches share."""
    build, inputs = CASES[case]
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = Alone(build(), inputs())
        wanted = alone.gradients(alone.whole)
        assert_same(alone.gradients(alone.halves), wanted)
    assert {p.grad.dtype for p in alone.layer.parameters() if p.grad is not None} == {torch.float32}


# Hooks, and what cannot be split


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.LayerNorm(4))


Hook = Callable[[nn.Parameter, list[int]], Any]


def changing(parameter: nn.Parameter, calls: list[int]) -> Any:
    def hook(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient.view(-1).view_as(gradient) * 0.5 + 1  # laid out like the parameter

    return parameter.register_hook(hook)


def accumulated(parameter: nn.Parameter, calls: list[int]) -> Any:
    return parameter.register_post_accumulate_grad_hook(lambda p: calls.append(1))


def behind_the_sum(parameter: nn.Parameter, calls: list[int]) -> Any:
    """As DistributedDataParallel has it."""
    node = get_gradient_edge(parameter).node
    return node, node.register_hook(lambda *_: calls.append(1))


@pytest.mark.parametrize("hook", [changing, accumulated, behind_the_sum])
def test_hooks_of_parameters_run_once_with_the_sum(hook: Hook) -> None:
    """Of weights that wait, and of those whose gradients come with the first half."""
    alone = Alone(chain(), torch.randn(4, 6))
    calls: list[int] = []
    hooks = [hook(parameter, calls) for parameter in alone.layer.parameters()]
    wanted = alone.gradients(alone.whole)
    assert len(calls) == len(hooks) * NUM_MICROBATCHES
    calls.clear()
    alone.layer.zero_grad()
    inputs = [
        gradient
        for m in range(NUM_MICROBATCHES)
        for gradient in alone.stage.backward(m, alone.forward(m), Kind.I)
    ]
    assert not calls
    for m in range(NUM_MICROBATCHES):
        alone.stage.backward_weights(m)
    assert len(calls) == len(hooks) * NUM_MICROBATCHES
    assert_same([*inputs, *(p.grad for p in alone.layer.parameters())], wanted)


class Overwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(x)
        output: Tensor = self.linear(self.hidden)
        return output

    def overwrite(self) -> None:
        with torch.no_grad():
            self.hidden.add_(1)


def test_what_the_second_half_needs_may_not_be_overwritten() -> None:
    layer = Overwritten()
    alone = Alone(layer, torch.randn(4, 6))
    gradients = alone.forward()
    alone.stage.backward(0, gradients, Kind.I)
    layer.overwrite()
    with pytest.raises(RuntimeError, match="the gradients of weights are computed"):
        alone.stage.backward_weights(0)
    alone.stage.finish(complete=False)
    gradients = alone.forward()
    layer.overwrite()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        alone.stage.backward(0, gradients, Kind.I)
