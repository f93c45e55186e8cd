"""The paper's tables as our one declared configuration gives them, from records: no torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import msgspec

from gpipe_bench.harness import REFERENCE
from gpipe_bench.harness.compare import peers_of
from gpipe_bench.harness.experiment import Case, RunOptions
from gpipe_bench.harness.paper import SENTENCES, PaperNumber, load_paper, of_the_paper
from gpipe_bench.harness.record import REPRODUCTION, Metric, Record, of_case
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
from gpipe_bench.harness.verdict import Comparison, Part, Result, Spread

Place = tuple[str, str, str]
"""Table, row and column."""
KINDS: dict[str, Kind] = {"ratio": "ratios of speeds", "samples/s": "speeds", "GiB": "bytes"}
"""Kind of a published number, by its unit."""
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
STRIDE = "control-stride"
COUNTED = "parameters over the original's"
"""The row of a quotient of two exact counts."""


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


def percent(error: float) -> str:
    """`55 %`, `7.6 %`: so many digits that a reader can check an answer."""
    return f"{100 * error:.{0 if error >= 0.1 else 1}f} %"


def error_of(table: str, row: str, value: float | None = None) -> float:
    """The error of a computed number, as a factor minus 1.

    The error of a share of the step, whose `value` is in per cent, is that of the ratio of its part to the
    rest, times the share that is left: s = r / (1 + r), so ds / s = (1 - s) dr / r.
    """
    if row == COUNTED:
        return 0.0
    known = errors()[_kind(table, row)].error
    if table.startswith("breakdown") and value is not None:
        return known * (1 - value / 100)
    return of_quotient(known) if table in ("claims", STRIDE) else known


def _kind(table: str, row: str) -> Kind:
    of_bytes = table in ("claims", STRIDE) or row in ("peak activation memory", "maximum parameters")
    return "bytes" if of_bytes else "ratios of speeds"


def answers(records: Sequence[Record]) -> list[Result]:
    """Our number for every one of the paper that the records compute, with the predictor's error."""
    return [
        Result(
            table=place[0], row=place[1], column=place[2], question="as published", metric=metric,
            spread=_spread(metric, error_of(*place[:2], metric.value)), record=record,
            not_comparable="" if metric.value is not None else BASELINE,
        )
        for place, metric, record in _computed(records)
    ]  # fmt: skip


def _computed(records: Sequence[Record]) -> Iterable[tuple[tuple[str, str, str], Metric, Record]]:
    for record in of_case(records, "done", part=REPRODUCTION):
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
    """By (table of the paper, unit): cells with the paper's number beside ours, and cells of the value 1."""
    return _by_table(answers(records))


def _by_table(entries: Iterable[Result]) -> dict[tuple[str, str], tuple[list[Cell], list[Cell]]]:
    printed = of_the_paper()
    found: dict[tuple[str, str], tuple[list[Cell], list[Cell]]] = {}
    for entry in sorted(entries, key=lambda each: each.table):
        cell, metric = printed.get(entry.place), entry.metric
        if cell is None or metric is None or cell.same_as is not None or entry.table == SENTENCES:
            continue
        kept = found.setdefault((cell.table, cell.unit), ([], []))
        kept[cell.kind == "identity"].append(_cell(cell, metric, entry.question == "as published"))
    return found


def _cell(cell: PaperNumber, metric: Metric, is_computed: bool) -> Cell:
    value = None if metric.value is None else convert(metric.value, metric.unit, cell.unit)
    error = error_of(cell.table, cell.row, value) if is_computed else 0.0
    why = BASELINE if value is None else ""
    return Cell(cell.row, cell.column, cell.target, cell.target_rounding, value, error, why)


def by_the_bubble(cells: Sequence[Cell], fixed: Sequence[Cell]) -> list[Cell]:
    """The cells with what the bubble's formula alone says, as a baseline: the speed of even stages,
    K M / (M + K - 1), over that of the cell that is 1. None where the cells are not over K and M.
    """

    def speed(cell: Cell) -> float:
        m, k = (int(label.partition("=")[2]) for label in (cell.row, cell.column))
        return k * m / (m + k - 1)

    if not fixed or not all(cell.row[:2] + cell.column[:2] == "M=K=" for cell in (*cells, *fixed)):
        return []
    return [cell._replace(ours=speed(cell) / speed(fixed[0])) for cell in cells]


def covers(cell: Comparison) -> bool:
    """Whether `text` has shown the number: it is computed, or stands beside one and is not judged. Computed
    sentences are not in it; what repeats another number need not be shown.
    """
    if cell.is_computed:
        return cell.table != SENTENCES or not cell.counted
    return cell.entry is not None and _beside(cell.entry)


def _beside(entry: Result) -> bool:
    """Whether it ran here at another size than the paper's, so that it is shown and not judged."""
    is_cell = entry.table != SENTENCES and entry.source == "paper" and entry.question == "here"
    return is_cell and bool(entry.context)


def text(entries: Sequence[Result], *, notes: bool = False) -> str:
    """Each table of the paper, computed at its size and run here side by side, and the four numbers of both.

    Computed numbers have their error and an answer; those of scaled models that ran here are not judged.

    Args:
        entries: of an experiment; its sentences are left out
        notes: also what is to be said of single numbers
    """
    computed = [each for each in entries if each.record is not None and each.record.is_computed]
    here = [each for each in entries if _beside(each)]
    tables, beside = _by_table(computed), _by_table(here)
    parts = [
        _table(table, unit, tables.get((table, unit)), beside.get((table, unit)), here, notes=notes)
        for table, unit in sorted({*tables, *beside})
    ]
    if tables:
        kinds = {_kind(each.table, each.row) for each in computed}
        known = "; ".join(f"{kind} {error}" for kind, error in errors().items() if kind in kinds)
        parts.append(fill(f"The predictor's error, on numbers that torchgpipe published: {known}."))
    return "\n\n".join(parts)


Judged = tuple[list[Cell], list[Cell]]
"""Cells, and those that are 1 by definition."""


def _table(
    table: str,
    unit: str,
    computed: Judged | None,
    beside: Judged | None,
    here: Sequence[Result],
    *,
    notes: bool,
) -> str:
    of_paper, peers = of_the_paper(), peers_of(load_paper())
    ours, theirs = (
        {(table, each.row, each.column): each for each in found[0]} if found else {}
        for found in (computed, beside)
    )
    places = [place for place in of_paper if place in ours or place in theirs]
    varies = [at for at in (1, 2) if len({place[at] for place in places}) > 1] or [1, 2]

    def label(place: Place) -> str:
        """Row and column, as far as they are not the same all over."""
        return ", ".join(place[at] for at in varies)

    headers = ["", "paper"] + ["torchgpipe"] * any(place in peers for place in places)
    headers += ["computed", "/ paper", ""] if computed else []
    if beside is not None:
        (provenance, *_) = {each.metric.provenance for each in here if each.table == table and each.metric}
        headers += [f"here, {provenance}", "/ paper"]
    lines = []
    for place in places:
        line = [label(place), _as_printed(of_paper[place])]
        if "torchgpipe" in headers:
            line.append(peers[place].printed if place in peers else "-")
        if computed is not None:
            cell = ours.get(place)
            line += ["-", "-", ""] if cell is None else [_ours(cell, unit), _ratio(cell), cell.answer]
        if beside is not None:
            cell = theirs.get(place)
            line += ["-", "-"] if cell is None else [_ours(cell, unit), _ratio(cell)]
        lines.append(line)
    below = [f"computed at the paper's size, as declared: {summed(*computed)}"] if computed else []
    if computed and (bare := by_the_bubble(*computed)):
        below.append(f"baseline, the bubble's formula alone with the same error: {summed(bare, computed[1])}")
    below += [f"run here, not judged: {summed(*beside).numbers}"] if beside else []
    below = [fill(each, rest="  ") for each in below]
    if notes:
        own = [(each.place, each.note) for each in here if each.table == table]
        papers = [
            (place, note) for place in places for note in (of_paper[place].erratum, of_paper[place].note)
        ]
        below += _notes([(label(place), note) for place, note in (*own, *papers)], len(places))
    same = [places[0][at] for at in (1, 2) if at not in varies]
    return numbers_text(": ".join([table, *same]), headers, lines, "", *below)


def _ours(cell: Cell, unit: str) -> str:
    if cell.ours is None:
        return "-"
    return show(cell.ours, unit, 3) + (f" +- {percent(cell.error)}" if cell.error else "")


def _ratio(cell: Cell) -> str:
    return "-" if cell.ratio is None else f"{cell.ratio:.2f}"


def _notes(said: Iterable[tuple[str, str]], every: int) -> list[str]:
    """Each distinct note once, with the numbers that it is about, unless that is all of them."""
    places: dict[str, list[str]] = {}
    for label, note in said:
        if note:
            places.setdefault(note, []).append(label)
    return [
        fill(note if len(about) >= every else f"{'; '.join(about)}: {note}", "- ", "  ")
        for note, about in places.items()
    ]


def _as_printed(cell: PaperNumber) -> str:
    return cell.printed + (f" (means {cell.corrected_printed})" if cell.corrected_printed else "")


SECONDS = {
    "table1": {"amoebanet": 27.0, "transformer": 4.0}, "table2": {"amoebanet": 8.0, "transformer": 9.0},
    "table3": {"amoebanet": 16.0, "transformer": 3.0}, "figure3": {"resnet101": 6.0, "amoebanet": 10.0},
    "table4": {"resnet101": 6.0}, "computed": {STRIDE: 12.0},
}  # fmt: skip
"""Estimated seconds of computing, by experiment and model."""


def cases(experiment: str, options: RunOptions) -> list[Case]:
    """One case per model; none in the smoke profile, since the models have the paper's size."""
    found = {} if options.profile == "smoke" else SECONDS[experiment]
    return [Case({"part": REPRODUCTION, "model": model}, seconds) for model, seconds in found.items()]


def is_computed(case: Case) -> bool:
    """Whether the case computes the paper's numbers."""
    return case.key.get("part") == REPRODUCTION


def timed(records: Sequence[Record]) -> list[Record]:
    """The records of what ran here."""
    return [record for record in records if not record.is_computed]
