"""Hypotheses about Table 1's activation memory: every combination of what the paper leaves open.

Both halves are one experiment of the paper, so a hypothesis is about both, except for the settings that only
one of them has. The first is the base: the first value that the file of unknowns allows of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from gpipe_bench.experiments.paper_models import HALVES
from gpipe_bench.experiments.table1.published.choices import Choices, activation_choices, hypothesis_record
from gpipe_bench.harness.judging.hypotheses import Hypothesis, Key
from gpipe_bench.harness.judging.paper import load_paper
from gpipe_bench.harness.judging.units import convert
from gpipe_bench.harness.judging.unknowns import Value
from gpipe_bench.harness.records.record import Record

BASE = "the base"
ROW = "peak activation memory"


def hypotheses(records: Sequence[Record]) -> list[Hypothesis]:
    """One for each combination of the settings of the halves on record; none without records."""
    found = {half: record for half in HALVES if (record := hypothesis_record(records, half)) is not None}
    if not found:
        return []
    choices = {half: activation_choices(record) for half, record in found.items()}
    settings: dict[str, dict[Value, None]] = {}
    for each in choices.values():
        for combination in each.settings:
            for name, value in combination.items():
                settings.setdefault(name, {})[value] = None
    shared = [name for name in settings if all(name in each.names for each in choices.values())]
    order = [*shared, *(name for name in settings if name not in shared)]
    values = {half: _values(half, each) for half, each in choices.items()}
    base = {name: next(iter(settings[name])) for name in order}
    made = []
    for chosen in product(*(settings[name] for name in order)):
        combination = dict(zip(order, chosen, strict=True))
        numbers: dict[Key, float] = {}
        for half, each in choices.items():
            numbers |= values[half][tuple(combination[name] for name in each.names)]
        made.append(Hypothesis(name=_named(combination, base), values=numbers, settings=combination))
    return made


def _values(half: str, choices: Choices) -> dict[tuple[Value, ...], dict[Key, float]]:
    """The numbers of one half in the paper's units, by the values of its settings."""
    table = HALVES[half].table
    units = {cell.key: cell.unit for cell in load_paper() if cell.source == "paper"}
    keys = {column: (table, ROW, column) for column in choices.columns}
    found: dict[tuple[Value, ...], dict[Key, float]] = {}
    for index, settings in enumerate(choices.settings):
        numbers = {}
        for column, values in choices.columns.items():
            value = values[index]
            if value is not None:
                numbers[keys[column]] = convert(value, "bytes", units[keys[column]])
        found[tuple(settings.values())] = numbers
    return found


def _named(settings: Mapping[str, Value], base: Mapping[str, Value]) -> str:
    """What differs from the base."""
    changed = {name: value for name, value in settings.items() if value != base[name]}
    return ", ".join(_words(changed)) or BASE


def _words(settings: Mapping[str, Value]) -> Iterator[str]:
    """`bfloat16, gradients x1, cut by layers, M = 16`."""
    for name, value in settings.items():
        match name:
            case "gradient_copies":
                yield f"gradients x{value}"
            case "boundary_tensors":
                yield f"boundary {value}"
            case "partition_cost":
                yield f"cut by {value}"
            case "num_microbatches":
                yield f"M = {value}"
            case "auxiliary_head":
                yield "auxiliary head" if value else "no auxiliary head"
            case "num_classes":
                yield f"{value} classes"
            case _:
                yield str(value)
