"""What the records of the schedules say, in tables of words."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.schedules.grid import NAMES, REMATS
from gpipe_bench.harness.judging.compare import Comparison
from gpipe_bench.harness.records.record import Record, of_case
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.harness.report.table import text_table


def tables(records: Sequence[Record], comparisons: list[Comparison]) -> str:
    """The published numbers first, then ours."""
    parts = [text_table(comparisons)] if comparisons else []
    for record in of_case(records, "done", part="equal costs"):
        parts += [_grid(record, remat) for remat in REMATS]
    return "\n\n".join(parts)


def _grid(record: Record, remat: str) -> str:
    counts = sorted({int(str(quantity.key["M"])) for quantity in record.quantities})
    lines = []
    for name in NAMES:
        line = [name]
        for count in counts:
            found = [
                record.quantity(what, schedule=name, M=count, remat=remat)
                for what in ("step in slots", "bubble", "graphs alive")
            ]
            slots, bubble, alive = [
                each.value for each in found if each is not None and each.value is not None
            ]
            line.append(f"{slots:g}, {100 * bubble:.1f} %, {alive:g}")
        lines.append(line)
    headers = ["", *(f"M={count}" for count in counts)]
    how = "without re-materialization" if remat == "never" else "every micro-batch recomputed"
    return Grid(
        title=f"K = {record.case['num_workers']}, {how}: slots of a step, bubble, graphs alive (replayed)",
        columns=headers,
        lines=lines,
        right=numbers(headers),
    ).text()
