"""Our numbers for the cells of Table 1 and of the claims made from it, from records alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpipe_bench.experiments.paper_models import COLUMNS, HALVES
from gpipe_bench.experiments.table1.published.choices import (
    activation_choices,
    capacity_choices,
    capacity_record,
    fitting,
    hypothesis_record,
    parameter_choices,
    ranged,
)
from gpipe_bench.experiments.table1.published.sentences import sentences
from gpipe_bench.experiments.table1.published.settings import spread_of
from gpipe_bench.harness.judging.entry import Entry
from gpipe_bench.harness.judging.spread import Spread
from gpipe_bench.harness.judging.units import show
from gpipe_bench.harness.records.record import Quantity, Record, find

BYTES_PER_PARAMETER = 12
JUDGED_ATTENTION = {"amoebanet": "none", "transformer": "explicit"}
"""The softmax of 2019 was kept in memory."""

ACTIVATIONS = (
    "ours is the sum over the accelerators of what comes and goes in a step, under every combination of what "
    "the paper leaves open"
)
CAPACITY = (
    "ours is the largest model on the grid of what may have been tried, at the paper's number of "
    "micro-batches and cut by its rule, in the memory that an accelerator may have had"
)
ANY_COUNT = "maximum parameters, any number of micro-batches"
"""A row of ours: what this engine can do."""
CONTEXT = (
    "context: with as many micro-batches as the model needs and the cut that memory likes best, which the "
    "paper's numbers are not about"
)

CLAIMS = (
    ("AmoebaNet: largest on 8 accelerators over naive-1", "amoebanet", "pipeline-8", "naive-1"),
    ("Transformer: largest on 128 partitions over naive-1", "transformer", "pipeline-128", "naive-1"),
    ("Transformer: larger by re-materialization alone", "transformer", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger on one accelerator", "amoebanet", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger from 1 to 8 accelerators", "amoebanet", "pipeline-8", "pipeline-1"),
)
"""Row, half and the two columns that are divided."""


def cells(records: Sequence[Record]) -> list[Entry]:
    found: list[Entry] = []
    for half in HALVES:
        for column in COLUMNS[half]:
            found += [
                _parameters(records, half, column.name, "parameters", 1),
                _parameters(records, half, column.name, "parameter memory", BYTES_PER_PARAMETER),
                _activations(records, half, column.name),
                _capacity(records, half, column.name),
                _any_count(records, half, column.name),
            ]
    for claim in CLAIMS:
        found += [_claim(records, *claim), _quotient(records, *claim)]
    return found + sentences(records)


def _parameters(records: Sequence[Record], half: str, column: str, row: str, each: int) -> Entry:
    """An exact count, or so many bytes for each; a range where the model's own options are not stated."""
    record = find(records, part="paper", half=half, column=column, attention=JUDGED_ATTENTION[half])
    prediction = hypothesis_record(records, half)
    spread = parameter_choices(prediction).spread(column) if prediction is not None else None
    return Entry(
        table=HALVES[half].table,
        row=row,
        column=column,
        question="as published",
        quantity=record.quantity(row) if record is not None else None,
        spread=_times(spread, each),
        record=record,
        status=record.status if record is not None else "done",
        reason=record.reason if record is not None else "",
    )


def _times(spread: Spread | None, factor: int) -> Spread | None:
    """None for a single number, which is no range."""
    if spread is None or spread.low == spread.high:
        return None
    return Spread(
        low=factor * spread.low,
        high=factor * spread.high,
        parts=tuple(replace(p, low=factor * p.low, high=factor * p.high) for p in spread.parts),
        combinations=spread.combinations,
    )


def _activations(records: Sequence[Record], half: str, column: str) -> Entry:
    row, record = "peak activation memory", hypothesis_record(records, half)
    entry = Entry(table=HALVES[half].table, row=row, column=column, question="as published")
    spread = activation_choices(record).spread(column) if record is not None else None
    if record is None or spread is None:
        return _without(records, "hypotheses", half, entry)
    return replace(
        entry,
        quantity=ranged(row, "bytes", spread),
        spread=spread,
        record=record,
        note=f"{ACTIVATIONS} ({spread.combinations}); {_fits(record, half, column)}",
    )


def _fits(record: Record, half: str, column: str) -> str:
    found = fitting(record, column)
    if found is None:
        return "under none of them does the model fit into the memory that is stated"
    count, low, high = found
    unit = "GB" if half == "amoebanet" else "GiB"
    scale = 1e9 if unit == "GB" else 2**30
    return (
        f"under {count} of them the model fits into the memory that is stated, with "
        f"{show(low / scale, unit)} to {show(high / scale, unit)}"
    )


def _capacity(records: Sequence[Record], half: str, column: str) -> Entry:
    row, record = "maximum parameters", capacity_record(records, half)
    entry = Entry(table=HALVES[half].table, row=row, column=column, question="as published")
    spread = capacity_choices(record).spread(column) if record is not None else None
    if record is None or spread is None:
        return _without(records, "capacity", half, entry)
    if not spread.high:
        return replace(entry, record=record, status="out_of_memory",
            reason="nothing fits under any combination", note=CAPACITY,
        )  # fmt: skip
    return replace(
        entry,
        quantity=ranged(row, "parameters", spread),
        spread=spread,
        record=record,
        note=CAPACITY + _nothing(capacity_choices(record).columns[column]),
    )


def _nothing(values: Sequence[float | None]) -> str:
    none = sum(not value for value in values)
    return f"; under {none} of {len(values)} combinations nothing fits" if none else ""


def _any_count(records: Sequence[Record], half: str, column: str) -> Entry:
    key = {"half": half, "column": column, "attention": JUDGED_ATTENTION[half], "precision": "float32"}
    record = find(records, part="largest", **key)
    quantity = record.quantity("parameters") if record is not None else None
    return Entry(
        table=HALVES[half].table,
        row=ANY_COUNT,
        column=column,
        quantity=quantity if quantity is not None and quantity.value is not None else None,
        record=record,
        not_comparable=CONTEXT,
    )


def _without(records: Sequence[Record], part: str, half: str, entry: Entry) -> Entry:
    """A prediction that has no record, or one without a number."""
    record = find(records, part=part, half=half)
    return replace(
        entry,
        record=record,
        status=record.status if record is not None else "done",
        reason=record.reason if record is not None else "",
    )


def _claim(records: Sequence[Record], row: str, half: str, over: str, under: str) -> Entry:
    """How many times larger what fits is, both under the same settings."""
    entry = Entry(table="claims", row=row, column=f"{over} / {under}", question="as published")
    record = capacity_record(records, half)
    if record is None:
        return _without(records, "capacity", half, entry)
    choices = capacity_choices(record)
    values = choices.quotient(over, under)
    spread = spread_of(choices.settings, values, choices.names)
    none = sum(value is None for value in values)
    note = "ours is the quotient of the largest models that fit, both under the same settings"
    if none:
        note += f"; under {none} of {len(values)} combinations nothing fits in {under}, so there is none"
    return replace(
        entry,
        quantity=ranged(row, "ratio", spread) if spread is not None else None,
        spread=spread,
        note=note,
        not_comparable="" if spread is not None else f"nothing fits in {under} under any combination",
    )


def _quotient(records: Sequence[Record], row: str, half: str, over: str, under: str) -> Entry:
    """The quotient of the exact counts of the models that the paper names."""
    prediction = hypothesis_record(records, half)
    choices = parameter_choices(prediction) if prediction is not None else None
    spread = (
        spread_of(choices.settings, choices.quotient(over, under), choices.names)
        if choices is not None
        else None
    )
    counts = []
    for column in (over, under):
        record = find(records, part="paper", half=half, column=column, attention=JUDGED_ATTENTION[half])
        quantity = record.quantity("parameters") if record is not None else None
        counts.append(quantity.value if quantity is not None and quantity.value is not None else 0)
    value = counts[0] / counts[1] if all(counts) else None
    return Entry(
        table="claims",
        row=f"quotient of the printed counts, {row}",
        column=f"{over} / {under}",
        question="as published",
        quantity=Quantity(name=row, value=value, unit="ratio", provenance="modelled"),
        spread=_times(spread, 1),
    )
