"""Table 1's unknown settings, and what each combination of them gives: everything that needs no torch.

The values come from results/unknowns.toml alone. A case computes all combinations of one half at once, in the
order of `itertools.product`, so a record keeps one list of numbers for each column and no names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import median

from gpipe_bench.experiments.paper_models import HALVES, Column
from gpipe_bench.harness.judging.spread import Part, Spread
from gpipe_bench.harness.judging.unknowns import Unknown, Value, load_unknowns

SHARED = (
    "activation_format", "gradient_copies", "kept_by", "tensor_layout", "boundary_tensors",
    "partition_cost", "partition_rule",
)  # fmt: skip
"""Settings of both halves."""
OWN = {"amoebanet": ("auxiliary_head", "num_classes"), "transformer": ("num_microbatches",)}
"""Settings of one half, after the shared ones."""

OWN_OF_MODEL: dict[str, tuple[str, ...]] = {"amoebanet": OWN["amoebanet"], "transformer": ()}
"""Settings of one half that change the model's parameters."""

CAP = "memory_cap_bytes"

Combination = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Numbers:
    """One number for each combination, None for those that cannot be; and which of them fit.

    Args:
        values: in the order of `combinations`
        fits: whether the column's model then fits into its accelerators
    """

    values: tuple[int | None, ...]
    fits: tuple[bool, ...]


@cache
def unknown(half: str) -> Mapping[str, Unknown]:
    """The unknown settings of one half; the file is read once."""
    return load_unknowns().of(HALVES[half].table)


@cache
def allowed(half: str) -> dict[str, tuple[Value, ...]]:
    """The allowed values of each setting, by name, the shared settings first."""
    return {name: unknown(half)[name].allowed for name in (*SHARED, *OWN[half])}


def cap_bytes(half: str) -> tuple[float, float]:
    """The smallest and the largest memory that an accelerator may have had."""
    low, high = unknown(half)[CAP].ends
    return float(low), float(high)


@cache
def combinations(half: str) -> tuple[Combination, ...]:
    """All combinations, the last setting running fastest."""
    names = allowed(half)
    return tuple(dict(zip(names, values, strict=True)) for values in product(*names.values()))


def num_microbatches(half: str, column: Column, combination: Combination) -> int:
    """M of a column: one without a pipeline, the stated or the chosen one with it."""
    if column.is_naive:
        return 1
    return int(combination.get("num_microbatches", HALVES[half].num_microbatches))


def spread_of(
    settings: Sequence[Combination], values: Sequence[float | None], names: Sequence[str]
) -> Spread | None:
    """The range over all combinations that have a number; None where none has.

    What a setting does alone is the range of the medians over all else, one for each of its values, where all
    of them were tried.
    """
    found = [(each, value) for each, value in zip(settings, values, strict=True) if value is not None]
    if not found:
        return None
    numbers = [value for _, value in found]
    return Spread(
        low=min(numbers), high=max(numbers), parts=tuple(_parts(found, names)), combinations=len(numbers)
    )


def _parts(found: Sequence[tuple[Combination, float]], names: Sequence[str]) -> Iterator[Part]:
    for name in names:
        contexts: dict[tuple[Value, ...], dict[Value, float]] = {}
        for settings, value in found:
            rest = tuple(each for other, each in settings.items() if other != name)
            contexts.setdefault(rest, {})[settings[name]] = value
        # Only where all of its values were tried with the same others do they tell what it does.
        most = max(map(len, contexts.values()))
        matched = [values for values in contexts.values() if len(values) == most]
        middles = [median(values[each] for values in matched if each in values) for each in matched[0]]
        if min(middles) < max(middles):
            yield Part(what=name, low=min(middles), high=max(middles))
