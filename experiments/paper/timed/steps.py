"""Whole steps, taken in turns by the processes of a case, and what every action of them took.

As many processes as there are devices to measure on take the steps of all configurations round by round,
there and back within each, so that the numbers of one round can be set against each other on a machine that
does other things too. All stages of a configuration run in each process, at the same time in every process: a
stage's action times are those it has beside busy neighbours, which is how it would run in a pipeline. A
configuration that has a process for each of its stages is also run for real, one stage per process, and that
is what the replay must reproduce: two stages on a CPU, every number of stages up to that of the GPUs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from gpipe_bench.experiments.engines.setup import Engine, Setup, clear, resolve
from gpipe_bench.experiments.paper.timed.layers import layer_seconds
from gpipe_bench.experiments.paper.timed.results import (
    Found,
    Steps,
    TimedActions,
    check_ran,
    results,
    samples_of,
)
from gpipe_bench.experiments.paper.timed.workloads import Configuration, Job, Workload
from gpipe_bench.harness.environment import usable_cores
from gpipe_bench.harness.experiment import Outcome, RunOptions
from gpipe_bench.harness.rounds import Usage, turns
from gpipe_bench.harness.runner import memory_error
from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.clock import conditions
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.pipeline.ranks.failure import nccl_options
from gpipe_bench.pipeline.stage.trees import split
from gpipe_bench.planner.timing import boundary_bytes, copy_bandwidth, settle, time_step

LEARNING_RATE = 1e-6  # updates are timed, not wanted
ALONE, SHARED = "all stages in one process", "one stage per process"
REAL_STAGES = (2, 4, 8)
REAL_ROUNDS = {"smoke": 1, "short": 6, "full": 6}
"""Rounds of steps that run for real: two turns each, there and back, of two steps."""
BULK_BYTES = 2**26  # of a transfer that measures the bandwidth: half a millisecond over NVLink
TRIPS = 11


def measure(job: Job) -> list[Found]:
    """Runs the processes of a case, one thread each and, on CPUs, pinned. `MemoryError` where no
    configuration fits.
    """
    found: list[Found] = run_processes(work, num_devices(job.device), job, device=job.device)
    steps = found[0].steps  # processes give up together
    if all(each.out_of_memory and not (each.turns or each.real_s) for each in steps):
        raise MemoryError(steps[0].out_of_memory)
    return found


def run_real(
    workload: Workload, counts: Sequence[int], options: RunOptions, *, microbatch_size: int | None = None
) -> Outcome:
    """Takes the steps, with each of `counts` micro-batches and every number of stages there are devices for.

    Without `microbatch_size` all have the workload's mini-batch. Skipped where there is one device alone.
    """
    stages = [k for k in REAL_STAGES if k <= num_devices(options.device)]
    if not stages:
        return Outcome(status="skipped", reason="two stages need 2 devices or cores of their own")
    counts = counts[:2] if options.profile == "smoke" else counts
    sizes = [workload.batch_size if microbatch_size is None else m * microbatch_size for m in counts]
    plan = tuple(
        Configuration(k, m, size, runs_for_real=True)
        for k in stages
        for m, size in zip(counts, sizes, strict=True)
    )
    job = Job(workload, plan, REAL_ROUNDS[options.profile], options.engine or "ours", options.device)
    metrics, details = results(job, measure(job))
    return Outcome(tuple(metrics), details)


def num_devices(device: str) -> int:
    """Processes that time side by side: one per GPU, at most eight, or two cores of a CPU."""
    return min(devices.count("cuda"), max(REAL_STAGES)) if device == "cuda" else min(usable_cores(), 2)


def run_processes(
    function: Callable[..., Any], num_processes: int, *arguments: Any, device: str = "cpu"
) -> list[Any]:
    """`gpipe_bench.pipeline.ranks.launch.launch`; RuntimeError with the first failure's own message, where
    torch's launcher has a page of text, which stays the cause.

    They run on the CPU unless `device` asks for GPUs.
    """
    from torch.multiprocessing.spawn import ProcessException

    from gpipe_bench.pipeline.ranks.launch import launch

    try:
        return launch(function, num_processes, *arguments, device=device)
    except ProcessException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise RuntimeError(f"process {error.error_index}: {lines[-1]}") from error


def work(job: Job) -> Found:
    """Takes all steps of a case. Runs in every process at once, or in one alone."""
    training = Training(job)
    apart = devices.is_accelerator(training.device) and dist.is_initialized() and dist.get_world_size() > 1
    link = measured_link(training.device) if apart else None
    settle()
    layers_s: dict[int, tuple[float, ...]] = {}
    too_large: dict[int, str] = {}  # errors, by the size of micro-batches of which no layer can be timed

    def time_layers(size: int) -> None:
        example = training.example(size)
        layers_s[size] = layer_seconds(training.layers, 1, training.loss, *example, remat="always")

    for size in sorted({each.microbatch_size for each in job.configurations}):
        ran_out = attempt(partial(time_layers, size))
        if ran_out:
            layers_s.pop(size, None)
            too_large[size] = f"one layer at a time: {ran_out}"
            training.forget()
    timed = {
        index: TimedConfiguration(each, training, partition(layers_s[each.microbatch_size], each.num_stages))
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
            timed[index].found if index in timed else Steps(out_of_memory=too_large[each.microbatch_size])
            for index, each in enumerate(job.configurations)
        ),
        copy_bandwidth(training.device),
        conditions(),
        used,
        link,
        memory_of(training.device),
    )


def memory_of(device: torch.device) -> dict[str, int]:
    """The most bytes that an accelerator's allocator has given out in this process, and what it took from the
    device for that; nothing for a CPU.
    """
    if not devices.is_accelerator(device):
        return {}
    return {
        "peak_bytes": devices.peak_bytes(device),
        "reserved_bytes": torch.accelerator.max_memory_reserved(device),
        "alloc_retries": torch.accelerator.memory_stats(device).get("num_alloc_retries", 0),
    }


class Training:
    """The model that all configurations of a case train in this process, each on its own mini-batch."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, devices.current(job.device)
        model = job.workload.build(self.device, seed=job.seed)
        self.layers: Sequence[nn.Module] = list(model)
        self.loss = job.workload.loss()
        self._optimizers = [optimizer_of(layer) for layer in self.layers]

    def example(self, batch_size: int) -> tuple[Any, Any]:
        return self.job.workload.example(batch_size, self.device, seed=self.job.seed)

    def update_s(self, span: range) -> float:
        """Seconds of the optimizer's step on a stage."""
        devices.synchronize(self.device)
        start_s = perf_counter()
        for layer in span:
            if self._optimizers[layer] is not None:
                self._optimizers[layer].step()
        devices.synchronize(self.device)
        return perf_counter() - start_s

    def forget(self) -> None:
        """Gives back what a step that ran out of memory has left: gradients, and what the error held."""
        clear(self.layers)
        gc.collect()
        devices.empty_cache(self.device)


def optimizer_of(layer: nn.Module) -> Any:
    """RMSProp with momentum, the paper's 12 bytes per parameter; none without parameters."""
    parameters = list(layer.parameters())
    return torch.optim.RMSprop(parameters, lr=LEARNING_RATE, momentum=0.9) if parameters else None


class TimedConfiguration:
    """A configuration cut into `stages`, ready to take its turns; `found` is what those kept have found."""

    def __init__(self, configuration: Configuration, training: Training, stages: Partition) -> None:
        self._configuration, self._training = configuration, training
        self._batch, self._target = training.example(configuration.batch_size)
        num_microbatches, remat = configuration.num_microbatches, configuration.remat
        self._program = gpipe(len(stages), num_microbatches, remat)
        self._boundary_bytes = sent_bytes(training.layers, stages, split(self._batch, num_microbatches)[0])
        self.found = Steps(stages)
        self._num_stages, self._engines = len(stages), dict[str, Engine | None]()
        groups: dict[str, Any] = {ALONE: None}
        if configuration.runs_for_real:
            groups[SHARED] = group_of(len(stages))
        reasons = []
        for where, group in groups.items():
            if where == SHARED and dist.get_rank() >= len(stages):
                self._engines[where] = None  # waits for the others
                continue
            setup = Setup(training.layers, stages, num_microbatches, remat, training.device, group)
            try:
                self._engines[where] = resolve(training.job.engine)(setup)
            except ValueError as error:  # what the engine can't do
                reasons.append(f"{where}: {error}")
        self.found.why = "; ".join(reasons)

    def take_turn(self, *, keep: bool = True) -> None:
        """A step with all stages in this process, then one with a stage per process where that is asked for.

        All processes must call; what is not kept warms up. Where the memory of one of them does not suffice,
        all take no more such steps, and those that were kept are dropped. RuntimeError for a step with other
        actions than its schedule's.
        """
        found, take = self.found, {ALONE: self._take_alone, SHARED: self._take_shared}
        for where in list(self._engines):
            ran_out = attempt(partial(take[where], keep))
            if not ran_out:
                continue
            del self._engines[where]
            if where == ALONE:
                found.turns, found.counts = [], {}
            else:
                found.real_s = []
            found.out_of_memory = "; ".join(filter(None, [found.out_of_memory, f"{where}: {ran_out}"]))
            self._training.forget()

    def _take_alone(self, keep: bool) -> None:
        found = self.found
        _, timeline = self._step(ALONE)
        update_s = tuple(self._training.update_s(span) for span in found.partition)
        if timeline is not None:
            found.counts = check_ran(timeline, self._program)
            if keep:
                found.turns.append(self._timed(timeline, update_s))
        elif not found.why:
            engine = self._training.job.engine
            found.why = f"engine {engine} keeps no timeline, so its steps cannot be laid out"

    def _take_shared(self, keep: bool) -> None:
        step_s, timeline = self._step(SHARED)
        stage = dist.get_rank()
        if stage >= self._num_stages:
            return
        step_s += self._training.update_s(self.found.partition[stage])
        if timeline is not None:
            check_ran(timeline, self._program, stage)
        if keep:
            self.found.real_s.append(step_s)

    def _step(self, where: str) -> tuple[float, Timeline | None]:
        training, engine = self._training, self._engines[where]
        step = None if engine is None else partial(engine.step, self._batch, self._target, training.loss)
        step_s = time_step(step, training.layers, device=training.device)
        return step_s, getattr(engine, "timeline", None)

    def _timed(self, timeline: Timeline, update_s: tuple[float, ...]) -> TimedActions:
        configuration = self._configuration
        start_s = perf_counter()
        split(self._batch, configuration.num_microbatches)
        setup_s = perf_counter() - start_s
        return TimedActions(
            self.found.partition,
            configuration.num_microbatches,
            configuration.remat,
            samples_of([timeline]),
            update_s,
            setup_s,
            *self._boundary_bytes,
        )


def group_of(num_stages: int) -> Any:
    """The group of the first so many processes; all must call."""
    if num_stages == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(list(range(num_stages)))


def sent_bytes(
    layers: Sequence[nn.Module], stages: Partition, microbatch: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of a micro-batch over each boundary between stages, forward and back."""
    ends = [span.stop - 1 for span in stages[:-1]]
    ahead, back = boundary_bytes(layers, microbatch)
    return tuple(ahead[end] for end in ends), tuple(back[end] for end in ends)


def attempt(call: Callable[[], object]) -> str:
    """Calls, and returns "" or which process ran out of memory with which error. All processes must call.

    A configuration that is too large for the device is a result; the others of the case go on. So that no
    process waits for one that gave up, all learn of it at once.
    """
    mine = ""
    try:
        call()
    except Exception as error:
        memory = memory_error(error)
        if memory is None:
            raise
        mine = f"{type(memory).__name__}: {(str(memory).splitlines() or [''])[0]}"
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return mine
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return "; ".join(f"process {rank}: {text}" for rank, text in enumerate(found) if text)


def measured_link(device: torch.device) -> Link:
    """The slowest of the links between neighbouring ranks, as a pipeline's messages find it; all ranks must
    call.

    Between the GPUs of a machine it may be NVLink, a switch or the host's memory, which differ by a factor of
    thirty, and nothing else says which. A message of four bytes tells the latency, a large one the bandwidth.
    """
    group = None
    if devices.is_accelerator(device):  # a pipeline's messages take fewer thread blocks than torch's own
        options = nccl_options(dist.ProcessGroupNCCL, sums=False)
        group = dist.new_group(backend="nccl", timeout=options._timeout, pg_options=options)
    found = torch.tensor([[_one_way_s(rank, size, device, group) for size in (4, BULK_BYTES)]
                          for rank in range(dist.get_world_size() - 1)])  # fmt: skip
    dist.all_reduce(found, dist.ReduceOp.MAX)
    each = ", ".join(f"{BULK_BYTES / seconds / 1e9:.1f} GB/s" for _, seconds in found.tolist())
    latency_s, bulk_s = found.amax(0).tolist()
    if group is not None:
        dist.destroy_process_group(group)
    return Link(
        "between neighbours", latency_s, BULK_BYTES / bulk_s,
        source=f"measured between neighbouring ranks over {dist.get_backend()}, one at a time: {each}",
    )  # fmt: skip


def _one_way_s(rank: int, num_bytes: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Seconds one way of a message between a rank and the next, the median of several round trips, of which
    the first warms up; 0 on other ranks. All ranks must call.
    """
    ball, found = torch.zeros(num_bytes, dtype=torch.uint8, device=device), list[float]()
    dist.barrier()
    for _ in range(TRIPS if dist.get_rank() in (rank, rank + 1) else 0):
        start_s = perf_counter()
        for source, target in ((rank, rank + 1), (rank + 1, rank)):
            if dist.get_rank() == source:
                dist.send(ball, target, group)
            else:
                dist.recv(ball, source, group)
        devices.synchronize(device)
        found.append((perf_counter() - start_s) / 2)
    return median(found[1:]) if found else 0.0
