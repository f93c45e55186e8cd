"""One configuration of a timing case in one process: its engines, its turns, and what its steps took."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.engines.setup import Engine, Setup, clear, resolve
from gpipe_bench.experiments.measuring.timed_actions import TimedActions, check_ran, samples_of
from gpipe_bench.harness.workers import memory_error
from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.pipeline.plan.schedule import SCHEDULES
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.pipeline.stage.microbatch import flatten, split
from gpipe_bench.planner.timing import time_step


class Configuration(NamedTuple):
    """K, M and N. `runs_for_real` also takes its steps with one stage per process."""

    num_stages: int
    num_microbatches: int
    batch_size: int
    remat: str = "always"
    runs_for_real: bool = False
    schedule: str = "gpipe"
    label: str = ""  # what results call it, instead of K and M

    @property
    def microbatch_size(self) -> int:
        return -(-self.batch_size // self.num_microbatches)


class Training(NamedTuple):
    """What all configurations of a case train, each on its own mini-batch."""

    layers: Sequence[nn.Module]
    optimizers: Sequence[Any]  # one per layer
    compute_loss: Callable[..., Tensor]
    device: torch.device
    engine: str = "ours"


class Steps(NamedTuple):
    """What one process found for one configuration. `turns` is empty where the engine keeps no timeline or
    cannot run all stages in a process, `real_s` where it was not run for real; `why` says why.
    """

    partition: Partition
    turns: tuple[TimedActions, ...]  # two per round, there and back
    in_process_s: tuple[float, ...]  # whole steps with all stages in this process
    real_s: tuple[float, ...]  # whole steps with one stage here, the optimizer's included
    real_timeline: Timeline | None  # of this process's stage, of the last such step
    counts: dict[str, int]
    why: str
    out_of_memory: str = ""  # the error, where a device had no room for a step; then it has no numbers

    @property
    def without_numbers(self) -> bool:
        """Whether there was no room for any step."""
        return bool(self.out_of_memory) and not (self.turns or self.in_process_s or self.real_s)


NO_STEPS = Steps((), (), (), (), None, {}, "")


class TimedConfiguration:
    """A configuration cut into `stages`, ready to take its turns."""

    def __init__(
        self,
        configuration: Configuration,
        training: Training,
        stages: Partition,
        batch: Any,
        target: Any,
    ) -> None:
        self._configuration, self._training, self._stages = configuration, training, stages
        self._batch, self._target = batch, target
        self._program = SCHEDULES[configuration.schedule](
            configuration.num_stages, configuration.num_microbatches, configuration.remat
        )
        self._activation_bytes, self._gradient_bytes = self._boundaries()
        self._turns: list[TimedActions] = []
        self._in_process_s: list[float] = []
        self._real_s: list[float] = []
        self._real_timeline: Timeline | None = None
        self._counts: dict[str, int] = {}
        reasons: list[str] = []
        self._alone = self._build(None, "all stages in one process", reasons)
        self._shared: Engine | None = None
        if configuration.runs_for_real:
            self._shared = self._build(dist.group.WORLD, "one stage per process", reasons)
        self._why, self._out_of_memory = "; ".join(reasons), ""

    def take_turn(self, *, keep: bool = True) -> None:
        """A step with all stages in this process, then one with a stage per process where that is asked for.

        All processes must call; what is not kept warms up. Where the memory of one of them does not suffice,
        all take no more such steps, and those that were kept are dropped. RuntimeError for a step with other
        actions than its schedule's.
        """
        if self._alone is not None:
            ran_out = attempt(lambda: self._take_alone(keep))
            if ran_out:
                self._alone, self._out_of_memory = None, f"all stages in one process: {ran_out}"
                self._turns, self._in_process_s, self._counts = [], [], {}
                forget(self._training)
        if self._shared is not None:
            ran_out = attempt(lambda: self._take_shared(keep))
            if ran_out:
                self._shared, self._real_s, self._real_timeline = None, [], None
                self._out_of_memory = "; ".join(
                    filter(None, [self._out_of_memory, f"one stage per process: {ran_out}"])
                )
                forget(self._training)

    def _take_alone(self, keep: bool) -> None:
        assert self._alone is not None
        step_s, timeline = self._step(self._alone)
        update_s = tuple(self._update(span) for span in self._stages)
        if keep:
            self._in_process_s.append(step_s)
        if timeline is not None:
            self._counts = check_ran(timeline, self._program)
            if keep:
                self._turns.append(self._timed(timeline, update_s))
        elif not self._why:
            self._why = f"engine {self._training.engine} keeps no timeline, so its steps cannot be laid out"

    def _take_shared(self, keep: bool) -> None:
        assert self._shared is not None
        step_s, timeline = self._step(self._shared)
        stage = dist.get_rank()
        step_s += self._update(self._stages[stage])
        if timeline is not None:
            check_ran(timeline, self._program, stage)
        if keep:
            self._real_s.append(step_s)
            self._real_timeline = timeline

    def steps(self) -> Steps:
        """What the turns that were kept have found."""
        return Steps(
            self._stages,
            tuple(self._turns),
            tuple(self._in_process_s),
            tuple(self._real_s),
            self._real_timeline,
            self._counts,
            self._why,
            self._out_of_memory,
        )

    def _build(self, group: dist.ProcessGroup | None, where: str, reasons: list[str]) -> Engine | None:
        """None, and a reason more, where the engine can't do that."""
        configuration, training = self._configuration, self._training
        setup = Setup(
            training.layers,
            self._stages,
            configuration.num_microbatches,
            configuration.remat,
            training.device,
            group,
        )
        try:
            return resolve(training.engine)(setup)
        except ValueError as error:
            reasons.append(f"{where}: {error}")
            return None

    def _step(self, engine: Engine) -> tuple[float, Timeline | None]:
        training = self._training
        step = partial(engine.step, self._batch, self._target, training.compute_loss)
        step_s = time_step(step, training.layers, device=training.device)
        return step_s, getattr(engine, "timeline", None)

    def _update(self, span: range) -> float:
        device = self._training.device
        devices.synchronize(device)
        start_s = perf_counter()
        for layer in span:
            self._training.optimizers[layer].step()
        devices.synchronize(device)
        return perf_counter() - start_s

    def _timed(self, timeline: Timeline, update_s: tuple[float, ...]) -> TimedActions:
        configuration = self._configuration
        start_s = perf_counter()
        split(self._batch, configuration.num_microbatches)
        setup_s = perf_counter() - start_s
        return TimedActions(
            self._stages,
            configuration.num_microbatches,
            configuration.remat,
            samples_of([timeline]),
            update_s,
            setup_s,
            self._activation_bytes,
            self._gradient_bytes,
            configuration.schedule,
        )

    def _boundaries(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of one micro-batch over each boundary: distinct tensors, and those that need a gradient."""
        layers = self._training.layers
        value = split(self._batch, self._configuration.num_microbatches)[0]
        forward, back = [], []
        was_training = [layer.training for layer in layers]
        try:
            for layer in layers:
                layer.eval()  # must not move batch normalization's averages
            with torch.no_grad():
                for span in self._stages[:-1]:
                    for index in span:
                        value = layers[index](value)
                    tensors, _ = flatten(value)
                    forward.append(sum(tensor.nbytes for tensor in tensors))
                    back.append(sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point()))
        finally:
            for layer, training in zip(layers, was_training, strict=True):
                layer.train(training)
        return tuple(forward), tuple(back)


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


def forget(training: Training) -> None:
    """Gives back what a step that ran out of memory has left: gradients, and what the error held."""
    clear(training.layers)
    gc.collect()
    devices.empty_cache(training.device)
