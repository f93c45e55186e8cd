"""Times whole steps in turns, in all processes of a case, and every action within them.

There is a process for each device; together they run the steps of all configurations, round by round. Every
process runs all stages, at the same time as the others, so a stage's actions have busy neighbours as in a
pipeline. A configuration with a process for each stage is also run for real, to test the replay.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.harness.environment import of_gpus, usable_cores
from gpipe_bench.harness.experiment import Outcome, RunOptions
from gpipe_bench.harness.record import Metric
from gpipe_bench.harness.rounds import Usage, turns
from gpipe_bench.harness.runner import memory_error
from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.clock import Clock, conditions
from gpipe_bench.pipeline.plan.links import Link
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Action, Kind
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.pipeline.ranks.failure import nccl_options
from gpipe_bench.pipeline.stage.split_backward import run_engine
from gpipe_bench.pipeline.stage.tensors import MicrobatchState
from gpipe_bench.pipeline.stage.trees import Message, flatten, split, tensors_of
from gpipe_bench.planner.probes import boundary_bytes, copy_bandwidth, settle, time_step

from ..engines.setup import Engine, Setup, clear, resolve
from .results import Found, Steps, TimedActions, check_ran, results, samples_of
from .workloads import Configuration, Job, Workload

LEARNING_RATE = 1e-6  # only the time of updates matters
ALONE, SHARED = "all stages in one process", "one stage per process"
REAL_STAGES = (2, 4, 8)
REAL_ROUNDS = {"smoke": 1, "short": 6, "full": 6}
"""Rounds of real steps, with two turns each of two steps."""
BULK_BYTES = 2**26  # of a message that measures bandwidth
TRIPS = 11


def measure(job: Job) -> list[Found]:
    """Runs a case's processes, with one thread each and, on CPUs, pinned. `MemoryError` if no configuration
    fits.
    """
    found: list[Found] = run_processes(work, num_devices(job.device), job, device=job.device)
    steps = found[0].steps  # all processes stop together
    if all(each.out_of_memory and not (each.turns or each.real_s) for each in steps):
        raise MemoryError(steps[0].out_of_memory)
    return found


def timed(
    workload: Workload, plan: Sequence[Configuration], rounds: int, options: RunOptions
) -> tuple[list[Found], list[Metric], dict[str, Any]]:
    """Times the steps of a plan; returns each process's findings, and all metrics and details."""
    job = Job(workload, tuple(plan), rounds, options.engine or "ours", options.device)
    found = measure(job)
    return found, *results(job, found)


def run_real(
    workload: Workload, counts: Sequence[int], options: RunOptions, *, microbatch_size: int | None = None
) -> Outcome:
    """Times real steps, with each of `counts` micro-batches and each number of stages that there are devices
    for.

    Without `microbatch_size` all use the workload's mini-batch. Skipped with a single device.
    """
    stages = [k for k in REAL_STAGES if k <= num_devices(options.device)]
    if not stages:
        return Outcome(status="skipped", reason="two stages need 2 devices or cores of their own")
    counts = counts[:2] if options.profile == "smoke" else counts
    sizes = [workload.batch_size if microbatch_size is None else m * microbatch_size for m in counts]
    plan = [
        Configuration(k, m, size, runs_for_real=True)
        for k in stages
        for m, size in zip(counts, sizes, strict=True)
    ]
    _, metrics, details = timed(workload, plan, REAL_ROUNDS[options.profile], options)
    return Outcome(tuple(metrics), details)


def num_devices(device: str) -> int:
    """The number of processes: one per GPU, at most eight, or two on a CPU's cores."""
    return min(devices.count("cuda"), max(REAL_STAGES)) if device == "cuda" else min(usable_cores(), 2)


def run_processes(
    function: Callable[..., Any], num_processes: int, *arguments: Any, device: str = "cpu"
) -> list[Any]:
    """Calls `launch`, by default on the CPU. RuntimeError with the first failure's own message; its cause is
    the launcher's error, with a page of text.
    """
    from torch.multiprocessing.spawn import ProcessException

    from gpipe_bench.pipeline.ranks.launch import launch

    try:
        return launch(function, num_processes, *arguments, device=device)
    except ProcessException as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise RuntimeError(f"process {error.error_index}: {lines[-1]}") from error


def work(job: Job) -> Found:
    """Times all steps of a case, in every process at once, or in a single one."""
    training = Training(job)
    on_gpu = devices.is_accelerator(training.device)
    link = measured_link(training.device) if on_gpu and _has_others() else None
    settle()
    gpu: dict[str, Any] = {"before": of_gpus()} if on_gpu else {}
    layers_s: dict[int, tuple[float, ...]] = {}
    too_large: dict[int, str] = {}  # errors by micro-batch size for which a layer does not fit

    def time_layers(size: int) -> None:
        example = training.example(size)
        layers_s[size] = layer_seconds(training.layers, 1, training.loss, *example, remat="always")

    for size in sorted({each.microbatch_size for each in job.configurations}):
        ran_out = attempt(partial(time_layers, size))
        if ran_out:
            layers_s.pop(size, None)
            too_large[size] = f"one layer at a time: {ran_out}"
            training.forget()
    configurations = {
        index: TimedConfiguration(each, training, partition(layers_s[each.microbatch_size], each.num_stages))
        for index, each in enumerate(job.configurations)
        if each.microbatch_size in layers_s
    }
    for each in configurations.values():
        each.take_turn(keep=False)  # warms up
    start = Usage.now()
    for each in turns(list(configurations.values()), job.rounds, job.seed):
        each.take_turn()
    used = Usage.now().since(start)
    if on_gpu:
        gpu |= {
            "after": of_gpus(),  # at once: idle GPUs lower their clocks
            "peak_bytes": devices.peak_bytes(training.device),
            "reserved_bytes": torch.accelerator.max_memory_reserved(training.device),
            "alloc_retries": torch.accelerator.memory_stats(training.device).get("num_alloc_retries", 0),
        }
    found = {index: each.found for index, each in configurations.items()}
    steps = (
        found.get(index) or Steps(out_of_memory=too_large[each.microbatch_size])
        for index, each in enumerate(job.configurations)
    )
    return Found(tuple(steps), copy_bandwidth(training.device), conditions(), used, link, gpu)


class Training:
    """The model that all configurations of a case train in this process."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, devices.current(job.device)
        model = job.workload.build(self.device, seed=job.seed)
        self.layers: Sequence[nn.Module] = list(model)
        self.loss = job.workload.loss()
        # RMSProp with momentum: the paper's 12 bytes per parameter. A layer without parameters has no
        # optimizer.
        self._optimizers = [
            torch.optim.RMSprop(parameters, lr=LEARNING_RATE, momentum=0.9) if parameters else None
            for parameters in (list(layer.parameters()) for layer in self.layers)
        ]

    def example(self, batch_size: int) -> tuple[Any, Any]:
        return self.job.workload.example(batch_size, self.device, seed=self.job.seed)

    def update_s(self, span: range) -> float:
        """Seconds of the optimizer's step on a stage."""
        devices.synchronize(self.device)
        start_s = perf_counter()
        for optimizer in filter(None, self._optimizers[span.start : span.stop]):
            optimizer.step()
        devices.synchronize(self.device)
        return perf_counter() - start_s

    def forget(self) -> None:
        """Frees the memory of a step that ran out of memory: gradients, and the error's references."""
        clear(self.layers)
        gc.collect()
        devices.empty_cache(self.device)


class TimedConfiguration:
    """A configuration with `stages`, ready to take turns; `found` has its findings."""

    def __init__(self, configuration: Configuration, training: Training, stages: Partition) -> None:
        self._configuration, self._training = configuration, training
        self._batch, self._target = training.example(configuration.batch_size)
        num_microbatches, remat = configuration.num_microbatches, configuration.remat
        self._program = gpipe(len(stages), num_microbatches, remat)
        ahead, back = boundary_bytes(training.layers, split(self._batch, num_microbatches)[0])
        ends = [span.stop - 1 for span in stages[:-1]]
        self._boundary_bytes = tuple(ahead[end] for end in ends), tuple(back[end] for end in ends)
        self.found = Steps(stages)
        self._num_stages, self._engines = len(stages), dict[str, Engine | None]()
        groups: dict[str, Any] = {ALONE: None}
        if configuration.runs_for_real:
            everyone = len(stages) == dist.get_world_size()
            groups[SHARED] = dist.group.WORLD if everyone else dist.new_group([*range(len(stages))])
        reasons = []
        for where, group in groups.items():
            if where == SHARED and dist.get_rank() >= len(stages):
                self._engines[where] = None  # only waits
                continue
            setup = Setup(training.layers, stages, num_microbatches, remat, training.device, group)
            try:
                self._engines[where] = resolve(training.job.engine)(setup)
            except ValueError as error:  # what the engine can't do
                reasons.append(f"{where}: {error}")
        self.found.why = "; ".join(reasons)

    def take_turn(self, *, keep: bool = True) -> None:
        """Runs a step with all stages in this process, then one with a stage per process if requested.

        All processes must call; a turn that is not kept warms up. If one runs out of memory, all stop running
        such steps and drop those that were kept. RuntimeError for a step with other actions than its
        schedule's.
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
            self.found.partition, configuration.num_microbatches, configuration.remat,
            samples_of([timeline]), update_s, setup_s, *self._boundary_bytes,
        )  # fmt: skip


def attempt(call: Callable[[], object]) -> str:
    """Calls; returns which process ran out of memory and its error, or "". All processes must call.

    A configuration that is too large is a result; the case goes on. All processes learn of it at once, so
    that none waits for another.
    """
    mine = ""
    try:
        call()
    except Exception as error:
        memory = memory_error(error)
        if memory is None:
            raise
        mine = f"{type(memory).__name__}: {(str(memory).splitlines() or [''])[0]}"
    if not _has_others():
        return mine
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return "; ".join(f"process {rank}: {text}" for rank, text in enumerate(found) if text)


def _has_others() -> bool:
    """Whether this process is one of several."""
    return dist.is_initialized() and dist.get_world_size() > 1


def measured_link(device: torch.device) -> Link:
    """The slowest link between neighbouring ranks, measured with a pipeline's messages; all ranks must call.

    Between GPUs it may be NVLink, a switch or the host's memory, which differ by a factor of thirty. Four
    bytes measure the latency, a large message the bandwidth.
    """
    group = None
    if devices.is_accelerator(device):  # as in a pipeline: fewer thread blocks than torch's default
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
    """One-way seconds of a message between a rank and the next: the median of several round trips after a
    first one; 0 on other ranks. All ranks must call.
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


# Seconds of single layers, by which a timed model is partitioned. A pipeline with one layer per stage would
# keep each layer's input for all micro-batches (71 GiB for ResNet-101), so layers run in order, each as a
# stage runs it, and each input is dropped after use.
#
# A GPU runs many layers faster than Python launches them. So it is kept busy before each repeat while the
# host enqueues (`devices.hold`), and the device's time is measured. If it starts too early, the repeat runs
# again with a longer hold; a warning names layers for which that did not help.

REPEATS = 4  # the first warms up
AHEAD, MOST_AHEAD_S = 1.5, 0.5  # hold relative to launch time; longest hold
LONGER, MOST_TIMES = 2.0, 16.0  # factor by which a hold grows, and its maximum
KINDS = (Kind.F, Kind.R, Kind.B)
Seconds = dict[Kind, float]


def layer_seconds(
    layers: Sequence[nn.Module],
    num_microbatches: int,
    compute_loss: Callable[..., Tensor],
    batch: Any,
    target: Any,
    remat: str,
) -> tuple[float, ...]:
    """Seconds of every layer for one micro-batch: forward, backward and, if `remat` says so, recomputation.

    All processes must cut at the same places, so the mean over processes is returned, and all must call.
    """
    device = flatten(batch)[0][0].device
    first, wanted = (split(each, num_microbatches)[0] for each in (batch, target))
    found = [
        sum(s for kind, s in seconds.items() if kind is not Kind.R or remat != "never")
        for seconds in alone(layers, compute_loss, first, wanted, device)
    ]
    seconds_of_all = torch.tensor(found, dtype=torch.float64)
    if _has_others():
        dist.all_reduce(seconds_of_all)
        seconds_of_all /= dist.get_world_size()
    return tuple(seconds_of_all.tolist())


def alone(
    layers: Sequence[nn.Module],
    compute_loss: Callable[..., Tensor],
    batch: Any,
    target: Any,
    device: torch.device,
    repeats: int = REPEATS,
) -> list[Seconds]:
    """Median seconds of each layer on one micro-batch: forward without a graph, forward with one
    (recomputation), and backward; the last layer's include the loss. The first repeat does not count.
    """
    found, value, ahead, late = list[Seconds](), batch, _Ahead(device), list[str]()
    for index, layer in enumerate(layers):
        is_last = index == len(layers) - 1
        end = (lambda output: compute_loss(output, target)) if is_last else lambda output: output
        found.append(_timed(_Taken(layer, end, value, index), ahead, repeats))
        if ahead.failed:
            late.append(str(index))
        layer.zero_grad(set_to_none=True)
        if not is_last:
            with torch.no_grad():
                value = layer(value)
    if late:
        warnings.warn(
            f"{device} had begun with layers {', '.join(late)} before the host had asked for all of them, so "
            "their seconds may be the host's; time them on a host that does nothing else",
            stacklevel=2,
        )
    return found


class _Ahead:
    """How long a device is kept busy; grows by `LONGER` if it was too short."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times, self.failed = device, 1.0, False

    def hold(self, asked_s: float) -> None:
        devices.hold(self.device, self.times * min(AHEAD * asked_s, MOST_AHEAD_S))

    def was_enough(self, started: int | torch.Event) -> bool:
        """Whether the device was still held; `started` is the mark recorded after the hold."""
        if isinstance(started, int) or not started.query():
            return True
        if self.times < MOST_TIMES:
            self.times *= LONGER
            return False
        self.failed = True
        return True


def _timed(taken: _Taken, ahead: _Ahead, repeats: int) -> Seconds:
    actions = [Action(0, kind, number) for number in range(repeats) for kind in KINDS]
    clock, ahead.failed = Clock(actions, [ahead.device]), False
    clock.begin()
    asked_s = 0.0
    for first in range(0, len(actions), len(KINDS)):
        while True:
            ahead.hold(asked_s)
            begun_s = perf_counter()
            for position in range(first, first + len(KINDS)):
                clock.note(2 * position)
                taken.take(actions[position].kind)
                clock.note(2 * position + 1)
            asked_s = perf_counter() - begun_s
            if not first or ahead.was_enough(clock.times[2 * first]):
                break
    clock.complete = True
    samples: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    for event in clock.events():
        if event.action.microbatch > 0 or repeats == 1:
            samples[event.action.kind].append(event.duration_s)
    return {kind: median(of_kind) for kind, of_kind in samples.items()}


class _Taken:
    """Runs a layer as a stage does: forward, recomputation, backward."""

    def __init__(self, layer: nn.Module, end: Callable[[Any], Any], value: Any, index: int) -> None:
        tensors, structure = flatten(value, "a layer's input")
        tensors = tuple([tensor.detach() for tensor in tensors])
        needed = tuple([tensor.is_floating_point() and index > 0 for tensor in tensors])
        self._layer, self._end, self._message = layer, end, Message(tensors, structure, needed)
        self._kept: Any = None
        self._seeds: tuple[Tensor, ...] = ()  # made in advance: a pipeline receives them

    def take(self, kind: Kind) -> None:
        if kind is Kind.B:
            if self._seeds:
                run_engine(self._kept.edges, self._seeds)
            self._kept = None
            return
        kept = MicrobatchState(self._message)
        with torch.set_grad_enabled(kind is Kind.R):
            outputs = tuple(tensors_of(self._end(self._layer(kept.enter()))))
        if kind is Kind.R:
            kept.keep_graph(outputs, (True,) * len(outputs))
            self._kept = kept
            if not self._seeds:
                self._seeds = tuple([torch.ones_like(t) for t in outputs if t.requires_grad])
