"""What the records of Table 1's predictions hold, as ranges: no torch, nothing computed twice.

A record keeps a number for every combination of the unknown settings, so the ranges, what each setting does
alone, quotients under one combination and the hypotheses are all read from the same lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from gpipe_bench.experiments.table1.published.settings import Combination, spread_of
from gpipe_bench.harness.judging.spread import Spread
from gpipe_bench.harness.records.record import Quantity, Record, find


@dataclass(frozen=True, slots=True)
class Choices:
    """The combinations of a record and a number for each, by column; None where there can be none."""

    names: tuple[str, ...]
    settings: tuple[Combination, ...]
    columns: Mapping[str, tuple[float | None, ...]]

    def spread(self, column: str) -> Spread | None:
        """The range of a column."""
        return spread_of(self.settings, self.columns[column], self.names)

    def quotient(self, over: str, under: str) -> tuple[float | None, ...]:
        """One column over another under the same settings; None where the second is nothing."""
        return tuple(
            a / b if a is not None and b else None
            for a, b in zip(self.columns[over], self.columns[under], strict=True)
        )


def activation_choices(record: Record) -> Choices:
    """Peak activation memory in bytes."""
    settings = _product(record.details["settings"])
    columns = {name: tuple(column["bytes"]) for name, column in record.details["columns"].items()}
    return Choices(tuple(record.details["settings"]), settings, columns)


def parameter_choices(record: Record) -> Choices:
    """Parameters of the columns' models, where settings change them."""
    details = record.details["parameters"]
    columns = {name: tuple(counts) for name, counts in details["columns"].items()}
    return Choices(tuple(details["settings"]), _product(details["settings"]), columns)


def capacity_choices(record: Record) -> Choices:
    """Parameters of the largest models; 0 where nothing fits."""
    names = tuple(record.details["settings"])
    values = [record.details["settings"][name] for name in names]
    settings = tuple(
        {name: values[place][index] for place, (name, index) in enumerate(zip(names, indices, strict=True))}
        for indices in record.details["combinations"]
    )
    columns = {name: tuple(column["parameters"]) for name, column in record.details["columns"].items()}
    return Choices(names, settings, columns)


def fitting(record: Record, column: str) -> tuple[int, float, float] | None:
    """Under how many combinations a column's model fits, and the range of its memory then; None for none."""
    found = record.details["columns"][column]
    values = [
        value for value, fits in zip(found["bytes"], found["fits"], strict=True) if fits == "1" and value
    ]
    return (len(values), min(values), max(values)) if values else None


def ranged(name: str, unit: str, spread: Spread) -> Quantity:
    """A prediction; its middle stands for it."""
    return Quantity(name=name, value=(spread.low + spread.high) / 2, unit=unit, provenance="modelled")


def hypothesis_record(records: Sequence[Record], half: str) -> Record | None:
    """The record of a half's activation memory under every combination."""
    return _done(find(records, part="hypotheses", half=half))


def capacity_record(records: Sequence[Record], half: str) -> Record | None:
    """The record of a half's largest models under every combination."""
    return _done(find(records, part="capacity", half=half))


def _done(record: Record | None) -> Record | None:
    return record if record is not None and record.status == "done" else None


def _product(settings: Mapping[str, Sequence[str | int | float | bool]]) -> tuple[Combination, ...]:
    return tuple(dict(zip(settings, values, strict=True)) for values in product(*settings.values()))
