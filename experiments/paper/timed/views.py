"""What the timed tables show: one long table of numbers, which texts pivot and figures draw.

    title, cell, K, M, N | metric | value, low, high, n | provenance | text

A row is one number of one configuration, ours or published; a table selects metrics and pivots them, a figure
hands the same rows to seaborn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.paper.timed.claims import published
from gpipe_bench.harness.record import Metric, Record, interval_name, of_case
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.report.grid import numbers_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Place = tuple[str, str, str]
"""Table, row and column of the paper."""
OURS, RAN, COMPUTED, PAPER = "here, replayed", "here, measured", "computed", "paper"
NAMES = {"normalised throughput": OURS, "normalised real throughput": RAN}


def long(records: Sequence[Record], place: Callable[[Record, str], Place]) -> DataFrame:
    """Every number of the configurations of `records`, with what is published and computed for their places.

    Args:
        records: of an experiment; those of steps have configurations, and what is computed is joined to them
        place: where a configuration of a record stands in the paper
    """
    from pandas import DataFrame

    computed = {
        (str(metric.key["table"]), str(metric.key["row"]), str(metric.key["column"])): metric
        for record in of_case(records, "done", part=reproduced.PART)
        for metric in record.metrics
    }
    rows: list[dict[str, Any]] = []
    for number, record in enumerate(records):
        cells: Mapping[str, Any] = record.details.get("cells", {}) if record.status == "done" else {}
        for cell, facts in cells.items():
            where = place(record, cell)
            at = {
                "record": number, "title": record.details["title"], "scale": record.details["scale"],
                "cell": cell,
                "K": facts["num_stages"], "M": facts["num_microbatches"], "N": facts["batch_size"],
                "why": facts["why"], **record.case,
            }  # fmt: skip
            rows += [{**at, **each} for each in _numbers(record, facts, where, computed.get(where))]
    return DataFrame(rows, columns=[*dict.fromkeys([*_COLUMNS, *(name for row in rows for name in row)])])


_COLUMNS = (
    "record", "title", "scale", "cell", "K", "M", "N", "why", "part", "batch", "metric", "value", "text", "n",
)  # fmt: skip
"""Columns that are there whatever was measured."""


def _numbers(
    record: Record, facts: Mapping[str, Any], place: Place, computed: Metric | None
) -> Iterator[dict[str, Any]]:
    found = [(NAMES.get(each.name, each.name), each) for each in record.metrics if each.key == facts["key"]]
    if computed is not None:
        found.append((COMPUTED, computed))
    for name, metric in found:
        yield {
            "metric": name, "value": metric.value, "low": metric.low, "high": metric.high,
            "n": len(metric.samples), "provenance": metric.provenance, "text": interval(metric),
        }  # fmt: skip
    table, row, column = place
    for source in ("paper", "torchgpipe"):
        if (cell := published(table).get((source, row, column))) is not None:
            yield {"metric": source, "value": cell.value, "provenance": "published", "text": cell.printed}


def interval(metric: Metric | None, why: str = "") -> str:
    """`3.21 [3.15, 3.30]`, or why there is none."""
    if metric is None or metric.value is None:
        return f"not run: {why}" if why else "not run"
    if metric.low is None or metric.high is None or metric.low == metric.high:
        return f"{metric.value:.2f}"
    return f"{metric.value:.2f} [{metric.low:.2f}, {metric.high:.2f}]"


def throughput(numbers: DataFrame, title: str, *notes: str) -> str:
    """Paper, torchgpipe, and ours replayed and measured, of one model."""
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
    """How far the laid-out steps are from the same steps run on as many devices."""
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
    PAPER: ("X", (4, 2)),
    COMPUTED: ("D", (1, 1.5)),
    OURS: ("o", ""),
    RAN: ("s", ""),
}
"""Marker and dashes by whose the line is."""


def lines(numbers: DataFrame, *, x: str, hue: str, y: str) -> Figure:
    """A panel for each model: the paper's and ours over `x`, a line for each of `hue`."""
    import seaborn
    from matplotlib.figure import Figure

    shown = numbers[numbers.metric.isin(LOOKS) & numbers.value.notna()].rename(columns={"metric": "whose"})
    shown = shown.astype({hue: str, "value": float})
    models = shown.groupby("title", sort=False)
    figure = Figure(figsize=(4.4 * len(models) + 1.3, 3.6), layout="constrained")
    there = [whose for whose in LOOKS if whose in {*shown.whose}]
    for axes, (_, of) in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        seaborn.lineplot(
            of, x=x, y="value", hue=hue, style="whose", style_order=there, palette="viridis", ax=axes,
            markers={whose: LOOKS[whose][0] for whose in there}, markersize=6, markeredgecolor="none",
            dashes={whose: LOOKS[whose][1] for whose in there},
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
    """The title above a picture of one model, whose numbers from here are of a smaller one."""
    return f"{title}\nhere: {scale}" if scale else title
