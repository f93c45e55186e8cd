"""One training, from its seed to its weights: sequential or pipelined, in one process or one per stage.

It writes a checkpoint after every evaluation and takes up where the latest one was written, so a training
that was killed ends with the weights of one that was not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn

from gpipe_bench.experiments.consistency.disk import (
    Trained,
    Watch,
    alone,
    drop_checkpoints,
    keep,
    kept,
    latest_checkpoint,
    save_checkpoint,
)
from gpipe_bench.experiments.consistency.tasks.task import Task
from gpipe_bench.experiments.consistency.updates import WeightAverage
from gpipe_bench.pipeline import Pipeline, checkpoint
from gpipe_bench.pipeline.stage.rng import run_plain


@dataclass(frozen=True)
class Setting:
    """How a training is laid out.

    Args:
        engine: "pipeline"; "sequential" is the plain model without any
        num_stages, num_microbatches: of the pipeline
        seed: of the mini-batches, what augments them, and dropout
        device: "cpu" or "cuda"
        initial_seed: of the initial weights; None: the same
    """

    engine: str = "pipeline"
    num_stages: int = 1
    num_microbatches: int = 1
    seed: int = 0
    device: str = "cpu"
    initial_seed: int | None = None

    def __post_init__(self) -> None:
        if self.engine == "sequential" and (self.num_stages, self.num_microbatches) != (1, 1):
            raise ValueError("a sequential training has one stage and one micro-batch; use engine='pipeline'")


class Trainer(Protocol):
    """What the loop needs of a way to train."""

    @property
    def module(self) -> nn.Module: ...

    def step(self, inputs: Any, target: Tensor) -> float: ...
    def forward(self, inputs: Any) -> Any: ...
    def save(self, folder: Path, optimizer: torch.optim.Optimizer) -> None: ...
    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> None: ...


class Sequential:
    """The plain model: one forward, one backward. Draws are those of a pipeline with one micro-batch."""

    def __init__(self, model: nn.Sequential, task: Task, seed: int, device: str) -> None:
        self.module, self._task, self._seed, self._device = model, task, seed, device
        self._num_steps = 0

    def step(self, inputs: Any, target: Tensor) -> float:
        output = run_plain(
            self.module.children(), inputs,
            seed=self._seed, step=self._num_steps, microbatch=0, device=self._device,
        )  # fmt: skip
        loss = self._task.loss(output, target)
        torch.autograd.backward(loss)
        self._num_steps += 1
        return float(loss.detach())

    def forward(self, inputs: Any) -> Any:
        with torch.no_grad():
            return self.module(inputs)

    def save(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        state = {"model": self.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "num_steps": self._num_steps}, folder / "sequential.pt")

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        state = torch.load(folder / "sequential.pt", map_location=self._device, weights_only=True)
        self.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self._num_steps = state["num_steps"]


class Pipelined:
    """The model as a pipeline: GPipe's schedule, recomputing all micro-batches but the last."""

    def __init__(self, model: nn.Sequential, task: Task, setting: Setting, group: Any) -> None:
        self.module = self.pipeline = Pipeline(
            model,
            num_stages=setting.num_stages,
            num_microbatches=setting.num_microbatches,
            remat="except_last",
            seed=setting.seed,
            group=group,
        )
        self._task = task

    def step(self, inputs: Any, target: Tensor) -> float:
        return float(self.pipeline.step(inputs, target, self._task.loss))

    def forward(self, inputs: Any) -> Any:
        return self.pipeline(inputs)

    def save(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        checkpoint.save(folder / "pipeline", self.pipeline, optimizer)

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        checkpoint.load(folder / "pipeline", self.pipeline, optimizer)


def train(
    task: Task,
    setting: Setting,
    folder: Path,
    *,
    group: distributed.ProcessGroup | None = None,
    watch: Watch = lambda event, steps: None,
) -> Trained:
    """Trains, or goes on, or only reads what is finished in `folder`. With a `group` all ranks must call;
    each returns the weights of its own stage, and only the last rank's scores count.
    """
    rank = 0 if group is None else distributed.get_rank(group)
    with alone(folder, rank, group):
        known = kept(folder, rank)
        return known or _train(task, setting, folder, rank, group, watch)


def _train(
    task: Task,
    setting: Setting,
    folder: Path,
    rank: int,
    group: distributed.ProcessGroup | None,
    watch: Watch,
) -> Trained:
    torch.manual_seed(setting.seed if setting.initial_seed is None else setting.initial_seed)
    model = task.build().to(setting.device)
    trainer: Trainer
    layers: tuple[int, ...] = (len(model),)
    if setting.engine == "sequential":
        trainer = Sequential(model, task, setting.seed, setting.device)
    else:
        pipelined = Pipelined(model, task, setting, group)
        trainer, layers = pipelined, tuple(len(span) for span in pipelined.pipeline.partition)
    optimizer = task.optimizer(trainer.module.named_parameters())
    average = None if task.average_decay is None else WeightAverage(trainer.module, task.average_decay)
    done, losses, curve = 0, [], list[tuple[int, float, float]]()
    latest = latest_checkpoint(folder)
    if latest is not None:
        trainer.load(latest, optimizer)
        state = torch.load(latest / f"loop-{rank}.pt", map_location=setting.device, weights_only=True)
        done, curve = state["done"], [tuple(point) for point in state["curve"]]
        if average is not None:
            average.load(state["average"])
    trainer.module.train()
    while done < task.num_steps:
        for parameters in optimizer.param_groups:
            parameters["lr"] = task.learning_rate(done)
        inputs, target = task.batch(done, setting.seed)
        losses.append(trainer.step(_moved(inputs, setting.device), target.to(setting.device)))
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if average is not None:
            average.update(done)
        watch("step", done)
        if done % task.evaluate_every == 0 or done == task.num_steps:
            score = evaluate(task, trainer, average, setting.device)
            curve.append((done, sum(losses) / len(losses), score))
            losses = []
            if done < task.num_steps:
                state = {"done": done, "curve": curve, "average": average and average.average}
                write = partial(trainer.save, optimizer=optimizer)
                save_checkpoint(folder, write, state, rank, group, watch)
    weights = {name: tensor.detach().cpu() for name, tensor in trainer.module.state_dict().items()}
    trained = Trained(tuple(curve), weights, layers)
    keep(folder, trained, rank)
    if group is not None:
        distributed.barrier(group)
    if rank == 0:
        drop_checkpoints(folder)
    watch("finished", done)
    return trained


def evaluate(task: Task, trainer: Trainer, average: WeightAverage | None, device: str) -> float:
    """The score on the held-out examples, of the averaged weights if there are any. NaN where the output is
    on another rank.
    """
    total = number = 0.0
    trainer.module.eval()
    with average.applied() if average is not None else _as_it_is():
        for inputs, target in task.held_out():
            output = trainer.forward(_moved(inputs, device))
            if output is not None:
                one, many = task.count(output, target.to(device))
                total, number = total + one, number + many
    trainer.module.train()
    return task.score(total, number) if number else float("nan")


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def _moved(inputs: Any, device: str) -> Any:
    return tuple(t.to(device) for t in inputs) if isinstance(inputs, tuple) else inputs.to(device)
