"""Layers whose backward is split, each with something that a split can get wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_bench.pipeline.stage.trees import Tree


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


def ids(*shape: int, upto: int = 50) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, upto, shape)


def image(channels: int = 8) -> Callable[[], Tensor]:
    return reals(4, channels, 9, 9)


def _with_parts(do: Callable[..., Tensor], *parts: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Call(do, *(part() for part in parts))


def _in_place_on_a_view(layer: Call, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :4].addmm_(x, layer.w)
    return y


def _kept_transpose(layer: Call, x: Tensor) -> Tensor:
    w = layer.w.t()
    return torch.tanh(torch.tanh(x @ w) @ w) @ w


def _heads_of_one_weight(layer: Call, x: Tensor) -> Tensor:
    query, key = layer.w.split([8, 24])
    return F.linear(F.linear(x, query).repeat(1, 3), layer.w[:24, :24]) + F.linear(x, key)


# Name: how the layer is built, and what goes in.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tree]]] = {
    "linear": (lambda: nn.Linear(32, 16), reals(8, 32)),
    "linear, three dimensions": (lambda: nn.Linear(32, 16), reals(4, 7, 32)),
    "linear, transposed input": (lambda: nn.Linear(32, 16), lambda: torch.randn(7, 4, 32).transpose(0, 1)),
    "linear without bias": (lambda: nn.Linear(32, 16, bias=False), reals(4, 7, 32)),
    "linear to one number": (lambda: nn.Linear(32, 1), reals(1, 32)),
    "linear, frozen weight": (lambda: frozen(nn.Linear(32, 16), "weight"), reals(8, 32)),
    "linear, frozen bias": (lambda: frozen(nn.Linear(32, 16), "bias"), reals(8, 32)),
    "all frozen but the last": (
        lambda: nn.Sequential(frozen(nn.Linear(32, 32), "weight", "bias"), nn.Linear(32, 8)),
        reals(8, 32),
    ),
    "matrix product": (lambda: Call(lambda s, x: x @ s.w, w=(32, 16)), reals(4, 32)),
    "matrix product, three dimensions": (lambda: Call(lambda s, x: x @ s.w, w=(32, 16)), reals(4, 7, 32)),
    "weight on the left": (lambda: Call(lambda s, x: s.w @ x, w=(16, 4)), reals(4, 32)),
    "product of weights": (lambda: Call(lambda s, x: x @ (s.a @ s.b), a=(32, 4), b=(4, 8)), reals(4, 32)),
    "weight by itself": (lambda: Call(lambda s, x: x @ (s.w @ s.w), w=(32, 32)), reals(4, 32)),
    "addmm with factors": (
        lambda: Call(lambda s, x: torch.addmm(s.b, x, s.w, alpha=0.5, beta=2), w=(32, 8), b=(8,)),
        reals(4, 32),
    ),
    "addmm with a bias like the output": (
        lambda: Call(lambda s, x: torch.addmm(s.b, x, s.w), w=(32, 8), b=(4, 8)), reals(4, 32),
    ),
    "addmm to the input": (
        lambda: Call(lambda s, x: torch.addmm(x, torch.tanh(x), s.w), w=(32, 32)), reals(4, 32),
    ),
    "experts": (lambda: Call(lambda s, x: x.bmm(s.w), w=(4, 32, 8)), reals(4, 7, 32)),
    "einsum": (
        lambda: Call(lambda s, x: torch.einsum("btd,hde->bhte", x, s.w), w=(2, 32, 8)), reals(4, 7, 32),
    ),
    "embedding": (lambda: nn.Embedding(50, 32), ids(4, 7)),
    "embedding, padded and scaled": (
        lambda: nn.Sequential(
            nn.Embedding(50, 32, padding_idx=3, scale_grad_by_freq=True), nn.Linear(32, 8)
        ),
        ids(4, 7),
    ),
    "embedding, sparse": (lambda: nn.Embedding(50, 32, sparse=True), ids(4, 7)),
    "bag of embeddings": (lambda: nn.EmbeddingBag(50, 16), ids(4, 7)),
    "convolution": (lambda: nn.Conv2d(8, 12, 3, padding=1), image()),
    "convolution in groups": (
        lambda: nn.Conv2d(8, 16, 3, groups=4, stride=2, dilation=2, padding=2), image(),
    ),
    "convolution, same size": (lambda: nn.Conv2d(8, 12, 3, padding="same"), image()),
    "convolution, transposed": (
        lambda: nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1), image(),
    ),
    "convolution in one dimension": (lambda: nn.Conv1d(8, 6, 3), reals(4, 8, 20)),
    "convolution, channels last": (
        lambda: nn.Conv2d(8, 12, 3, padding=1),
        lambda: torch.randn(4, 8, 9, 9).to(memory_format=torch.channels_last),
    ),
    "convolution, weight laid out channels last": (
        lambda: nn.Conv2d(8, 12, 3, padding=1).to(memory_format=torch.channels_last), image(),
    ),
    "convolution, frozen weight": (lambda: frozen(nn.Conv2d(8, 12, 3), "weight"), image()),
    "batch normalization": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        image(),
    ),
    "group normalization": (lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)), image()),
    "layer normalization": (lambda: nn.LayerNorm(32), reals(4, 7, 32)),
    "attention": (
        _with_parts(lambda s, x: s.parts[0](x, x, x)[0], lambda: nn.MultiheadAttention(32, 4)),
        reals(7, 4, 32),
    ),
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
    "recurrent": (_with_parts(lambda s, x: s.parts[0](x)[0], lambda: nn.LSTM(32, 16)), reals(5, 4, 32)),
    "bilinear": (
        _with_parts(lambda s, x, y: s.parts[0](x, y), lambda: nn.Bilinear(32, 32, 8)),
        lambda: (torch.randn(4, 32), torch.randn(4, 32)),
    ),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(32, 16)), reals(4, 32)),
    "left out of autocast": (_with_parts(Call.precise, lambda: nn.Linear(32, 16)), reals(8, 32)),
    "functional call": (_with_parts(Call.functional, lambda: nn.Linear(32, 32)), reals(4, 32)),
    "in place": (
        lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 8)), reals(4, 32),
    ),
    "in place on a view": (lambda: Call(_in_place_on_a_view, w=(32, 4)), reals(4, 32)),
    "used twice": (
        _with_parts(lambda s, x: s.parts[0](torch.tanh(s.parts[0](x))), lambda: nn.Linear(32, 32)),
        reals(4, 32),
    ),
    "large and used twice": (  # more than W collects before it adds
        _with_parts(lambda s, x: s.parts[0](torch.tanh(s.parts[0](x))), lambda: nn.Linear(600, 600)),
        reals(2, 600),
    ),
    "used three times": (
        _with_parts(lambda s, x: s.parts[0](s.parts[0](s.parts[0](x))), lambda: nn.Linear(32, 32)),
        reals(4, 32),
    ),
    "convolution used three times": (
        _with_parts(lambda s, x: s.parts[0](s.parts[0](s.parts[0](x))), lambda: nn.Conv2d(8, 8, 1)),
        image(),
    ),
    "transposed once, used three times": (lambda: Call(_kept_transpose, w=(32, 32)), reals(4, 32)),
    "used many times": (
        lambda: Call(
            lambda s, x: s.parts[0](torch.tanh(s.parts[0](torch.tanh(s.parts[0](torch.tanh(
                s.parts[0](torch.tanh(s.parts[0](torch.tanh(s.parts[0](x)))))))))))
            , nn.Linear(32, 32)
        ),
        reals(4, 32),
    ),
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
    "hooks on activations of ids": (
        _with_parts(Call.hooked, lambda: nn.Embedding(50, 32), lambda: nn.Linear(32, 8)), ids(4, 7),
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
