"""Small models that together pass everything a layer may pass, and the plain step to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline import Pipeline, run_plain
from gpipe_bench.pipeline.stage.layers import Generators, stream_key
from gpipe_bench.pipeline.stage.trees import Tree, change, num_examples, sizes, split

EXACT = {"rtol": 1e-12, "atol": 1e-14}
"""For float64, element by element: sums hide permuted and cancelling errors."""
AMOEBANET = {
    "num_layers": 3, "num_filters": 8, "num_classes": 10, "image_size": 67, "aux_head": True, "dropout": 0.2,
}  # fmt: skip


class Start(nn.Module):
    """(image, ids) -> (features, ids): integers pass between layers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, channels, 3, padding=1)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        image, ids = inputs
        return self.conv(image).to(memory_format=torch.channels_last), ids


class ConvWithSkip(nn.Module):
    """(features, ids) -> (new features, features, ids): a skip connection in the tuple."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        features, ids = inputs
        return self.norm(self.conv(features)).tanh(), features, ids


class Join(nn.Module):
    """(features, skip, ids) -> (features, ids)."""

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        features, skip, ids = inputs
        return features + 0.5 * skip, ids


class Twice(nn.Module):
    """(features, ids) -> (features, features, ids): the same tensor twice."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        features, ids = inputs
        return features, features, ids


class Gate(nn.Module):
    """(a, b, ids) -> (gated, mask, ids), where the mask is floating point but needs no gradient."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.value = nn.Conv2d(channels, channels, 1)
        self.gate = nn.Conv2d(channels, channels, 1)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        a, b, ids = inputs
        mask = (ids % 2).to(a.dtype).view(-1, 1, 1, 1)
        return self.value(a) * self.gate(b).sigmoid(), mask, ids


class Masked(nn.Module):
    """(features, mask, ids) -> (features, ids), with the ids embedded."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, channels)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        features, mask, ids = inputs
        return features * (1 + mask) + self.embed(ids)[:, :, None, None], ids


class Noise(nn.Module):
    """(features, ids) -> (features, ids) with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        features, ids = inputs
        return self.drop(features), ids


class Head(nn.Module):
    """(features, ids) -> logits."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, 3)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        features, _ = inputs
        return self.linear(features.mean((2, 3)))


def everything(channels: int = 4) -> nn.Sequential:
    """Twelve layers: skips, integers, a repeated tensor, a mask without gradient, dropout, batch
    normalization.
    """
    c = channels
    return nn.Sequential(
        Start(c), ConvWithSkip(c), Join(), Twice(), Gate(c), Masked(c),
        Noise(), ConvWithSkip(c), Join(), Noise(), Twice(), nn.Sequential(Gate(c), Masked(c), Head(c)),
    )  # fmt: skip


def everything_batch(
    batch_size: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tree, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(batch_size, 2, 4, 4, generator=generator, dtype=dtype)
    ids = torch.randint(7, (batch_size,), generator=generator)
    return (image, ids), torch.randint(3, (batch_size,), generator=generator)


def mlp(width: int = 6, depth: int = 8, dropout: float = 0.2) -> nn.Sequential:
    """`depth` layers of tanh(Linear) with dropout, without batch normalization."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(depth))
    )


def mlp_batch(
    batch_size: int, width: int = 6, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch_size, width, generator=generator, dtype=dtype) for _ in range(2))  # type: ignore[return-value]


def seeded(
    build: Callable[[], nn.Sequential], dtype: torch.dtype = torch.float64, seed: int = 0
) -> nn.Sequential:
    """A model with parameters that only depend on `seed`."""
    torch.manual_seed(seed)
    return build().to(dtype)


@dataclass
class Plain:
    """Loss, outputs and gradients of a plain training step over the same micro-batches."""

    loss: Tensor
    outputs: list[Tree] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def plain_step(
    model: nn.Sequential,
    batch: Tree,
    target: Tree,
    loss_fn: Callable[..., Tensor],
    num_microbatches: int,
    *,
    seed: int = 0,
    step: int = 0,
) -> Plain:
    """The result that a step must equal: each micro-batch through the uncut model, losses weighted by their
    share of examples.
    """
    examples = num_examples(batch)
    lengths = sizes(examples, num_microbatches)
    result = Plain(torch.zeros((), dtype=torch.float64))
    generators = Generators(torch.device("cpu"))
    for m, (inputs, wanted) in enumerate(
        zip(split(batch, num_microbatches), split(target, num_microbatches), strict=True)
    ):
        output = run_plain(model, inputs, seed=seed, step=step, microbatch=m)
        states = generators.save()
        generators.seed(stream_key(seed, step, len(model), m))
        loss = loss_fn(output, wanted) * (lengths[m] / examples)
        generators.restore(states)
        loss.backward()
        result.loss = result.loss + loss.detach()
        result.outputs.append(change(output, Tensor.detach, "the output"))
    result.gradients = {name: p.grad for name, p in model.named_parameters()}
    return result


def assert_own_gradients(model: nn.Module, wanted: Mapping[str, Tensor | None], **tolerance: float) -> None:
    """Asserts that every gradient of a model is the wanted one, bit by bit unless a tolerance is given;
    `wanted` may also have those of other ranks.
    """
    for name, parameter in model.named_parameters():
        if wanted[name] is None:
            assert parameter.grad is None, name
        elif tolerance:
            torch.testing.assert_close(
                parameter.grad, wanted[name], **tolerance, msg=lambda t, n=name: f"{n}: {t}"
            )
        else:
            assert torch.equal(parameter.grad, wanted[name]), name


Data = Callable[[int], tuple[Tree, Tree]]


def assert_trains_as_plain(
    build: Callable[[], nn.Sequential],
    data: Data,
    loss_fn: Callable[..., Tensor],
    num_microbatches: int,
    *,
    num_steps: int = 1,
    between: Callable[[int, nn.Sequential], None] = lambda step, layers: None,
    **options: Any,
) -> tuple[Pipeline, nn.Sequential]:
    """Asserts that loss, gradients and buffers of each step equal the plain model's.

    `data` returns a step's batch and target; `between` is called before each step, with the plain model and
    with the pipeline's. Returns the pipeline and the plain model.
    """
    plain, layers = seeded(build), seeded(build)
    plain_loss, options = copy.deepcopy(loss_fn), {"cost": [1] * len(layers), **options}
    pipeline = Pipeline(layers, num_microbatches=num_microbatches, **options)
    for step in range(num_steps):
        batch, target = data(step)
        for model in (plain, layers):
            between(step, model)
            model.zero_grad()
        wanted = plain_step(
            plain, change(batch, Tensor.clone, "it"), target, plain_loss,
            min(num_microbatches, num_examples(batch)), step=step,
        )  # fmt: skip
        torch.testing.assert_close(pipeline.step(batch, target, loss_fn), wanted.loss, **EXACT)
        assert {name for name, _ in pipeline.named_parameters()} == wanted.gradients.keys()
        assert_own_gradients(pipeline, wanted.gradients, **EXACT)
        found, expected = dict(pipeline.named_buffers()), dict(plain.named_buffers())
        assert found.keys() == expected.keys()
        for name, buffer in expected.items():
            owner = plain.get_submodule(name.rpartition(".")[0])
            if not isinstance(owner, nn.modules.batchnorm._BatchNorm):  # averages of the mini-batch
                torch.testing.assert_close(found[name], buffer, **EXACT, msg=lambda t, n=name: f"{n}: {t}")
    return pipeline, plain


class CapturedLoss:
    """A loss function that keeps the output of every micro-batch, in order.

    A recomputation calls it again with the same target; the first output counts.
    """

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self.loss_fn = loss_fn
        self._outputs: dict[int, Tensor] = {}

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self._outputs.setdefault(target.storage_offset(), output.detach().clone())
        return self.loss_fn(output, target)

    @property
    def outputs(self) -> list[Tensor]:
        return [output for _, output in sorted(self._outputs.items())]
