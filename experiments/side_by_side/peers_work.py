"""What the processes of one side-by-side case do: build every engine from the same setup, check all of them,
then let them take turns.

All engines work on the very same layers, cut at the same places, on the same mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from gpipe_bench.experiments.engines.checks import named_parameters, reference, verify
from gpipe_bench.experiments.engines.isolated import Tell
from gpipe_bench.experiments.engines.known import Ours
from gpipe_bench.experiments.engines.setup import Engine, NoStepError, Setup, build, clear
from gpipe_bench.experiments.measuring.layer_seconds import layer_seconds
from gpipe_bench.experiments.measuring.turns import measure
from gpipe_bench.experiments.side_by_side.engine_work import mean_actions_s
from gpipe_bench.harness.rounds import Usage
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline.memory.tracker import LiveMemory
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.times.clock import conditions

PARTITION_MICROBATCHES = 4  # of the step that times single layers


class PeersJob(NamedTuple):
    """One case as its processes see it. `engines` maps each arm's name to its engine and its `remat`."""

    model: str
    options: dict[str, Any]
    microbatch_size: int
    num_stages: int
    num_microbatches: int
    engines: dict[str, tuple[str, str]]
    in_process: bool
    rounds: int
    seed: int


class PeersResult(NamedTuple):
    """What one process found. Times are seconds per step, two samples per round."""

    checks: dict[str, dict[str, Any]]  # what every engine really did
    refused: dict[str, str]  # why an engine can't run this
    partition: Partition
    actions_s: dict[str, float]  # mean of our latest step, by stage and kind: "0F"
    conditions: dict[str, str]
    times: dict[str, list[float]]
    usage: Usage
    peak_bytes: dict[str, int | None]  # of what a step's operations make; None where they can't be seen


def work(job: PeersJob) -> PeersResult:
    """What one process does for a case."""
    torch.manual_seed(job.seed)  # the same weights in every process
    layers = list(MODELS[job.model](**job.options))
    size = job.microbatch_size * job.num_microbatches
    batch, target = example_batch(job.model, size, **job.options)
    loss = loss_fn(job.model, **job.options)
    count = PARTITION_MICROBATCHES
    example = example_batch(job.model, job.microbatch_size * count, **job.options)
    layers_s = layer_seconds(layers, count, loss, *example, remat=job.engines["ours"][1])
    spans = partition(layers_s, job.num_stages)
    group = None if job.in_process else dist.group.WORLD
    setups: dict[str, Setup] = {}
    engines: dict[str, Engine] = {}
    refused: dict[str, str] = {}
    for name, (engine, remat) in job.engines.items():
        setup = Setup(layers, spans, job.num_microbatches, remat, torch.device("cpu"), group)
        found, reason = built(engine, setup)
        reason = _first_of_all(reason)
        if reason or found is None:
            refused[name] = reason
        else:
            engines[name], setups[name] = found, setup

    expected = reference(setups["ours"], batch, target, loss)

    def checked() -> dict[str, dict[str, Any]]:
        return {
            name: verify(name, engine, setups[name], batch, target, loss, expected)
            for name, engine in engines.items()
        }

    checks = checked()
    steps: dict[str, Callable[[], object] | None] = {
        name: partial(engine.step, batch, target, loss) for name, engine in engines.items()
    }
    measured = measure(steps, layers, job.rounds, job.seed)
    ours = engines["ours"]
    assert isinstance(ours, Ours)
    actions_s = mean_actions_s(ours.pipeline)
    checked()  # still right after all rounds
    peaks = {
        name: peak_bytes(step, setups[name]) for name, step in steps.items() if step is not None
    }  # behind the timing, which must not meet what this leaves behind
    return PeersResult(checks, refused, spans, actions_s, conditions(), *measured, peaks)


def peak_bytes(step: Callable[[], object], setup: Setup) -> int | None:
    """Most bytes that a step's operations have alive at a time in this process. None where that is less than
    the gradients, which it surely makes: then the operations run in threads of its own.
    """
    clear(setup.layers)
    if dist.is_initialized():
        dist.barrier()
    with LiveMemory() as memory:
        step()
    gradients = [p.grad for p in named_parameters(setup).values() if p.grad is not None]
    least = sum(gradient.nbytes for gradient in gradients)
    clear(setup.layers)
    peak = memory.peak_bytes[""]
    return peak if peak >= least else None


def work_told(tell: Tell, job: PeersJob) -> PeersResult:
    """`work`, where it is given up when it takes too long."""
    return work(job)


def tried(tell: Tell, job: PeersJob, name: str) -> None:
    """Lets one engine do what it will be timed for, before the others depend on it. Raises what it raises,
    RuntimeError where it does something else; nothing if it can't run this.
    """
    torch.manual_seed(job.seed)
    layers = list(MODELS[job.model](**job.options))
    engine_name, remat = job.engines[name]
    size = job.microbatch_size * job.num_microbatches
    batch, target = example_batch(job.model, size, **job.options)
    loss = loss_fn(job.model, **job.options)
    spans = partition([1.0] * len(layers), job.num_stages)
    group = None if job.in_process else dist.group.WORLD
    setup = Setup(layers, spans, job.num_microbatches, remat, torch.device("cpu"), group)
    expected = reference(setup, batch, target, loss)
    tell("the plain model's gradients are known")
    engine, reason = built(engine_name, setup)
    if not _first_of_all(reason) and engine is not None:
        verify(name, engine, setup, batch, target, loss, expected)


def built(name: str, setup: Setup) -> tuple[Engine | None, str]:
    """The engine, or why it can't run this. NoStepError where it is none."""
    try:
        return build(name, setup), ""
    except NoStepError:
        raise
    except ValueError as error:
        return None, str(error)


def _first_of_all(reason: str) -> str:
    """The first reason that any process has; an engine that one process can't build is none for all."""
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((each for each in reasons if each), "")
