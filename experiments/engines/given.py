"""An engine under test beside the uncut model: both take the same steps, and are trained alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_bench.experiments.engines.checks import counting, named_parameters, reference
from gpipe_bench.experiments.engines.setup import Engine, Setup, clear

WIDTH, SEED, STEPS, LEARNING_RATE = 6, 1811, 4, 0.1


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """The loss: the mean over what it is given."""
    return ((output - target) ** 2).mean()


class Step(NamedTuple):
    """A step that an engine has taken: its number from 1, the loss that it returned and what it counted."""

    number: int
    loss: Any
    counts: Any


@dataclass
class Given:
    """An engine, what it was built from, and the uncut model beside it, whose weights are trained alike.

    Where layers draw at random (not `compares`), gradients are not compared; its layers train by its own.
    `before` are mini-batch and weights of the steps until now; `disturbed` is what a step has changed of what
    it was given, in words; `everything` are the gradients of the latest step, of all layers.
    """

    engine: Engine
    setup: Setup
    plain: Sequence[nn.Module]
    batch: Tensor
    target: Tensor
    everything: dict[str, Tensor] = field(default_factory=dict)
    before: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = field(default_factory=list)
    disturbed: str = ""
    compares: bool = True

    @property
    def whole(self) -> Setup:
        """The uncut model's, all in this process."""
        return replace(self.setup, layers=self.plain, group=None, placement=())

    @property
    def expected(self) -> dict[str, Tensor]:
        """The gradients that a step must leave in this process."""
        return {name: self.everything[name] for name in named_parameters(self.setup)}

    def draw(self, number: int) -> None:
        """The mini-batch of a step, and the gradients of the uncut model."""
        self.batch, self.target = drawn(len(self.batch), number, self.batch.dtype)
        if self.compares:
            self.everything = reference(self.whole, self.batch, self.target, mean_square)

    def step(self, loss_fn: Callable[..., Tensor] = mean_square, *, clean: bool = True) -> Any:
        """One step, by default without earlier gradients; what it may not change is put back."""
        if clean:
            clear(self.setup.layers)
        batch, target = self.batch.clone(), self.target.clone()
        local = self.setup.local_layers
        parameters = [(p, p.detach().clone(), p.requires_grad) for p in _parameters(local)]
        loss = self.engine.step(batch, target, loss_fn)
        found = {
            "the mini-batch": not (torch.equal(batch, self.batch) and torch.equal(target, self.target)),
            "weights, which an optimizer does": any(not torch.equal(p, value) for p, value, _ in parameters),
            "parameters, in whose place are others": any(
                now is not before[0] for now, before in zip(_parameters(local), parameters, strict=True)
            ),
            "layers, to evaluation mode": not all(layer.training for layer in local),
            "parameters, which train no longer or again": any(p.requires_grad != n for p, _, n in parameters),
            "the process, in which gradients are off": not torch.is_grad_enabled(),
        }
        torch.set_grad_enabled(True)
        for layer in local:
            layer.train()
        with torch.no_grad():
            for parameter, value, needs in parameters:
                parameter.copy_(value)
                parameter.requires_grad_(needs)
        self.disturbed = self.disturbed or " and ".join(what for what, changed in found.items() if changed)
        return loss

    def train(self, steps: int = STEPS, loss_fn: Callable[..., Tensor] = mean_square) -> Iterator[Step]:
        """Steps with another mini-batch each; once one has been looked at, weights are updated."""
        for number in range(1, steps + 1):
            self.draw(number)
            weights = {name: p.detach().clone() for name, p in named_parameters(self.whole).items()}
            first = {stage: self.setup.stage_layers(stage)[0] for stage in self.setup.local_stages}
            with counting(first) as counts:
                loss = self.step(loss_fn)
            yield Step(number, loss, counts())
            self.before.append((self.batch, self.target, weights))
            with torch.no_grad():
                for setup in (self.setup, self.whole) if self.compares else (self.setup,):
                    for parameter, name in {p: name for name, p in named_parameters(setup).items()}.items():
                        gradient = self.everything[name] if self.compares else parameter.grad
                        parameter.sub_(LEARNING_RATE * (0 if gradient is None else gradient))


def drawn(size: int, number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The mini-batch of a step, alike in every process."""
    generator = torch.Generator().manual_seed(SEED + number)
    batch, target = (torch.randn(size, WIDTH, dtype=dtype, generator=generator) for _ in range(2))
    return batch, target


def _parameters(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [parameter for layer in layers for parameter in layer.parameters()]
