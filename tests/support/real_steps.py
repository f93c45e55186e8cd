"""Counts real training steps storage by storage, to compare with the memory model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.pipeline import (
    Action,
    Boundary,
    InProcess,
    Pipeline,
    Profiler,
    Schedule,
    StageMemory,
    pipeline_memory,
)
from gpipe_bench.pipeline.arguments import schedule_of
from gpipe_bench.pipeline.memory.trace import LayerProfile, as_tuple
from gpipe_bench.pipeline.memory.tracker import LiveMemory
from gpipe_bench.pipeline.memory.workers import shared_weights
from gpipe_bench.pipeline.stage.trees import Tree, split

Loss = Callable[..., Tensor]

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9, foreach=False),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=False),
}


class Call(nn.Module):
    """A layer that calls a function of its modules and its input."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(modules)

    def forward(self, value: Any) -> Any:
        return self.function(value, *self.parts)


@dataclass(frozen=True)
class Step:
    """The settings of a training step."""

    num_stages: int = 1
    num_microbatches: int = 1
    remat: str = "never"
    schedule: str | Schedule = "gpipe"
    optimizer: str = "rmsprop"
    autocast: torch.dtype | None = None

    def precision(self) -> AbstractContextManager[object]:
        return nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast)


@dataclass
class Counted:
    """Peak bytes of each worker: in the whole step, and in each action."""

    peaks: list[int]
    actions: dict[Action, int] = field(default_factory=dict)


def count(
    model: nn.Sequential, batch: Tree, target: Tree, loss_fn: Loss, step: Step
) -> tuple[Counted, Pipeline]:
    """Train two steps on separate in-process devices; count the second, in which optimizer state exists."""
    memory = LiveMemory()
    schedule = schedule_of(step.schedule, step.num_stages, step.num_microbatches, step.remat)
    home = schedule.worker
    # Copies of messages belong to the receiving worker.
    transport = InProcess(copy=True, observe_transfer=lambda stage: memory.owned_by(home(stage)))
    pipeline = Pipeline(
        model,
        num_stages=step.num_stages,
        num_microbatches=step.num_microbatches,
        schedule=schedule,
        cost=[1.0] * len(model),
        transport=transport,
    )
    stages = pipeline.stages
    seen: set[nn.Parameter] = set()
    parameters = []
    for stage in stages:
        own = dict.fromkeys(p for layer in stage.layers for p in layer.parameters())
        parameters.append([p for p in own if p not in seen])
        seen.update(own)
    optimizers = [OPTIMIZERS[step.optimizer](own) if own else None for own in parameters]
    num_workers = schedule.num_workers
    counted = Counted([0] * num_workers)

    def collect(worker: int) -> int:
        peak = memory.peak_bytes[worker]
        counted.peaks[worker] = max(counted.peaks[worker], peak)
        memory.peak_bytes[worker] = memory.live_bytes[worker]
        return peak

    @contextmanager
    def observe(action: Action) -> Iterator[None]:
        collect(home(action.stage))
        with memory.owned_by(home(action.stage)):
            yield
        counted.actions[action] = collect(home(action.stage))

    with memory:
        for stage in stages:
            with memory.owned_by(home(stage.index)):
                memory.watch(t for layer in stage.layers for t in (*layer.parameters(), *layer.buffers()))
                stage.statistics.begin()  # its tensors belong to the stage
        for index in range(2):
            if index == 1:
                gc.collect()  # frees what only the first step builds, such as its checks
                counted.peaks[:] = [0] * num_workers
                memory.reset_peaks()
            with step.precision():
                pipeline.step(batch, target, loss_fn, observe=observe)
            for stage, optimizer in zip(stages, optimizers, strict=True):
                if optimizer is not None:
                    with memory.owned_by(home(stage.index)):
                        optimizer.step()
                        optimizer.zero_grad()
                collect(home(stage.index))
    data = [0] * num_workers
    data[home(0)] += sum(tensor.untyped_storage().nbytes() for tensor in dict.fromkeys(as_tuple(batch)))
    data[home(step.num_stages - 1)] += sum(tensor.untyped_storage().nbytes() for tensor in as_tuple(target))
    counted.peaks = [peak + own for peak, own in zip(counted.peaks, data, strict=True)]
    counted.actions = {action: peak + data[home(action.stage)] for action, peak in counted.actions.items()}
    return counted, pipeline


def profiles(
    model: nn.Sequential, batch: Tree, target: Tree, loss_fn: Loss, step: Step
) -> tuple[tuple[LayerProfile, ...], LayerProfile]:
    """Profiles of the layers and the loss, at the (larger) micro-batch size."""
    profiler = Profiler(step.autocast, ties_apart=True)
    inputs = split(batch, step.num_microbatches)[0]
    part = split(target, step.num_microbatches)[0]
    return profiler.model(model, loss_fn, Boundary.of(inputs), Boundary.of(part))


def compare(
    model: nn.Sequential, batch: Tree, target: Tree, loss_fn: Loss, step: Step
) -> tuple[Counted, tuple[StageMemory, ...]]:
    """Returns a real step's bytes, and the memory model's."""
    counted, pipeline = count(model, batch, target, loss_fn, step)
    layers, loss = profiles(model, batch, target, loss_fn, step)
    modelled = pipeline_memory(
        layers,
        loss,
        pipeline.partition,
        pipeline.schedule,
        step.optimizer,
        receive_ahead=None,
        ties=shared_weights(list(model)),
    )
    return counted, modelled
