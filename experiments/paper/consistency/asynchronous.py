"""What inconsistency looks like: an asynchronous pipeline in the manner of PipeDream.

Whole mini-batches stream through the stages and every stage updates its weights after each backward, without
waiting for the others. The order is our own 1F1B schedule with mini-batches in the place of micro-batches,
so a gradient at stage k is applied K - 1 - k updates after its forward. With weight stashing the backward
uses the weights of its forward, which the stage keeps (one version per mini-batch in flight); without, it
uses whatever the weights are by then, and the gradient belongs to no function at all. With one stage both
are the sequential training, bit for bit.

The stages take turns in one process: staleness, versions and the weights are those of K devices, the time is
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gpipe_bench.experiments.paper.consistency.tasks import Task
from gpipe_bench.experiments.paper.consistency.training import WeightAverage, evaluate
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.plan.named import one_f_one_b
from gpipe_bench.pipeline.plan.schedule import Kind, execution_order
from gpipe_bench.pipeline.stage.layers import Generators, stream_key


@dataclass(frozen=True)
class Asynchronous:
    """What an asynchronous training did. Lists have one entry per stage."""

    curve: tuple[tuple[int, float, float], ...]
    staleness: tuple[float, ...]  # updates between a mini-batch's forward and its backward, largest
    versions: tuple[int, ...]  # of the weights, kept at once, with the current one
    weight_bytes: tuple[int, ...]  # all versions together, at most
    weights: dict[str, Tensor]

    @property
    def score(self) -> float:
        return self.curve[-1][2]


@dataclass
class _Stage:
    layers: Sequence[nn.Module]
    first_layer: int
    optimizer: torch.optim.Optimizer
    twins: dict[int, dict[str, Tensor]]  # per layer: the live weights, as the optimizer sees them
    updates: int = 0
    flights: dict[int, _Flight] = field(default_factory=dict)
    staleness: int = 0
    versions: int = 1
    weight_bytes: int = 0


@dataclass
class _Flight:
    """A mini-batch between its forward and its backward at one stage."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: dict[int, dict[str, Tensor]]  # the leaves that the gradient arrives in
    version: int


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
    partition = Pipeline(model, num_stages=num_stages, num_microbatches=1).partition
    layers = list(model.children())
    names = [name for name, _ in model.named_children()]
    stages = []
    for span in partition:
        twins: dict[int, dict[str, Tensor]] = {
            i: {n: nn.Parameter(p.data) for n, p in layers[i].named_parameters()} for i in span
        }
        named = [(f"{names[i]}.{n}", twin) for i in span for n, twin in twins[i].items()]
        stages.append(_Stage([layers[i] for i in span], span.start, task.optimizer(named), twins))
    average = None if task.average_decay is None else WeightAverage(model, task.average_decay)
    generators = Generators(torch.device("cpu"))
    messages: dict[tuple[Kind, int, int], tuple[Tensor | None, ...]] = {}
    losses: list[float] = []
    curve: list[tuple[int, float, float]] = []
    model.train()
    for action in execution_order(one_f_one_b(num_stages, task.num_steps)):
        stage, last = stages[action.stage], action.stage == num_stages - 1
        step = action.microbatch
        if action.kind is Kind.F:
            if action.stage == 0:
                inputs: Any = task.batch(step, seed)[0]
                received = inputs if isinstance(inputs, tuple) else (inputs,)
            else:
                received = messages.pop((Kind.F, action.stage, step))
            states = generators.save()
            outputs = _forward(stage, step, received, generators, seed, stash)
            generators.restore(states)
            if last:
                value = outputs if len(outputs) > 1 else outputs[0]
                loss = task.loss(value, task.batch(step, seed)[1])
                losses.append(float(loss.detach()))
                stage.flights[step].outputs = (loss,)
            else:
                messages[Kind.F, action.stage + 1, step] = tuple(t.detach() for t in outputs)
            _note_versions(stage, stash)
        else:
            gradients = None if last else messages.pop((Kind.B, action.stage, step))
            given = _backward(stage, step, gradients)
            if action.stage > 0:
                messages[Kind.B, action.stage - 1, step] = given
            for group in stage.optimizer.param_groups:
                group["lr"] = rate * task.learning_rate(stage.updates)
            stage.optimizer.step()
            stage.optimizer.zero_grad()
            stage.updates += 1
            if action.stage == 0:  # the last to finish a mini-batch
                if average is not None:
                    average.update(step + 1)
                if (step + 1) % task.evaluate_every == 0 or step + 1 == task.num_steps:
                    since = losses[curve[-1][0] if curve else 0 : step + 1]
                    curve.append((step + 1, sum(since) / len(since), evaluate(task, model, average)))
    return Asynchronous(
        tuple(curve),
        tuple(stage.staleness for stage in stages),
        tuple(stage.versions for stage in stages),
        tuple(stage.weight_bytes for stage in stages),
        {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
    )


def _forward(
    stage: _Stage, step: int, received: tuple[Tensor, ...], generators: Generators, seed: int, stash: bool
) -> tuple[Tensor, ...]:
    """Runs a stage's layers on leaves of their own: copies with stashing, else the live storage itself."""
    entered = tuple(
        t.detach().requires_grad_() if stage.first_layer and t.is_floating_point() else t for t in received
    )
    value: Any = entered if len(entered) > 1 else entered[0]
    weights: dict[int, dict[str, Tensor]] = {}
    for offset, layer in enumerate(stage.layers):
        index = stage.first_layer + offset
        # .data has no version counter of its own: autograd does not notice that a later update overwrites
        # what this graph saved, and that is what training without stashing means.
        weights[index] = {
            name: (twin.detach().clone() if stash else twin.data).requires_grad_()
            for name, twin in stage.twins[index].items()
        }
        generators.seed(stream_key(seed, step, index, 0))
        # Batch normalization's backward also asks whether its running statistics are still those it saw.
        statistics = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        value = functional_call(layer, {**weights[index], **statistics}, (value,))
        for name, buffer in layer.named_buffers():
            buffer.copy_(statistics[name])
    outputs = value if isinstance(value, tuple) else (value,)
    stage.flights[step] = _Flight(entered, outputs, weights, stage.updates)
    return outputs


def _backward(
    stage: _Stage, step: int, gradients: tuple[Tensor | None, ...] | None
) -> tuple[Tensor | None, ...]:
    """Puts the gradients where the optimizer finds them; returns those of the inputs."""
    flight = stage.flights.pop(step)
    stage.staleness = max(stage.staleness, stage.updates - flight.version)
    if gradients is None:
        torch.autograd.backward(flight.outputs[0])
    else:
        pairs = [(o, g) for o, g in zip(flight.outputs, gradients, strict=True) if g is not None]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    for index, named in flight.weights.items():
        for name, leaf in named.items():
            stage.twins[index][name].grad = leaf.grad
    return tuple(t.grad for t in flight.inputs)


def _note_versions(stage: _Stage, stash: bool) -> None:
    """Distinct versions in use: the current one, and with stashing those of the mini-batches in flight."""
    versions = {stage.updates} | ({flight.version for flight in stage.flights.values()} if stash else set())
    one = sum(t.numel() * t.element_size() for named in stage.twins.values() for t in named.values())
    stage.versions = max(stage.versions, len(versions))
    stage.weight_bytes = max(stage.weight_bytes, len(versions) * one)
