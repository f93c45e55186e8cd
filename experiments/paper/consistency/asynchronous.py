"""What inconsistency looks like: an asynchronous pipeline in the manner of PipeDream.

Whole mini-batches stream through K stages in 1F1B order, and every stage updates its weights after each
backward, without waiting for the others. So stage k, counted from 0, runs the forward of a mini-batch
K - 1 - k updates before the one that its gradient makes. With weight stashing the backward uses the weights
of its forward, which the stage keeps; without, it uses whatever the weights are by then, and the gradient
belongs to no function at all.

A gradient depends on nothing that comes later, so the mini-batches are gone through one after the other, each
stage with the weights that it had. Staleness, versions and weights are those of K devices, the time is not.
With one stage both are the sequential training, bit for bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_bench.experiments.paper.consistency.tasks import Task
from gpipe_bench.experiments.paper.consistency.training import WeightAverage, evaluate
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.stage.layers import run_plain


@dataclass(frozen=True)
class Asynchronous:
    """Result of an asynchronous training of more than K mini-batches. `staleness` and the rest have an entry
    per stage.
    """

    curve: tuple[tuple[int, float, float], ...]
    staleness: tuple[int, ...]  # updates between a mini-batch's forward and its own, largest
    versions: tuple[int, ...]  # of the weights, kept at once, with the current one
    weight_bytes: tuple[int, ...]  # all versions together, at most
    weights: dict[str, Tensor]

    @property
    def score(self) -> float:
        return self.curve[-1][2]


def train_asynchronously(
    task: Task,
    num_stages: int,
    seed: int,
    *,
    stash: bool,
    rate: float = 1.0,
    initial_seed: int | None = None,
) -> Asynchronous:
    """Trains by the task's recipe, update for update, with stale weights and `rate` times its learning rate.
    The initial weights are those of `initial_seed`, or of `seed`. CPU only.
    """
    torch.manual_seed(seed if initial_seed is None else initial_seed)
    model = task.build()
    layers = list(model.named_children())
    weights = dict(model.named_parameters())
    stages = [
        [f"{layers[i][0]}.{name}" for i in span for name, _ in layers[i][1].named_parameters()]
        for span in Pipeline(model, num_stages=num_stages, num_microbatches=1).partition
    ]
    versions = [  # of each stage, from that of the forward to the latest
        deque([_copied(weights, names)], maxlen=num_stages - stage) for stage, names in enumerate(stages)
    ]
    optimizer = task.optimizer(weights.items())
    average = None if task.average_decay is None else WeightAverage(model, task.average_decay)
    losses, curve = list[float](), list[tuple[int, float, float]]()
    most = [1] * num_stages
    model.train()
    for step in range(task.num_steps):
        inputs, target = task.batch(step, seed)
        for kept in versions:
            _put(weights, kept[0])
        output = run_plain(model.children(), inputs, seed=seed, step=step, microbatch=0, device="cpu")
        loss = task.loss(output, target)
        losses.append(float(loss.detach()))
        if stash:
            torch.autograd.backward(loss)
        for kept in versions:
            _put(weights, kept[-1])
        if not stash:
            torch.autograd.backward(loss)
        for group in optimizer.param_groups:
            group["lr"] = rate * task.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        most = [max(number, len(kept)) for number, kept in zip(most, versions, strict=True)]
        for names, kept in zip(stages, versions, strict=True):
            kept.append(_copied(weights, names))
        if average is not None:
            average.update(step + 1)
        if (step + 1) % task.evaluate_every == 0 or step + 1 == task.num_steps:
            curve.append((step + 1, sum(losses) / len(losses), evaluate(task, model, average)))
            losses = []
    held = [number if stash else 1 for number in most]
    sizes = [sum(each.nbytes for each in kept[-1].values()) for kept in versions]
    return Asynchronous(
        tuple(curve),
        tuple(number - 1 for number in most),
        tuple(held),
        tuple(number * size for number, size in zip(held, sizes, strict=True)),
        {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
    )


def _copied(weights: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    return {name: weights[name].detach().clone() for name in names}


def _put(weights: Mapping[str, Tensor], version: Mapping[str, Tensor]) -> None:
    """Overwrites them. `.data` has no version counter of its own: autograd does not notice that a backward
    meets other weights than its forward, and that is what training without stashing means.
    """
    for name, tensor in version.items():
        weights[name].data.copy_(tensor)
