"""Shows the paper's tables as computed under our declared configuration, from records, without torch."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import correlation, median
from typing import NamedTuple

import msgspec

from .. import REFERENCE
from ..compare import compare
from ..experiment import Case, RunOptions
from ..paper import SENTENCES, convert, load_paper, of_the_paper, percent, show
from ..record import REPRODUCTION, Record, of_case
from ..reproduction import (
    Kind,
    PredictorError,
    Published,
    load_reproduction,
    of_increase,
    of_quotient,
    predictor_errors,
)
from ..verdict import Answer, Comparison, Result, Spread
from .grid import fill, numbers_text
from .table import is_beside

Place = tuple[str, str, str]
"""Table, row and column."""
KINDS: dict[str, Kind] = {"ratio": "ratios of speeds", "samples/s": "speeds", "GiB": "bytes"}
"""Kind of a published number by its unit; the predictor's error depends on the kind."""
BASELINE = "the paper's own run does not fit under the declared choices"
CLAIMS = (
    ("AmoebaNet: largest on 8 accelerators over naive-1", "amoebanet", "pipeline-8", "naive-1"),
    ("Transformer: largest on 128 partitions over naive-1", "transformer", "pipeline-128", "naive-1"),
    ("Transformer: larger by re-materialization alone", "transformer", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger on one accelerator", "amoebanet", "pipeline-1", "naive-1"),
    ("AmoebaNet: larger from 1 to 8 accelerators", "amoebanet", "pipeline-8", "pipeline-1"),
)
"""Row, half of Table 1, and the two columns whose quotient it is."""
EXTRA = "extra time by recomputation"
NEXT = "recomputation over the next largest overhead"
STRIDE = "control-stride"
COUNTED = "parameters over the original's"
"""The row that is a quotient of two exact counts."""
TESTED: tuple[Answer, ...] = ("agrees", "differs", "no test")  # possible answers for a computed number


@functools.cache
def errors() -> dict[Kind, PredictorError]:
    """The predictor's error by kind, from the reference records' predictions of others' published numbers."""
    published = {cell.key: cell for cell in load_paper() if cell.source == "torchgpipe" and not cell.exact}
    found: dict[Place, Published] = {}
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


def error_of(table: str, row: str, value: float | None = None) -> float:
    """The relative error of a computed number, as a factor minus 1. `value` is in per cent. A share of the
    step has the error of its part over the rest, times the remaining share; an increase has its quotient's
    error, over the increase.
    """
    if row == COUNTED:
        return 0.0
    known = errors()[_kind(table, row)].error
    if table.startswith("breakdown") and value is not None:
        return known * (1 - value / 100)
    if row == EXTRA and value is not None:
        return of_increase(known, value / 100)
    return of_quotient(known) if row == NEXT or table in ("claims", STRIDE) else known


def _kind(table: str, row: str) -> Kind:
    of_bytes = table in ("claims", STRIDE) or row in ("peak activation memory", "maximum parameters")
    return "bytes" if of_bytes else "ratios of speeds"


def answers(records: Sequence[Record]) -> list[Result]:
    """Our number for every number of the paper that the records compute, with the predictor's error."""
    found = []
    for record in of_case(records, "done", part=REPRODUCTION):
        late = load_reproduction().declared_afterwards({str(each.key["table"]) for each in record.metrics})
        for metric in record.metrics:
            table, row, column = (str(metric.key[name]) for name in ("table", "row", "column"))
            value, error = metric.value, error_of(table, row, metric.value)
            found.append(
                Result(
                    table=table, row=row, column=column, question="as published", metric=metric,
                    spread=None if value in (None, 1) else spread(row, float(value or 0), error),
                    error=error, record=record, not_comparable=BASELINE if value is None else late,
                    note="" if value is None else metric.note,
                )
            )  # fmt: skip
    return found


def spread(row: str, value: float, error: float) -> Spread:
    """The range of a computed number with this error."""
    rest = 0.0
    if row == EXTRA:  # an increase: its error is that of the quotient of two times
        rest, error = 100.0, error * value / (100 + value)
    low, high = ((value + rest) * factor - rest for factor in (1 / (1 + error), 1 + error))
    return Spread(low=low, high=high, parts=("error of the predictor",))


Cells = tuple[list[Comparison], list[Comparison]]
"""Comparisons of a table in one unit: computed ones, and those that are 1 by definition."""


def cells(records: Sequence[Record]) -> dict[tuple[str, str], Cells]:
    """The records' computed numbers beside the paper's, by (table of the paper, unit)."""
    return _by_table(compare(answers(records), whole=()))


def _by_table(comparisons: Iterable[Comparison]) -> dict[tuple[str, str], Cells]:
    printed = of_the_paper()
    found: dict[tuple[str, str], Cells] = {}
    for cell in sorted(comparisons, key=lambda each: each.table):
        number, metric = printed.get(cell.place), cell.entry and cell.entry.metric
        if metric and number is not None and number.same_as is None and cell.table != SENTENCES:
            kept = found.setdefault((cell.table, cell.unit), ([], []))
            kept[cell.kind == "identity"].append(cell)
    return found


def by_the_bubble(cells: Sequence[Comparison], fixed: Sequence[Comparison]) -> list[Comparison]:
    """A baseline for the cells: speeds by the bubble's formula alone, K M / (M + K - 1), over that of the
    cell that is 1. Empty if the cells are not over K and M.
    """

    def speed(cell: Comparison) -> float:
        m, k = (int(label.partition("=")[2]) for label in (cell.row, cell.column))
        return k * m / (m + k - 1)

    if not fixed or not all(cell.row[:2] + cell.column[:2] == "M=K=" for cell in (*cells, *fixed)):
        return []
    found = []
    for cell in cells:
        if (entry := cell.entry) is not None and entry.metric is not None:
            value = speed(cell) / speed(fixed[0])
            metric, ends = replace(entry.metric, value=value), spread(cell.row, value, entry.error)
            found.append(replace(entry, metric=metric, spread=ends, not_comparable=""))
    return compare(found, whole=())


class Summed(NamedTuple):
    """The summary of a table.

    Args:
        counts: number of cells with each answer
        off: the median of |ours / paper - 1|; None without a number
        rank: Spearman's correlation; None below three cells, or if one side is constant
        directions: number of neighbouring pairs that change as the paper's do
        pairs: number of neighbouring pairs
    """

    counts: Counter[Answer]
    off: float | None
    rank: float | None
    directions: int
    pairs: int

    def __str__(self) -> str:
        counts = ", ".join(f"{self.counts[word]} {word}" for word in TESTED)
        return "; ".join(filter(None, [counts, self.numbers]))

    @property
    def numbers(self) -> str:
        """The summary's numbers without the counts, in words."""
        parts = []
        if self.off is not None:
            parts.append(f"median |ours / paper - 1| {100 * self.off:.0f} %")
        if self.rank is not None:
            parts.append(f"rank correlation {self.rank:.2f}")
        if self.pairs:
            parts.append(f"{self.directions} of {self.pairs} directions are the paper's")
        return "; ".join(parts)


def summed(cells: Sequence[Comparison], fixed: Sequence[Comparison] = ()) -> Summed:
    """The summary of some cells; cells that are 1 by definition (`fixed`) count only for directions.

    Neighbours are cells of one row in the order of columns, or of one column in the order of rows.
    """
    known = [pair for cell in cells if (pair := _numbers(cell))]
    moves = [
        (b[0] - a[0], b[1] - a[1])
        for one, other in _neighbours([*cells, *fixed])
        if (a := _numbers(one)) and (b := _numbers(other)) and a[0] != b[0]
    ]
    return Summed(
        Counter(cell.answer for cell in cells),
        median(abs(ours / paper - 1) for paper, ours in known) if known else None,
        _rank_correlation(known),
        sum(paper * ours > 0 for paper, ours in moves),
        len(moves),
    )


def _numbers(cell: Comparison) -> tuple[float, float] | None:
    """The paper's number and ours; None if one is missing."""
    return None if cell.target is None or cell.ours is None else (cell.target, cell.ours)


def _neighbours(cells: Sequence[Comparison]) -> Iterable[tuple[Comparison, Comparison]]:
    for of_line, along in (("row", "column"), ("column", "row")):
        lines: dict[str, list[tuple[float, Comparison]]] = {}
        for cell in cells:
            if (number := _number(getattr(cell, along))) is not None:
                lines.setdefault(getattr(cell, of_line), []).append((number, cell))
        for line in lines.values():
            yield from pairwise(cell for _, cell in sorted(line, key=lambda each: each[0]))


def _number(label: str) -> float | None:
    """`8` for "K=8" and "pipeline-8"; naive columns come first. None for a label without a number."""
    digits = "".join(letter for letter in label.partition(" ")[0] if letter.isdigit())
    return float(digits) - 0.5 * label.startswith("naive") if digits else None


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's correlation, with mean ranks of ties; None below three pairs or if one side is constant."""
    if len(pairs) < 3 or any(len(set(side)) < 2 for side in zip(*pairs, strict=True)):
        return None
    ordered = [sorted(side) for side in zip(*pairs, strict=True)]
    ranks = [
        [line.index(value) + (line.count(value) - 1) / 2 for value in side]
        for line, side in zip(ordered, zip(*pairs, strict=True), strict=True)
    ]
    return correlation(*ranks)


def text(comparisons: Sequence[Comparison], *, notes: bool = False) -> str:
    """Each table of the paper, computed at the paper's size beside what ran here, with the summaries of both.

    Computed numbers have an error and an answer; numbers of scaled models that ran here are not judged.

    Args:
        comparisons: an experiment's; the paper's sentences are left out
        notes: whether to add notes on single numbers
    """
    computed = [cell for cell in comparisons if cell.is_computed]
    tables, beside = _by_table(computed), _by_table(filter(is_beside, comparisons))
    parts = [
        _table(table, unit, tables.get((table, unit)), beside.get((table, unit)), notes=notes)
        for table, unit in sorted({*tables, *beside})
    ]
    if tables:
        kinds = {_kind(each.table, each.row) for each in computed}
        known = "; ".join(f"{kind} {error}" for kind, error in errors().items() if kind in kinds)
        parts.append(fill(f"The predictor's error, on numbers that torchgpipe published: {known}."))
    return "\n\n".join(parts)


def _table(table: str, unit: str, computed: Cells | None, beside: Cells | None, *, notes: bool) -> str:
    ours, theirs = ({each.place: each for each in found[0]} if found else {} for found in (computed, beside))
    every = {**theirs, **ours}
    cells = {place: every[place] for place in of_the_paper() if place in every}
    varies = [at for at in (1, 2) if len({place[at] for place in cells}) > 1] or [1, 2]

    def label(place: Place) -> str:
        """Row and column, without what is the same in the whole table."""
        return ", ".join(place[at] for at in varies)

    def of_each(found: Cells | None) -> list[tuple[str, str]]:
        """The note of each of our numbers."""
        return [(label(each.place), each.entry.note) for of in found or () for each in of if each.entry]

    def number(cell: Comparison | None) -> list[str]:
        if cell is None or cell.ours is None or cell.ratio is None:
            return ["-", "-"]
        error = cell.entry.error if cell.entry is not None else 0.0
        return [show(cell.ours, unit, 3) + f" +- {percent(error)}" * bool(error), f"{cell.ratio:.2f}"]

    headers = ["", "paper"] + ["torchgpipe"] * any(cell.peer_printed for cell in cells.values())
    headers += ["computed", "/ paper", ""] if computed else []
    if beside is not None:
        entries = [each.entry for found in beside for each in found]
        (provenance, *_) = {each.metric.provenance for each in entries if each and each.metric}
        headers += [f"here, {provenance}", "/ paper"]
    lines = []
    for place, cell in cells.items():
        line = [label(place), cell.paper_text]
        if "torchgpipe" in headers:
            line.append(cell.peer_printed or "-")
        if computed is not None:
            line += [*number(ours.get(place)), ours[place].answer if place in ours else ""]
        if beside is not None:
            line += number(theirs.get(place))
        lines.append(line)
    below = [f"computed at the paper's size, as declared: {summed(*computed)}"] if computed else []
    if computed and (bare := by_the_bubble(*computed)):
        below.append(f"baseline, the bubble's formula alone with the same error: {summed(bare, computed[1])}")
    below += [f"run here, not judged: {summed(*beside).numbers}"] if beside else []
    below = [fill(each, rest="  ") for each in below]
    whys = [(label(place), cell.reason) for place, cell in ours.items() if cell.verdict == "not comparable"]
    below += _notes([*whys, *of_each(computed)], len(cells))
    if notes:
        own = of_each(beside)
        numbers = [of_the_paper()[place] for place in cells]
        papers = [(label(each.key), note) for each in numbers for note in (each.erratum, each.note)]
        below += _notes([*own, *papers], len(cells))
    same = [next(iter(cells))[at] for at in (1, 2) if at not in varies]
    return numbers_text(": ".join([table, *same]), headers, lines, "", *below)


def _notes(said: Iterable[tuple[str, str]], every: int) -> list[str]:
    """Each distinct note once, with the labels of its numbers, unless it is about all."""
    places: dict[str, list[str]] = {}
    for label, note in said:
        if note:
            places.setdefault(note, []).append(label)
    return [
        fill(note if len(about) >= every else f"{'; '.join(about)}: {note}", "- ", "  ")
        for note, about in places.items()
    ]


SECONDS = {
    "table1": {"amoebanet": 27.0, "transformer": 10.0}, "table2": {"amoebanet": 8.0, "transformer": 2.0},
    "table3": {"amoebanet": 16.0, "transformer": 1.0}, "figure3": {"resnet101": 3.0, "amoebanet": 10.0},
    "table4": {"resnet101": 3.0}, "computed": {STRIDE: 12.0},
}  # fmt: skip
"""Estimated seconds of computing, by experiment and model."""
SMOKE_S = 3.0  # longest case of the smoke profile


def cases(experiment: str, options: RunOptions) -> list[Case]:
    """One case per model at the paper's size; in the smoke profile only those that take a few seconds."""
    most_s = SMOKE_S if options.profile == "smoke" else math.inf
    found = {model: seconds for model, seconds in SECONDS[experiment].items() if seconds <= most_s}
    return [Case({"part": REPRODUCTION, "model": model}, seconds) for model, seconds in found.items()]


def is_computed(case: Case) -> bool:
    """Whether the case computes the paper's numbers."""
    return case.key.get("part") == REPRODUCTION
