"""Shows Table 1 from records: text, figures, and results for its cells and claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.paper import convert, show
from gpipe_bench.harness.record import Metric, Record, find, of_case
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.report.table import computed_markdown
from gpipe_bench.harness.verdict import Comparison, Result
from gpipe_bench.models.paper import COLUMNS, GIB, HALVES

from ..drawing import paper_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


JUDGED_ATTENTION = {"amoebanet": "none", "transformer": "explicit"}
"""In 2019 the softmax was kept in memory."""
ANY_COUNT = "maximum parameters, any number of micro-batches"
"""A row for what this engine can do."""
CONTEXT = (
    "context: with as many micro-batches as the model needs and the cut that memory likes best, which the "
    "paper's numbers are not about"
)

PARTS = ("parameters", "optimizer_state", "gradients", "boundary", "activations", "transients", "buffers")
MOVING = ("boundary", "activations", "transients")
"""Parts of memory except parameters, gradients and optimizer state."""
SUMS = {
    "parameter memory": ("parameters", "optimizer_state"), "  activations": MOVING,
    "  with gradients": (*MOVING, "gradients"),
}  # fmt: skip


def tables(records: Sequence[Record]) -> str:
    """Tables beyond the paper's: memory by category, the largest models, measured stages."""
    parts: list[str] = []
    for half in HALVES:
        of, data = of_case(records, half=half, attention=JUDGED_ATTENTION[half]), HALVES[half]
        heading = f"{data.model}, mini-batch {data.batch_size}, {data.cap_gib} GiB per accelerator"
        parts += [_memory_table(of, half, heading), _largest_table(of, half, heading)]
    parts.append(_devices(records))
    return "\n\n".join(filter(None, parts))


def _gib(num_bytes: float) -> str:
    return show(num_bytes / GIB, "GiB", 3)


def _value(record: Record | None, name: str) -> float | None:
    metric = record.metric(name) if record is not None else None
    return metric.value if metric is not None else None


def _said(record: Record | None, name: str, text: Callable[[float], str] = str) -> str:
    value = _value(record, name)
    return "-" if value is None else text(value)


def _memory_table(records: Sequence[Record], half: str, heading: str) -> str:
    """A table of the accelerators' memory with the paper's models, by category."""
    every = {each.name: find(records, "done", part="paper", column=each.name) for each in COLUMNS[half]}
    found = {name: record for name, record in every.items() if record is not None}
    if not found:
        return ""
    placements = [record.details["placement"] for record in found.values()]
    lines = [["micro-batches", *(str(each["num_microbatches"]) for each in placements)]]
    for row, parts in ({part.replace("_", " "): (part,) for part in PARTS} | SUMS).items():
        total = [sum(stage[part] for stage in each["stages"] for part in parts) for each in placements]
        lines.append([row, *map(_gib, total)])
    peaks = [float(_value(record, "peak per accelerator") or 0) for record in found.values()]
    caps = [record.details["cap_gib"] * GIB for record in found.values()]
    lines.append(["fullest accelerator", *map(_gib, peaks)])
    lines.append(["  fits", *("yes" if n <= cap else "no" for n, cap in zip(peaks, caps, strict=True))])
    title = (
        f"The paper's models here: {heading} (modelled)\n"
        "Sums over the accelerators, at the moment each is fullest; float32, RMSProp with momentum"
    )
    return Grid(title=title, columns=["", *found], lines=lines).text()


def _largest_table(records: Sequence[Record], half: str, heading: str) -> str:
    """A table of the largest models, relative to the paper's and to ours without a pipeline."""
    every = of_case(records, part="largest")
    columns = [each for each in COLUMNS[half] if of_case(every, column=each.name)]
    if not columns:
        return ""
    paper = [_value(find(records, part="paper", column=each.name), "parameters") for each in columns]
    lines = [["paper", *(_size(each.num_layers, each.num_filters) for each in columns)]]
    found = [find(every, column=each.name) for each in columns]
    counts = [_value(record, "parameters") for record in found]
    naive = _value(find(every, column="naive-1"), "parameters")
    lines += [
        ["this engine", *map(_largest_size, found)],
        ["  parameters", *(_said(each, "parameters", lambda n: show(n, "parameters")) for each in found)],
        ["  times the paper's model", *map(_ratio, counts, paper)],
        ["  times our naive-1", *(_ratio(count, naive) for count in counts)],
        ["  micro-batches needed", *(_said(record, "num_microbatches") for record in found)],
        ["  fullest accelerator", *(_said(record, "peak per accelerator", _gib) for record in found)],
    ]
    notes = [
        f"Nothing fits in {record.case['column']}: {parameters.note}"
        for record in every
        if (parameters := record.metric("parameters")) is not None and parameters.value is None
    ]
    title = f"The largest models that fit, float32: {heading} (modelled)"
    names = ["", *(each.name for each in columns)]
    return Grid(title=title, columns=names, lines=lines, notes=notes).text()


def _size(num_layers: int, num_filters: int) -> str:
    return f"({num_layers}, {num_filters})" if num_filters else f"L = {num_layers}"


def _largest_size(record: Record | None) -> str:
    layers, filters = _value(record, "num_layers"), _value(record, "num_filters")
    if layers is None:
        return "-" if record is None else "nothing fits"
    return _size(int(layers), int(filters or 0))


def _ratio(over: float | None, under: float | None) -> str:
    return "-" if over is None or not under else f"{over / under:.2f}"


def _devices(records: Sequence[Record]) -> str:
    """A table of real stages on a GPU; in the paper all of them fit."""
    lines = []
    for record in of_case(records, part="device"):
        name = [record.case["half"], record.case["column"], record.case.get("precision", "float32")]
        if record.status != "done":
            lines.append([*name, record.status.replace("_", " "), "", "", record.reason, ""])
            continue
        facts = record.details
        said, agrees = f"fits {facts['cap_gib']:g} GiB", "as in the paper"
        if not facts["fits"]:  # the first stage that ran out of memory
            stage = next(stage for stage in facts["stages"] if stage["ran_out"])
            why = f"stage {stage['stage']} held {_gib(stage['at_most'])}; "
            why += ". ".join(stage["ran_out"].split(". ")[:2])
            said = f"does not fit {facts['cap_gib']:g} GiB: {why}"
            agrees = "not as in the paper, where it fits"
        peaks = [_said(record, f"{how} peak", _gib) for how in ("measured", "modelled")]
        lines.append([*name, len(facts["stages"]), *peaks, said, agrees])
    headers = ["model", "column", "", "distinct stages", "measured peak", "modelled peak", "", ""]
    title = "Every distinct stage for real on this GPU, alone, under the paper's cap (fullest one)"
    return Grid(title=title, columns=headers, lines=lines).text() if lines else ""


WHOSE = ("paper", "computed under the declared choices", "this engine")


def figures(records: Sequence[Record]) -> list[Plot]:
    """A figure per half of the table; none without computed records."""
    found = {(cell.table, cell.row, cell.column): cell for cell in compare(cells(records))}
    named = {half: (data.table, "maximum parameters", COLUMNS[half][1].name) for half, data in HALVES.items()}
    return [
        Plot(
            name=f"table1-{half}",
            caption=(
                f"Table 1, {half}: the largest models, and activation memory of the paper's models. Computed "
                "numbers carry the error of our predictions, of which none is small enough for a test; this "
                "engine (PyTorch, float32) cuts exactly and takes as many micro-batches as it needs"
            ),
            alt="Bars per column of Table 1, logarithmic; every number stands in the table above.",
            draw=partial(_draw, found, of_case(records, half=half, attention=JUDGED_ATTENTION[half]), half),
            style=partial(paper_style, 1.1),
        )
        for half, place in named.items()
        if place in found and found[place].ours is not None
    ]


def _draw(found: Mapping[tuple[str, str, str], Comparison], records: Sequence[Record], half: str) -> Figure:
    """Model sizes on the left, activation memory on the right, in the paper's unit."""
    import seaborn
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    table, names = HALVES[half].table, [each.name for each in COLUMNS[half]]
    sizes, moving = (
        [found[table, row, name] for name in names]
        for row in ("maximum parameters", "peak activation memory")
    )
    unit, here = moving[0].unit, list[float | None]()
    for name in names:  # activation memory with the paper's micro-batches
        record = find(records, "done", part="paper", column=name)
        stages = [] if record is None else record.details["placement"]["stages"]
        total = sum(stage[part] for stage in stages for part in MOVING)
        here.append(None if record is None else convert(total, "bytes", unit))
    largest = (find(records, part="largest", column=name, precision="float32") for name in names)
    _bars(left, sizes, [_value(record, "parameters") for record in largest])
    _bars(right, moving, here)
    left.set(ylabel="parameters", title=f"{HALVES[half].model}: largest model")
    right.set(ylabel=f"{unit}, all accelerators", title="activation memory of the paper's models")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    seaborn.despine(figure)
    return figure


def _bars(axes: Axes, cells: Sequence[Comparison], here: Iterable[float | None]) -> None:
    """Bars for each column of the table: paper, computed with its error, this engine."""
    import seaborn
    from matplotlib.ticker import NullFormatter

    printed = [cell.paper if cell.corrected is None else cell.corrected for cell in cells]
    whose = zip(WHOSE, ("0.6", *seaborn.color_palette("deep", 2)), strict=True)
    for shift, (label, color), heights in zip(
        (-0.27, 0, 0.27), whose, (printed, [cell.ours for cell in cells], here), strict=True
    ):
        known = {place + shift: height for place, height in enumerate(heights)}
        axes.bar([*known], [height or 0 for height in known.values()], 0.25, color=color, label=label)
        for place in [place for place, height in known.items() if height is None]:
            axes.text(
                place, 0.02, "nothing fits", rotation=90, ha="center", va="bottom", size="x-small",
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip
    for place, cell in enumerate(cells):
        if cell.ours is not None and cell.range_low is not None and cell.range_high is not None:
            axes.vlines(place, cell.range_low, cell.range_high, color="black", linewidth=1.2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: show(value, "parameters" if value >= 1e6 else "", 1))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(range(len(cells)), [cell.column for cell in cells])
    axes.xaxis.grid(visible=False)


# Answers: cells and claims --------------------------------------------------------------------------------


def cells(records: Sequence[Record]) -> list[Result]:
    found: list[Result] = []
    for half in HALVES:
        for column in COLUMNS[half]:
            record = _of_the_paper(records, half, column.name)
            found += [  # an exact count, and bytes proportional to it
                Result(
                    table=HALVES[half].table, row=row, column=column.name, question="as published",
                    metric=record.metric(row) if record is not None else None, record=record,
                )
                for row in ("parameters", "parameter memory")
            ]  # fmt: skip
            found.append(_any_count(records, half, column.name))
    for row, half, over, under in reproduced.CLAIMS:  # quotients of exact counts
        ours, theirs = (_value(_of_the_paper(records, half, name), "parameters") for name in (over, under))
        value = ours / theirs if ours and theirs else None
        found.append(
            Result(
                table="claims", row=f"quotient of the printed counts, {row}", column=f"{over} / {under}",
                question="as published",
                metric=Metric(name=row, value=value, unit="ratio", provenance="modelled"),
            )
        )  # fmt: skip
    return found + reproduced.answers(records)


def _of_the_paper(records: Sequence[Record], half: str, column: str) -> Record | None:
    return find(records, part="paper", half=half, column=column, attention=JUDGED_ATTENTION[half])


def _any_count(records: Sequence[Record], half: str, column: str) -> Result:
    key = {"half": half, "column": column, "attention": JUDGED_ATTENTION[half], "precision": "float32"}
    record = find(records, part="largest", **key)
    known = _value(record, "parameters") is not None
    return Result(
        table=HALVES[half].table, row=ANY_COUNT, column=column, record=record, not_comparable=CONTEXT,
        metric=record.metric("parameters") if record is not None and known else None,
    )  # fmt: skip


def table(records: Sequence[Record]) -> str:
    """Both halves of Table 1 as markdown: paper, ours with its error, ours / paper, answer."""
    names = {half.table for half in HALVES.values()}
    return computed_markdown([cell for cell in compare(cells(records)) if cell.table in names])
