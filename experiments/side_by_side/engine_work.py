"""What the processes of one case do: build the arms, check them, time them in turns.

`launch` starts `work` once per case in all processes; they live through all rounds, so that neither start-up
nor a cold allocator is measured. Every process returns its own times; the experiment puts them together.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.measuring.machine_usage import usage
from gpipe_bench.experiments.side_by_side.engine_arms import (
    Arm,
    Subject,
    bare_model,
    bare_stage,
    ours,
    schedule_gpipe,
    sequential,
    torchgpipe,
    verify,
)
from gpipe_bench.experiments.side_by_side.rounds import measure
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.clock import conditions

WAIT_S = 0.02  # of a waiting stage, per action
TRANSFORMER: dict[str, Any] = {
    "num_layers": 8, "vocab_size": 64, "d_model": 256, "ffn_dim": 1024, "num_heads": 4, "seq_len": 64,
}  # fmt: skip
TRANSFORMER_MICROBATCH = 2
WIDTH = 8  # of a layer that computes next to nothing
TINY_LAYERS_PER_STAGE = 2
SAMPLE_S = 0.06  # a sample is of as many steps as take about this long


class Task(NamedTuple):
    """One case as its processes see it."""

    part: str
    num_stages: int
    num_microbatches: int
    remat: str
    rounds: int
    seed: int = 0
    against: str = ""
    transport: str = "memory"  # shared by neighbours, or "gloo"


class Result(NamedTuple):
    """What one process found. Times are seconds per step, two samples per round."""

    times: dict[str, list[float]]
    counts: dict[str, dict[str, Any]]
    actions_s: dict[str, float]  # mean of our latest step, by stage and kind: "0F"
    conditions: dict[str, str]
    cpu_s: float  # of this process while it measured
    busy_s: float  # of all cores together, this process included, in the same time
    wall_s: float
    num_cores: int


class _Wait(torch.autograd.Function):
    """Waits in both directions as a device would compute, using hardly any core: there is one addition."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        time.sleep(WAIT_S)
        return value + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(WAIT_S)
        return gradient, gradient


class Waiting(nn.Module):
    """A stage that takes `WAIT_S` for every action. Micro-batches of one example: (1, d) -> (1, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = _Wait.apply(value, self.weight)  # type: ignore[no-untyped-call]
        return result


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def subject_of(task: Task) -> Subject:
    """The layers and the mini-batch of a case; the same in every process."""
    torch.manual_seed(task.seed)
    count, num_stages = task.num_microbatches, task.num_stages
    if task.part == "transformer":
        size = count * TRANSFORMER_MICROBATCH
        layers = tuple(MODELS["transformer-lm"](**TRANSFORMER))
        batch, target = example_batch("transformer-lm", size, **TRANSFORMER)
        loss = loss_fn("transformer-lm", **TRANSFORMER)
    else:
        loss = _mean_square
        batch, target = torch.randn(count, WIDTH), torch.randn(count, WIDTH)
        if task.part == "overlap":
            layers = tuple(Waiting() for _ in range(num_stages))
        elif task.part == "small":
            layers = tuple(nn.Linear(WIDTH, WIDTH) for _ in range(num_stages))
        else:
            layers = tuple(nn.Linear(WIDTH, WIDTH) for _ in range(num_stages * TINY_LAYERS_PER_STAGE))
    per_stage = len(layers) // num_stages
    spans = tuple(range(k * per_stage, (k + 1) * per_stage) for k in range(num_stages))
    return Subject(layers, spans, batch, target, loss, count)


def arms_of(task: Task, subject: Subject) -> tuple[list[Arm], Pipeline]:
    """The arms of a case in this process, ours first, and our pipeline."""
    if task.part == "in process":
        arm, pipeline = ours(subject, task.remat)
        other = [torchgpipe(subject, task.remat)] if task.against == "torchgpipe" else []
        return [arm, bare_model(subject, task.remat), *other], pipeline
    group = dist.group.WORLD
    assert group is not None, "launch has made the process group"
    rank = dist.get_rank(group)
    arm, pipeline = ours(subject, task.remat, group=group, share_memory=task.transport == "memory")
    match task.part:
        case "overlap":
            return [arm, bare_stage(subject, rank)], pipeline
        case "small":
            return [arm, schedule_gpipe(subject, task.remat, group), bare_stage(subject, rank)], pipeline
    arms = [arm, schedule_gpipe(subject, task.remat, group)]
    if task.remat == "never":
        arms.append(sequential(subject, "sequential", idle=rank > 0))
        arms.append(sequential(subject, "sequential on every core"))
    return arms, pipeline


def work(task: Task) -> Result:
    """What one process does for a case."""
    subject = subject_of(task)
    arms, pipeline = arms_of(task, subject)
    counts = verify(subject, arms)
    repeats = {arm.name: repeats_of(arm.step) for arm in arms}
    gc.collect()
    gc.freeze()  # what lives from here on, so that collecting between samples is quick

    def prepare() -> None:
        subject.clear()
        gc.collect()
        dist.barrier()

    before = usage()
    times = measure(
        {arm.name: arm.step for arm in arms}, repeats, task.rounds, task.seed, prepare, time.perf_counter
    )
    cpu_s, busy_s, wall_s = (after - start for after, start in zip(usage(), before, strict=True))
    subject.clear()
    if verify(subject, arms).keys() != counts.keys():  # still the same after all rounds
        raise RuntimeError("the arms changed while they were measured")
    cores = psutil.cpu_count() or 1
    return Result(times, counts, actions_s(pipeline), conditions(), cpu_s, busy_s, wall_s, cores)


def repeats_of(step: Callable[[], object] | None) -> int:
    """Steps per sample, the same in every process: as many as the slowest needs to fill `SAMPLE_S`."""
    dist.barrier()
    start_s = time.perf_counter()
    if step is not None:
        for _ in range(2):
            step()
    step_s = torch.tensor([(time.perf_counter() - start_s) / 2], dtype=torch.float64)
    dist.all_reduce(step_s, dist.ReduceOp.MAX)
    return max(1, round(SAMPLE_S / float(step_s)))


def actions_s(pipeline: Pipeline) -> dict[str, float]:
    """Mean of each stage's actions in the latest step: {"0F": seconds}."""
    durations_s: dict[str, list[float]] = {}
    for event in pipeline.timeline.events:
        name = f"{event.action.stage}{event.action.kind.value}"
        durations_s.setdefault(name, []).append(event.duration_s)
    return {name: sum(each) / len(each) for name, each in durations_s.items()}
