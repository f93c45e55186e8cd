"""What the processes of a timing case do: take whole steps, in turns, and keep what every action took.

As many processes as there are devices to measure on take the steps of all configurations round by round,
there and back, so that the numbers of one round can be set against each other on a machine that does other
things too. All stages of a configuration run in each process, at the same time in every process: a stage's
action times are those it has beside busy neighbours, which is how it would run in a pipeline. A configuration
with as many stages as processes is also run for real, one stage per process, and that is what the replay must
reproduce.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gpipe_bench.experiments.engines.setup import Engine, Setup, resolve
from gpipe_bench.experiments.measuring.device_timing import barrier, copy_bandwidth, synchronize
from gpipe_bench.experiments.measuring.layer_seconds import layer_seconds
from gpipe_bench.experiments.measuring.machine_usage import Usage
from gpipe_bench.experiments.measuring.timed_actions import TimedActions, check_ran, samples_of
from gpipe_bench.models import MODELS, example_batch, loss_fn
from gpipe_bench.pipeline.clock import conditions
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import SCHEDULES
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.pipeline.stage.microbatch import flatten, split

LEARNING_RATE = 1e-6  # updates are timed, not wanted
MOST_LAYER_MICROBATCHES = 4  # of a step that times single layers


class Configuration(NamedTuple):
    """One cell: K, M and N. `runs_for_real` also takes its steps with one stage per process."""

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


class Task(NamedTuple):
    """One case as its processes see it."""

    model: str
    options: dict[str, Any]
    configurations: tuple[Configuration, ...]
    rounds: int
    engine: str = "ours"
    device: str = "cpu"
    seed: int = 1811


class Steps(NamedTuple):
    """What one process found for one configuration. `rounds` is empty where the engine keeps no timeline or
    cannot run all stages in a process, `real_s` where it was not run for real; `why` says why.
    """

    partition: Partition
    rounds: tuple[TimedActions, ...]
    in_process_s: tuple[float, ...]  # whole steps with all stages in this process
    real_s: tuple[float, ...]  # whole steps with one stage here, the optimizer's included
    real_timeline: Timeline | None  # of this process's stage, of the last such step
    counts: dict[str, int]
    why: str


class Found(NamedTuple):
    """What one process found."""

    steps: tuple[Steps, ...]  # in the order of the configurations
    layers_s: dict[
        int, tuple[float, ...]
    ]  # forward, recomputation and backward of each layer, by micro-batch size
    num_parameters: int
    copy_bytes_per_s: float
    conditions: dict[str, str]
    busy_share: float  # of this machine's cores that other programs took meanwhile


def work(task: Task) -> Found:
    """Takes all steps of a case. Runs in every process at once, or in one alone."""
    device = torch.device(task.device if task.device != "cuda" else torch.cuda.current_device())
    torch.manual_seed(task.seed)
    model = MODELS[task.model](**task.options).to(device)
    compute_loss = loss_fn(task.model, **task.options)
    layers = list(model)
    cells = [_Cell(task, each, layers, compute_loss, device) for each in task.configurations]
    layers_s: dict[int, tuple[float, ...]] = {}
    for size in sorted({each.microbatch_size for each in task.configurations}):
        count = max(1, min(MOST_LAYER_MICROBATCHES, _largest_batch(task, size) // size))
        layers_s[size] = layer_seconds(layers, count, compute_loss, *_example(task, size * count, device))
    optimizers = [_optimizer(layer) for layer in layers]
    for cell in cells:
        cell.build(partition(layers_s[cell.configuration.microbatch_size], cell.configuration.num_stages))
    usage = Usage()
    for number in range(-1, task.rounds):  # the first round warms up
        for cell in cells if number % 2 == 0 else reversed(cells):
            cell.take_round(optimizers, keep=number >= 0)
    return Found(
        tuple(cell.steps() for cell in cells),
        layers_s,
        sum(parameter.numel() for parameter in model.parameters()),
        copy_bandwidth(device),
        conditions(),
        usage.of_others(),
    )


class _Cell:
    """One configuration in one process."""

    def __init__(
        self,
        task: Task,
        configuration: Configuration,
        layers: Sequence[nn.Module],
        compute_loss: Callable[..., Tensor],
        device: torch.device,
    ) -> None:
        self.task, self.configuration, self.device = task, configuration, device
        self.layers, self.compute_loss = layers, compute_loss
        self.batch, self.target = _example(task, configuration.batch_size, device)
        self.program = SCHEDULES[configuration.schedule](
            configuration.num_stages, configuration.num_microbatches, configuration.remat
        )
        self.alone: Engine | None = None  # all stages in this process
        self.shared: Engine | None = None  # one stage per process
        self.why = ""
        self.rounds: list[TimedActions] = []
        self.in_process_s: list[float] = []
        self.real_s: list[float] = []
        self.real_timeline: Timeline | None = None
        self.counts: dict[str, int] = {}

    def build(self, stages: Partition) -> None:
        self.stages = stages
        self.activation_bytes, self.gradient_bytes = self._boundaries()
        factory = resolve(self.task.engine)
        groups: dict[str, dist.ProcessGroup | None] = {"all stages in one process": None}
        if self.configuration.runs_for_real:
            groups["one stage per process"] = dist.group.WORLD
        reasons = []
        for where, group in groups.items():
            setup = Setup(
                self.layers,
                stages,
                self.configuration.num_microbatches,
                self.configuration.remat,
                self.device,
                group,
            )
            try:
                engine = factory(setup)
            except ValueError as error:
                reasons.append(f"{where}: {error}")
                continue
            if group is None:
                self.alone = engine
            else:
                self.shared = engine
        self.why = "; ".join(reasons)

    def take_round(self, optimizers: Sequence[torch.optim.Optimizer], *, keep: bool) -> None:
        if self.alone is not None:
            step_s, timeline = self._step(self.alone)
            update_s = [self._update(optimizers, span) for span in self.stages]
            if keep:
                self.in_process_s.append(step_s)
            if timeline is not None:
                self.counts = check_ran(timeline, self.program)
                if keep:
                    self.rounds.append(self._timed(timeline, update_s))
            elif not self.why:
                self.why = f"engine {self.task.engine} keeps no timeline, so its steps cannot be laid out"
            self._clear()
        if self.shared is not None:
            step_s, timeline = self._step(self.shared)
            step_s += self._update(optimizers, self.stages[dist.get_rank()])
            if keep:
                self.real_s.append(step_s)
                self.real_timeline = timeline
            self._clear()

    def steps(self) -> Steps:
        return Steps(
            self.stages,
            tuple(self.rounds),
            tuple(self.in_process_s),
            tuple(self.real_s),
            self.real_timeline,
            self.counts,
            self.why,
        )

    def _step(self, engine: Engine) -> tuple[float, Timeline | None]:
        gc.collect()
        barrier()
        synchronize(self.device)
        start_s = time.perf_counter()
        engine.step(self.batch, self.target, self.compute_loss)
        synchronize(self.device)
        return time.perf_counter() - start_s, getattr(engine, "timeline", None)

    def _update(self, optimizers: Sequence[torch.optim.Optimizer], span: range) -> float:
        synchronize(self.device)
        start_s = time.perf_counter()
        for layer in span:
            optimizers[layer].step()
        synchronize(self.device)
        return time.perf_counter() - start_s

    def _timed(self, timeline: Timeline, update_s: Sequence[float]) -> TimedActions:
        configuration = self.configuration
        start_s = time.perf_counter()
        split(self.batch, configuration.num_microbatches)
        setup_s = time.perf_counter() - start_s
        return TimedActions(
            self.stages,
            configuration.num_microbatches,
            configuration.remat,
            samples_of([timeline]),
            tuple(update_s),
            setup_s,
            self.activation_bytes,
            self.gradient_bytes,
            configuration.schedule,
        )

    def _boundaries(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of one micro-batch over each boundary: distinct tensors, and those that need a gradient."""
        value = split(self.batch, self.configuration.num_microbatches)[0]
        forward, back = [], []
        was_training = [layer.training for layer in self.layers]
        try:
            for layer in self.layers:
                layer.eval()  # must not move batch normalization's averages
            with torch.no_grad():
                for span in self.stages[:-1]:
                    for index in span:
                        value = self.layers[index](value)
                    tensors, _ = flatten(value)
                    forward.append(sum(tensor.nbytes for tensor in tensors))
                    back.append(sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point()))
        finally:
            for layer, training in zip(self.layers, was_training, strict=True):
                layer.train(training)
        return tuple(forward), tuple(back)

    def _clear(self) -> None:
        for layer in self.layers:
            layer.zero_grad(set_to_none=True)


def _largest_batch(task: Task, microbatch_size: int) -> int:
    return max(each.batch_size for each in task.configurations if each.microbatch_size == microbatch_size)


def _example(task: Task, batch_size: int, device: torch.device) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(task.seed)
    batch, target = example_batch(task.model, batch_size, generator=generator, **task.options)
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
