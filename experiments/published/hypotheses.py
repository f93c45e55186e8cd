"""The settings of a prediction as hypotheses: the middle, every setting changed alone, and the best of all.

All come from what the record keeps, so nothing is predicted again. The best combination is chosen by the
paper's numbers, which a prediction never is; it says how many it is the best of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from gpipe_bench.experiments.published.entries import PART
from gpipe_bench.harness.hypotheses import Hypothesis
from gpipe_bench.harness.paper import PaperCell, load_paper
from gpipe_bench.harness.record import Record, Scalar, of_case

Cell = tuple[str, str, str]

TRIED = "combinations tried"
"""Of the settings of the best one: how many it is the best of."""
EACH_M = "one batch for each M: "


def hypotheses_of(records: Sequence[Record], paper: Sequence[PaperCell] | None = None) -> list[Hypothesis]:
    """Of every model that the records predict. `paper` is the file's numbers by default."""
    cells = load_paper() if paper is None else paper
    printed = {cell.key: cell.target for cell in cells if cell.source == "paper" and cell.kind == "result"}
    return [
        hypothesis
        for record in of_case(records, "done", part=PART)
        for hypothesis in _of_record(record, printed)
    ]


def _of_record(record: Record, printed: Mapping[Cell, float]) -> Iterator[Hypothesis]:
    title, reference = record.details["title"], dict(record.details["reference"])
    cells = _cells(record)
    judged = [number for number, cell in enumerate(cells) if cell in printed]
    middle = {}
    for number in judged:
        table, row, column = cells[number]
        quantity = record.quantity("prediction", table=table, row=row, column=column)
        assert quantity is not None
        assert quantity.value is not None
        middle[cells[number]] = float(quantity.value)
    yield Hypothesis(name=f"{title}: the middle of everything", values=middle, settings=reference)
    for each in record.details["changed"]:
        yield Hypothesis(
            name=f"{title}: {each['setting']} {_text(each['value'])}",
            # A share of nothing has no ratio to the paper's, so it accounts for nothing.
            values={cells[number]: each["values"][number] for number in judged if each["values"][number] > 0},
            settings=reference | {each["setting"]: each["value"]},
        )
    best = _best(record, judged, cells, printed)
    if best is not None:
        values, settings, count = best
        yield Hypothesis(
            name=f"{title}: the best of {count:,} combinations",
            values=values,
            settings=reference | settings | {TRIED: count},
        )


def _cells(record: Record) -> list[Cell]:
    return [(each["cell"][0], each["cell"][1], each["cell"][2]) for each in record.details["predicted"]]


def _best(
    record: Record, judged: Sequence[int], cells: Sequence[Cell], printed: Mapping[Cell, float]
) -> tuple[dict[Cell, float], dict[str, Scalar], int] | None:
    """Values, settings and how many were tried; None where no combination has all numbers."""
    tried = record.details["tried"]
    names = list(tried["settings"])
    combinations = list(product(*tried["settings"].values()))
    found: list[tuple[float, dict[Cell, float], dict[str, Scalar]]] = []
    count = 0
    rows: dict[tuple[Scalar, ...], dict[str, dict[Cell, float]]] = {}
    for number, combination in enumerate(combinations):
        settings = dict(zip(names, combination, strict=True))
        batch = str(settings.get("batch_size", ""))
        values = {cells[cell]: tried["values"][cell][number] for cell in judged}
        if batch.startswith(EACH_M):
            own, first = batch.removeprefix(EACH_M).split(", first ")
            others = tuple(value for name, value in settings.items() if name != "batch_size")
            rows.setdefault((*others, first), {}).setdefault(own, {}).update(
                {cell: value for cell, value in values.items() if value is not None}
            )
        elif all(value is not None for value in values.values()):
            count += 1
            found.append((_distance(values.items(), printed), values, settings))
    others_of = [name for name in names if name != "batch_size"]
    for key, by_batch in rows.items():
        chosen = _row_by_row(key[-1], by_batch, [cells[number] for number in judged], printed)
        if chosen is not None:
            values, batches, many = chosen
            count += many
            settings = {**dict(zip(others_of, key[:-1], strict=True)), "batch_size": EACH_M + batches}
            found.append((_distance(values.items(), printed), values, settings))
    best = min(found, key=lambda each: each[0], default=None)
    return None if best is None or best[0] == math.inf else (best[1], best[2], count)


def _row_by_row(
    first: Scalar,
    by_batch: Mapping[str, Mapping[Cell, float]],
    judged: Sequence[Cell],
    printed: Mapping[Cell, float],
) -> tuple[dict[Cell, float], str, int] | None:
    """With a batch for each row of the table and a given one for the first: the best of every row.

    The distance adds up over rows, so the best of each are the best together.
    """
    values: dict[Cell, float] = {}
    batches, many = [], 1
    for row in dict.fromkeys(cell[1] for cell in judged):
        members = [cell for cell in judged if cell[1] == row]
        options = [
            (_distance([(cell, of[cell]) for cell in members], printed), batch)
            for batch, of in by_batch.items()
            if all(cell in of for cell in members)
        ]
        if not options:
            return None
        many *= len(options)
        _, batch = min(options, key=lambda each: each[0])
        values |= {cell: by_batch[batch][cell] for cell in members}
        batches.append(f"{row}: {batch}")
    return values, ", ".join(batches), many


def _distance(values: Iterable[tuple[Cell, Any]], printed: Mapping[Cell, float]) -> float:
    """Sum of squares of the logarithms of ours over the paper's; infinite where ours is 0."""
    return sum(math.log(value / printed[cell]) ** 2 if value > 0 else math.inf for cell, value in values)


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
