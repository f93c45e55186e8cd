"""The ways to take one training step that are measured side by side, each on the same layers and data.

All arms of a case work on the very same modules and parameters, so that nothing but the engine differs. An
arm also says how often one step must run a stage forward and backward; `verify` counts it on the real layers,
because a benchmark that forgot its micro-batches or its re-materialization has measured something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.engines.checks import (
    check_count,
    counting,
    forward_rows,
    gradient_error,
    gradients_of,
)
from gpipe_bench.experiments.engines.known import Ours, TorchGPipe, Torchgpipe
from gpipe_bench.experiments.engines.setup import Engine, Setup, clear
from gpipe_bench.pipeline import Pipeline


class Subject(NamedTuple):
    """What is trained: layers in equal stages, and one mini-batch."""

    layers: tuple[nn.Module, ...]
    spans: tuple[range, ...]  # layers of each stage
    batch: Tensor
    target: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    num_microbatches: int

    def stage(self, index: int) -> nn.Sequential:
        return nn.Sequential(*(self.layers[i] for i in self.spans[index]))

    def setup(self, remat: str, group: dist.ProcessGroup | None = None) -> Setup:
        """What an engine is built from, on the CPU."""
        return Setup(self.layers, self.spans, self.num_microbatches, remat, torch.device("cpu"), group)

    def parameters(self, stages: Sequence[int]) -> dict[str, nn.Parameter]:
        """The parameters of some stages, named by layer index: "3.weight"."""
        return {
            f"{index}.{name}": parameter
            for stage in stages
            for index in self.spans[stage]
            for name, parameter in self.layers[index].named_parameters()
        }

    @property
    def microbatches(self) -> list[tuple[Tensor, Tensor]]:
        count = self.num_microbatches
        return list(zip(self.batch.chunk(count), self.target.chunk(count), strict=True))


class Arm(NamedTuple):
    """One way to take a step. `step` is None in a process that has no part in it.

    `forwards` and `backwards` are how often a step runs each of `stages`, those that this process runs.
    `whole` says whether it leaves the mini-batch's gradients.
    """

    name: str
    step: Callable[[], object] | None
    stages: tuple[int, ...]
    forwards: int
    backwards: int
    whole: bool = True


def forwards(num_microbatches: int, remat: str) -> int:
    """How often a step runs a stage forward."""
    return len(forward_rows([1] * num_microbatches, remat))


def engine_arm(name: str, engine: Engine, subject: Subject, setup: Setup, num_forwards: int) -> Arm:
    """An engine under test as an arm."""

    def step() -> object:
        return engine.step(subject.batch, subject.target, subject.loss_fn)

    return Arm(name, step, setup.local_stages, num_forwards, setup.num_microbatches)


def ours(
    subject: Subject, remat: str, *, group: dist.ProcessGroup | None = None, share_memory: bool = True
) -> tuple[Arm, Pipeline]:
    """This engine, one process per stage with a `group`, all stages in this process without."""
    setup = subject.setup(remat, group)
    engine = Ours(setup, share_memory=share_memory)
    count = forwards(subject.num_microbatches, remat)
    return engine_arm("ours", engine, subject, setup, count), engine.pipeline


def schedule_gpipe(subject: Subject, remat: str, group: dist.ProcessGroup) -> Arm:
    """torch.distributed.pipelining.ScheduleGPipe, with every stage checkpointed unless `remat` is never."""
    setup = subject.setup(remat, group)
    count = forwards(subject.num_microbatches, "never" if remat == "never" else "always")
    return engine_arm("ScheduleGPipe", TorchGPipe(setup), subject, setup, count)


def sequential(subject: Subject, name: str, *, idle: bool = False) -> Arm:
    """The plain model in this process, micro-batch by micro-batch."""
    model, count = nn.Sequential(*subject.layers), subject.num_microbatches
    microbatches = subject.microbatches

    def step() -> None:
        for inputs, target in microbatches:
            (subject.loss_fn(model(inputs), target) / count).backward()  # type: ignore[no-untyped-call]

    stages = () if idle else tuple(range(len(subject.spans)))
    return Arm(name, None if idle else step, stages, count, count)


def bare_stage(subject: Subject, stage: int) -> Arm:
    """One stage's forwards and backwards alone: no engine, no messages, gradients made up."""
    module, count, last = subject.stage(stage), subject.num_microbatches, len(subject.spans) - 1
    with torch.no_grad():
        arriving = nn.Sequential(*(subject.stage(before) for before in range(stage)))(subject.batch)
        inputs = list(zip(arriving.chunk(count), subject.target.chunk(count), strict=True))
        gradient = torch.ones_like(module(inputs[0][0]))

    def step() -> None:
        outputs = []
        for value, target in inputs:
            output = module(value.detach().requires_grad_(stage > 0))
            outputs.append(subject.loss_fn(output, target) / count if stage == last else output)
        for output in reversed(outputs):
            output.backward(None if stage == last else gradient)

    return Arm("bare layers", step, (stage,), count, count, whole=False)


def bare_model(subject: Subject, remat: str) -> Arm:
    """The layers in this process, with the same micro-batches and recomputations but without an engine."""
    model, count = nn.Sequential(*subject.layers), subject.num_microbatches
    microbatches = subject.microbatches

    def step() -> None:
        if remat == "never":
            losses = [subject.loss_fn(model(inputs), target) / count for inputs, target in microbatches]
            for loss in reversed(losses):
                loss.backward()  # type: ignore[no-untyped-call]
            return
        again = microbatches if remat == "always" else microbatches[:-1]
        with torch.no_grad():
            for inputs, target in again:
                subject.loss_fn(model(inputs), target)
        for inputs, target in reversed(microbatches):
            (subject.loss_fn(model(inputs), target) / count).backward()  # type: ignore[no-untyped-call]

    return Arm("bare layers", step, tuple(range(len(subject.spans))), forwards(count, remat), count)


def torchgpipe(subject: Subject, remat: str) -> Arm:
    """torchgpipe in this process, a worker thread per stage, all on the CPU. Needs the package."""
    setup = subject.setup(remat)
    count = forwards(subject.num_microbatches, remat)
    return engine_arm("torchgpipe", Torchgpipe(setup), subject, setup, count)


def verify(subject: Subject, arms: Sequence[Arm]) -> dict[str, dict[str, Any]]:
    """One step of every arm: what its stages did, and how far its gradients are from the first arm's.

    Raises RuntimeError where a stage ran more or less often than the arm says, or on micro-batches of another
    size, or where the gradients differ by more than rounding.
    """
    size = len(subject.batch) // subject.num_microbatches
    wanted: dict[str, Tensor] = {}
    report: dict[str, dict[str, Any]] = {}
    for arm in arms:
        if arm.step is None:
            continue
        arm.step()  # agrees on shapes, where an engine does that
        clear(subject.layers)
        with counting({stage: subject.layers[subject.spans[stage].start] for stage in arm.stages}) as counted:
            arm.step()
        for stage, count in counted().items():
            check_count(arm.name, stage, count, [[size] * arm.forwards], arm.backwards)
        report[arm.name] = {"forwards": arm.forwards, "backwards": arm.backwards, "examples": size}
        if arm.whole:
            found = gradients_of(subject.parameters(arm.stages), arm.name)
            for name, gradient in found.items():
                wanted.setdefault(name, gradient)
            expected = {name: wanted[name] for name in found}
            report[arm.name]["gradient error"] = gradient_error(found, expected, arm.name)
        clear(subject.layers)
    return report
