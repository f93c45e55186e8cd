"""What the processes of a timing case do: take whole steps, in turns, and keep what every action took.

As many processes as there are devices to measure on take the steps of all configurations round by round,
there and back within each, so that the numbers of one round can be set against each other on a machine that
does other things too. All stages of a configuration run in each process, at the same time in every process: a
stage's action times are those it has beside busy neighbours, which is how it would run in a pipeline. A
configuration with as many stages as processes is also run for real, one stage per process, and that is what
the replay must reproduce.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_bench.experiments.measuring.configuration import (
    NO_STEPS,
    Configuration,
    Steps,
    TimedConfiguration,
    Training,
    attempt,
    forget,
)
from gpipe_bench.experiments.measuring.layer_seconds import layer_seconds
from gpipe_bench.harness.rounds import Usage, turns
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.pipeline.times.clock import conditions
from gpipe_bench.planner.timing import copy_bandwidth, settle

LEARNING_RATE = 1e-6  # updates are timed, not wanted
MOST_LAYER_MICROBATCHES = 4  # of a step that times single layers


class StepJob(NamedTuple):
    """One case as its processes see it."""

    model: str
    options: dict[str, Any]
    configurations: tuple[Configuration, ...]
    rounds: int  # of two turns each
    engine: str = "ours"
    device: str = "cpu"
    seed: int = 1811


class Found(NamedTuple):
    """What one process found."""

    steps: tuple[Steps, ...]  # in the order of the configurations
    layers_s: dict[int, tuple[float, ...]]
    """Forward, recomputation and backward of each layer, by micro-batch size."""
    num_parameters: int
    copy_bytes_per_s: float
    conditions: dict[str, str]
    usage: Usage  # over all rounds


def work(job: StepJob) -> Found:
    """Takes all steps of a case. Runs in every process at once, or in one alone."""
    device = devices.current(job.device)
    torch.manual_seed(job.seed)
    model = MODELS[job.model](**job.options).to(device)
    layers = list(model)
    training = Training(
        layers,
        [_optimizer(layer) for layer in layers],
        loss_fn(job.model, **job.options),
        device,
        job.engine,
    )
    settle()
    layers_s: dict[int, tuple[float, ...]] = {}
    too_large: dict[int, str] = {}  # errors, by the size of micro-batches of which no layer can be timed

    def time_layers(size: int) -> None:
        count = max(1, min(MOST_LAYER_MICROBATCHES, _largest_batch(job, size) // size))
        example = _example(job, size * count, device)
        layers_s[size] = layer_seconds(layers, count, training.compute_loss, *example, remat="always")

    for size in sorted({each.microbatch_size for each in job.configurations}):
        ran_out = attempt(partial(time_layers, size))
        if ran_out:
            layers_s.pop(size, None)
            too_large[size] = f"one layer at a time: {ran_out}"
            forget(training)
    timed = {
        index: TimedConfiguration(
            each,
            training,
            partition(layers_s[each.microbatch_size], each.num_stages),
            *_example(job, each.batch_size, device),
        )
        for index, each in enumerate(job.configurations)
        if each.microbatch_size in layers_s
    }
    for each in timed.values():
        each.take_turn(keep=False)  # warms up
    start = Usage.now()
    for each in turns(list(timed.values()), job.rounds, job.seed):
        each.take_turn()
    used = Usage.now().since(start)
    return Found(
        tuple(
            timed[index].steps()
            if index in timed
            else NO_STEPS._replace(out_of_memory=too_large[each.microbatch_size])
            for index, each in enumerate(job.configurations)
        ),
        layers_s,
        sum(parameter.numel() for parameter in model.parameters()),
        copy_bandwidth(device),
        conditions(),
        used,
    )


def _largest_batch(job: StepJob, microbatch_size: int) -> int:
    return max(each.batch_size for each in job.configurations if each.microbatch_size == microbatch_size)


def _example(job: StepJob, batch_size: int, device: torch.device) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(job.seed)
    batch, target = example_batch(job.model, batch_size, generator=generator, **job.options)
    return _to(batch, device), _to(target, device)


def _to(tree: Any, device: torch.device) -> Any:
    return tree.to(device) if isinstance(tree, Tensor) else tuple(tensor.to(device) for tensor in tree)


def _optimizer(layer: nn.Module) -> Any:
    """RMSProp with momentum, the paper's 12 bytes per parameter; nothing without parameters."""
    parameters = list(layer.parameters())
    return torch.optim.RMSprop(parameters, lr=LEARNING_RATE, momentum=0.9) if parameters else _Nothing()


class _Nothing:
    def step(self) -> None:
        """A layer without parameters has nothing to update."""
