"""The largest models that the paper's accelerators hold, at its micro-batches and by its partitions.

The other search (gpipe_bench.experiments.table1.largest) asks what this engine can do: any number of
micro-batches and the cut that memory likes best. This one predicts what the paper could: M = 16 where it is
stated, the allowed ones where it is not, stages cut by a rule that does not look at memory, sizes on the grid
of what was tried, in the memory that an accelerator may have had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

from gpipe_bench.experiments.paper_models import Column
from gpipe_bench.experiments.table1.published.activation_memory import ADDED, Stage, needed, stages_of
from gpipe_bench.experiments.table1.published.models import PLAIN, model_of
from gpipe_bench.experiments.table1.published.settings import CAP, SHARED, Combination, unknown
from gpipe_bench.harness.judging.unknowns import Value

PARTITION = ("partition_cost", "partition_rule")
KINDS = ("activation_format", "kept_by", "tensor_layout")
EXTREMES = (
    ("float32", "every operation", "tiled 8 x 128"),
    ("bfloat16", "a fusing compiler", "dense"),
)
"""Of `KINDS`, what takes most memory and what takes least."""
FIXED: dict[str, Combination] = {
    "amoebanet": {"auxiliary_head": True, "num_classes": 1001},
    "transformer": {},
}
"""Settings that hardly move a capacity, as in `HALVES`."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The model with most parameters that fits; `num_filters` is 0 for the Transformer."""

    num_parameters: int
    num_layers: int
    num_filters: int


@cache
def choices(half: str) -> dict[str, tuple[Value, ...]]:
    """The values of each setting that a capacity depends on, both ends of a range.

    Gradients are there whether a report counts them or not, so of their copies 1 and 2 are distinct here.
    """
    grid = ("filters_step",) if half == "amoebanet" else ("num_microbatches",)
    found = {name: unknown(half)[name].ends for name in (*SHARED, *grid, CAP)}
    found["gradient_copies"] = tuple(each for each in found["gradient_copies"] if each != 0)
    return found


@cache
def capacity_combinations(half: str) -> tuple[Combination, ...]:
    """All combinations with the first partition; every partition with the first of `KINDS` and with those
    that take most and least memory. Partitions are exchanged for one another without moving the ends.
    """
    values = choices(half)
    first_kinds = tuple(values[name][0] for name in KINDS)
    first_cut = tuple(values[name][0] for name in PARTITION)
    every = (dict(zip(values, each, strict=True)) for each in product(*values.values()))
    return tuple(
        each
        for each in every
        if tuple(each[name] for name in PARTITION) == first_cut
        or tuple(each[name] for name in KINDS) in (first_kinds, *EXTREMES)
    )


def capacity(half: str, column: Column) -> tuple[Largest | None, ...]:
    """The largest model of a column under each of `capacity_combinations`; None where not even the smallest
    one fits.
    """
    return tuple(largest(half, column, settings) for settings in capacity_combinations(half))


def largest(half: str, column: Column, settings: Combination) -> Largest | None:
    """The largest model of a column under some settings."""
    settings = {**settings, **FIXED[half]}
    if half == "transformer":
        # The embedding and the softmax are layers too.
        smallest = max(column.num_stages - 2, 1)
        count = last_that(partial(_fits, half, column, settings, 0), smallest, column.num_layers)
        return None if count is None else _sized(half, count, 0)
    step, best = int(settings["filters_step"]), None
    for depth in unknown(half)["num_layers"].allowed:
        guess, start = column.num_filters // step, 1
        if best is not None:  # only what would beat it
            start = 1 + (last_that(partial(_beaten, half, best, int(depth), step), 1, guess) or 0)
        count = last_that(partial(_fits_width, half, column, settings, int(depth), step), start, guess)
        best = best if count is None else _sized(half, int(depth), count * step)
    return best


def _beaten(half: str, best: Largest, depth: int, step: int, count: int) -> bool:
    return _sized(half, depth, count * step).num_parameters <= best.num_parameters


def _fits_width(half: str, column: Column, settings: Combination, depth: int, step: int, count: int) -> bool:
    return _fits(half, column, settings, count * step, depth)


def _fits(half: str, column: Column, settings: Combination, num_filters: int, num_layers: int) -> bool:
    """Whether every accelerator has the memory that its stage needs. A model that is too small for the rule
    to give every accelerator a layer is not too large.
    """
    sized = replace(column, num_layers=num_layers, num_filters=num_filters)
    walked = tuple(sorted((name, each) for name, each in settings.items() if name not in (*ADDED, CAP)))
    stages = _stages(half, sized, walked)
    cap = float(settings[CAP])
    return stages is None or all(needed(stage, settings) <= cap for stage in stages)


@cache
def _stages(half: str, column: Column, settings: tuple[tuple[str, Value], ...]) -> frozenset[Stage] | None:
    """The distinct accelerators of a model; None where the rule leaves one without a layer."""
    stages = stages_of(half, column, dict(settings))
    return None if stages is None else frozenset(stages)


@cache
def _sized(half: str, num_layers: int, num_filters: int) -> Largest:
    model = model_of(half, num_layers, num_filters, 2, {**FIXED[half], **PLAIN})
    return Largest(model.num_parameters, num_layers, num_filters)


def last_that(holds: Callable[[int], bool], start: int, guess: int) -> int | None:
    """The largest number from ``start`` on for which something holds, if that is lost only once.

    Looks from ``guess`` on in growing steps, so that a good guess costs few looks. None if it does not hold
    at ``start``.
    """
    low = max(guess, start)
    reach = 1
    if holds(low):
        while holds(low + reach):
            low, reach = low + reach, 2 * reach
        high = low + reach
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
