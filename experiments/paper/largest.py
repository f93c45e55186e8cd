"""Searches the largest model of a family that fits on K accelerators, and measures stages of Table 1.

For this engine a model fits if some partition into K stages keeps the modelled peak of every stage within the
cap. More micro-batches never need more memory, so sizes are searched at one example per micro-batch, and then
the fewest sufficient micro-batches are reported.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Metric
from gpipe_bench.harness.runner import memory_error
from gpipe_bench.models import example_batch, loss_fn
from gpipe_bench.models.paper import GIB, HALVES, PAPER_NUM_LAYERS, column
from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.clock import Clock
from gpipe_bench.pipeline.memory.peaks import OPTIMIZERS, StageMemory
from gpipe_bench.pipeline.memory.profile import ModelProfile
from gpipe_bench.pipeline.memory.trace import Boundary, LayerProfile, TensorSpec
from gpipe_bench.pipeline.memory.tracker import LiveMemory
from gpipe_bench.pipeline.memory.workers import StagePeaks
from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.named import gpipe, naive
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.stage.stage import Gradients, Stage
from gpipe_bench.pipeline.stage.trees import Message, split, tensors_of
from gpipe_bench.pipeline.step import prepare, run
from gpipe_bench.pipeline.transport import InProcess

from .profiles import Reading, amoebanet, meta_model, transformer
from .workloads import materialized

FILTERS_STEP = 16


@dataclass(frozen=True)
class Setting:
    """The settings of a model's run, except its size."""

    half: str
    num_stages: int
    is_naive: bool
    precision: str
    attention: str = "fused"
    cap_gib: float = 0.0  # in GiB; 0: the paper's

    @classmethod
    def of(cls, half: str, name: str, precision: str, attention: str) -> Setting:
        """The setting of a column of Table 1."""
        size = column(half, name)
        return cls(half, size.num_stages, size.is_naive, precision, attention)

    @property
    def cap_bytes(self) -> int:
        return int((self.cap_gib or HALVES[self.half].cap_gib) * GIB)

    @property
    def batch_size(self) -> int:
        return HALVES[self.half].batch_size

    @cache  # noqa: B019
    def schedule(self, num_microbatches: int) -> Schedule:
        """The schedule: naive-1 keeps all activations of one mini-batch; pipelines recompute every
        micro-batch.
        """
        return naive(self.num_stages) if self.is_naive else gpipe(self.num_stages, num_microbatches)

    def microbatch_counts(self) -> tuple[int, ...]:
        """Numbers of micro-batches that divide the mini-batch, fewest first."""
        if self.is_naive:
            return (1,)
        return tuple(m for m in range(1, self.batch_size + 1) if self.batch_size % m == 0)

    def profile(self, num_layers: int, num_filters: int, num_microbatches: int) -> ModelProfile:
        size = self.batch_size // num_microbatches
        reading = Reading(number_format=self.precision)
        if self.half == "transformer":
            return transformer(reading, num_layers, size, self.attention)
        return amoebanet(reading, num_layers, num_filters, size)


@dataclass(frozen=True)
class Placement:
    """A model, its partition and its stages' memory."""

    num_layers: int
    num_filters: int
    num_parameters: int
    num_microbatches: int
    partition: Partition
    stages: tuple[StageMemory, ...]

    @property
    def peak_bytes(self) -> int:
        """The largest peak of an accelerator."""
        return max(stage.peak for stage in self.stages)

    @property
    def counter_bytes(self) -> int:
        """The optimizer's step counts, which the paper's 12 bytes per parameter do not contain."""
        state = OPTIMIZERS["rmsprop"].state
        return sum(stage.optimizer_state - state * stage.parameters for stage in self.stages)

    def describe(self) -> dict[str, Any]:
        """Facts for the record: the partition, and each stage's memory in bytes."""
        return {
            "num_layers": self.num_layers, "num_filters": self.num_filters,
            "num_microbatches": self.num_microbatches,
            "layers_per_stage": [len(stage) for stage in self.partition],
            "stages": [asdict(stage) for stage in self.stages],
        }  # fmt: skip


def place(
    setting: Setting, num_layers: int, num_filters: int, num_microbatches: int, cap_bytes: int | None = None
) -> Placement | None:
    """Cuts the model so that the largest peak is smallest; None if that exceeds the cap."""
    profile, peaks = _peaks(setting, num_layers, num_filters, num_microbatches)
    stages = peaks.partition(setting.cap_bytes if cap_bytes is None else cap_bytes)
    if stages is None:
        return None
    memory = tuple(peaks.memory(stage.start, stage.stop) for stage in stages)
    return Placement(num_layers, num_filters, profile.num_parameters, num_microbatches, stages, memory)


def fits(setting: Setting, num_layers: int, num_filters: int, num_microbatches: int) -> bool:
    """Whether `place` finds a partition, without searching the best one."""
    return _peaks(setting, num_layers, num_filters, num_microbatches)[1].fits(setting.cap_bytes)


def _peaks(
    setting: Setting, num_layers: int, num_filters: int, num_microbatches: int
) -> tuple[ModelProfile, StagePeaks]:
    profile = setting.profile(num_layers, num_filters, num_microbatches)
    if setting.num_stages > len(profile.layers):
        raise ValueError(
            f"cannot cut {len(profile.layers)} layers into {setting.num_stages} stages: "
            f"use at most {len(profile.layers)}"
        )
    schedule, ahead = setting.schedule(num_microbatches), int(setting.num_stages > 1)
    return profile, StagePeaks(profile.layers, profile.loss, schedule, "rmsprop", receive_ahead=ahead)


def place_anyhow(setting: Setting, num_layers: int, num_filters: int, num_microbatches: int) -> Placement:
    """Places the model without a cap: the memory that accelerators would need."""
    cap = setting.cap_bytes
    while (placement := place(setting, num_layers, num_filters, num_microbatches, cap)) is None:
        cap *= 2
    return placement


class Size(NamedTuple):
    """The size of a model; `num_filters` is 0 for the Transformer."""

    num_parameters: int
    num_layers: int
    num_filters: int


def largest_size(
    half: str,
    fits: Callable[[int, int], bool],
    count: Callable[[int, int], int],
    *,
    step: int,
    guess: tuple[int, int],
    least: int = 1,
) -> Size | None:
    """The size of a family with most parameters that fits; None if none does.

    Args:
        fits, count: functions of layers and filters: whether they fit, and their parameters
        step: step of the number of filters
        guess: layers and filters near the result; a good guess makes the search fast
        least: layers of the smallest Transformer
    """
    if half == "transformer":
        num_layers = last_that(lambda layers: fits(layers, 0), least, guess[0])
        return None if num_layers is None else Size(count(num_layers, 0), num_layers, 0)
    near = guess[1] // step

    def of_depth(depth: int, parameters: int) -> Size | None:
        """The largest size of this depth that fits and has more than `parameters` parameters."""
        beaten = last_that(lambda steps: count(depth, steps * step) <= parameters, 1, near)
        steps = last_that(lambda steps: fits(depth, steps * step), 1 + (beaten or 0), near)
        return None if steps is None else Size(count(depth, steps * step), depth, steps * step)

    best: Size | None = None
    for depth in PAPER_NUM_LAYERS:
        best = of_depth(depth, best.num_parameters if best else 0) or best
    return best


def largest(setting: Setting) -> Placement:
    """The model with most parameters that fits. Raises ValueError if the smallest does not."""
    counts = setting.microbatch_counts()
    least = max(setting.num_stages - 2, 1)  # embedding and softmax are layers, too
    best = largest_size(
        setting.half,
        lambda layers, filters: fits(setting, layers, filters, counts[-1]),
        lambda layers, filters: setting.profile(layers, filters, counts[-1]).num_parameters,
        step=FILTERS_STEP, guess=(least, FILTERS_STEP), least=least,
    )  # fmt: skip
    if best is None:
        raise ValueError(
            f"no {HALVES[setting.half].model} fits into {setting.cap_bytes / GIB:g} GiB on "
            f"{setting.num_stages} accelerator(s) with mini-batch {setting.batch_size}; use more stages"
        )
    num_layers, num_filters = best.num_layers, best.num_filters
    fewest = next(count for count in counts if fits(setting, num_layers, num_filters, count))
    placement = place(setting, num_layers, num_filters, fewest)
    assert placement is not None, "a model that fits at the most micro-batches fits"
    return placement


def last_that(holds: Callable[[int], bool], start: int, guess: int) -> int | None:
    """The largest number from ``start`` on for which `holds`, which must change only once; None if not at
    ``start``. A good guess makes it fast.
    """
    low, end, reach = start, max(guess, start), 1
    while holds(end):
        low, end, reach = end, end + reach, 2 * reach
    count = bisect_left(range(low, end), True, key=lambda number: not holds(number))
    return low + count - 1 if count else None


# Real training steps of single stages of Table 1, to test the memory model: boundary tensors are made up with
# the right shapes where neighbours would send theirs, and outputs are dropped. Inputs are made when used; the
# memory model has a receive posted ahead. On a CPU the same code counts storages (in tests).

ATTENTION = {"amoebanet": "none", "transformer": "fused"}  # as computed on a GPU
NUM_STEPS = 2  # the optimizer's state exists from the second step on


class MadeUp(InProcess):
    """Stands for a stage's neighbours: sends random tensors and drops what it receives."""

    def __init__(
        self, inputs: Boundary, outputs: Boundary, unused: frozenset[int], device: torch.device
    ) -> None:
        super().__init__()
        self._inputs, self._outputs, self._unused, self._device = inputs, outputs, unused, device

    def send(self, edge: Edge, microbatch: int, message: Message) -> None:
        """Dropped at once, as if it had left."""

    def receive(self, edge: Edge, microbatch: int) -> Message:
        specs = [self._inputs.tensors[index] for index in self._inputs.distinct]
        places = {index: place for place, index in enumerate(self._inputs.distinct)}
        structure = tuple(places[first] for first in self._inputs.same_as) if self._inputs.is_tuple else None
        tensors = tuple(self._make(spec) for spec in specs)
        return Message(tensors, structure, tuple(spec.requires_grad for spec in specs))

    def send_back(self, edge: Edge, microbatch: int, gradients: Gradients) -> None:
        """Dropped at once, as if it had left."""

    def receive_back(self, edge: Edge, microbatch: int) -> Gradients:
        specs = ((index, self._outputs.tensors[index]) for index in self._outputs.distinct)
        return tuple(
            self._make(spec) if spec.requires_grad and index not in self._unused else None
            for index, spec in specs
        )

    def _make(self, spec: TensorSpec) -> torch.Tensor:
        if spec.dtype.is_floating_point:
            return torch.randn(spec.shape, dtype=spec.dtype, device=self._device)
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)


@dataclass(frozen=True)
class Part:
    """One stage of a placement, with what a run needs."""

    index: int
    layers: range
    memory: StageMemory
    profiles: tuple[LayerProfile, ...]


def distinct_parts(setting: Setting, placement: Placement) -> list[Part]:
    """One of each kind of stage: by its layers, and whether it is first or last."""
    profile = setting.profile(placement.num_layers, placement.num_filters, placement.num_microbatches)
    found: dict[object, Part] = {}
    last = len(placement.partition) - 1
    for index, (layers, memory) in enumerate(zip(placement.partition, placement.stages, strict=True)):
        profiles = profile.layers[layers.start : layers.stop]
        key = (tuple(map(id, profiles)), index == 0, index == last)
        found.setdefault(key, Part(index, layers, memory, profiles))
    return list(found.values())


def baseline_bytes(device: torch.device) -> int:
    """Bytes that an accelerator's allocator holds before there is a stage.

    Matrix products and convolutions allocate workspaces of tens of MiB at their first use, which belong to no
    stage; so each is used once, by the threads of forward and backward.
    """
    linear, convolution = nn.Linear(64, 64, device=device), nn.Conv2d(4, 4, 3, device=device)
    linear(torch.ones(64, 64, device=device)).sum().backward()
    convolution(torch.ones(1, 4, 16, 16, device=device)).sum().backward()
    devices.synchronize(device)
    del linear, convolution
    gc.collect()
    devices.reset_peak(device)
    return devices.peak_bytes(device)


def measure(
    part: Part, model: nn.Sequential, half: str, schedule: Schedule, options: dict[str, Any], batch_size: int,
    device: torch.device, precision: str = "float32",
) -> int:  # fmt: skip
    """Peak bytes of a steady training step of one stage, with RMSProp updating one parameter at a time.

    On an accelerator the allocator counts, on a CPU storages from birth to death. In bfloat16 activations
    are, by autocast.
    """
    device = devices.exact(device)
    storages = None if devices.is_accelerator(device) else LiveMemory()
    before = baseline_bytes(device) if storages is None else 0
    layers = [materialized(model[layer], device) for layer in part.layers]
    is_last = part.index == schedule.num_stages - 1
    stage = Stage(part.index, layers, part.layers.start, device=device, is_last=is_last)
    inputs, target = example_batch(HALVES[half].model, batch_size, device=device, **options)
    first, final = part.profiles[0], part.profiles[-1]
    transport = MadeUp(first.inputs, final.outputs, final.unused, device)
    program = prepare(schedule, {part.index: stage})
    clock = Clock([step.action for step in program], [torch.device("cpu")] * schedule.num_stages)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = torch.optim.RMSprop(parameters, lr=1e-4, momentum=0.9, foreach=False)
    compute_loss, count = loss_fn(HALVES[half].model, **options), schedule.num_microbatches
    feed = split(inputs, count) if stage.is_first else ()
    targets = split(target, count) if is_last else ()
    if storages is not None:
        storages.watch([*parameters, *(buffer for layer in layers for buffer in layer.buffers())])
        storages.watch(
            [*(tensors_of(inputs) if stage.is_first else ()), *(tensors_of(target) if is_last else ())]
        )
    del inputs, target  # frees what this stage does not need
    with storages or nullcontext():
        for step in range(NUM_STEPS):
            if step == NUM_STEPS - 1:
                devices.reset_peak(device) if storages is None else storages.reset_peaks()
            half_used = precision == "bfloat16"  # as in a pipeline's step
            with torch.autocast(device.type, torch.bfloat16, enabled=half_used, cache_enabled=False):
                stage.begin(
                    step, count, training=True, feed=feed, targets=targets,
                    loss_fn=compute_loss if is_last else None,
                    shares=(1 / count,) * count if is_last else (),
                )  # fmt: skip
                run(program, transport, clock)
            stage.finish()
            optimizer.step()
            optimizer.zero_grad()
    if storages is not None:
        return storages.peak_bytes[""]
    devices.synchronize(device)
    return devices.peak_bytes(device) - before


def run_column(half: str, name: str, precision: str = "float32", *, smallest: bool = False) -> Outcome:
    """Runs every distinct stage of a column of Table 1 alone on this GPU, under the paper's cap; with
    `smallest`, stages of the smallest model with as many stages, in few micro-batches.

    A stage that does not fit is a result: for models without GPipe that is the table's point. The cap applies
    to the caching allocator, with fragmentation and libraries' workspaces. The stage with the largest
    modelled peak runs first.
    """
    size, setting, data = column(half, name), Setting.of(half, name, precision, ATTENTION[half]), HALVES[half]
    layers, filters, counts = size.num_layers, size.num_filters, setting.microbatch_counts()
    if smallest:
        counts = counts[:2]
        layers, filters = (
            (size.num_stages, 0) if half == "transformer" else (PAPER_NUM_LAYERS[0], FILTERS_STEP)
        )
    placement = place_anyhow(setting, layers, filters, counts[-1])
    shape = {"num_layers": layers} | ({"num_filters": filters} if filters else {})
    device = devices.current(devices.default_type())
    limit = torch.get_device_module(device).set_per_process_memory_fraction
    limit(min(1.0, setting.cap_bytes / devices.total_memory_bytes(device)), device)
    stages: list[dict[str, Any]] = []
    try:
        for part in sorted(distinct_parts(setting, placement), key=lambda part: -part.memory.peak):
            found, ran_out = None, ""
            try:
                found = measure(
                    part, meta_model(half, **shape), half, setting.schedule(counts[-1]), dict(data.options),
                    data.batch_size, device, precision=precision,
                )  # fmt: skip
            except RuntimeError as error:
                if (memory := memory_error(error)) is None:
                    raise
                ran_out = (str(memory).splitlines() or [type(memory).__name__])[0]
            stages.append(
                {
                    "stage": part.index, "measured": found, "modelled": part.memory.peak,
                    "at_most": devices.peak_bytes(device), "ran_out": ran_out,
                }
            )  # fmt: skip
            gc.collect()
            devices.empty_cache(device)
    finally:
        limit(1.0, device)
    out = "; ".join(f"stage {stage['stage']}: {stage['ran_out']}" for stage in stages if stage["ran_out"])
    measured = None if out else max(stage["measured"] for stage in stages)
    modelled = max(stage["modelled"] for stage in stages)
    return Outcome(
        (
            Metric(name="measured peak", value=measured, unit="bytes", provenance="measured", note=out),
            Metric(name="modelled peak", value=modelled, unit="bytes", provenance="modelled"),
        ),
        {
            "fits": not out, "cap_gib": setting.cap_bytes / GIB, "num_layers": layers, "num_filters": filters,
            "num_parameters": placement.num_parameters, "num_microbatches": placement.num_microbatches,
            "precision": precision, "stages": stages, "device": devices.name(device),
        },
    )  # fmt: skip
