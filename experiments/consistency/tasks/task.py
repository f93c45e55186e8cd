"""What a training needs to know of its data and model: the same for images and for text.

A task is immutable once made; everything random in it is a function of a seed and a step, so a training can
be taken up at any step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Batch = tuple[Any, Tensor]
LossFn = Callable[[Any, Tensor], Tensor]


class Task(Protocol):
    """A model, its data and its recipe."""

    metric: str  # what `score` gives, such as "accuracy"
    unit: str
    higher_is_better: bool
    batch_size: int
    num_steps: int
    evaluate_every: int  # steps
    num_microbatches: int
    average_decay: float | None  # None: the weights themselves are evaluated

    def build(self) -> nn.Sequential:
        """A new model, from torch's default generator."""
        ...

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Mean over the examples."""
        ...

    def optimizer(self, named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        """The recipe's, for these parameters: a whole model's or one stage's."""
        ...

    def learning_rate(self, step: int) -> float: ...

    def batch(self, step: int, seed: int) -> Batch:
        """Training mini-batch number `step` of the training with this seed."""
        ...

    def held_out(self) -> Iterable[Batch]: ...

    def count(self, output: Any, target: Tensor) -> tuple[float, float]:
        """Of a held-out batch: a sum and a number, which add up over batches."""
        ...

    def score(self, total: float, number: float) -> float:
        """The metric from the sums of `count`."""
        ...

    @property
    def required(self) -> float:
        """The score that trainings must reach, in the mean, to count as learned."""
        ...

    @property
    def floor(self) -> float:
        """The score that a single one may not miss, or it has failed."""
        ...

    @property
    def requirement(self) -> str:
        """The requirement in words."""
        ...


def derived(*numbers: int) -> torch.Generator:
    """A generator for one purpose: numbers such as (seed, epoch) that name it."""
    value = 0
    for number in numbers:
        value = (value * 1_000_003 + number + 0x9E37) % (2**63)
    return torch.Generator().manual_seed(value)


def epoch_order(num_examples: int, epoch: int, seed: int) -> Tensor:
    """The order in which an epoch takes the examples."""
    return torch.randperm(num_examples, generator=derived(seed, epoch, 1))


def chosen(step: int, seed: int, num_examples: int, batch_size: int) -> Tensor:
    """Indices of the examples of a mini-batch; an epoch's incomplete last mini-batch is left out."""
    per_epoch = num_examples // batch_size
    epoch, place = divmod(step, per_epoch)
    order = epoch_order(num_examples, epoch, seed)
    return order[place * batch_size : (place + 1) * batch_size]


def even_parts(number: int, size: int) -> Sequence[range]:
    """`range(number)` cut into parts of about `size`, none much smaller than the others."""
    parts = max(1, round(number / size))
    edges = [number * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]
