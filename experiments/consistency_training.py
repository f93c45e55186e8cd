"""One training, from its seed to its weights: sequential or pipelined, in one process or one per stage.

It writes a checkpoint after every evaluation and takes up where the latest one was written, so a training
that was killed ends with the weights of one that was not. A checkpoint appears by renaming a folder that is
complete: a kill while it is written leaves the one before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn

from experiments.consistency_task import Task
from experiments.weight_average import WeightAverage
from harness.lock import file_lock
from pipeline import Pipeline, checkpoint
from pipeline.rng import run_plain

Watch = Callable[[str, int], None]
"""Told what has just happened ("step", "saving", "saved", "finished") and how many steps are done."""


@dataclass(frozen=True)
class Setting:
    """How a training is laid out. `engine` "sequential" is the plain model without any pipeline."""

    engine: str = "pipeline"
    num_stages: int = 1
    num_microbatches: int = 1
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.engine == "sequential" and (self.num_stages, self.num_microbatches) != (1, 1):
            raise ValueError("a sequential training has one stage and one micro-batch; use engine='pipeline'")


@dataclass(frozen=True)
class Trained:
    """What a training ended with. `curve` holds (steps done, mean training loss since the last, score)."""

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
    """Whether an entry of a state dict is batch normalization's and not a weight."""
    return name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")


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
        with _silent_checkpoints():
            checkpoint.save(folder / "pipeline", self.pipeline, optimizer)

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        with _silent_checkpoints():
            checkpoint.load(folder / "pipeline", self.pipeline, optimizer)


@contextmanager
def _silent_checkpoints() -> Iterator[None]:
    """torch warns that a process without a group saves alone, which is what is asked of it here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


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
    with _alone(folder, rank, group):
        finished = _finished(folder, rank)
        return finished or _train(task, setting, folder, rank, group, watch)


def _train(
    task: Task,
    setting: Setting,
    folder: Path,
    rank: int,
    group: distributed.ProcessGroup | None,
    watch: Watch,
) -> Trained:
    torch.manual_seed(setting.seed)
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
                _save(folder, trainer, optimizer, state, rank, group, watch)
    weights = {name: tensor.detach().cpu() for name, tensor in trainer.module.state_dict().items()}
    trained = Trained(tuple(curve), weights, layers)
    _finish(folder, trained, rank)
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


# What is on disk


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the most steps."""
    found = [path for path in folder.glob("step-*") if path.suffix != ".part"]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def drop_checkpoints(folder: Path, but: Path | None = None) -> None:
    for path in folder.glob("step-*"):
        if path != but:
            shutil.rmtree(path, ignore_errors=True)


def _save(
    folder: Path,
    trainer: Trainer,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    rank: int,
    group: distributed.ProcessGroup | None,
    watch: Watch,
) -> None:
    target = folder / f"step-{state['done']:08d}"
    part = target.with_name(target.name + ".part")
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)  # what a killed run left
        part.mkdir(parents=True)
    if group is not None:
        distributed.barrier(group)
    trainer.save(part, optimizer)
    torch.save(dict(state), part / f"loop-{rank}.pt")
    watch("saving", state["done"])
    if group is not None:
        distributed.barrier(group)
    if rank == 0:
        part.rename(target)
        drop_checkpoints(folder, but=target)
    watch("saved", state["done"])


@contextmanager
def _alone(folder: Path, rank: int, group: distributed.ProcessGroup | None) -> Iterator[None]:
    """Keeps out another run, and worker processes that outlive a killed one; waits until they are done."""
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as file, file_lock(file.fileno()):
            if group is not None:
                distributed.barrier(group)
            yield
        return
    distributed.barrier(group)
    yield


def _finish(folder: Path, trained: Trained, rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"final-{rank}.pt.part"
    content = {"curve": trained.curve, "weights": trained.weights, "layers": trained.layers_per_stage}
    torch.save(content, part)
    part.rename(folder / f"final-{rank}.pt")


def _finished(folder: Path, rank: int) -> Trained | None:
    path = folder / f"final-{rank}.pt"
    if not path.exists():
        return None
    content = torch.load(path, weights_only=True)
    return Trained(tuple(tuple(point) for point in content["curve"]), content["weights"], content["layers"])


def folder_name(**what: object) -> str:
    """A folder name for a training: a digest of all that its result depends on."""
    plain = {key: repr(value) for key, value in what.items()}
    text = json.dumps(plain, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
