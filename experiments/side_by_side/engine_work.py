"""What the processes of one case do: build the arms, check them, time them in turns.

`launch` starts `work` once per case in all processes. Every process returns its own times; the experiment
puts them together.
"""

from __future__ import annotations

import time
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.measuring.timed_actions import samples_of
from gpipe_bench.experiments.measuring.turns import measure
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
from gpipe_bench.harness.rounds import Usage
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.times.clock import conditions

WAIT_S = 0.02  # of a waiting stage, per action
TRANSFORMER: dict[str, Any] = {
    "num_layers": 8, "vocab_size": 64, "d_model": 256, "ffn_dim": 1024, "num_heads": 4, "seq_len": 64,
}  # fmt: skip
TRANSFORMER_MICROBATCH = 2
WIDTH = 8  # of a layer that computes next to nothing
TINY_LAYERS_PER_STAGE = 2


class EngineJob(NamedTuple):
    """One case as its processes see it."""

    part: str
    num_stages: int
    num_microbatches: int
    remat: str
    rounds: int
    seed: int = 0
    against: str = ""
    transport: str = "memory"  # shared by neighbours, or "gloo"


class EngineResult(NamedTuple):
    """What one process found. Times are seconds per step, two samples per round."""

    counts: dict[str, dict[str, Any]]
    actions_s: dict[str, float]  # mean of our latest step, by stage and kind: "0F"
    conditions: dict[str, str]
    times: dict[str, list[float]]
    usage: Usage


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


def subject_of(job: EngineJob) -> Subject:
    """The layers and the mini-batch of a case; the same in every process."""
    torch.manual_seed(job.seed)
    count, num_stages = job.num_microbatches, job.num_stages
    if job.part == "transformer":
        size = count * TRANSFORMER_MICROBATCH
        layers = tuple(MODELS["transformer-lm"](**TRANSFORMER))
        batch, target = example_batch("transformer-lm", size, **TRANSFORMER)
        loss = loss_fn("transformer-lm", **TRANSFORMER)
    else:
        loss = _mean_square
        batch, target = torch.randn(count, WIDTH), torch.randn(count, WIDTH)
        if job.part == "overlap":
            layers = tuple(Waiting() for _ in range(num_stages))
        elif job.part == "small":
            layers = tuple(nn.Linear(WIDTH, WIDTH) for _ in range(num_stages))
        else:
            layers = tuple(nn.Linear(WIDTH, WIDTH) for _ in range(num_stages * TINY_LAYERS_PER_STAGE))
    per_stage = len(layers) // num_stages
    spans = tuple(range(k * per_stage, (k + 1) * per_stage) for k in range(num_stages))
    return Subject(layers, spans, batch, target, loss, count)


def arms_of(job: EngineJob, subject: Subject) -> tuple[list[Arm], Pipeline]:
    """The arms of a case in this process, ours first, and our pipeline."""
    if job.part == "in process":
        arm, pipeline = ours(subject, job.remat)
        other = [torchgpipe(subject, job.remat)] if job.against == "torchgpipe" else []
        return [arm, bare_model(subject, job.remat), *other], pipeline
    group = dist.group.WORLD
    assert group is not None, "launch has made the process group"
    rank = dist.get_rank(group)
    arm, pipeline = ours(subject, job.remat, group=group, share_memory=job.transport == "memory")
    match job.part:
        case "overlap":
            return [arm, bare_stage(subject, rank)], pipeline
        case "small":
            return [arm, schedule_gpipe(subject, job.remat, group), bare_stage(subject, rank)], pipeline
    arms = [arm, schedule_gpipe(subject, job.remat, group)]
    if job.remat == "never":
        arms.append(sequential(subject, "sequential", idle=rank > 0))
        arms.append(sequential(subject, "sequential on every core"))
    return arms, pipeline


def work(job: EngineJob) -> EngineResult:
    """What one process does for a case."""
    subject = subject_of(job)
    arms, pipeline = arms_of(job, subject)
    counts = verify(subject, arms)
    measured = measure({arm.name: arm.step for arm in arms}, subject.layers, job.rounds, job.seed)
    if verify(subject, arms).keys() != counts.keys():  # still the same after all rounds
        raise RuntimeError("the arms changed while they were measured")
    return EngineResult(counts, mean_actions_s(pipeline), conditions(), *measured)


def mean_actions_s(pipeline: Pipeline) -> dict[str, float]:
    """Mean of each stage's actions in the latest step: {"0F": seconds}."""
    found = samples_of([pipeline.timeline])
    return {f"{stage}{kind.value}": mean(samples) for (stage, kind), samples in found.items()}
