"""The largest model of a family that fits on K accelerators: the search behind Table 1.

"Fits" means that some split into K stages keeps the modelled peak of every stage within the cap. More
micro-batches never need more memory (the boundary inputs add up to one mini-batch either way), so sizes are
searched at one example per micro-batch, and the fewest micro-batches that will do are reported afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

from gpipe_bench.experiments.paper.profiles import Reading, amoebanet, transformer
from gpipe_bench.models.paper import GIB, HALVES, PAPER_NUM_LAYERS, column
from gpipe_bench.pipeline.memory.peaks import OPTIMIZERS, StageMemory
from gpipe_bench.pipeline.memory.profile import ModelProfile
from gpipe_bench.pipeline.memory.workers import StagePeaks
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
    optimizer: str = "rmsprop"  # the paper's

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
            self.optimizer,
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
    """The largest number from ``start`` on for which something holds, if that is lost only once.

    Looks from ``guess`` on in growing steps, so that a good guess costs few looks. None if it does not hold
    at ``start``.
    """
    low = first = max(guess, start)
    reach = 1
    if holds(first):
        while holds(first + reach):
            low, reach = first + reach, 2 * reach
        high = first + reach
    else:
        high = low
        while high > start and not holds(low := max(high - reach, start)):
            high, reach = low, 2 * reach
        if high == start:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
