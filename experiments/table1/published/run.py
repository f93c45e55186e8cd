"""Runs the cases that predict Table 1: what every combination of the unknown settings gives, for a record."""

from __future__ import annotations

from collections.abc import Callable

from gpipe_bench.experiments.paper_models import COLUMNS
from gpipe_bench.experiments.table1.published.activation_memory import activation_memory, parameter_counts
from gpipe_bench.experiments.table1.published.capacity import capacity, capacity_combinations, choices
from gpipe_bench.experiments.table1.published.settings import OWN_OF_MODEL, allowed, combinations
from gpipe_bench.harness.experiment import Outcome
from gpipe_bench.harness.records.record import Quantity


def hypotheses(half: str) -> Outcome:
    """Activation memory and parameters of the paper's columns under every combination of what is unknown."""
    found = {each.name: activation_memory(half, each) for each in COLUMNS[half]}
    return Outcome(
        (_combinations(len(combinations(half))),),
        {
            "settings": {name: list(values) for name, values in allowed(half).items()},
            "columns": {
                name: {"bytes": list(each.values), "fits": "".join("01"[fits] for fits in each.fits)}
                for name, each in found.items()
            },
            "parameters": {
                "settings": {name: list(allowed(half)[name]) for name in OWN_OF_MODEL[half]},
                "columns": {each.name: list(parameter_counts(half, each)) for each in COLUMNS[half]},
            },
        },
    )


def capacities(half: str) -> Outcome:
    """The largest models at the paper's micro-batches and by its partitions, under what is unknown."""
    values = choices(half)
    found = {each.name: capacity(half, each) for each in COLUMNS[half]}
    return Outcome(
        (_combinations(len(capacity_combinations(half))),),
        {
            "settings": {name: list(each) for name, each in values.items()},
            "combinations": [
                [each.index(settings[name]) for name, each in values.items()]
                for settings in capacity_combinations(half)
            ],
            "columns": {
                name: {
                    "parameters": [each.num_parameters if each else 0 for each in models],
                    "num_layers": [each.num_layers if each else 0 for each in models],
                    "num_filters": [each.num_filters if each else 0 for each in models],
                }
                for name, models in found.items()
            },
        },
    )


def _combinations(number: int) -> Quantity:
    return Quantity(name="combinations", value=number, unit="number", provenance="modelled")


RUNS: dict[str, Callable[[str], Outcome]] = {"hypotheses": hypotheses, "capacity": capacities}
"""By the part of the case's key; each takes a half of the table."""
