"""The ways to take one training step that are measured side by side, each on the same layers and data.

All arms of a case work on the very same modules and parameters, so that nothing but the engine differs. An
arm also says how often one step must run a stage forward and backward; `verify` counts it on the real layers,
because a benchmark that forgot its micro-batches or its re-materialization has measured something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from pipeline import Pipeline


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

    @property
    def costs(self) -> list[float]:
        """Costs by which the pipeline cuts as `spans` does."""
        return [1 / len(span) for span in self.spans for _ in span]

    @property
    def microbatches(self) -> list[tuple[Tensor, Tensor]]:
        count = self.num_microbatches
        return list(zip(self.batch.chunk(count), self.target.chunk(count), strict=True))

    def clear(self) -> None:
        for layer in self.layers:
            layer.zero_grad(set_to_none=True)


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
    return {"never": 1, "always": 2, "except_last": 2}[remat] * num_microbatches - (remat == "except_last")


def ours(
    subject: Subject, remat: str, *, group: dist.ProcessGroup | None = None, share_memory: bool = True
) -> tuple[Arm, Pipeline]:
    """This engine, one process per stage with a `group`, all stages in this process without."""
    pipeline = Pipeline(
        subject.layers,
        num_stages=len(subject.spans),
        num_microbatches=subject.num_microbatches,
        remat=remat,
        cost=subject.costs,
        group=group,
        share_memory=share_memory,
    )
    if pipeline.partition != subject.spans:
        raise RuntimeError(
            f"the pipeline is cut into {pipeline.partition}, the other arms into {subject.spans}"
        )
    count = subject.num_microbatches
    stages = tuple(stage.index for stage in pipeline.stages)

    def step() -> object:
        return pipeline.step(subject.batch, subject.target, subject.loss_fn)

    return Arm("ours", step, stages, forwards(count, remat), count), pipeline


class Checkpointed(nn.Module):
    """A stage that is recomputed inside its backward, as one does with torch's own engine."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, value: Tensor) -> Any:
        return checkpoint(self.stage, value, use_reentrant=False)


def schedule_gpipe(subject: Subject, remat: str, group: dist.ProcessGroup) -> Arm:
    """torch.distributed.pipelining.ScheduleGPipe, with every stage checkpointed unless `remat` is never."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, num_stages, count = dist.get_rank(group), len(subject.spans), subject.num_microbatches
    module: nn.Module = subject.stage(rank)
    if remat != "never":
        module = Checkpointed(module)
    stage = PipelineStage(module, rank, num_stages, torch.device("cpu"), group=group)
    last = rank == num_stages - 1
    schedule = ScheduleGPipe(stage, count, loss_fn=subject.loss_fn)
    # It keeps and concatenates all outputs unless told not to, which older versions cannot be.
    options: dict[str, Any] = (
        {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}
    )

    def step() -> object:
        inputs = (subject.batch,) if rank == 0 else ()
        if last:
            return schedule.step(*inputs, target=subject.target, losses=[], **options)
        return schedule.step(*inputs, **options)

    return Arm(
        "ScheduleGPipe", step, (rank,), forwards(count, "never" if remat == "never" else "always"), count
    )


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
    from torchgpipe import GPipe

    count, num_stages = subject.num_microbatches, len(subject.spans)
    model = GPipe(
        nn.Sequential(*subject.layers),
        balance=[len(span) for span in subject.spans],
        devices=["cpu"] * num_stages,
        chunks=count,
        checkpoint=remat,
    )

    def step() -> None:
        subject.loss_fn(model(subject.batch), subject.target).backward()  # type: ignore[no-untyped-call]

    return Arm("torchgpipe", step, tuple(range(num_stages)), forwards(count, remat), count)


class Count(NamedTuple):
    """What one stage really did in a step."""

    rows: tuple[int, ...]  # examples of each forward
    backwards: int


@contextmanager
def counting(subject: Subject, stages: Sequence[int]) -> Iterator[Callable[[], dict[int, Count]]]:
    """Counts the forwards of each stage's first layer and the gradients that come back to its outputs."""
    rows: dict[int, list[int]] = {stage: [] for stage in stages}
    backwards = dict.fromkeys(stages, 0)
    hooks = []
    for stage in stages:
        layer = subject.layers[subject.spans[stage].start]

        def backward(gradient: Tensor, stage: int = stage) -> None:
            backwards[stage] += 1

        def forward(
            module: nn.Module,
            inputs: tuple[Tensor, ...],
            output: Tensor,
            stage: int = stage,
            backward: Callable[[Tensor], None] = backward,
        ) -> None:
            rows[stage].append(len(inputs[0]))
            if output.requires_grad:
                output.register_hook(backward)  # type: ignore[no-untyped-call]

        hooks.append(layer.register_forward_hook(forward))
    try:
        yield lambda: {stage: Count(tuple(rows[stage]), backwards[stage]) for stage in stages}
    finally:
        for hook in hooks:
            hook.remove()


def verify(subject: Subject, arms: Sequence[Arm]) -> dict[str, dict[str, Any]]:
    """One step of every arm: what its stages did, and how far its gradients are from the first arm's.

    Raises RuntimeError where a stage ran more or less often than the arm says, or on micro-batches of another
    size, or where the gradients differ by more than rounding.
    """
    size = len(subject.batch) // subject.num_microbatches
    wanted: dict[int, list[Tensor]] = {}
    report: dict[str, dict[str, Any]] = {}
    for arm in arms:
        if arm.step is None:
            continue
        arm.step()  # agrees on shapes, where an engine does that
        subject.clear()
        with counting(subject, arm.stages) as counted:
            arm.step()
        counts = counted()
        for stage, count in counts.items():
            if count != Count((size,) * arm.forwards, arm.backwards):
                raise RuntimeError(
                    f"{arm.name}: stage {stage} ran {count.backwards} backwards and {len(count.rows)} "
                    f"forwards of {sorted(set(count.rows))} examples; it should be {arm.backwards} and "
                    f"{arm.forwards} of {size}"
                )
        report[arm.name] = {"forwards": arm.forwards, "backwards": arm.backwards, "examples": size}
        if arm.whole:
            report[arm.name]["gradient error"] = _difference(subject, arm, wanted)
        subject.clear()
    return report


def _difference(subject: Subject, arm: Arm, wanted: dict[int, list[Tensor]]) -> float:
    largest = 0.0
    for stage in arm.stages:
        parameters = [p for i in subject.spans[stage] for p in subject.layers[i].parameters()]
        gradients = [p.grad.clone() for p in parameters if p.grad is not None]
        if len(gradients) != len(parameters):
            raise RuntimeError(f"{arm.name} left parameters of stage {stage} without a gradient")
        for found, expected in zip(gradients, wanted.setdefault(stage, gradients), strict=True):
            scale = float(expected.abs().max()) or 1.0
            largest = max(largest, float((found - expected).abs().max()) / scale)
    if not largest < 1e-3:
        raise RuntimeError(f"the gradients of {arm.name} differ by {largest:.1e} from those of the first arm")
    return largest
