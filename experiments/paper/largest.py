"""What the accelerators of Table 1 hold, and the largest model of a family that fits on K of them.

As this engine runs it, "fits" means that some split into K stages keeps the modelled peak of every stage
within the cap. More micro-batches never need more memory (the boundary inputs add up to one mini-batch either
way), so sizes are searched at one example per micro-batch, and the fewest micro-batches that will do are
reported afterwards.

Under given choices of what the paper does not state, one walk over a stage's layers gives what it holds;
number format and micro-batches change the profiles that are walked, the partition where stages begin.
Gradients of parameters and copies of boundary tensors are not counted, as declared. Equal stages are walked
once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.experiments.paper.full_size import cut_by
from gpipe_bench.experiments.paper.profiles import (
    DEPTH,
    Reading,
    amoebanet,
    meta_model,
    of_depth,
    transformer,
)
from gpipe_bench.harness.reproduction import Value
from gpipe_bench.models import example_batch
from gpipe_bench.models.paper import GIB, HALVES, PAPER_NUM_LAYERS, Column, column
from gpipe_bench.pipeline.memory.peaks import OPTIMIZERS, StageMemory
from gpipe_bench.pipeline.memory.profile import ModelProfile, fake_copy
from gpipe_bench.pipeline.memory.stage_bytes import stage_bytes
from gpipe_bench.pipeline.memory.trace import LayerProfile
from gpipe_bench.pipeline.memory.workers import StagePeaks, stage_memory
from gpipe_bench.pipeline.plan.named import gpipe, naive
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.pipeline.plan.schedule import Schedule

FILTERS_STEP = 16


@dataclass(frozen=True)
class Setting:
    """Everything about a model's run except the model's size."""

    half: str
    num_stages: int
    is_naive: bool
    precision: str
    attention: str = "fused"
    cap_gib: float = 0.0  # 0: the paper's

    @classmethod
    def of(cls, half: str, name: str, precision: str, attention: str) -> Setting:
        """Setting of a column of the table."""
        size = column(half, name)
        return cls(half, size.num_stages, size.is_naive, precision, attention)

    @property
    def cap_bytes(self) -> int:
        return int((self.cap_gib or HALVES[self.half].cap_gib) * GIB)

    @property
    def batch_size(self) -> int:
        return HALVES[self.half].batch_size

    def schedule(self, num_microbatches: int) -> Schedule:
        """Naive-1 keeps all activations of one mini-batch; a pipeline recomputes every micro-batch."""
        return _schedule(self.num_stages, num_microbatches, self.is_naive)

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

    def peaks(self, profile: ModelProfile, num_microbatches: int) -> StagePeaks:
        return StagePeaks(
            profile.layers,
            profile.loss,
            self.schedule(num_microbatches),
            "rmsprop",
            receive_ahead=1 if self.num_stages > 1 else 0,
        )


@cache
def _schedule(num_stages: int, num_microbatches: int, is_naive: bool) -> Schedule:
    return naive(num_stages) if is_naive else gpipe(num_stages, num_microbatches, remat="always")


@dataclass(frozen=True)
class Placement:
    """A model on its stages."""

    num_layers: int
    num_filters: int
    num_parameters: int
    num_microbatches: int
    partition: Partition
    stages: tuple[StageMemory, ...]

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the fullest accelerator."""
        return max(stage.peak for stage in self.stages)

    @property
    def counter_bytes(self) -> int:
        """The optimizer's step counts, which the paper's 12 bytes per parameter do not contain."""
        state = OPTIMIZERS["rmsprop"].state
        return sum(stage.optimizer_state - state * stage.parameters for stage in self.stages)

    def describe(self) -> dict[str, Any]:
        """Facts for the record: where the cuts are and what fills each stage, in bytes."""
        return {
            "num_layers": self.num_layers,
            "num_filters": self.num_filters,
            "num_microbatches": self.num_microbatches,
            "layers_per_stage": [len(stage) for stage in self.partition],
            "stages": [asdict(stage) for stage in self.stages],
        }


def place(
    setting: Setting, num_layers: int, num_filters: int, num_microbatches: int, cap_bytes: int | None = None
) -> Placement | None:
    """Cut the model so that its fullest stage is smallest; None if that exceeds the cap."""
    profile, peaks = _peaks(setting, num_layers, num_filters, num_microbatches)
    stages = peaks.partition(setting.cap_bytes if cap_bytes is None else cap_bytes)
    if stages is None:
        return None
    memory = tuple(peaks.memory(stage.start, stage.stop) for stage in stages)
    return Placement(num_layers, num_filters, profile.num_parameters, num_microbatches, stages, memory)


def fits(setting: Setting, num_layers: int, num_filters: int, num_microbatches: int) -> bool:
    """Whether `place` finds a cut, without looking for the best one."""
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
    return profile, setting.peaks(profile, num_microbatches)


def place_anyhow(setting: Setting, num_layers: int, num_filters: int, num_microbatches: int) -> Placement:
    """The same without a cap: how much an accelerator would have to hold."""
    cap = setting.cap_bytes
    while (placement := place(setting, num_layers, num_filters, num_microbatches, cap)) is None:
        cap *= 2
    return placement


class Size(NamedTuple):
    """Size of a model; `num_filters` is 0 for the Transformer."""

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
    """The size with most parameters of a family that fits; None where none does.

    Args:
        half: the family
        fits, count: whether layers and filters fit, and their parameters
        step: of the filters
        guess: layers and filters near the answer, which costs few looks if it is good
        least: layers of the smallest Transformer
    """
    if half == "transformer":
        num_layers = last_that(lambda layers: fits(layers, 0), least, guess[0])
        return None if num_layers is None else Size(count(num_layers, 0), num_layers, 0)
    near = guess[1] // step

    def of_depth(depth: int, parameters: int) -> Size | None:
        """The largest size of this depth that fits, if it has more than `parameters` parameters."""
        beaten = last_that(lambda steps: count(depth, steps * step) <= parameters, 1, near)
        steps = last_that(lambda steps: fits(depth, steps * step), 1 + (beaten or 0), near)
        return None if steps is None else Size(count(depth, steps * step), depth, steps * step)

    best: Size | None = None
    for depth in PAPER_NUM_LAYERS:
        best = of_depth(depth, best.num_parameters if best else 0) or best
    return best


def largest(setting: Setting) -> Placement:
    """The model with most parameters that fits. Raises ValueError if the smallest one does not."""
    most = setting.microbatch_counts()[-1]
    # The embedding and the softmax are layers too.
    least = max(setting.num_stages - 2, 1)
    best = largest_size(
        setting.half,
        lambda num_layers, num_filters: fits(setting, num_layers, num_filters, most),
        lambda num_layers, num_filters: setting.profile(num_layers, num_filters, most).num_parameters,
        step=FILTERS_STEP, guess=(least, FILTERS_STEP), least=least,
    )  # fmt: skip
    if best is None:
        raise ValueError(
            f"no {HALVES[setting.half].model} fits into {setting.cap_bytes / GIB:g} GiB on "
            f"{setting.num_stages} accelerator(s) with mini-batch {setting.batch_size}; use more stages"
        )
    num_layers, num_filters = best.num_layers, best.num_filters
    fewest = next(
        count for count in setting.microbatch_counts() if fits(setting, num_layers, num_filters, count)
    )
    placement = place(setting, num_layers, num_filters, fewest)
    assert placement is not None, "a model that fits at the most micro-batches fits"
    return placement


def last_that(holds: Callable[[int], bool], start: int, guess: int) -> int | None:
    """The largest number from ``start`` on for which something holds, if that is lost only once; None if it
    does not hold at ``start``. A good guess costs few looks.
    """
    low, end, reach = start, max(guess, start), 1
    while holds(end):
        low, end, reach = end, end + reach, 2 * reach
    count = bisect_left(range(low, end), True, key=lambda number: not holds(number))
    return low + count - 1 if count else None


# Under given choices ----------------------------------------------------------------------------------------

Combination = Mapping[str, Value]
"""Settings by name."""
BYTES_PER_PARAMETER = 12


@dataclass(frozen=True)
class Stage:
    """Bytes of one accelerator.

    Args:
        held: all that comes and goes in a step, without gradients of parameters
        fixed: parameters with the optimizer's state, and buffers
    """

    held: int
    fixed: int


def num_microbatches(half: str, column: Column, settings: Combination) -> int:
    """M of a column: one without a pipeline, the stated or the chosen one with it."""
    if column.is_naive:
        return 1
    return int(settings.get("num_microbatches", HALVES[half].num_microbatches))


def stages_of(half: str, column: Column, settings: Combination) -> tuple[Stage, ...] | None:
    """Every accelerator of a column; None where the partition would leave one without a layer."""
    cuts = cuts_of(half, column, settings)
    if cuts is None:
        return None
    count = num_microbatches(half, column, settings)
    model = model_of(half, column.num_layers, column.num_filters, HALVES[half].batch_size // count, settings)
    found: dict[object, Stage] = {}
    stages = []
    for index, cut in enumerate(cuts):
        # All of the Transformer's layers between embedding and softmax are one.
        like = (len(cut), index == 0, index == len(cuts) - 1) if half == "transformer" else index
        if like not in found:
            layers = model.layers[cut.start : cut.stop]
            loss = model.loss if index == len(cuts) - 1 else None
            found[like] = _stage(layers, loss, len(cuts), index == 0, count, column.is_naive)
        stages.append(found[like])
    return tuple(stages)


@cache
def _stage(
    layers: tuple[LayerProfile, ...],
    loss: LayerProfile | None,
    num_stages: int,
    is_first: bool,
    num_microbatches: int,
    is_naive: bool,
) -> Stage:
    """Equal stages are walked once."""
    remat = "never" if is_naive else "always"
    return Stage(
        held=held_bytes(layers, loss, num_stages, num_microbatches, is_first, remat),
        fixed=sum(BYTES_PER_PARAMETER * layer.num_parameters + layer.buffer_bytes for layer in layers),
    )


@cache
def held_bytes(
    layers: tuple[LayerProfile, ...], loss: LayerProfile | None, k: int, m: int, is_first: bool, remat: str
) -> int:
    """Bytes that a step of one stage takes and gives back, at its peak, without gradients of parameters."""
    stage = replace(
        stage_bytes(tuple(map(bare, layers)), loss),
        parameter_bytes=0, trained_sizes=(), buffer_bytes=0, gradient_bytes=0,
    )  # fmt: skip
    schedule = gpipe(k, m, remat)
    return stage_memory(stage, schedule.actions[0], "sgd", is_first=is_first, receive_ahead=int(k > 1)).peak


@cache
def bare(layer: LayerProfile) -> LayerProfile:
    """The layer as if gradients of parameters took no memory, in every backward."""
    first = layer.first
    sizes = tuple(0 if storage in first.gradients else size for storage, size in enumerate(first.sizes))
    first = replace(first, sizes=sizes)
    return replace(layer, first=first, later=first)


PLAIN: Combination = {"activation_format": "float32"}
"""Profiles of which only parameters or the number of layers are asked."""


def model_of(
    half: str, num_layers: int, num_filters: int, microbatch_size: int, settings: Combination
) -> ModelProfile:
    """The profiles of a model under some settings, without the gradients of parameters."""
    reading = Reading(
        number_format=str(settings["activation_format"]),
        autocast=False,
        with_shapes=True,
    )
    if half == "transformer":
        return transformer(reading, num_layers, microbatch_size)
    return amoebanet(
        reading, num_layers, num_filters, microbatch_size, int(settings["num_classes"]),
        auxiliary_head=bool(settings["auxiliary_head"]),
    )  # fmt: skip


def cuts_of(half: str, column: Column, settings: Combination) -> Partition | None:
    """The layers of a column's stages; None where a stage would be empty."""
    costs = costs_of(half, column.num_layers, column.num_filters, settings)
    return cut_by(costs, str(settings["partition_rule"]), column.num_stages)


def costs_of(half: str, num_layers: int, num_filters: int, settings: Combination) -> tuple[float, ...]:
    """Cost of each layer in the choice of cuts."""
    model = model_of(half, num_layers, num_filters, 2, {**settings, **PLAIN})
    match settings["partition_cost"]:
        case "layers":
            return (1.0,) * len(model.layers)
        case "parameters":
            return tuple(float(layer.num_parameters) for layer in model.layers)
    return _operations(half, num_layers, num_filters, bool(settings.get("auxiliary_head", False)))


@cache
def _operations(half: str, num_layers: int, num_filters: int, auxiliary_head: bool) -> tuple[float, ...]:
    """Multiplications and additions of each layer's forward pass."""
    if half == "transformer":
        embedding, layer, softmax = map(float, _counted_operations(half, 0))
        return (embedding, *[layer] * num_layers, softmax)
    samples = zip(*(_counted_operations(half, width) for width in OPERATIONS_SAMPLED_AT), strict=True)
    layers = [float(quadratic(OPERATIONS_SAMPLED_AT, values, num_filters)) for values in samples]
    if not auxiliary_head:
        del layers[HEAD]
    return of_depth(layers, num_layers)


OPERATIONS_SAMPLED_AT = (144, 544, 1040)
"""Widths; operations are quadratic in the width."""
HEAD = 12
"""Place of the auxiliary head in the sampled models."""


def quadratic(places: Sequence[int], values: Sequence[int], at: int) -> Fraction:
    """The value at a place of the polynomial through all given ones."""
    total = Fraction(0)
    for place, value in zip(places, values, strict=True):
        others = [each for each in places if each != place]
        over, under = prod(at - each for each in others), prod(place - each for each in others)
        total += Fraction(value * over, under)
    return total


@cache
def _counted_operations(half: str, num_filters: int) -> tuple[int, ...]:
    size = {"num_layers": DEPTH, "num_filters": num_filters} if num_filters else {"num_layers": 1}
    layers = meta_model(half, **size)
    value: Any = example_batch(HALVES[half].model, 2, device="meta", **HALVES[half].options)[0]
    found = []
    with FakeTensorMode(), torch.no_grad():
        value = torch.empty(value.shape, dtype=value.dtype)
        for layer in layers:
            with FlopCounterMode(display=False) as counter:
                value = fake_copy(layer)(value)
            found.append(counter.get_total_flops())
    return tuple(found)


FIXED: dict[str, Combination] = {
    "amoebanet": {"auxiliary_head": True, "num_classes": 1001},
    "transformer": {},
}
"""Settings that hardly move a capacity, as in `HALVES`."""


@cache
def num_parameters(half: str, num_layers: int, num_filters: int) -> int:
    """Number of parameters of a model, by its size."""
    return model_of(half, num_layers, num_filters, 2, {**FIXED[half], **PLAIN}).num_parameters
