"""Both halves of Table 1 for the README: one line for the paper, one for ours, one for the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.paper_models import COLUMNS, HALVES
from gpipe_bench.experiments.table1.cells import JUDGED_ATTENTION, cells
from gpipe_bench.harness.judging.compare import Comparison, compare
from gpipe_bench.harness.judging.units import show
from gpipe_bench.harness.records.record import Record, find
from gpipe_bench.harness.report.table import ours_text, paper_text, verdict_text


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
        lines.append(f"| {row}: paper | {' | '.join(paper_text(cell) for cell in found)} |")
        text = [_range(cell) if row == "peak activation memory" else ours_text(cell, "-") for cell in found]
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
