"""What the tables of timed steps have in common: cells, intervals, the paper's column, the replay's error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from gpipe_bench.harness.paper import PaperCell, load_paper
from gpipe_bench.harness.record import Quantity, Record
from gpipe_bench.harness.report.grid import Grid, numbers

SMOKE = "The smoke profile proves the path with models of a few milliseconds; run the short one for numbers."


def published(table: str) -> dict[tuple[str, str, str], PaperCell]:
    return {
        (cell.source, cell.row, cell.column): cell
        for cell in load_paper()
        if cell.table == table and cell.kind != "setting"
    }


def interval(quantity: Quantity | None, why: str = "") -> str:
    """`3.21 [3.15, 3.30]`, or why there is none."""
    if quantity is None or quantity.value is None:
        return f"not run: {why}" if why else "not run"
    if quantity.low is None or quantity.high is None or quantity.low == quantity.high:
        return f"{quantity.value:.2f}"
    return f"{quantity.value:.2f} [{quantity.low:.2f}, {quantity.high:.2f}]"


def percent(quantity: Quantity | None) -> str:
    return "-" if quantity is None or quantity.value is None else f"{100 * quantity.value:.0f} %"


def replay_errors(records: Sequence[Record]) -> str:
    """How far the laid-out steps are from the same steps run on as many devices."""
    lines, errors = [], []
    for record, name, facts in _cells(records):
        error, ran, laid_out = (
            record.quantity(what, **facts["key"]) for what in ("replay error", "real step", "step")
        )
        if error is None or error.value is None or ran is None or laid_out is None:
            continue
        assert ran.value is not None
        assert laid_out.value is not None
        errors.append(abs(error.value))
        lines.append(
            [
                record.details["title"], name, f"{laid_out.value:.1f}", f"{ran.value:.1f}",
                f"{100 * error.value:+.1f} %",
                f"{100 * facts.get('spread', 0.0):.0f} %",
            ]
        )  # fmt: skip
    if not lines:
        return ""
    title = (
        f"Replay against measurement: median absolute error {100 * median(errors):.1f} % over {len(lines)} "
        "cells\n  spread: interquartile range of an action's samples, median over stages and kinds"
    )
    headers = ["", "cell", "replayed (ms)", "measured (ms)", "error", "spread"]
    return Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text()


def _cells(records: Sequence[Record]) -> Iterator[tuple[Record, str, dict[str, Any]]]:
    for record in records:
        if record.status == "done" and "cells" in record.details:
            for name, facts in record.details["cells"].items():
                yield record, name, facts
