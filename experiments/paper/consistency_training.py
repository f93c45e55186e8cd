"""Runs one training: sequential, pipelined, over processes, or with stale weights."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from gpipe_bench.pipeline import Pipeline, devices
from gpipe_bench.pipeline.ranks.launch import launch
from gpipe_bench.pipeline.stage.layers import run_plain

from .consistency_protocol import Subject
from .consistency_tasks import Task, task_of


@dataclass(frozen=True)
class Setting:
    """How a training runs.

    Args:
        engine: "pipeline", or "sequential" for the plain model (one stage, one micro-batch)
        seed: of mini-batches, augmentation and dropout
        device: "cpu" or "cuda"
        initial_seed: of the initial weights; default: `seed`
    """

    engine: str = "pipeline"
    num_stages: int = 1
    num_microbatches: int = 1
    seed: int = 0
    device: str = "cpu"
    initial_seed: int | None = None


@dataclass(frozen=True)
class Trained:
    """The result of a training. `curve` has (steps done, mean training loss since the last, score)."""

    curve: tuple[tuple[int, float, float], ...]
    weights: dict[str, Tensor]  # parameters and buffers
    layers_per_stage: tuple[int, ...]

    @property
    def score(self) -> float:
        return self.curve[-1][2]

    @property
    def digest(self) -> str:
        """SHA-256 of all weights, without the running statistics."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.weights.items()):
            if not is_statistic(name):
                digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def is_statistic(name: str) -> bool:
    """Whether an entry of a state dict is a statistic of batch normalization, not a weight."""
    return name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")


def trained(subject: Subject, setting: Setting, processes: int = 1) -> Trained:
    """Trains, with a process per stage if `processes` is above 1."""
    if processes == 1:
        return train(task_of(subject), setting)
    if setting.device == "cuda" and devices.count("cuda") < processes:
        setting = replace(setting, device="cpu")  # the question is whether processes change results
    parts: list[Trained] = launch(train_rank, processes, subject, setting, device=setting.device)
    weights = {name: tensor for part in parts for name, tensor in part.weights.items()}
    return replace(parts[-1], weights=weights)


def train_rank(subject: Subject, setting: Setting) -> Trained:
    """Trains one stage of the model, in one process of several."""
    if setting.device == "cuda":
        setting = replace(setting, device=f"cuda:{distributed.get_rank()}")
    return train(task_of(subject), setting, group=distributed.group.WORLD)


def train(task: Task, setting: Setting, *, group: distributed.ProcessGroup | None = None) -> Trained:
    """Trains. With a `group` all ranks must call; each returns its own stage's weights, and only the last
    rank's scores are valid.
    """
    torch.manual_seed(setting.seed if setting.initial_seed is None else setting.initial_seed)
    model = task.build().to(setting.device)
    pipeline = None
    if setting.engine == "pipeline":
        pipeline = Pipeline(
            model, num_stages=setting.num_stages, num_microbatches=setting.num_microbatches,
            remat="except_last", seed=setting.seed, group=group,
        )  # fmt: skip
    module = model if pipeline is None else pipeline
    optimizer, curve = task.optimizer(module.named_parameters()), _Curve(task, module, setting.device)
    module.train()
    for step in range(task.num_steps):
        for parameters in optimizer.param_groups:
            parameters["lr"] = task.learning_rate(step)
        inputs, target = (each.to(setting.device) for each in task.batch(step, setting.seed))
        if pipeline is not None:
            loss = pipeline.step(inputs, target, task.loss)
        else:  # one forward and backward, with the draws
            loss = task.loss(_plain(model, inputs, setting.seed, step, setting.device), target)
            torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        curve.add(float(loss.detach()))
    weights = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
    spans = [model] if pipeline is None else pipeline.partition
    return Trained(tuple(curve.points), weights, tuple(map(len, spans)))


def _plain(model: nn.Sequential, inputs: Tensor, seed: int, step: int, device: str = "cpu") -> Any:
    return run_plain(model.children(), inputs, seed=seed, step=step, microbatch=0, device=device)


class _Curve:
    """The curve of a training: `points` of steps done, mean loss since the last, and held-out score."""

    def __init__(self, task: Task, module: nn.Module, device: str = "cpu") -> None:
        self._task, self._module, self._device = task, module, device
        decay = task.average_decay
        self._average = None if decay is None else WeightAverage(module, decay)
        self._done, self._losses = 0, list[float]()
        self.points: list[tuple[int, float, float]] = []

    def add(self, loss: float) -> None:
        """Adds the loss of one more step."""
        self._done += 1
        self._losses.append(loss)
        if self._average is not None:
            self._average.update(self._done)
        if self._done % self._task.evaluate_every == 0 or self._done == self._task.num_steps:
            score = evaluate(self._task, self._module, self._average, self._device)
            self.points.append((self._done, sum(self._losses) / len(self._losses), score))
            self._losses = []


@torch.no_grad()
def evaluate(
    task: Task, module: nn.Module, average: WeightAverage | None = None, device: str = "cpu"
) -> float:
    """The score on held-out examples, with averaged weights if any. NaN if the output is on another rank."""
    total = number = 0.0
    module.eval()
    with nullcontext() if average is None else average.applied():
        for inputs, target in task.held_out():
            output = module(inputs.to(device))
            if output is not None:
                one, many = task.count(output, target.to(device))
                total, number = total + one, number + many
    module.train()
    return task.score(total, number) if number else float("nan")


class WeightAverage:
    """The moving average of a module's floating-point state, running statistics included; `applied` lends it
    to the module for an evaluation. The decay rises to its final value by TensorFlow's ramp, so that short
    trainings do not average in their random start.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        state = module.state_dict(keep_vars=True)
        self._live = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
        self.average = _copied(self._live, self._live)

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Adds the weights after update number `num_updates`, counted from 1."""
        decay = min(self._decay, (1.0 + num_updates) / (10.0 + num_updates))
        torch._foreach_lerp_(list(self.average.values()), list(self._live.values()), 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the module has the averages; afterwards its own values, bit for bit."""
        own = _copied(self._live, self._live)
        _put(self._live, self.average)
        try:
            yield
        finally:
            _put(self._live, own)


# Inconsistent training, for comparison: an asynchronous pipeline like PipeDream's. Mini-batches stream
# through K stages in 1F1B order, and every stage updates its weights after each backward. So stage k, counted
# from 0, runs a mini-batch's forward K - 1 - k updates before that mini-batch's own update. With weight
# stashing the backward uses the weights of its forward, which the stage keeps; without, it uses the current
# weights, and the gradient belongs to no function. A gradient depends on nothing later, so mini-batches are
# run one after another, each stage with the weights that it would have.


@dataclass(frozen=True)
class Asynchronous(Trained):
    """The result of an asynchronous training of more than K mini-batches, with an entry per stage."""

    staleness: tuple[int, ...]  # most updates between a mini-batch's forward and its own
    versions: tuple[int, ...]  # most versions of the weights at a time
    weight_bytes: tuple[int, ...]  # of all versions together, at most


def train_asynchronously(
    task: Task, num_stages: int, seed: int, *, stash: bool, rate: float = 1.0, initial_seed: int | None = None
) -> Asynchronous:
    """Trains by the task's recipe, with stale weights and `rate` times its learning rate. Initial weights are
    those of `initial_seed`, or of `seed`. CPU only.
    """
    torch.manual_seed(seed if initial_seed is None else initial_seed)
    model = task.build()
    layers = list(model.named_children())
    weights = dict(model.named_parameters())
    cut = Pipeline(model, num_stages=num_stages, num_microbatches=1).partition
    stages = [
        [f"{layers[i][0]}.{name}" for i in span for name, _ in layers[i][1].named_parameters()]
        for span in cut
    ]
    versions = [  # of each stage, from the forward's to the latest
        deque([_copied(weights, names)], maxlen=num_stages - stage) for stage, names in enumerate(stages)
    ]
    optimizer, curve = task.optimizer(weights.items()), _Curve(task, model)
    most = [1] * num_stages
    model.train()
    for step in range(task.num_steps):
        inputs, target = task.batch(step, seed)
        for kept in versions:
            _put(weights, kept[0])
        loss = task.loss(_plain(model, inputs, seed, step), target)
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
        curve.add(float(loss.detach()))
    held = [number if stash else 1 for number in most]
    sizes = [sum(each.nbytes for each in kept[-1].values()) for kept in versions]
    return Asynchronous(
        tuple(curve.points),
        _copied(model.state_dict(), model.state_dict()),
        tuple(map(len, cut)),
        tuple(number - 1 for number in most),
        tuple(held),
        tuple(number * size for number, size in zip(held, sizes, strict=True)),
    )


def _copied(weights: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: weights[name].detach().clone() for name in names}


def _put(weights: Mapping[str, Tensor], version: Mapping[str, Tensor]) -> None:
    """Overwrites the weights. `.data` has no version counter, so autograd does not notice that a backward
    uses other weights than its forward: that is training without stashing.
    """
    for name, tensor in version.items():
        weights[name].data.copy_(tensor)
