"""What the processes at the two ends of a slow link do: measure it, and take steps over it at several rates.

The rates are chosen by the model itself: as multiples of the rate at which a message takes as long as the
forward of the slower stage, so that the points lie where communication stops being hidden on any machine. All
rates take turns there and back within a round, and so does a step of all stages in each process, from which
the replay of the same turn gets its action times.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from gpipe_bench.experiments.engines.known import Ours
from gpipe_bench.experiments.engines.setup import Setup
from gpipe_bench.experiments.measuring.configuration import Configuration
from gpipe_bench.experiments.measuring.step_timing import StepJob, work
from gpipe_bench.experiments.measuring.timed_actions import TimedActions, check_ran, samples_of
from gpipe_bench.experiments.table3.slow_link import set_rate
from gpipe_bench.harness.rounds import Usage, turns
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline.plan.schedule import Kind, gpipe
from gpipe_bench.planner.timing import time_step

LEAST_BYTES_PER_S = 1e5
BULK_S = 0.03  # of a transfer that measures the bandwidth
MOST_BULK_BYTES, LEAST_BULK_BYTES = 2**25, 2**15
PINGS = 20
ALONE = -1  # among the rates: a step of all stages in each process, which sends nothing


class LinkJob(NamedTuple):
    """`multiples` are of the rate at which a message takes a forward; None is the link without a limit."""

    model: str
    options: dict[str, Any]
    num_microbatches: int
    batch_size: int
    rounds: int  # of two turns each
    multiples: tuple[float | None, ...]
    remat: str = "always"
    seed: int = 1811


class Measured(NamedTuple):
    """One turn of one rate."""

    bandwidth_bytes_per_s: float  # of a bulk transfer; the slower direction
    latency_s: float  # one way, half of a round trip of four bytes
    step_s: float  # without the optimizer


class LinkFound(NamedTuple):
    """What one process found."""

    rates: tuple[float | None, ...]  # bytes per second, in the order of the multiples
    timed: tuple[TimedActions, ...]  # by turn; without updates, which the steps have not either
    measured: tuple[tuple[Measured, ...], ...]  # by turn and rate
    congestion_control: str
    usage: Usage  # over all rounds


def steps_at_rates(job: LinkJob) -> LinkFound:
    """Runs in both processes at once; rank is the stage."""
    configuration = Configuration(2, job.num_microbatches, job.batch_size, job.remat)
    once = StepJob(job.model, job.options, (configuration,), 1, seed=job.seed)
    first = replace(work(once).steps[0].turns[0], update_s=())
    torch.manual_seed(job.seed)
    layers = list(MODELS[job.model](**job.options))
    compute_loss = loss_fn(job.model, **job.options)
    generator = torch.Generator().manual_seed(job.seed)
    batch, target = example_batch(job.model, job.batch_size, generator=generator, **job.options)
    program = gpipe(2, job.num_microbatches, job.remat)

    def engine(group: Any) -> Ours:
        setup = Setup(layers, first.partition, job.num_microbatches, job.remat, torch.device("cpu"), group)
        return Ours(setup, share_memory=False)

    alone, shared = engine(None), engine(dist.group.WORLD)
    rates = _rates(first, job.multiples)

    def step(of: Ours, stage: int | None) -> float:
        step_s = time_step(partial(of.step, batch, target, compute_loss), layers)
        check_ran(of.timeline, program, stage)
        return step_s

    def in_process() -> TimedActions:
        _set_rate(None)
        step(alone, None)
        return replace(first, samples_s=samples_of([alone.timeline]))

    def over_link(rate: float | None) -> Measured:
        _set_rate(rate)
        bandwidth, latency_s = _bandwidth(rate), _latency()
        return Measured(bandwidth, latency_s, step(shared, dist.get_rank()))

    in_process()  # warms up, as does the next
    over_link(rates[0])  # the fastest
    timed: list[TimedActions] = []
    measured: list[list[Measured]] = [[] for _ in rates]
    start = Usage.now()
    for index in turns((ALONE, *range(len(rates))), job.rounds, job.seed):
        if index == ALONE:
            timed.append(in_process())
        else:
            measured[index].append(over_link(rates[index]))
    used = Usage.now().since(start)
    _set_rate(None)
    by_turn = tuple(zip(*measured, strict=True))
    return LinkFound(rates, tuple(timed), by_turn, _congestion_control(), used)


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
