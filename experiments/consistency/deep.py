"""Deep networks and the paper's two remedies: scaled initialization and clipped logits.

Section 5 of the paper starts the feed-forward layers of its deep translation models scaled down by the
number of layers and clips logits above some magnitude. Here a deep narrow Transformer is trained with and
without each, at a rate that is safe for shallow ones and without a warm-up, so that there is something to
remedy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from gpipe_bench.experiments.consistency.tasks.language import topics_task
from gpipe_bench.experiments.consistency.tasks.recipe import DEEP, TextRecipe

LOGIT_CLIP = 8.0
"""The paper gives no value; e^8 : 1 between two tokens is more than a language model of this size needs."""


@dataclass(frozen=True)
class Trainability:
    """One training. A step whose loss or gradient is not finite is counted and its update left out."""

    first_norm: float  # of the gradient before the first update
    largest_norm: float
    median_norm: float
    non_finite: int
    norms: tuple[float | None, ...]  # per step
    losses: tuple[float | None, ...]
    largest_activation: float  # root mean square after the last layer, before the first update
    layer_norms: tuple[float, ...]  # of the gradient of each layer's weights, before the first update
    perplexity: float
    unigram: float


def train_deep(
    deep_init: bool, logit_clip: float | None, seed: int, recipe: TextRecipe = DEEP, split_seed: int = 0
) -> Trainability:
    """Trains with a constant rate; the loss is in natural logarithms per token."""
    task = topics_task(replace(recipe, deep_init=deep_init, logit_clip=logit_clip), split_seed)
    torch.manual_seed(seed)
    model = task.build()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2)
    )
    norms: list[float | None] = []
    losses: list[float | None] = []
    layer_norms: tuple[float, ...] = ()
    largest_activation = 0.0
    for step in range(recipe.num_steps):
        inputs, target = task.batch(step, seed)
        value = inputs
        for layer in list(model.children())[:-1]:
            value = layer(value)
        loss = task.loss(model[-1](value), target)
        torch.autograd.backward(loss)
        norm = float(
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        )
        if not step:
            largest_activation = float(value.detach().square().mean().sqrt())
            layer_norms = tuple(
                float(
                    torch.nn.utils.get_total_norm([p.grad for p in layer.parameters() if p.grad is not None])
                )
                for layer in model.children()
            )
        finite = math.isfinite(norm) and math.isfinite(float(loss.detach()))
        norms.append(norm if finite else None)
        losses.append(float(loss.detach()) if finite else None)
        if finite:
            optimizer.step()
        optimizer.zero_grad()
    total = number = 0.0
    model.eval()
    with torch.no_grad():
        for inputs, target in task.held_out():
            one, many = task.count(model(inputs), target)
            total, number = total + one, number + many
    known = sorted(norm for norm in norms if norm is not None)
    return Trainability(
        first_norm=norms[0] or 0.0,
        largest_norm=known[-1] if known else 0.0,
        median_norm=known[len(known) // 2] if known else 0.0,
        non_finite=sum(norm is None for norm in norms),
        norms=tuple(norms),
        losses=tuple(losses),
        largest_activation=largest_activation,
        layer_norms=layer_norms,
        perplexity=task.score(total, number),
        unigram=task.unigram,
    )
