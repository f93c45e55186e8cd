"""Our numbers for the cells of Table 1 and of the claims made from it, from records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpipe_bench.experiments.table1.settings import (
    CLAIMS,
    Choices,
    activation_choices,
    capacity_choices,
    capacity_record,
    hypothesis_record,
    parameter_choices,
    possible,
    ranged,
)
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.paper import SENTENCES
from gpipe_bench.harness.record import Quantity, Record, find
from gpipe_bench.harness.report.table import ours_text, paper_text, verdict_text
from gpipe_bench.harness.units import show
from gpipe_bench.harness.verdict import Answer, Comparison, Spread
from gpipe_bench.models.paper import COLUMNS, HALVES

BYTES_PER_PARAMETER = 12
JUDGED_ATTENTION = {"amoebanet": "none", "transformer": "explicit"}
"""The softmax of 2019 was kept in memory."""

ACTIVATIONS = (
    "ours is the sum over the accelerators of what comes and goes in a step, under the combinations of what "
    "the paper leaves open"
)
CAPACITY = (
    "ours is the largest model on the grid of what may have been tried, at the paper's number of "
    "micro-batches and cut by its rule, in the memory that an accelerator may have had"
)
QUOTIENT = "ours is the quotient of the largest models that fit, both under the same settings"
ANY_COUNT = "maximum parameters, any number of micro-batches"
"""A row of ours: what this engine can do."""
CONTEXT = (
    "context: with as many micro-batches as the model needs and the cut that memory likes best, which the "
    "paper's numbers are not about"
)


def cells(records: Sequence[Record]) -> list[Answer]:
    found: list[Answer] = []
    known = {half: _Half.of(records, half) for half in HALVES}
    for half, of in known.items():
        for column in COLUMNS[half]:
            found += [
                _parameters(records, of, half, column.name, "parameters", 1),
                _parameters(records, of, half, column.name, "parameter memory", BYTES_PER_PARAMETER),
                _activations(records, of, half, column.name),
                _capacity(records, of, half, column.name),
                _any_count(records, half, column.name),
            ]
    for row, half, over, under in CLAIMS:
        found.append(_claim(records, known[half], row, half, over, under))
        found.append(_quotient(records, known[half], row, half, over, under))
    return found + _sentences(known)


class _Half(NamedTuple):
    """What the records say of one half under every combination."""

    memory: Record | None
    activations: Choices | None
    fitting: Choices | None  # those of the activations under which the paper's models fit
    parameters: Choices | None
    largest: Record | None
    capacity: Choices | None

    @classmethod
    def of(cls, records: Sequence[Record], half: str) -> _Half:
        memory, largest = hypothesis_record(records, half), capacity_record(records, half)
        every = None if memory is None else activation_choices(memory)
        return cls(
            memory,
            every,
            None if every is None or memory is None else every.of(possible(memory)),
            None if memory is None else parameter_choices(memory),
            largest,
            None if largest is None else capacity_choices(largest),
        )


def _parameters(records: Sequence[Record], of: _Half, half: str, column: str, row: str, each: int) -> Answer:
    """An exact count, or so many bytes for each; a range where the model's own options are not stated."""
    record = find(records, part="paper", half=half, column=column, attention=JUDGED_ATTENTION[half])
    spread = None if of.parameters is None else of.parameters.spread(of.parameters.columns[column])
    return Answer(
        table=HALVES[half].table,
        row=row,
        column=column,
        question="as published",
        quantity=record.quantity(row) if record is not None else None,
        spread=_times(spread, each),
        record=record,
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


def _activations(records: Sequence[Record], of: _Half, half: str, column: str) -> Answer:
    row = "peak activation memory"
    entry = Answer(
        table=HALVES[half].table, row=row, column=column, question="as published",
        record=find(records, part="hypotheses", half=half),
    )  # fmt: skip
    if of.memory is None or of.activations is None or of.fitting is None:
        return entry
    tried, values = len(of.activations.settings), of.fitting.columns[column]
    spread = of.fitting.spread(values)
    if spread is None:
        return entry
    alone = of.memory.details["columns"][column]["fits"].count("1")
    return replace(
        entry,
        quantity=ranged(row, "bytes", of.fitting.middle(values)),
        spread=spread,
        others_tried=tried - len(values),  # under which the models do not fit
        note=(
            f"{ACTIVATIONS} under which the paper's models fit ({len(values):,} of "
            f"{tried:,}); this one by itself fits under {f'{alone:,}' if alone else 'none'}"
        ),
    )


def _capacity(records: Sequence[Record], of: _Half, half: str, column: str) -> Answer:
    row, choices = "maximum parameters", of.capacity
    entry = Answer(
        table=HALVES[half].table, row=row, column=column, question="as published",
        record=find(records, part="capacity", half=half),
    )  # fmt: skip
    if choices is None:
        return entry
    values = choices.columns[column]
    spread = choices.spread(values)
    if spread is None:
        return entry
    if not spread.high:
        why = "nothing fits under any combination"
        return replace(entry, status="out_of_memory", reason=why, note=CAPACITY)
    none = sum(not value for value in values)
    nothing = f"; under {none} of {len(values)} combinations nothing fits" if none else ""
    quantity = ranged(row, "parameters", choices.middle(values))
    return replace(entry, quantity=quantity, spread=spread, note=CAPACITY + nothing)


def _any_count(records: Sequence[Record], half: str, column: str) -> Answer:
    key = {"half": half, "column": column, "attention": JUDGED_ATTENTION[half], "precision": "float32"}
    record = find(records, part="largest", **key)
    quantity = record.quantity("parameters") if record is not None else None
    return Answer(
        table=HALVES[half].table,
        row=ANY_COUNT,
        column=column,
        quantity=quantity if quantity is not None and quantity.value is not None else None,
        record=record,
        not_comparable=CONTEXT,
    )


def _claim(records: Sequence[Record], of: _Half, row: str, half: str, over: str, under: str) -> Answer:
    """How many times larger what fits is, both under the same settings."""
    entry = Answer(table="claims", row=row, column=f"{over} / {under}", question="as published")
    choices = of.capacity
    if choices is None:
        return replace(entry, record=find(records, part="capacity", half=half))
    values = choices.quotient(over, under)
    spread = choices.spread(values)
    none = sum(value is None for value in values)
    note = QUOTIENT
    if none:
        note += f"; under {none} of {len(values)} combinations nothing fits in {under}, so there is none"
    if spread is None:
        return replace(entry, note=note, not_comparable=f"nothing fits in {under} under any combination")
    return replace(entry, quantity=ranged(row, "ratio", choices.middle(values)), spread=spread, note=note)


def _quotient(records: Sequence[Record], of: _Half, row: str, half: str, over: str, under: str) -> Answer:
    """The quotient of the exact counts of the models that the paper names."""
    choices = of.parameters
    spread = choices.spread(choices.quotient(over, under)) if choices is not None else None
    counts = []
    for column in (over, under):
        record = find(records, part="paper", half=half, column=column, attention=JUDGED_ATTENTION[half])
        quantity = record.quantity("parameters") if record is not None else None
        counts.append(quantity.value if quantity is not None and quantity.value is not None else 0)
    value = counts[0] / counts[1] if all(counts) else None
    return Answer(
        table="claims",
        row=f"quotient of the printed counts, {row}",
        column=f"{over} / {under}",
        question="as published",
        quantity=Quantity(name=row, value=value, unit="ratio", provenance="modelled"),
        spread=_times(spread, 1),
    )


PER_ACCELERATOR = (
    ("Transformer-L: largest model, per accelerator", "transformer", 128),
    ("AmoebaNet-D: largest model, per accelerator", "amoebanet", 8),
)
"""Row, half, and how many accelerators are set against one."""


def _sentences(known: Mapping[str, _Half]) -> list[Answer]:
    """An entry for each sentence that the records suffice for."""
    found = []
    for row, half, most in PER_ACCELERATOR:
        choices = known[half].capacity
        if choices is None:
            continue
        quotients = choices.quotient(f"pipeline-{most}", "pipeline-1")
        values = [None if value is None else value / most for value in quotients]
        spread = choices.spread(values)
        if spread is None:
            continue
        found.append(
            Answer(
                table=SENTENCES,
                row=row,
                column=f"pipeline-{most} over pipeline-1",
                question="as published",
                quantity=ranged(row, "ratio", choices.middle(values)),
                spread=spread,
                record=known[half].largest,
                note=f"{QUOTIENT}, over the number of accelerators",
            )
        )
    return found


def table(records: Sequence[Record]) -> str:
    """Both halves of Table 1 as markdown: paper, ours, verdict."""
    comparisons = {c.place: c for c in compare(cells(records))}
    return "\n\n".join(_half(half, records, comparisons) for half in HALVES)


def _half(half: str, records: Sequence[Record], comparisons: dict[tuple[str, str, str], Comparison]) -> str:
    data, columns = HALVES[half], COLUMNS[half]
    lines = [
        f"| {data.model}, {data.cap_gib} GiB each | {' | '.join(column.name for column in columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for row in ("parameters", "parameter memory", "peak activation memory"):
        found = [comparisons[data.table, row, column.name] for column in columns]
        lines.append(f"| {row}: paper | {' | '.join(paper_text(cell) or '–' for cell in found)} |")
        text = [_range(cell) if row == "peak activation memory" else ours_text(cell) or "-" for cell in found]
        lines.append(f"| ours (modelled) | {' | '.join(text)} |")
        lines.append(f"| verdict | {' | '.join(verdict_text(cell, ', x') for cell in found)} |")
    found = [comparisons[data.table, "maximum parameters", column.name] for column in columns]
    lines.append(f"| **largest at the paper's M** | {' | '.join(map(_range, found))} |")
    lines.append(f"| verdict | {' | '.join(verdict_text(cell, ', x') for cell in found)} |")
    key = {"half": half, "attention": JUDGED_ATTENTION[half], "precision": "float32"}
    largest = [find(records, part="largest", column=column.name, **key) for column in columns]
    lines.append(f"| largest here, any M | {' | '.join(map(_largest, largest))} |")
    return "\n".join(lines)


def _range(cell: Comparison) -> str:
    if cell.range_low is None or cell.range_high is None:
        return "-"
    return f"{show(cell.range_low, cell.unit, 3)} to {show(cell.range_high, cell.unit, 3)}"


def _largest(record: Record | None) -> str:
    quantity = record.quantity("parameters") if record is not None else None
    if record is None or quantity is None or quantity.value is None:
        return "nothing fits"
    placement = record.details["placement"]
    size = f"({placement['num_layers']}, {placement['num_filters']})"
    if not placement["num_filters"]:
        size = f"L = {placement['num_layers']}"
    return f"{size}: {show(quantity.value, quantity.unit, 3)}"
