"""The paper's tables as our one declared configuration gives them, from records: no torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import msgspec

from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.paper import SENTENCES, PaperNumber, load_paper
from gpipe_bench.harness.record import Metric, Record, of_case
from gpipe_bench.harness.report.grid import fill, numbers_text
from gpipe_bench.harness.reproduction import (
    Cell,
    Kind,
    PredictorError,
    Published,
    of_quotient,
    predictor_errors,
    summed,
)
from gpipe_bench.harness.units import convert, show
from gpipe_bench.harness.verdict import Part, Result, Spread

PART = "reproduction"
KINDS: dict[str, Kind] = {"ratio": "ratios of speeds", "samples/s": "speeds", "GiB": "bytes"}
"""What is published by its unit."""
BASELINE = "the paper's own run does not fit under the declared choices"
CLAIMS = (
    ("AmoebaNet: largest on 8 accelerators over naive-1", "amoebanet", "pipeline-8", "naive-1"),
    ("Transformer: largest on 128 partitions over naive-1", "transformer", "pipeline-128", "naive-1"),
    ("Transformer: larger by re-materialization alone", "transformer", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger on one accelerator", "amoebanet", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger from 1 to 8 accelerators", "amoebanet", "pipeline-8", "pipeline-1"),
)
"""Row, half and the two columns that are divided."""
EXTRA = "extra time by recomputation"


@functools.cache
def errors() -> dict[Kind, PredictorError]:
    """The predictor's error, from what the reference records make of others' published numbers."""
    published = {cell.key: cell for cell in load_paper() if cell.source == "torchgpipe" and not cell.exact}
    found: dict[tuple[str, str, str], Published] = {}
    for path in sorted(REFERENCE.glob("*/predictions.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = msgspec.json.decode(line)
            for number in record["metrics"] if record["status"] == "done" else ():
                key = number["key"]
                place = (key["table"], key["row"], key["column"])
                cell = published.get(place)
                if cell is not None and cell.unit in KINDS and record["profile"] != "smoke":
                    value = convert(number["value"], number["unit"], cell.unit)
                    model = place[0].replace("-accuracy", "").partition("-")
                    name = model[2] if model[0].startswith(("table", "figure")) else model[0]
                    found[place] = Published(name, KINDS[cell.unit], value, cell.value)
    return predictor_errors(found.values())


def error_of(table: str, row: str) -> float:
    """Of a computed number, as a factor less 1."""
    known = errors()
    if table == "claims":
        return of_quotient(known["bytes"].error)
    of_bytes = row in ("peak activation memory", "maximum parameters")
    return known["bytes" if of_bytes else "ratios of speeds"].error


def answers(records: Sequence[Record]) -> list[Result]:
    """Our number for every one of the paper that the records compute, with the predictor's error."""
    return [
        Result(
            table=place[0], row=place[1], column=place[2], question="as published", metric=metric,
            spread=_spread(metric, error_of(place[0], place[1])), record=record,
            not_comparable="" if metric.value is not None else BASELINE,
        )
        for place, metric, record in _computed(records)
    ]  # fmt: skip


def _computed(records: Sequence[Record]) -> Iterable[tuple[tuple[str, str, str], Metric, Record]]:
    for record in of_case(records, "done", part=PART):
        for metric in record.metrics:
            key = metric.key
            yield (str(key["table"]), str(key["row"]), str(key["column"])), metric, record


def _spread(metric: Metric, error: float) -> Spread | None:
    if metric.value is None or metric.value == 1:  # 1 by definition
        return None
    value = float(metric.value)
    if metric.key["row"] == EXTRA:  # a quotient of two times as an increase
        ends = sorted(100 * ((1 + value / 100) * factor - 1) for factor in (1 / (1 + error), 1 + error))
    else:
        ends = sorted((value / (1 + error), value * (1 + error)))
    part = Part(what="error of the predictor", low=ends[0], high=ends[1])
    return Spread(low=ends[0], high=ends[1], parts=(part,))


def cells(records: Sequence[Record]) -> dict[tuple[str, str], tuple[list[Cell], list[Cell]]]:
    """By table of the paper and unit: its results beside ours, and those that are 1 by definition."""
    printed = {cell.key: cell for cell in load_paper() if cell.source == "paper"}
    found: dict[tuple[str, str], tuple[list[Cell], list[Cell]]] = {}
    for place, metric, _ in sorted(_computed(records), key=lambda each: each[0][0]):
        cell = printed.get(place)
        if cell is None or cell.same_as is not None or place[0] == SENTENCES:
            continue
        kept = found.setdefault((cell.table, cell.unit), ([], []))
        kept[cell.kind == "identity"].append(_cell(cell, metric))
    return found


def _cell(cell: PaperNumber, metric: Metric) -> Cell:
    value = None if metric.value is None else convert(metric.value, metric.unit, cell.unit)
    why = BASELINE if value is None else "" if cell.comparable else cell.erratum
    error = error_of(cell.table, cell.row)
    return Cell(cell.row, cell.column, cell.target, cell.target_rounding, value, error, why)


def text(records: Sequence[Record]) -> str:
    """Each table: paper, ours with its error, ours over the paper's, the answer; and its four numbers."""
    printed = {cell.key: cell for cell in load_paper() if cell.source == "paper"}
    parts = []
    for (table, unit), (judged, fixed) in cells(records).items():
        lines = [
            [
                f"{cell.row}, {cell.column}",
                _as_printed(printed[table, cell.row, cell.column]),
                "-" if cell.ours is None else f"{show(cell.ours, unit, 3)} +- {100 * cell.error:.0f} %",
                "-" if cell.ratio is None else f"{cell.ratio:.2f}",
                cell.answer,
            ]
            for cell in judged
        ]
        headers = ["", "paper", "ours, computed", "ours / paper", ""]
        title = f"{table}: computed at the paper's size, under one declared configuration"
        parts.append(numbers_text(title, headers, lines, fill(str(summed(judged, fixed)))))
    if parts:
        known = "; ".join(f"{kind} {error}" for kind, error in errors().items())
        parts.append(fill(f"The predictor's error, on numbers that torchgpipe published: {known}."))
    return "\n\n".join(parts)


def _as_printed(cell: PaperNumber) -> str:
    return cell.printed + (f" (means {cell.corrected_printed})" if cell.corrected_printed else "")


SECONDS = {
    "table1": {"amoebanet": 27.0, "transformer": 4.0}, "table2": {"amoebanet": 8.0, "transformer": 9.0},
    "table3": {"amoebanet": 16.0, "transformer": 3.0}, "figure3": {"resnet101": 6.0, "amoebanet": 10.0},
    "table4": {"resnet101": 6.0},
}  # fmt: skip
"""By experiment and model, what computing takes."""


def cases(experiment: str, options: RunOptions) -> list[Case]:
    """One for each model of the experiment, but of the smoke profile: these are of the paper's size."""
    found = {} if options.profile == "smoke" else SECONDS[experiment]
    return [Case({"part": PART, "model": model}, seconds) for model, seconds in found.items()]


def is_computed(case: Case) -> bool:
    """Whether the case computes the paper's numbers."""
    return case.key.get("part") == PART


def timed(records: Sequence[Record]) -> list[Record]:
    """The records of what ran here."""
    return [record for record in records if record.case.get("part") != PART]
