"""One training, from its seed to its weights: sequential or pipelined, in one process or one per stage.

It writes a checkpoint after every evaluation and takes up where the latest one was written, so a training
that was killed ends with the weights of one that was not. A checkpoint appears by renaming a folder that is
complete: a kill while it is written leaves the one before.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from gpipe_bench.experiments.paper.consistency.recipes import Subject
from gpipe_bench.experiments.paper.consistency.tasks import Task, TextTask, task_of
from gpipe_bench.harness import ROOT
from gpipe_bench.harness.environment import source_digest
from gpipe_bench.harness.experiment import RunOptions
from gpipe_bench.harness.store import file_lock
from gpipe_bench.pipeline import Pipeline, checkpoint, devices
from gpipe_bench.pipeline.ranks.launch import launch
from gpipe_bench.pipeline.stage.layers import run_plain

Watch = Callable[[str, int], None]
"""Told what has just happened ("step", "saving", "saved", "finished") and how many steps are done."""

TRAINED_BY = (
    "models", "pipeline", "experiments/paper/consistency/recipes.py",
    "experiments/paper/consistency/tasks.py", "experiments/paper/consistency/training.py",
)  # fmt: skip
"""The sources that a training depends on: an edit of any other lets an unfinished one go on."""


@dataclass(frozen=True)
class Setting:
    """How a training is laid out.

    Args:
        engine: "pipeline"; "sequential" is the plain model without any, so one stage and one micro-batch
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


def trained(
    subject: Subject, setting: Setting, processes: int, options: RunOptions, *, fresh: bool = False
) -> Trained:
    """Trains, goes on, or reads what the same sources have finished, unless a `fresh` one is asked for."""
    what = {
        "subject": subject, "setting": setting, "processes": processes,
        "code": source_digest(ROOT, TRAINED_BY), "torch": torch.__version__,
    }  # fmt: skip
    text = json.dumps({key: repr(value) for key, value in what.items()}, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    folder = (options.scratch or Path(_temporary().name)) / name
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    if processes == 1:
        return train(task_of(subject), setting, folder)
    if options.device == "cuda" and devices.count("cuda") < processes:
        setting = replace(setting, device="cpu")  # what is asked is whether processes change anything
    parts = launch(train_rank, processes, subject, setting, folder, device=setting.device)
    weights = {name: tensor for part in parts for name, tensor in part.weights.items()}
    last: Trained = parts[-1]
    return replace(last, weights=weights)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="consistency-")


def train_rank(subject: Subject, setting: Setting, folder: Path) -> Trained:
    """One process of several: its stage of the model."""
    if setting.device == "cuda":
        setting = replace(setting, device=f"cuda:{distributed.get_rank()}")
    return train(task_of(subject), setting, folder, group=distributed.group.WORLD)


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
    final = folder / f"final-{rank}.pt"
    with _alone(folder, rank, group):
        if not final.exists():
            found = _train(task, setting, folder, rank, group, watch)
            torch.save(
                {"curve": found.curve, "weights": found.weights, "layers": found.layers_per_stage},
                part := final.with_suffix(".pt.part"),
            )
            part.rename(final)
            if group is not None:
                distributed.barrier(group)
            if rank == 0:
                _drop_checkpoints(folder)
            watch("finished", task.num_steps)
            return found
    known = torch.load(final, weights_only=True)
    return Trained(tuple(tuple(point) for point in known["curve"]), known["weights"], known["layers"])


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
    pipeline = None
    if setting.engine == "pipeline":
        pipeline = Pipeline(
            model, num_stages=setting.num_stages, num_microbatches=setting.num_microbatches,
            remat="except_last", seed=setting.seed, group=group,
        )  # fmt: skip
    module = model if pipeline is None else pipeline
    optimizer = task.optimizer(module.named_parameters())
    average = None if task.average_decay is None else WeightAverage(module, task.average_decay)
    done, losses, curve = 0, [], list[tuple[int, float, float]]()
    latest = latest_checkpoint(folder)
    if latest is not None:
        if pipeline is not None:
            checkpoint.load(latest / "pipeline", pipeline, optimizer)
        state = torch.load(latest / f"loop-{rank}.pt", map_location=setting.device, weights_only=True)
        done, curve = state["done"], [tuple(point) for point in state["curve"]]
        if pipeline is None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        if average is not None:
            average.load(state["average"])
    module.train()
    while done < task.num_steps:
        for parameters in optimizer.param_groups:
            parameters["lr"] = task.learning_rate(done)
        inputs, target = task.batch(done, setting.seed)
        inputs, target = _moved(inputs, setting.device), target.to(setting.device)
        if pipeline is not None:
            losses.append(float(pipeline.step(inputs, target, task.loss)))
        else:  # one forward, one backward, with the draws of a pipeline's only micro-batch
            layers = model.children()
            output = run_plain(
                layers, inputs, seed=setting.seed, step=done, microbatch=0, device=setting.device
            )
            loss = task.loss(output, target)
            torch.autograd.backward(loss)
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if average is not None:
            average.update(done)
        watch("step", done)
        if done % task.evaluate_every == 0 or done == task.num_steps:
            curve.append((done, sum(losses) / len(losses), evaluate(task, module, average, setting.device)))
            losses = []
            if done < task.num_steps:
                state = {"done": done, "curve": curve, "average": average and average.average}
                if pipeline is None:
                    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                _save_checkpoint(folder, state, pipeline, optimizer, rank, group, watch)
    weights = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
    spans = [model] if pipeline is None else pipeline.partition
    return Trained(tuple(curve), weights, tuple(len(span) for span in spans))


@torch.no_grad()
def evaluate(
    task: Task, module: nn.Module, average: WeightAverage | None = None, device: str = "cpu"
) -> float:
    """The score on the held-out examples, of the averaged weights if there are any. NaN where the output is
    on another rank.
    """
    total = number = 0.0
    module.eval()
    with nullcontext() if average is None else average.applied():
        for inputs, target in task.held_out():
            output = module(_moved(inputs, device))
            if output is not None:
                one, many = task.count(output, target.to(device))
                total, number = total + one, number + many
    module.train()
    return task.score(total, number) if number else float("nan")


def _moved(inputs: Any, device: str) -> Any:
    return tuple(t.to(device) for t in inputs) if isinstance(inputs, tuple) else inputs.to(device)


def train_deep(task: TextTask, seed: int) -> tuple[list[float | None], list[float | None], float]:
    """Trains at the recipe's rate throughout, without a pipeline: the whole gradient's norm and the loss of
    each step, and the held-out score. A step where one is not finite has None and changes nothing.
    """
    recipe = task.recipe
    torch.manual_seed(seed)
    model = task.build()
    optimizer = torch.optim.Adam(
        model.parameters(), lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2)
    )
    norms: list[float | None] = []
    losses: list[float | None] = []
    for step in range(recipe.num_steps):
        inputs, target = task.batch(step, seed)
        loss = task.loss(model(inputs), target)
        torch.autograd.backward(loss)
        norm = float(
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        )
        finite = math.isfinite(norm) and math.isfinite(float(loss.detach()))
        norms.append(norm if finite else None)
        losses.append(float(loss.detach()) if finite else None)
        if finite:
            optimizer.step()
        optimizer.zero_grad()
    return norms, losses, evaluate(task, model)


class WeightAverage:
    """Follows the floating-point state of a module; `applied` lends it the averages for an evaluation.

    The recipe evaluates a moving average of the weights instead of the weights themselves. With TensorFlow's
    ramp its decay starts low and rises towards its final value, so that short trainings do not average in
    their random beginning. The running statistics of batch normalization are averaged along: they belong to
    the weights they were seen with.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        state = module.state_dict(keep_vars=True)
        self._live = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
        self.average = {name: tensor.detach().clone() for name, tensor in self._live.items()}

    def update(self, num_updates: int) -> None:
        """Takes the weights in after update number `num_updates`, counted from 1."""
        decay = min(self._decay, (1.0 + num_updates) / (10.0 + num_updates))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.values()), [t.detach() for t in self._live.values()], 1.0 - decay
            )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the module holds the averages; afterwards its own values, bit for bit."""
        own = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        _fill(self._live, self.average)
        try:
            yield
        finally:
            _fill(self._live, own)

    def load(self, average: dict[str, Tensor]) -> None:
        """Goes on from averages kept earlier."""
        _fill(self.average, average)


@torch.no_grad()
def _fill(tensors: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the most steps."""
    found = [path for path in folder.glob("step-*") if path.suffix != ".part"]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def _drop_checkpoints(folder: Path, but: Path | None = None) -> None:
    for path in folder.glob("step-*"):
        if path != but:
            shutil.rmtree(path, ignore_errors=True)


def _save_checkpoint(
    folder: Path,
    state: dict[str, Any],
    pipeline: Pipeline | None,
    optimizer: torch.optim.Optimizer,
    rank: int,
    group: distributed.ProcessGroup | None,
    watch: Watch,
) -> None:
    """The loop's `state`, and the pipeline with its optimizer. All ranks call."""
    target = folder / f"step-{state['done']:08d}"
    part = target.with_name(target.name + ".part")
    if rank == 0:
        shutil.rmtree(part, ignore_errors=True)  # what a killed run left
        part.mkdir(parents=True)
    if group is not None:
        distributed.barrier(group)
    if pipeline is not None:
        checkpoint.save(part / "pipeline", pipeline, optimizer)
    torch.save(state, part / f"loop-{rank}.pt")
    watch("saving", state["done"])
    if group is not None:
        distributed.barrier(group)
    if rank == 0:
        part.rename(target)
        _drop_checkpoints(folder, but=target)
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
