"""Our numbers for the cells of Table 1 and of the claims made from it, from records alone."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.record import Metric, Record, find
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.report.table import computed_markdown
from gpipe_bench.harness.verdict import Result
from gpipe_bench.models.paper import COLUMNS, HALVES

JUDGED_ATTENTION = {"amoebanet": "none", "transformer": "explicit"}
"""The softmax of 2019 was kept in memory."""
ANY_COUNT = "maximum parameters, any number of micro-batches"
"""A row of ours: what this engine can do."""
CONTEXT = (
    "context: with as many micro-batches as the model needs and the cut that memory likes best, which the "
    "paper's numbers are not about"
)


def cells(records: Sequence[Record]) -> list[Result]:
    found: list[Result] = []
    for half in HALVES:
        for column in COLUMNS[half]:
            found += [
                _parameters(records, half, column.name, "parameters"),
                _parameters(records, half, column.name, "parameter memory"),
                _any_count(records, half, column.name),
            ]
    found += [_quotient(records, *claim) for claim in reproduced.CLAIMS]
    return found + reproduced.answers(records)


def _parameters(records: Sequence[Record], half: str, column: str, row: str) -> Result:
    """An exact count, or so many bytes for each."""
    record = find(records, part="paper", half=half, column=column, attention=JUDGED_ATTENTION[half])
    return Result(
        table=HALVES[half].table, row=row, column=column, question="as published",
        metric=record.metric(row) if record is not None else None, record=record,
    )  # fmt: skip


def _any_count(records: Sequence[Record], half: str, column: str) -> Result:
    key = {"half": half, "column": column, "attention": JUDGED_ATTENTION[half], "precision": "float32"}
    record = find(records, part="largest", **key)
    metric = record.metric("parameters") if record is not None else None
    return Result(
        table=HALVES[half].table,
        row=ANY_COUNT,
        column=column,
        metric=metric if metric is not None and metric.value is not None else None,
        record=record,
        not_comparable=CONTEXT,
    )


def _quotient(records: Sequence[Record], row: str, half: str, over: str, under: str) -> Result:
    """The quotient of the exact counts of the models that the paper names."""
    counts = []
    for column in (over, under):
        record = find(records, part="paper", half=half, column=column, attention=JUDGED_ATTENTION[half])
        metric = record.metric("parameters") if record is not None else None
        counts.append(metric.value if metric is not None and metric.value is not None else 0)
    value = counts[0] / counts[1] if all(counts) else None
    return Result(
        table="claims", row=f"quotient of the printed counts, {row}", column=f"{over} / {under}",
        question="as published",
        metric=Metric(name=row, value=value, unit="ratio", provenance="modelled"),
    )  # fmt: skip


def table(records: Sequence[Record]) -> str:
    """Both halves of Table 1 as markdown: paper, ours with its error, ours / paper, answer."""
    names = {half.table for half in HALVES.values()}
    return computed_markdown([cell for cell in compare(cells(records)) if cell.table in names])
