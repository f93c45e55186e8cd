"""What the processes of one side-by-side case do: build every engine from the same setup, check all of them,
then let them take turns.

All engines work on the very same layers, cut at the same places, on the same mini-batch; the processes live
through all rounds, so that neither start-up nor a cold allocator is measured.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
from torch import distributed as dist
from torch import nn

from gpipe_bench.experiments.engines.checks import reference, verify
from gpipe_bench.experiments.engines.known import Ours
from gpipe_bench.experiments.engines.setup import Engine, NoStepError, Setup, build
from gpipe_bench.experiments.measuring.machine_usage import usage
from gpipe_bench.experiments.side_by_side.engine_work import actions_s, repeats_of
from gpipe_bench.experiments.side_by_side.rounds import measure
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import Pipeline
from gpipe_bench.pipeline.clock import conditions
from gpipe_bench.pipeline.plan.partition import Partition, partition

PARTITION_MICROBATCHES = 4  # of the step that times single layers


class Task(NamedTuple):
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


class Result(NamedTuple):
    """What one process found. Times are seconds per step, two samples per round."""

    times: dict[str, list[float]]
    checks: dict[str, dict[str, Any]]  # what every engine really did
    refused: dict[str, str]  # why an engine can't run this
    partition: Partition
    actions_s: dict[str, float]  # mean of our latest step, by stage and kind: "0F"
    conditions: dict[str, str]
    cpu_s: float  # of this process while it measured
    busy_s: float  # of all cores together, this process included, in the same time
    wall_s: float
    num_cores: int


def work(task: Task) -> Result:
    """What one process does for a case."""
    torch.manual_seed(task.seed)  # the same weights in every process
    layers = list(MODELS[task.model](**task.options))
    size = task.microbatch_size * task.num_microbatches
    batch, target = example_batch(task.model, size, **task.options)
    loss = loss_fn(task.model, **task.options)
    spans = balanced(layers, task)
    group = None if task.in_process else dist.group.WORLD
    setups: dict[str, Setup] = {}
    engines: dict[str, Engine] = {}
    refused: dict[str, str] = {}
    for name, (engine, remat) in task.engines.items():
        setup = Setup(layers, spans, task.num_microbatches, remat, torch.device("cpu"), group)
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

    def prepare() -> None:
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        gc.collect()
        dist.barrier()

    checks = checked()
    steps: dict[str, Callable[[], object] | None] = {
        name: partial(engine.step, batch, target, loss) for name, engine in engines.items()
    }
    repeats = {name: repeats_of(step) for name, step in steps.items()}
    gc.collect()
    gc.freeze()  # what lives from here on, so that collecting between samples is quick
    before = usage()
    times = measure(steps, repeats, task.rounds, task.seed, prepare, time.perf_counter)
    cpu_s, busy_s, wall_s = (after - start for after, start in zip(usage(), before, strict=True))
    ours = engines["ours"]
    assert isinstance(ours, Ours)
    actions = actions_s(ours.pipeline)
    checked()  # still right after all rounds
    cores = psutil.cpu_count() or 1
    return Result(times, checks, refused, spans, actions, conditions(), cpu_s, busy_s, wall_s, cores)


def built(name: str, setup: Setup) -> tuple[Engine | None, str]:
    """The engine, or why it can't run this. NoStepError where it is none."""
    try:
        return build(name, setup), ""
    except NoStepError:
        raise
    except ValueError as error:
        return None, str(error)


def balanced(layers: list[nn.Module], task: Task) -> Partition:
    """Stages of equal time: every layer is timed as a stage of its own. The first process decides for all."""
    count = PARTITION_MICROBATCHES
    batch, target = example_batch(task.model, task.microbatch_size * count, **task.options)
    pipeline = Pipeline(layers, num_stages=len(layers), num_microbatches=count, remat="never")
    for _ in range(3):  # the first two warm up
        pipeline.step(batch, target, loss_fn(task.model, **task.options))
    durations_s: dict[tuple[int, str], list[float]] = {}
    for event in pipeline.timeline.events:
        durations_s.setdefault((event.action.stage, event.action.kind), []).append(event.duration_s)
    costs_s = [0.0] * len(layers)
    for (index, _), samples in durations_s.items():
        costs_s[index] += median(samples)
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    found = [partition(costs_s, task.num_stages)]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _first_of_all(reason: str) -> str:
    """The first reason that any process has; an engine that one process can't build is none for all."""
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((each for each in reasons if each), "")
