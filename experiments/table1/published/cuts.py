"""Where the stages of Table 1's columns begin, by every rule and cost that the paper leaves open.

A layer counts for one, for its parameters or for the operations of its forward pass, which are counted at few
widths and known at all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.experiments.paper_models import HALVES, Column
from gpipe_bench.experiments.paper_profiles import meta_model, stacked
from gpipe_bench.experiments.table1.published.models import PLAIN, model_of
from gpipe_bench.experiments.table1.published.settings import Combination
from gpipe_bench.models import example_batch
from gpipe_bench.pipeline.memory.profile import fake_copy
from gpipe_bench.pipeline.plan.partition import Partition, partition

RULES = {"least variance": "variance", "cumulative share": "cumulative"}


def cuts_of(half: str, column: Column, settings: Combination) -> Partition | None:
    """Where the stages of a column begin; None where one would be empty."""
    return _cut(
        costs_of(half, column.num_layers, column.num_filters, settings),
        column.num_stages,
        RULES[str(settings["partition_rule"])],
    )


@cache
def _cut(costs: tuple[float, ...], num_stages: int, rule: str) -> Partition | None:
    try:
        return partition(costs, num_stages, rule)
    except ValueError:  # a stage without layers
        return None


def costs_of(half: str, num_layers: int, num_filters: int, settings: Combination) -> tuple[float, ...]:
    """What each layer counts for when the model is cut."""
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
    kinds = _operations_by_kind(half, num_filters)
    if half == "transformer":
        embedding, layer, softmax = kinds
        return (embedding, *[layer] * num_layers, softmax)
    entry, middle, head, end, classifier = kinds[:3], kinds[3:10], kinds[10:11], kinds[11:15], kinds[15:]
    return stacked(
        entry, middle, head if auxiliary_head else (), (*end, end[-1]), classifier, num_layers=num_layers
    )


OPERATIONS_SAMPLED_AT = (144, 544, 1040)
"""Widths; operations are quadratic in the width."""


@cache
def _operations_by_kind(half: str, num_filters: int) -> tuple[float, ...]:
    """Of one layer each, in the order in which a model has them."""
    if half == "transformer":
        return tuple(map(float, _counted_operations(half, 0)))
    samples = zip(*(_counted_operations(half, width) for width in OPERATIONS_SAMPLED_AT), strict=True)
    return tuple(float(quadratic(OPERATIONS_SAMPLED_AT, values, num_filters)) for values in samples)


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
    size = {"num_layers": 9, "num_filters": num_filters} if num_filters else {"num_layers": 1}
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
