"""Predictions read back from records: entries to be judged, and the text that is printed of them.

What is on record is the middle, the range over all admitted combinations and what each setting does alone. No
torch and no walk is needed here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpipe_bench.experiments.measuring.tables.step_text import SMOKE
from gpipe_bench.experiments.published.elsewhere import errors
from gpipe_bench.harness.paper import PaperCell, load_paper
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.harness.report.width import fill
from gpipe_bench.harness.units import show
from gpipe_bench.harness.unknowns import Unknown, load_unknowns
from gpipe_bench.harness.verdict import Allowed, Entry, Spread, about, at_least, within_factor

PART = "as published"
"""Of the key of a case that predicts; its other key is the model."""

_WORDS: dict[str, Callable[[PaperCell], Allowed]] = {
    "throughput without pipelining, over the accelerators": lambda cell: within_factor(
        _word("relatively_constant_ratio")
    ),
    "Transformer-48: share of a linear speed-up at M >> K": lambda cell: at_least(_word("near_linear_share")),
    "AmoebaNet-D (4, 512): share of a linear speed-up": lambda cell: at_least(_word("near_linear_share")),
    "extra time by recomputation": lambda cell: about(cell, _word("about")),
    "normalized throughput by the text": lambda cell: about(cell, _word("about")),
}
"""What a sentence's words admit, by its row."""


def _word(setting: str) -> Unknown:
    return load_unknowns().find("claims", setting)


def timed(records: Sequence[Record]) -> list[Record]:
    """The records of what ran here, without the predictions."""
    return [record for record in records if record.case.get("part") != PART]


def as_published(records: Sequence[Record]) -> list[Entry]:
    """Our prediction for every number of the paper that the records predict."""
    return [entry for record in of_case(records, "done", part=PART) for entry in _entries(record)]


def _entries(record: Record) -> Iterator[Entry]:
    paper = {cell.key: cell for cell in load_paper() if cell.source == "paper"}
    for table, row, column, spread in _predicted(record):
        cell = paper.get((table, row, column))
        words = _WORDS.get(row)
        yield Entry(
            table=table,
            row=row,
            column=column,
            question="as published",
            quantity=record.quantity("prediction", table=table, row=row, column=column),
            spread=spread,
            allowed=None if words is None or cell is None else words(cell),
            record=record,
            not_comparable=SMOKE if record.profile == "smoke" else "",
            note=_note(record, spread),
        )


def _predicted(record: Record) -> Iterator[tuple[str, str, str, Spread]]:
    for each in record.details["predicted"]:
        table, row, column = each["cell"]
        yield table, row, column, Spread.from_data(each["spread"])


def _note(record: Record, spread: Spread) -> str:
    note = (
        f"Predicted for {record.details['title']} on the paper's accelerators; the range is over "
        f"{spread.combinations:,} combinations of what the paper leaves open."
    )
    return f"{note} {record.details['note']}".strip()


def prediction_text(records: Sequence[Record]) -> str:
    """The predictions of all models on record, and how far the same code is off elsewhere."""
    done = of_case(records, "done", part=PART)
    if not done:
        return ""
    parts = [_grid(record) for record in done]
    found = errors(done[0])
    if found is not None:
        parts.append(fill(found.sentence))
    return "\n\n".join(parts)


def predicted_text(records: Sequence[Record], table: str, row: str, column: str) -> str:
    """`2.98 (2.60 to 3.10)`: middle and range of one prediction, or a dash."""
    for record in of_case(records, "done", part=PART):
        for *cell, spread in _predicted(record):
            quantity = record.quantity("prediction", table=table, row=row, column=column)
            if cell == [table, row, column] and quantity is not None and quantity.value is not None:
                if spread.low == spread.high:
                    return f"{quantity.value:.2f}"
                return f"{quantity.value:.2f} ({spread.low:.2f} to {spread.high:.2f})"
    return "-"


def _grid(record: Record) -> str:
    printed = {
        cell.key: "in words" if cell.form == "words" else cell.printed
        for cell in load_paper()
        if cell.source == "paper"
    }
    lines = []
    for table, row, column, spread in _predicted(record):
        quantity = record.quantity("prediction", table=table, row=row, column=column)
        if quantity is None or quantity.value is None or spread.low == spread.high:
            continue
        lines.append(
            [
                "\n".join(textwrap.wrap(f"{row}, {column}", 44)),
                printed.get((table, row, column), "-"),
                show(quantity.value, quantity.unit, 3),
                f"{show(spread.low, quantity.unit, 3)} to {show(spread.high, quantity.unit, 3)}",
                f"{spread.combinations:,}",
                widest(spread),
            ]
        )
    reference = ", ".join(f"{name} {_shown(value)}" for name, value in record.details["reference"].items())
    middle = textwrap.fill(f"middle: {reference}", 100, initial_indent="  ", subsequent_indent="    ")
    title = f"As published: {record.details['title']} at the paper's size, predicted\n{middle}"
    headers = ["", "paper", "middle", "range", "combinations", "widest alone"]
    note = record.details["note"]
    notes = textwrap.wrap(note, 100, initial_indent="  ", subsequent_indent="  ") if note else []
    return Grid(title=title, columns=headers, lines=lines, notes=notes, right=numbers(headers)).text()


def widest(spread: Spread) -> str:
    """The setting that moves a number most when it alone changes."""
    most = max(spread.parts, key=lambda part: part.high - part.low, default=None)
    return "-" if most is None else f"{most.what} ({most.low:.3g} to {most.high:.3g})"


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
