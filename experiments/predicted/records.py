"""Predictions of the paper's tables as cases, and read back from their records: answers, text, hypotheses.

What is on record is the middle, the range over all admitted combinations, what each setting does alone, and
what was tried; so nothing is predicted again, and neither torch nor numpy is needed to read.

How far the predictions are off is known from numbers that others published and that they were not made for
(see the experiment `predictions`). Only the middle that the rule gives counts there: a prediction that may be
chosen among many is always right somewhere. Ratios and absolute numbers are told apart, since the unknown
share of the peak moves an absolute number as a whole and leaves a ratio nearly alone.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from gpipe_bench.experiments.timed.claims import SMOKE, prediction_interval
from gpipe_bench.harness.experiment import Case, Outcome, RunOptions
from gpipe_bench.harness.hypotheses import Hypothesis, Walk
from gpipe_bench.harness.paper import PaperNumber, load_paper
from gpipe_bench.harness.record import Quantity, Record, Scalar, of_case
from gpipe_bench.harness.report.grid import fill, numbers_text
from gpipe_bench.harness.units import show
from gpipe_bench.harness.verdict import Answer, Part, Spread

Cell = tuple[str, str, str]
"""Table, row and column, as in results/paper.csv."""

PART = "as published"
"""Of the key of a case that predicts; its other key is the model."""

ESTIMATE_S = {
    ("table2", "amoebanet"): 25.0, ("table2", "transformer"): 8.0, ("table3", "amoebanet"): 22.0,
    ("table3", "transformer"): 6.0, ("figure3", "resnet101"): 14.0, ("figure3", "amoebanet"): 20.0,
    ("table4", "resnet101"): 16.0,
}  # fmt: skip
"""By experiment and model, everything that is predicted."""
SMOKE_S = 5.0

NOT_TRIED = ("share_of_peak",)
"""Settings of which the reasons for differences take the middle alone."""
OTHERS = "torchgpipe"
"""Whose published numbers tell how far predictions are off."""


# Cases ------------------------------------------------------------------------------------------------------


def cases(experiment: str, options: RunOptions) -> list[Case]:
    """One for each model of the experiment that is predicted."""
    smoke = options.profile == "smoke"
    return [
        Case({"part": PART, "model": model}, SMOKE_S if smoke else estimate_s)
        for (name, model), estimate_s in ESTIMATE_S.items()
        if name == experiment
    ]


def is_prediction(case: Case) -> bool:
    """Whether the case predicts, rather than times."""
    return case.key.get("part") == PART


def run(experiment: str, case: Case, options: RunOptions) -> Outcome:
    """Predicts one model's numbers. In the smoke profile, of a tiny model and in the middle alone."""
    from gpipe_bench.experiments.predicted import tables, torchgpipe

    quick = options.profile == "smoke"
    found = tables.predict(experiment, str(case.key["model"]), quick=quick)
    quantities, details = found.quantities(_unit)
    details |= found.to_data()
    if not quick:
        details["elsewhere"] = torchgpipe.middles()
        details["reasons"] = [
            {
                "name": name,
                "middle": [each.middle(cell) for cell in each.values],
                "tried": each.tried(NOT_TRIED),
            }
            for name, each in tables.reasons(experiment, str(case.key["model"])).items()
        ]
    return Outcome(tuple(quantities), details)


def _unit(cell: Cell) -> str:
    table, row, _ = cell
    return "%" if table.startswith("breakdown") or row == "extra time by recomputation" else "ratio"


def timed(records: Sequence[Record]) -> list[Record]:
    """The records of what ran here, without the predictions."""
    return [record for record in records if record.case.get("part") != PART]


# Answers ----------------------------------------------------------------------------------------------------


class Number(NamedTuple):
    """One predicted number of a record."""

    cell: Cell
    quantity: Quantity
    spread: Spread | None  # None where nothing is open


def predicted_numbers(record: Record) -> list[Number]:
    """All of them, in their order."""
    spreads = {
        tuple(each["cell"]): Spread.from_data(each["spread"]) for each in record.details.get("predicted", ())
    }
    found = []
    for quantity in record.quantities:
        table, row, column = (str(quantity.key[name]) for name in ("table", "row", "column"))
        found.append(Number((table, row, column), quantity, spreads.get((table, row, column))))
    return found


def as_published(records: Sequence[Record]) -> list[Answer]:
    """Our prediction for every number of the paper that the records predict."""
    found = []
    for record in of_case(records, "done", part=PART):
        error = prediction_error(record)
        for place, (cell, quantity, spread) in enumerate(predicted_numbers(record)):
            assert spread is not None
            note = (
                f"Predicted for {record.details['title']} on the paper's accelerators; the range is over "
                f"{spread.combinations:,} combinations of what the paper leaves open."
            )
            if error is not None:
                tried = record.details["tried"]["values"][place]
                spread = _with_error(cell, quantity, spread, tried, error)
            found.append(
                Answer(
                    table=cell[0], row=cell[1], column=cell[2], question="as published", quantity=quantity,
                    spread=spread,
                    record=record,
                    not_comparable=SMOKE if record.profile == "smoke" else "" if error else NO_ERROR,
                    note=f"{note} {record.details['note']}".strip(),
                )
            )  # fmt: skip
    return found


NO_ERROR = (
    "how far predictions are off is not on record with this one: fewer than two numbers that others published"
)
EXTRA = "extra time by recomputation"
"""A sentence that gives a quotient of two times as an increase."""


def prediction_error(record: Record) -> tuple[float, float] | None:
    """By what factors the next predicted quotient of two speeds may be off, from the smallest to the largest.

    They are the 95 % prediction interval of another draw from published over predicted ratios of others,
    which the same code gives in the middle of the same unknowns. Shares of a step may move either way. None
    where fewer than two are on record.
    """
    known = errors(record.details.get("elsewhere", ()))
    if known is None or len(known.ratios) < 2:
        return None
    low, high = map(math.exp, prediction_interval([-math.log1p(error) for error in known.ratios]))
    if record.experiment == "table4":
        reach = max(high, 1 / low)
        return 1 / reach, reach
    return low, high


def _off(cell: Cell, value: float, factor: float) -> float:
    """A number whose quotient of times is off by a factor."""
    return 100 * ((1 + value / 100) * factor - 1) if cell[1] == EXTRA else value * factor


def _with_error(
    cell: Cell,
    quantity: Quantity,
    spread: Spread,
    tried: Sequence[float | None],
    error: tuple[float, float],
) -> Spread:
    """The range with the error of the prediction in it; exact numbers have none."""
    if spread.low == spread.high:
        return spread
    least, most = error if cell[1] != EXTRA else (1 / error[1], 1 / error[0])
    middle = float(quantity.value or 0)
    part = Part(what="error of the prediction", low=_off(cell, middle, least), high=_off(cell, middle, most))
    return replace(
        spread,
        low=_off(cell, spread.low, least),
        high=_off(cell, spread.high, most),
        parts=(*spread.parts, part),
        values=tuple(value for value in tried if value is not None) if cell[1] != EXTRA else (),
        error=(least, most),
    )


class Errors(NamedTuple):
    """Predicted over published, less 1, of some numbers."""

    ratios: tuple[float, ...]
    absolute: tuple[float, ...]

    @property
    def sentence(self) -> str:
        """Of both kinds: median and worst."""
        kinds = {"ratios": [*map(abs, self.ratios)], "absolute speeds": [*map(abs, self.absolute)]}
        parts = [
            f"{kind} median {100 * median(found):.0f} %, worst {100 * max(found):.0f} % of {len(found)}"
            for kind, found in kinds.items()
            if found
        ]
        return (
            "The same code on torchgpipe's published numbers, which it was not made for, in the middle of "
            f"the same unknowns, errs by: {'; '.join(parts)}. See the experiment predictions."
        )


def errors(elsewhere: Iterable[Mapping[str, Any]]) -> Errors | None:
    """Of predictions {"cell": [table, row, column], "value": middle} of others' published numbers; None where
    there are none.
    """
    published = {cell.key: cell for cell in load_paper() if cell.source == OTHERS}
    known = [
        (published[key], each["value"])
        for each in elsewhere
        if (key := tuple(each["cell"])) in published and not published[key].exact
    ]
    ratios, absolute = (
        tuple(value / cell.value - 1 for cell, value in known if (cell.unit == "ratio") is is_ratio)
        for is_ratio in (True, False)
    )
    return Errors(ratios, absolute) if known else None


# Text -------------------------------------------------------------------------------------------------------


def prediction_text(records: Sequence[Record]) -> str:
    """The predictions of all models on record, and how far the same code is off elsewhere."""
    done = of_case(records, "done", part=PART)
    parts = [_grid(record) for record in done]
    found = errors(done[0].details.get("elsewhere", ())) if done else None
    return "\n\n".join(parts + ([fill(found.sentence)] if found else []))


def predicted_text(records: Sequence[Record], table: str, row: str, column: str) -> str:
    """`2.98 (2.60 to 3.10)`: middle and range of one prediction, or a dash."""
    for record in of_case(records, "done", part=PART):
        for cell, quantity, spread in predicted_numbers(record):
            if cell == (table, row, column) and spread is not None and quantity.value is not None:
                is_open = spread.low < spread.high
                return f"{quantity.value:.2f}" + (
                    f" ({spread.low:.2f} to {spread.high:.2f})" if is_open else ""
                )
    return "-"


def _grid(record: Record) -> str:
    printed = {
        cell.key: "in words" if cell.form == "words" else cell.printed
        for cell in load_paper()
        if cell.source == "paper"
    }
    lines = [
        [
            "\n".join(textwrap.wrap(f"{cell[1]}, {cell[2]}", 44)),
            printed.get(cell, "-"),
            show(quantity.value, quantity.unit, 3),
            f"{show(spread.low, quantity.unit, 3)} to {show(spread.high, quantity.unit, 3)}",
            f"{spread.combinations:,}",
            widest(spread),
        ]
        for cell, quantity, spread in predicted_numbers(record)
        if quantity.value is not None and spread is not None and spread.low < spread.high
    ]
    reference = ", ".join(f"{name} {_text(value)}" for name, value in record.details["reference"].items())
    middle = textwrap.fill(f"middle: {reference}", 100, initial_indent="  ", subsequent_indent="    ")
    title = f"As published: {record.details['title']} at the paper's size, predicted\n{middle}"
    headers = ["", "paper", "middle", "range", "combinations", "widest alone"]
    notes = textwrap.wrap(record.details["note"], 100, initial_indent="  ", subsequent_indent="  ")
    return numbers_text(title, headers, lines, *notes)


def widest(spread: Spread) -> str:
    """The setting that moves a number most when it alone changes."""
    most = max(spread.parts, key=lambda part: part.high - part.low, default=None)
    return "-" if most is None else f"{most.what} ({most.low:.3g} to {most.high:.3g})"


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# Hypotheses -------------------------------------------------------------------------------------------------

TRIED = "combinations tried"
"""Of the settings of the best one: how many it is the best of."""


def hypotheses_of(records: Sequence[Record], paper: Sequence[PaperNumber] | None = None) -> list[Hypothesis]:
    """The settings of each prediction as hypotheses: the middle, every setting changed alone, the best of
    all, and the reasons by name, which were thought of after looking. The best is chosen by the paper's
    numbers, which a prediction never is; it says of how many. `paper` is the file's numbers by default.
    """
    cells = load_paper() if paper is None else paper
    printed = {cell.key: cell.target for cell in cells if cell.source == "paper" and cell.kind == "result"}
    return [
        hypothesis
        for record in of_case(records, "done", part=PART)
        for hypothesis in _of_record(record, printed)
    ]


def _of_record(record: Record, printed: Mapping[Cell, float]) -> Iterator[Hypothesis]:
    title, reference = record.details["title"], dict(record.details["reference"])
    found = predicted_numbers(record)
    judged = {number: each.cell for number, each in enumerate(found) if each.cell in printed}

    def kept(values: Sequence[float]) -> dict[Cell, float]:
        # A share of nothing has no ratio to the paper's, so it accounts for nothing.
        return {cell: values[number] for number, cell in judged.items() if values[number] > 0}

    yield Hypothesis(
        name=f"{title}: the middle of everything",
        values=kept([float(each.quantity.value or 0) for each in found]),
        settings=reference,
    )
    for each in record.details["changed"]:
        yield Hypothesis(
            name=f"{title}: {each['setting']} {_text(each['value'])}",
            values=kept(each["values"]),
            settings=reference | {each["setting"]: each["value"]},
        )
    tried = record.details["tried"]
    options: list[tuple[Settings, dict[Cell, float]]] = [
        (settings, dict(zip(judged.values(), values, strict=True)))
        for settings, *values in zip(_settings(tried), *(tried["values"][n] for n in judged), strict=True)
        if None not in values
    ]
    best = min(options, key=lambda each: _distance(each[1], printed), default=None)
    if best is not None and _distance(best[1], printed) < math.inf:
        yield Hypothesis(
            name=f"{title}: the best of {len(options):,} combinations",
            values=best[1],
            settings=reference | best[0] | {TRIED: len(options)},
        )
    error = prediction_error(record)
    for reason in record.details.get("reasons", ()):
        yield Hypothesis(
            name=f"{title}: {reason['name']}",
            values=kept(reason["middle"]),
            settings=reference | {"reason": reason["name"]},
            after_looking=True,
            spreads={
                each.cell: _with_error(
                    each.cell, each.quantity,
                    Spread(low=min(given), high=max(given), combinations=len(given)),
                    given, error or (1.0, 1.0),
                )
                for each, tried in zip(found, reason["tried"]["values"], strict=True)
                if (given := [value for value in tried if value is not None])
            },
        )  # fmt: skip


Settings = dict[str, Scalar]


def _settings(tried: Mapping[str, Any]) -> list[Settings]:
    """Every combination that was tried."""
    return [dict(zip(tried["settings"], each, strict=True)) for each in product(*tried["settings"].values())]


def walks(records: Sequence[Record]) -> list[Walk]:
    """The combinations that each prediction tried, for claims about several cells at once."""
    found = []
    for record in of_case(records, "done", part=PART):
        cells, tried = [each.cell for each in predicted_numbers(record)], record.details["tried"]
        values = dict(zip(cells, tried["values"], strict=True))
        error = prediction_error(record) or (1.0, 1.0)
        if record.profile != "smoke":  # of a tiny model
            found.append(Walk(cells[0][0], _settings(tried), values, error))
    return found


def both_models(of_each: Sequence[Walk]) -> Walk | None:
    """Two predictions beside each other, under all pairs of settings that agree in what both have but for the
    nominal batch; None where there are not two.
    """
    if len(of_each) != 2:
        return None
    one, other = of_each
    shared = (one.settings[0].keys() & other.settings[0].keys()) - {"batch_size"}
    pairs = [
        (m, n)
        for (m, a), (n, b) in product(enumerate(one.settings), enumerate(other.settings))
        if all(a[name] == b[name] for name in shared)
    ]
    values: dict[Cell, Sequence[float | None]] = {
        c: [of[m] for m, _ in pairs] for c, of in one.values.items()
    }
    values |= {cell: [of[n] for _, n in pairs] for cell, of in other.values.items()}
    settings = [
        {**one.settings[m], "batch_size of the other": other.settings[n].get("batch_size")} for m, n in pairs
    ]
    return Walk("table2, both models", settings, values)


def equal_stages() -> Walk:
    """The closed form of Table 2 for equal stages, a free link, one batch, and forward : backward = 1 : 2.
    Recomputation is as early as it can be, or late: when the gradient arrives, which is as if it were none.
    """
    early = {(k, m): m * k / (4 * m + 3 * (k - 1)) for m in (1, 4, 32) for k in (2, 4, 8)}
    late = {(k, m): m * k / (m + k - 1) for k, m in early}
    values = {
        (table, f"M={m}", f"K={k}"): [rates[k, m] / rates[2, 1] for rates in (early, late)]
        for table in ("table2-amoebanet", "table2-transformer")
        for k, m in early
    }
    return Walk("equal stages", [{"recomputation": "early"}, {"recomputation": "late"}], values)


def _distance(values: Mapping[Cell, float], printed: Mapping[Cell, float]) -> float:
    """Sum of squares of the logarithms of ours over the paper's; infinite where ours is 0."""
    return sum(
        math.log(value / printed[cell]) ** 2 if value > 0 else math.inf for cell, value in values.items()
    )
