"""What the processes at the two ends of a slow link do: measure it, and take steps over it at several rates.

The rates are chosen by the model itself: as multiples of the rate at which a message takes as long as the
forward of the slower stage, so that the points lie where communication stops being hidden on any machine. All
rates take turns round by round, with a step of all stages in each process, from which the replay of the same
round gets its action times.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from gpipe_bench.experiments.engines.known import Ours
from gpipe_bench.experiments.engines.setup import Setup
from gpipe_bench.experiments.measuring.step_timing import Configuration, Task, work
from gpipe_bench.experiments.measuring.timed_actions import TimedActions, check_ran, samples_of
from gpipe_bench.experiments.table3.slow_link import set_rate
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline.plan.schedule import Kind, gpipe

LEAST_BYTES_PER_S = 1e5
BULK_S = 0.03  # of a transfer that measures the bandwidth
MOST_BULK_BYTES, LEAST_BULK_BYTES = 2**25, 2**15
PINGS = 20


class LinkTask(NamedTuple):
    """`multiples` are of the rate at which a message takes a forward; None is the link without a limit."""

    model: str
    options: dict[str, Any]
    num_microbatches: int
    batch_size: int
    rounds: int
    multiples: tuple[float | None, ...]
    remat: str = "always"
    seed: int = 1811


class Measured(NamedTuple):
    """One rate in one round."""

    bandwidth_bytes_per_s: float  # of a bulk transfer; the slower direction
    latency_s: float  # one way, half of a round trip of four bytes
    step_s: float  # without the optimizer


class LinkFound(NamedTuple):
    """What one process found."""

    rates: tuple[float | None, ...]  # bytes per second, in the order of the multiples
    timed: tuple[TimedActions, ...]  # by round; without updates, which the steps have not either
    measured: tuple[tuple[Measured, ...], ...]  # by round and rate
    congestion_control: str


def steps_at_rates(task: LinkTask) -> LinkFound:
    """Runs in both processes at once; rank is the stage."""
    configuration = Configuration(2, task.num_microbatches, task.batch_size, task.remat)
    once = Task(task.model, task.options, (configuration,), 1, seed=task.seed)
    first = replace(work(once).steps[0].rounds[0], update_s=())
    torch.manual_seed(task.seed)
    rank, layers = dist.get_rank(), list(MODELS[task.model](**task.options))
    compute_loss = loss_fn(task.model, **task.options)
    generator = torch.Generator().manual_seed(task.seed)
    batch, target = example_batch(task.model, task.batch_size, generator=generator, **task.options)
    program = gpipe(2, task.num_microbatches, task.remat)

    def engine(group: Any) -> Ours:
        setup = Setup(layers, first.partition, task.num_microbatches, task.remat, torch.device("cpu"), group)
        return Ours(setup, share_memory=False)

    alone, shared = engine(None), engine(dist.group.WORLD)
    rates = _rates(first, task.multiples)
    timed, measured = [], []
    for number in range(-1, task.rounds):  # the first round warms up
        _set_rate(None)
        _step(alone, layers, batch, target, compute_loss)
        check_ran(alone.timeline, program)
        seconds = samples_of([alone.timeline])
        found: dict[int, Measured] = {}
        order = range(len(rates)) if number % 2 else range(len(rates) - 1, -1, -1)
        for index in order if number >= 0 else [0]:  # the first rate is the fastest
            _set_rate(rates[index])
            bandwidth, latency_s = _bandwidth(rates[index]), _latency()
            step_s = _step(shared, layers, batch, target, compute_loss)
            ran = sorted(event.action for event in shared.timeline.events)
            if ran != sorted(program.actions[rank]):
                raise RuntimeError(f"stage {rank} ran {len(ran)} actions, not {len(program.actions[rank])}")
            found[index] = Measured(bandwidth, latency_s, step_s)
        if number >= 0:
            timed.append(replace(first, samples_s=seconds))
            measured.append(tuple(found[index] for index in range(len(rates))))
    _set_rate(None)
    return LinkFound(rates, tuple(timed), tuple(measured), _congestion_control())


def _set_rate(rate: float | None) -> None:
    """At both ends, while nothing is on its way."""
    dist.barrier()
    set_rate(rate)
    dist.barrier()


def _rates(timed: TimedActions, multiples: tuple[float | None, ...]) -> tuple[float | None, ...]:
    """The first process decides, so that both ends agree."""
    forward_s = max(median(timed.samples_s[stage, Kind.F]) for stage in range(2))
    unit = timed.activation_bytes[0] / forward_s
    rates = [None if each is None else max(LEAST_BYTES_PER_S, each * unit) for each in multiples]
    dist.broadcast_object_list(rates, src=0)
    return tuple(rates)


def _step(engine: Ours, layers: list[torch.nn.Module], batch: Any, target: Any, compute_loss: Any) -> float:
    gc.collect()
    dist.barrier()
    start_s = time.perf_counter()
    engine.step(batch, target, compute_loss)
    step_s = time.perf_counter() - start_s
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    return step_s


def _bandwidth(rate: float | None) -> float:
    """Bytes per second of one transfer that nothing else disturbs, the slower direction."""
    size = MOST_BULK_BYTES if rate is None else round(BULK_S * rate)
    bulk = torch.zeros(min(max(size, LEAST_BULK_BYTES), MOST_BULK_BYTES), dtype=torch.uint8)
    found = []
    for sender in range(2):
        dist.barrier()
        start_s = time.perf_counter()
        _pass(bulk, sender)
        _pass(torch.zeros(1), 1 - sender)  # says that it has arrived
        found.append(bulk.numel() / (time.perf_counter() - start_s))
    speeds = torch.tensor(found)
    dist.all_reduce(speeds, dist.ReduceOp.MIN)
    return float(speeds.min())


def _latency() -> float:
    """Seconds one way of a message of four bytes, the median of several round trips."""
    ball = torch.zeros(1)
    found = []
    for _ in range(PINGS):
        start_s = time.perf_counter()
        _pass(ball, 0)
        _pass(ball, 1)
        found.append((time.perf_counter() - start_s) / 2)
    latency = torch.tensor([median(found)])
    dist.broadcast(latency, src=0)
    return float(latency)


def _pass(tensor: torch.Tensor, sender: int) -> None:
    if dist.get_rank() == sender:
        dist.send(tensor, 1 - sender)
    else:
        dist.recv(tensor, sender)


def _congestion_control() -> str:
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
