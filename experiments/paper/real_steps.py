"""Real training steps of Table 1's stages, each alone, against the memory model.

K accelerators are not needed to see what one of them must hold. A stage alone gets made-up boundary tensors
of the right shape where its neighbours would send theirs, and drops what it would send. Every distinct stage
of a column runs under the paper's cap, so a measured "fits" for the 128-stage Transformer takes one GPU. What
a stage would receive is made when it is used, where the memory model has a receive posted ahead. On a CPU the
same code counts storages instead (used by tests).
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpipe_bench.experiments.paper.largest import FILTERS_STEP, Placement, Setting, place_anyhow
from gpipe_bench.experiments.paper.profiles import meta_model
from gpipe_bench.experiments.paper.timed.workloads import materialized
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.record import Metric
from gpipe_bench.harness.runner import memory_error
from gpipe_bench.models import example_batch, loss_fn
from gpipe_bench.models.paper import GIB, HALVES, PAPER_NUM_LAYERS, column
from gpipe_bench.pipeline import devices
from gpipe_bench.pipeline.clock import Clock
from gpipe_bench.pipeline.memory.peaks import StageMemory
from gpipe_bench.pipeline.memory.trace import Boundary, LayerProfile, TensorSpec
from gpipe_bench.pipeline.memory.tracker import LiveMemory
from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.stage.stage import Gradients, Stage
from gpipe_bench.pipeline.stage.trees import Message, split
from gpipe_bench.pipeline.step import prepare, run
from gpipe_bench.pipeline.transport import InProcess

ATTENTION = {"amoebanet": "none", "transformer": "fused"}  # as it is computed on a GPU
NUM_STEPS = 2  # the optimizer's state exists from the second step on


class MadeUp(InProcess):
    """Stands for the neighbours of one stage: sends it random tensors and takes what it sends."""

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
        ends = self._outputs
        return tuple(
            self._make(ends.tensors[index])
            if ends.tensors[index].requires_grad and index not in self._unused
            else None
            for index in ends.distinct
        )

    def _make(self, spec: TensorSpec) -> torch.Tensor:
        if spec.dtype.is_floating_point:
            return torch.randn(spec.shape, dtype=spec.dtype, device=self._device)
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)


@dataclass(frozen=True)
class Part:
    """Everything that is needed to run one stage of a placement."""

    index: int
    layers: range
    memory: StageMemory
    profiles: tuple[LayerProfile, ...]


def distinct_parts(setting: Setting, placement: Placement) -> list[Part]:
    """The stages that differ in their layers or in being first or last."""
    profile = setting.profile(placement.num_layers, placement.num_filters, placement.num_microbatches)
    found: dict[object, Part] = {}
    last = len(placement.partition) - 1
    for index, (layers, memory) in enumerate(zip(placement.partition, placement.stages, strict=True)):
        profiles = profile.layers[layers.start : layers.stop]
        key = (tuple(map(id, profiles)), index == 0, index == last)
        found.setdefault(key, Part(index, layers, memory, profiles))
    return list(found.values())


class Storages:
    """Counter on a CPU: the storages of tensors, from their birth to their death.

    `counting` is what the step runs in, `peak` the most since `reset`.
    """

    def __init__(self) -> None:
        self._memory = LiveMemory()

    def counting(self, held: list[torch.Tensor]) -> AbstractContextManager[object]:
        self._memory.watch(held)
        return self._memory

    def reset(self) -> None:
        self._memory.reset_peaks()

    def peak(self) -> int:
        return self._memory.peak_bytes[""]


class Allocator:
    """Counter on an accelerator: what its allocator has given out, beyond what it had when this was made.

    Libraries take workspaces of tens of MiB when they are first used, which belong to no stage; so they are
    used once before counting begins, by the thread of the forward and by that of the backward.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        warm_up(device)
        gc.collect()
        devices.reset_peak(device)
        self._baseline = devices.peak_bytes(device)

    def counting(self, held: list[torch.Tensor]) -> AbstractContextManager[object]:
        return nullcontext()

    def reset(self) -> None:
        devices.reset_peak(self._device)

    def peak(self) -> int:
        devices.synchronize(self._device)
        return devices.peak_bytes(self._device) - self._baseline


def warm_up(device: torch.device) -> None:
    """Makes the libraries of matrix products and convolutions take their workspaces."""
    linear, convolution = nn.Linear(64, 64, device=device), nn.Conv2d(4, 4, 3, device=device)
    linear(torch.ones(64, 64, device=device)).sum().backward()
    convolution(torch.ones(1, 4, 16, 16, device=device)).sum().backward()
    devices.synchronize(device)


def measure(
    part: Part, model: nn.Sequential, half: str, schedule: Schedule, options: dict[str, Any], batch_size: int,
    device: torch.device, counter: Storages | Allocator | None = None, precision: str = "float32",
) -> int:  # fmt: skip
    """A steady training step of one stage with RMSProp, one parameter updated at a time. In bfloat16 the
    activations are, by autocast.
    """
    device = devices.exact(device)
    if counter is None:
        counter = Allocator(device) if devices.is_accelerator(device) else Storages()
    layers = [materialized(model[layer], device) for layer in part.layers]
    is_last = part.index == schedule.num_stages - 1
    stage = Stage(part.index, layers, part.layers.start, device=device, is_last=is_last)
    inputs, target = example_batch(HALVES[half].model, batch_size, device=device, **options)
    first, final = part.profiles[0], part.profiles[-1]
    transport = MadeUp(first.inputs, final.outputs, final.unused, device)
    program = prepare(schedule, {part.index: stage})
    clock = Clock([step.action for step in program], [torch.device("cpu")] * schedule.num_stages)
    parameters = _parameters(layers)
    optimizer = torch.optim.RMSprop(parameters, lr=1e-4, momentum=0.9, foreach=False)
    compute_loss, count = loss_fn(HALVES[half].model, **options), schedule.num_microbatches
    feed = split(inputs, count) if stage.is_first else ()
    targets = split(target, count) if is_last else ()
    held = [*parameters, *(buffer for layer in layers for buffer in layer.buffers())]
    held += _tensors(inputs) if stage.is_first else ()
    held += _tensors(target) if is_last else ()
    del inputs, target  # what a stage does not need, no stage holds
    with counter.counting(held):
        del held
        for step in range(NUM_STEPS):
            if step == NUM_STEPS - 1:
                counter.reset()
            half_used = precision == "bfloat16"  # no cast is kept from F to R, as in a pipeline's step
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
    return counter.peak()


def _tensors(value: Any) -> tuple[torch.Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def run_column(half: str, name: str, precision: str = "float32", *, smallest: bool = False) -> Outcome:
    """Every distinct stage of a column of Table 1 by itself on this GPU, under the paper's cap; `smallest` is
    of the smallest model with as many stages, in few micro-batches.

    That a stage finds no room is a result: with the models without GPipe it is what the table is about. The
    cap holds for the caching allocator, fragmentation and the libraries' workspaces included. The fullest
    stage by the memory model comes first.
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
    return Outcome(
        _peaks_of(stages),
        {
            "fits": not any(stage["ran_out"] for stage in stages), "cap_gib": setting.cap_bytes / GIB,
            "num_layers": layers, "num_filters": filters, "num_parameters": placement.num_parameters,
            "num_microbatches": placement.num_microbatches, "precision": precision, "stages": stages,
            "device": devices.name(device),
        },
    )  # fmt: skip


def _peaks_of(stages: Sequence[dict[str, Any]]) -> tuple[Metric, ...]:
    """Peaks of the fullest stage, measured and modelled; no measured one where a stage found no room."""

    def most(name: str) -> int | None:
        known = [stage[name] for stage in stages]
        return None if None in known else max(known)

    out = "; ".join(f"stage {stage['stage']}: {stage['ran_out']}" for stage in stages if stage["ran_out"])
    return (
        Metric(name="measured peak", value=most("measured"), unit="bytes", provenance="measured", note=out),
        Metric(name="modelled peak", value=most("modelled"), unit="bytes", provenance="modelled"),
    )  # fmt: skip


def _parameters(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [parameter for layer in layers for parameter in layer.parameters()]
