"""Shows our replayed numbers beside the paper's: text, figures, and results for the paper's sentences.

The timed tables' numbers are one long table, with a row per number of a configuration, ours or published:

    title, cell, K, M, N | metric | value, low, high, n | provenance | text

A table pivots selected metrics, and seaborn draws the same rows. A sentence such as "almost linear" is tested
by one number and the range that its words admit (results/unknowns.toml).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from gpipe_bench.harness.paper import SENTENCES, PaperNumber, load_paper, of_the_paper
from gpipe_bench.harness.record import Metric, Record, Scalar, find, from_samples, interval_name, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.harness.report.reproduced import NEXT, Place, answers
from gpipe_bench.harness.reproduction import of_quotient
from gpipe_bench.harness.verdict import Result, Spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

SMOKE = "The smoke profile proves the path with models of a few milliseconds; run the short one for numbers."
UNKNOWN = (
    "The replay's error is not known here: no step of this table ran on as many devices as it has stages. "
    "Run it where two processes have a core each."
)
FEWEST_ERRORS = 3
"""With fewer measured steps of a model, those of the table's other models count as well."""
NOT_JUDGED = (
    "small models on this machine's cores against the paper's accelerators, so the cell is not judged"
)
Of = Literal["a step", "a quotient", "a quotient of quotients", "an increase"]
"""What a replayed number consists of: a share of one step has the error of one replay, a quotient of two
steps that of two, a quotient of two quotients that of four; an increase is a quotient minus 1, in per
cent."""


def of_steps(records: Sequence[Record]) -> list[Record]:
    """The records of a table's steps, whose cases have no `part`."""
    return [record for record in records if "part" not in record.case]


def by_model(records: Sequence[Record], models: Iterable[str], **case: Scalar) -> dict[str, Record]:
    """The finished record with this case for each model that has one, in the order of `models`."""
    found = {model: find(records, "done", model=model, **case) for model in models}
    return {model: record for model, record in found.items() if record is not None}


@functools.cache
def published(table: str) -> dict[tuple[str, str, str], PaperNumber]:
    """The published numbers of a table by source, row and column."""
    return {
        (cell.source, cell.row, cell.column): cell
        for cell in load_paper()
        if cell.table == table and cell.kind != "setting"
    }


def derived(
    name: str, formula: Callable[..., float], *of: Metric | None, unit: str = "ratio"
) -> Metric | None:
    """A number computed from others, turn by turn if all were measured in turns.

    A drift of the machine changes all numbers of a turn alike, and not their quotient. None if one of them
    has no value, or the formula divides by zero.
    """
    known = [each for each in of if each is not None and each.value is not None]
    if len(known) < len(of):
        return None
    turns = {len(each.samples) for each in known}
    in_turns = len(turns) == 1 and min(turns) > 1
    given = zip(*(each.samples if in_turns else (each.value,) for each in known), strict=True)
    try:
        return from_samples(name, [formula(*each) for each in given], unit, provenance=known[0].provenance)
    except ZeroDivisionError:
        return None


_LARGER = "Transformer-48: speed-up with four times the accelerators"
SPEED_UPS = {
    "table2-amoebanet": ("AmoebaNet-D: share of a linear speed-up", "K=8 over K=2, M=32", 4.0),
    "table2-transformer": (_LARGER, "K=8 / K=2, M=32", 1.0),
}
"""Sentences on Table 2 beyond its cells: row, column, and the divisor of throughput with 8 stages over that
with 2, at M = 32."""


def over_the_formula(k: int, m: int, shares: Mapping[str, float]) -> float:
    """The bubble's share over the formula's, from the shares of all parts in per cent."""
    return shares["bubble"] / (100 * (k - 1) / (m + k - 1))


def over_the_next(k: int, m: int, shares: Mapping[str, float]) -> float:
    """Recomputation's share over the next largest overhead's."""
    return shares["recompute"] / max(shares[part] for part in shares.keys() - {"computation", "recompute"})


OF_SHARES = {"bubble observed over (K-1)/(M+K-1)": over_the_formula, NEXT: over_the_next}
"""By row of a sentence, its number. v1, section 4.2, says of ResNet-101 on two and four stages that the
bubble is slightly smaller than the formula's, and recomputation the largest overhead."""


class Worst(float):
    """The number for a sentence about several K; `over` has every K's in words."""

    over: str


def worst(row: str, column: str, of_each: Mapping[str, float]) -> Worst:
    """The number for a sentence about several K, which must hold for each: the worst for its bound."""
    bound = of_the_paper()[SENTENCES, row, column].bound
    number = Worst((min if bound == "at least" else max)(of_each.values()))
    number.over = ", ".join(f"{name}: {each:.3g}" for name, each in of_each.items())
    return number


def least(
    of: Mapping[str, Record], pairs: Iterable[tuple[str, str, str]],
    speed: Callable[[Record, str], Metric | None], divisor: float,
) -> tuple[str, Metric] | None:  # fmt: skip
    """The model with the least quotient of two configurations' speeds over `divisor`, and this quotient."""

    def quotient(one: float, other: float) -> float:
        return one / other / divisor

    found = [
        (model, metric)
        for model, *names in pairs
        if model in of
        if (metric := derived(" over ".join(names), quotient, *(speed(of[model], name) for name in names)))
    ]
    return min(found, key=lambda each: each[1].value or 0.0, default=None)


def beside(
    records: Sequence[Record], record: Record, place: Place, metric: Metric | None, note: str, of: Of
) -> Result:
    """The result for a cell that scaled models ran: shown beside the paper's number, not judged."""
    return _entry(records, record, place, metric, note, of, NOT_JUDGED)


def sentence(
    records: Sequence[Record], record: Record, at: tuple[str, str], metric: Metric | None, note: str, of: Of
) -> list[Result]:
    """The result for a sentence, by row and column; none if the records have no number for it."""
    return [] if metric is None else [_entry(records, record, (SENTENCES, *at), metric, note, of)]


def _entry(
    records: Sequence[Record], record: Record, place: Place, metric: Metric | None, note: str, of: Of,
    context: str = "",
) -> Result:  # fmt: skip
    """A result with a replayed number and its range, by the replay's error in all records."""
    spread = replayed_spread(metric, next_error(records, record.case["model"]), of)
    table, row, column = place
    return Result(
        table=table, row=row, column=column, metric=metric, spread=spread, record=record, note=note,
        not_comparable=SMOKE if record.profile == "smoke" else "" if spread else UNKNOWN, context=context,
    )  # fmt: skip


def next_error(records: Sequence[Record], model: Scalar) -> tuple[float, float] | None:
    """The interval of log(measured / replayed seconds) for another step of this model.

    Every measured step counts, with any number of micro-batches, so the range covers both the scatter of
    steps and the replay of another schedule. None below two steps.
    """
    errors: list[float] = []
    for several in (of_case(records, "done", model=model), of_case(records, "done")):
        if len(errors) < FEWEST_ERRORS:
            errors = [
                -math.log1p(each)
                for record in several
                for error in record.metrics
                if error.name == "replay error" and error.value is not None
                for each in (error.samples or (error.value,))
            ]
    return prediction_interval(errors) if len(errors) > 1 else None


def prediction_interval(errors: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of one more draw from the normal distribution of at least two errors."""
    from scipy.special import stdtrit

    middle, count = statistics.fmean(errors), len(errors)
    factor = float(stdtrit(count - 1, 0.975)) * math.sqrt(1 + 1 / count)
    reach = factor * statistics.stdev(errors)
    return middle - reach, middle + reach


def replayed_spread(metric: Metric | None, error: tuple[float, float] | None, of: Of) -> Spread | None:
    """The range of a replayed number: its interval, widened by the replay's error (`next_error`). None
    without a number or an error.
    """
    if metric is None or metric.value is None or error is None:
        return None
    value = float(metric.value)
    low = value if metric.low is None else metric.low
    high = value if metric.high is None else metric.high
    steps = {"a step": 1, "a quotient of quotients": 4}.get(of, 2)
    most = 1 + of_quotient(math.expm1(max(map(abs, error))), steps)
    rest = 100.0 if of == "an increase" else 0.0  # to the quotient
    parts = (interval_name(len(metric.samples)), "error of the replay")
    return Spread(low=(low + rest) / most - rest, high=(high + rest) * most - rest, parts=parts)


# Text and figures


OURS, RAN, COMPUTED, PAPER = "here, replayed", "here, measured", "computed", "paper"
NAMES = {"normalised throughput": OURS, "normalised real throughput": RAN}


def long(records: Sequence[Record], place: Callable[[Record, str], Place]) -> DataFrame:
    """Every number of the records' configurations, with published and computed ones."""
    from pandas import DataFrame

    computed = {each.place: each for each in answers(records)}
    rows: list[dict[str, Any]] = []
    for number, record in enumerate(records):
        cells: Mapping[str, Any] = record.details.get("cells", {}) if record.status == "done" else {}
        for cell, facts in cells.items():
            where = place(record, cell)
            at = {
                "record": number, "title": record.details["title"], "scale": record.details["scale"],
                "cell": cell, "K": facts["num_stages"], "M": facts["num_microbatches"],
                "N": facts["batch_size"], "why": facts["why"], **record.case,
            }  # fmt: skip
            rows += [{**at, **each} for each in _numbers(record, facts, where, computed.get(where))]
    return DataFrame(rows, columns=[*dict.fromkeys([*_COLUMNS, *(name for row in rows for name in row)])])


_COLUMNS = (
    "record", "title", "scale", "cell", "K", "M", "N", "why", "part", "batch", "metric", "value", "low",
    "high", "text", "n",
)  # fmt: skip
"""Columns that always exist."""


def _numbers(
    record: Record, facts: Mapping[str, Any], place: Place, computed: Result | None
) -> Iterator[dict[str, Any]]:
    found = [
        (NAMES.get(each.name, each.name), each, (each.low, each.high))
        for each in record.metrics
        if each.key == facts["key"]
    ]
    if computed is not None and computed.metric is not None:
        found.append((COMPUTED, computed.metric, computed.range or (None, None)))
    for name, metric, (low, high) in found:
        yield {
            "metric": name, "value": metric.value, "low": low, "high": high,
            "n": len(metric.samples), "provenance": metric.provenance, "text": interval(metric),
        }  # fmt: skip
    table, row, column = place
    for source in ("paper", "torchgpipe"):
        if (cell := published(table).get((source, row, column))) is not None:
            yield {"metric": source, "value": cell.value, "provenance": "published", "text": cell.printed}


def interval(metric: Metric) -> str:
    """`3.21 [3.15, 3.30]`."""
    if metric.value is None:
        return "not run"
    if metric.low is None or metric.high is None or metric.low == metric.high:
        return f"{metric.value:.2f}"
    return f"{metric.value:.2f} [{metric.low:.2f}, {metric.high:.2f}]"


def throughput(numbers: DataFrame, title: str, *notes: str) -> str:
    """The throughput of one model: paper, torchgpipe, ours replayed and measured."""
    cells = numbers.drop_duplicates("cell").set_index("cell")
    texts = numbers.pivot(index="cell", columns="metric", values="text").reindex(cells.index)
    texts = texts.reindex(columns=[PAPER, "torchgpipe", OURS, RAN])
    texts[OURS] = texts[OURS].astype(object).fillna("not run: " + cells.why)
    texts["N"] = cells.N.astype(str)
    lines = texts.dropna(axis=1, how="all").fillna("-").reset_index()
    several = numbers[numbers.metric == OURS].n.max()
    which = f"  in brackets: {interval_name(int(several))}" if several > 1 else ""
    heading = "\n".join(filter(None, [title, *notes, which]))
    return numbers_text(heading, ["", *lines.columns[1:]], lines.to_numpy().tolist())


def replay_errors(numbers: DataFrame) -> str:
    """Replayed steps against the same steps measured on as many devices."""
    if numbers.empty or "replay error" not in {*numbers.metric}:
        return ""
    wanted = ["step", "real step", "replay error"]
    shown = numbers[numbers.metric.isin(wanted)]
    values = shown.pivot_table(
        index=["record", "title", "cell"], columns="metric", values="value", sort=False
    )
    values = values.dropna()[wanted]
    lines = [
        [*name[1:], f"{step:.1f}", f"{ran:.1f}", f"{100 * error:+.1f} %"]
        for name, (step, ran, error) in zip(values.index, values.to_numpy(), strict=True)
    ]
    middle = 100 * values["replay error"].abs().median()
    title = f"Replay against measurement: median absolute error {middle:.1f} % over {len(lines)} cells"
    return numbers_text(title, ["", "cell", "replayed (ms)", "measured (ms)", "error"], lines)


LOOKS: dict[str, tuple[str, Any]] = {
    PAPER: ("X", (4, 2)), COMPUTED: ("D", (1, 1.5)), OURS: ("o", ""), RAN: ("s", ""),
}  # fmt: skip
"""Marker and dashes by the source of a line."""


TO_THE_ENDS: Mapping[str, Any] = {"estimator": "median", "errorbar": ("pi", 100)}
"""Options with which seaborn draws `with_ends`."""


def with_ends(numbers: DataFrame) -> DataFrame:
    """The rows, and for each computed number two more: the ends of its range."""
    from pandas import concat

    computed = numbers[(numbers.metric == COMPUTED) & numbers.low.notna()]
    return concat([numbers, *(computed.assign(value=computed[end]) for end in ("low", "high"))])


def lines(numbers: DataFrame, *, x: str, hue: str, y: str) -> Figure:
    """A panel for each model: the paper's and our numbers over `x`, a line per `hue`, and error bars for
    computed numbers.
    """
    import seaborn
    from matplotlib.figure import Figure

    shown = numbers[numbers.metric.isin(LOOKS) & numbers.value.notna()]
    shown = with_ends(shown).rename(columns={"metric": "whose"})
    shown = shown.astype({hue: str, "value": float})
    models = shown.groupby("title", sort=False)
    figure = Figure(figsize=(4.4 * len(models) + 1.3, 3.6), layout="constrained")
    there = [whose for whose in LOOKS if whose in {*shown.whose}]
    for axes, (_, of) in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        seaborn.lineplot(
            of, x=x, y="value", hue=hue, style="whose", style_order=there, palette="viridis", ax=axes,
            markers={whose: LOOKS[whose][0] for whose in there}, markersize=6, markeredgecolor="none",
            dashes={whose: LOOKS[whose][1] for whose in there}, err_style="bars", err_kws={"capsize": 3},
            **TO_THE_ENDS,
        )  # fmt: skip
        ticks = sorted({*of[x]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, map(str, ticks))
        axes.set(ylim=(0, None), ylabel=y, xlabel={"M": "micro-batches M", "K": "stages K"}.get(x, x))
        axes.set_title(scaled(of.title.iloc[0], of.scale.iloc[0]), fontsize=9)
        handles, labels = axes.get_legend_handles_labels()
        axes.get_legend().remove()
    figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)
    return figure


def scaled(title: str, scale: str) -> str:
    """The title of a model's figure, with the scale of our numbers."""
    return f"{title}\nhere: {scale}" if scale else title
