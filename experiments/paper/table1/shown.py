"""Table 1 as text and as pictures: the comparison with the paper, then what the paper does not print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.drawing import paper_style, without_frame
from gpipe_bench.experiments.paper.table1.cells import JUDGED_ATTENTION, cells
from gpipe_bench.harness.compare import compare
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import Record, find, of_case
from gpipe_bench.harness.report.grid import Grid
from gpipe_bench.harness.units import convert, show
from gpipe_bench.harness.verdict import Comparison
from gpipe_bench.models.paper import COLUMNS, GIB, HALVES, Column

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LARGEST = "largest on a GPU"
PARTS = ("parameters", "optimizer_state", "gradients", "boundary", "activations", "transients", "buffers")


def tables(records: Sequence[Record]) -> str:
    """Tables that the paper does not print: what fills the accelerators, the largest models, what ran."""
    parts: list[str] = []
    for half in HALVES:
        for attention in dict.fromkeys(
            str(r.case["attention"]) for r in records if r.case.get("half") == half and "attention" in r.case
        ):
            parts += [_memory_table(records, half, attention), _largest_table(records, half, attention)]
    parts += [_verification(records), _devices(records), _largest_on_a_gpu(records)]
    return "\n\n".join(part for part in parts if part)


def _heading(half: str, attention: str) -> str:
    data = HALVES[half]
    note = "" if attention == "none" else f", {attention} attention"
    return f"{data.model}{note}, mini-batch {data.batch_size}, {data.cap_gib} GiB per accelerator"


def _columns(columns: Iterable[Column]) -> list[str]:
    return ["", *(column.name for column in columns)]


def _gib(num_bytes: float) -> str:
    return show(num_bytes / GIB, "GiB", 3)


def _memory_table(records: Sequence[Record], half: str, attention: str) -> str:
    """Table of what fills the accelerators with the paper's models."""
    found = {
        column: record
        for column in COLUMNS[half]
        if (record := find(records, part="paper", half=half, column=column.name, attention=attention))
        and record.status == "done"
    }
    if not found:
        return ""
    placements = {column: record.details["placement"] for column, record in found.items()}
    lines = [["micro-batches", *(str(each["num_microbatches"]) for each in placements.values())]]
    for part in PARTS:
        total = [sum(stage[part] for stage in each["stages"]) for each in placements.values()]
        lines.append([part.replace("_", " "), *map(_gib, total)])
    for row, parts in (
        ("parameter memory", ("parameters", "optimizer_state")),
        ("  activations", ("boundary", "activations", "transients")),
        ("  with gradients", ("boundary", "activations", "transients", "gradients")),
    ):
        total = [
            sum(stage[part] for part in parts for stage in each["stages"]) for each in placements.values()
        ]
        lines.append([row, *map(_gib, total)])
    for prefix, row in (("", "fullest accelerator"), ("best ", "fullest at the best M")):
        values, verdicts = [], []
        for record in found.values():
            peak, count = (
                record.metric(f"{prefix}peak per accelerator"),
                record.metric(f"{prefix}num_microbatches"),
            )
            assert peak is not None, "a finished case has its peak"
            assert peak.value is not None, "and a number in it"
            assert count is not None, "and its number of micro-batches"
            values.append(_gib(peak.value) + (f" (M = {count.value})" if prefix else ""))
            verdicts.append("yes" if peak.value <= record.details["cap_gib"] * GIB else "no")
        lines += [[row, *values], ["  fits", *verdicts]]
    title = (
        f"The paper's models here: {_heading(half, attention)} (modelled)\n"
        "Sums over the accelerators, at the moment each is fullest; float32, RMSProp with momentum"
    )
    return Grid(title=title, columns=_columns(found), lines=lines).text()


def _largest_table(records: Sequence[Record], half: str, attention: str) -> str:
    """The largest models, their ratio to the paper's and to ours without a pipeline."""

    def named(part: str, column: str, **more: str) -> Record | None:
        return find(records, part=part, half=half, column=column, attention=attention, **more)

    columns = [column for column in COLUMNS[half] if named("largest", column.name)]
    if not columns:
        return ""
    lines = [["paper", *(_size(column.num_layers, column.num_filters) for column in columns)]]
    for precision in dict.fromkeys(
        str(r.case["precision"]) for r in records if r.case.get("part") == "largest"
    ):
        found = [named("largest", column.name, precision=precision) for column in columns]
        if not any(found):
            continue
        counts = [_value(record, "parameters") for record in found]
        naive = _value(named("largest", "naive-1", precision=precision), "parameters")
        paper = [_value(named("paper", column.name), "parameters") for column in columns]
        lines += [
            [precision, *map(_largest_size, found)],
            ["  parameters", *("-" if count is None else show(count, "parameters") for count in counts)],
            ["  times the paper's model", *map(_ratio, counts, paper)],
            ["  times our naive-1", *(_ratio(count, naive) for count in counts)],
            ["  micro-batches needed", *(_count(record, "num_microbatches") for record in found)],
            ["  fullest accelerator", *(_peak(record) for record in found)],
        ]
    title = f"The largest models that fit: {_heading(half, attention)} (modelled)"
    notes = [
        f"Nothing fits in {record.case['column']}, {record.case['precision']}: {parameters.note}"
        for record in records
        if record.case.get("part") == "largest"
        and record.case["half"] == half
        and record.case["attention"] == attention
        and (parameters := record.metric("parameters")) is not None
        and parameters.value is None
    ]
    return Grid(title=title, columns=_columns(columns), lines=lines, notes=notes).text()


def _size(num_layers: int, num_filters: int) -> str:
    return f"({num_layers}, {num_filters})" if num_filters else f"L = {num_layers}"


def _value(record: Record | None, name: str) -> float | None:
    metric = record.metric(name) if record is not None else None
    return metric.value if metric is not None else None


def _largest_size(record: Record | None) -> str:
    layers, filters = _value(record, "num_layers"), _value(record, "num_filters")
    if layers is None:
        return "-" if record is None else "nothing fits"
    return _size(int(layers), int(filters or 0))


def _ratio(over: float | None, under: float | None) -> str:
    return "-" if over is None or not under else f"{over / under:.2f}"


def _count(record: Record | None, name: str) -> str:
    value = _value(record, name)
    return "-" if value is None else str(value)


def _peak(record: Record | None) -> str:
    value = _value(record, "peak per accelerator")
    return "-" if value is None else _gib(value)


def _verification(records: Sequence[Record]) -> str:
    """How well the model meets real steps."""
    found = [r for r in records if r.case.get("part") == "verify" and r.status == "done"]
    if not found:
        return ""
    lines = []
    for model in dict.fromkeys(str(r.case["model"]) for r in found):
        for num_stages in dict.fromkeys(r.case["num_stages"] for r in found):
            group = [r for r in found if r.case["model"] == model and r.case["num_stages"] == num_stages]
            if not group:
                continue
            worst = max(group, key=lambda record: _value(record, "largest error") or 0.0)
            tracked, modelled = _value(worst, "tracked peak"), _value(worst, "modelled peak")
            assert tracked is not None, "a finished verification counted"
            assert modelled is not None, "and modelled"
            lines.append(
                [
                    model, num_stages, len(group), f"{100 * (_value(worst, 'largest error') or 0):.4f} %",
                    f"{worst.case['remat']}, M = {worst.case['num_microbatches']}",
                    f"{tracked / 2**20:.3f} MiB", f"{modelled / 2**20:.3f} MiB",
                ]
            )  # fmt: skip
    headers = ["model (scaled down)", "K", "steps", "largest error", "at", "counted (measured)", "modelled"]
    title = "The memory model against real training steps on this machine, counted storage by storage"
    return Grid(title=title, columns=headers, lines=lines).text()


def _devices(records: Sequence[Record]) -> str:
    """Real stages on a GPU, where they ran, beside what the paper says of them: its models ran there, so by
    the paper every one fits.
    """
    lines = []
    for record in of_case(records, part="device"):
        name = [record.case["half"], record.case["column"], record.case.get("precision", "float32")]
        if record.status != "done":
            lines.append([*name, record.status.replace("_", " "), "", "", record.reason, ""])
            continue
        facts = record.details
        said = f"fits {facts['cap_gib']:g} GiB"
        if not facts["fits"]:
            said = f"does not fit {facts['cap_gib']:g} GiB: {_ran_out(facts['stages'])}"
        agrees = "as in the paper" if facts["fits"] else "not as in the paper, where it fits"
        peaks = [_value(record, f"{how} peak") for how in ("measured", "modelled")]
        shown = ["-" if peak is None else _gib(peak) for peak in peaks]
        lines.append([*name, len(facts["stages"]), *shown, said, agrees])
    headers = ["model", "column", "", "distinct stages", "measured peak", "modelled peak", "", ""]
    title = "Every distinct stage for real on this GPU, alone, under the paper's cap (fullest one)"
    return Grid(title=title, columns=headers, lines=lines).text() if lines else ""


def _ran_out(stages: Sequence[Mapping[str, Any]]) -> str:
    """Text about the first stage that ran out of memory; the record has all that torch says of it."""
    stage = next(stage for stage in stages if stage["ran_out"])
    said = ". ".join(stage["ran_out"].split(". ")[:2])
    return f"stage {stage['stage']} held {_gib(stage['at_most'])}; {said}"


def _largest_on_a_gpu(records: Sequence[Record]) -> str:
    """The largest model that fits, by the memory model and measured."""
    lines = []
    for record in of_case(records, part=LARGEST):
        name = [record.case["half"], record.case["column"]]
        if record.status != "done":
            lines.append([*name, record.status.replace("_", " "), "", record.reason])
            continue
        tried = {each["more"]: each for each in record.details["tried"]}
        modelled, found = _value(record, "modelled parameters"), _value(record, "measured parameters")
        fitting = [more for more, each in tried.items() if each["fits"]]
        if fitting == [0]:
            said = f"as modelled: one larger does not fit, {_ran_out(tried[1]['stages'])}"
        elif not fitting:
            said = f"none of {len(tried)} sizes fits; the memory model says too little"
        else:
            said = f"{abs(fitting[0])} {'larger' if fitting[0] > 0 else 'smaller'} than modelled"
        counts = ["-" if each is None else show(each, "parameters") for each in (modelled, found)]
        lines.append([*name, *counts, said])
    title = "The largest model that fits, every distinct stage for real on this GPU under the paper's cap"
    headers = ["model", "column", "modelled", "measured", ""]
    return Grid(title=title, columns=headers, lines=lines).text() if lines else ""


WHOSE = ("paper", "computed under the declared choices", "this engine")
MOVING = ("boundary", "activations", "transients")
"""Parts of the memory other than parameters, gradients and the optimizer's state."""


def figures(records: Sequence[Record]) -> list[Plot]:
    """One per half of the table. Halves without computed records are left out."""
    found = {(cell.table, cell.row, cell.column): cell for cell in compare(cells(records))}
    return [
        Plot(
            name=f"table1-{half}",
            caption=(
                f"Table 1, {half}: the largest models, and activation memory of the paper's models. Computed "
                "numbers carry the error of our predictions, of which none is small enough for a test; this "
                "engine (PyTorch, float32) cuts exactly and takes as many micro-batches as it needs"
            ),
            alt="Bars per column of Table 1, logarithmic; every number stands in the table above.",
            draw=partial(_draw, found, records, half),
            style=partial(paper_style, 1.1),
        )
        for half, data in HALVES.items()
        if (data.table, "maximum parameters", COLUMNS[half][1].name) in found
        and found[data.table, "maximum parameters", COLUMNS[half][1].name].ours is not None
    ]


def _draw(found: Mapping[tuple[str, str, str], Comparison], records: Sequence[Record], half: str) -> Figure:
    """Model sizes on the left, activation memory on the right, in the paper's unit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    unit = found[HALVES[half].table, "peak activation memory", COLUMNS[half][0].name].unit
    _bars(left, found, half, "maximum parameters", _largest_here(records, half))
    _bars(right, found, half, "peak activation memory", _moving_here(records, half, unit))
    left.set(ylabel="parameters", title=f"{HALVES[half].model}: largest model")
    right.set(ylabel=f"{unit}, all accelerators", title="activation memory of the paper's models")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    without_frame(figure)
    return figure


def _largest_here(records: Sequence[Record], half: str) -> list[float | None]:
    key = {"half": half, "attention": JUDGED_ATTENTION[half], "precision": "float32"}
    return [
        _value(find(records, part="largest", column=each.name, **key), "parameters") for each in COLUMNS[half]
    ]


def _moving_here(records: Sequence[Record], half: str, unit: str) -> list[float | None]:
    """Memory that comes and goes in a step, at the paper's number of micro-batches."""
    heights: list[float | None] = []
    for column in COLUMNS[half]:
        record = find(records, part="paper", half=half, column=column.name, attention=JUDGED_ATTENTION[half])
        stages = record.details["placement"]["stages"] if record and record.status == "done" else []
        total = sum(stage[part] for stage in stages for part in MOVING)
        heights.append(convert(total, "bytes", unit) if stages else None)
    return heights


def _bars(
    axes: Axes,
    found: Mapping[tuple[str, str, str], Comparison],
    half: str,
    row: str,
    here: Sequence[float | None],
) -> None:
    """Paper, computed with its error, and this engine, for each column of the table."""
    import seaborn
    from matplotlib.ticker import NullFormatter

    cells = [found[HALVES[half].table, row, column.name] for column in COLUMNS[half]]
    printed = [cell.paper if cell.corrected is None else cell.corrected for cell in cells]
    bars = zip(WHOSE, (printed, [cell.ours for cell in cells], here), strict=True)
    for index, (label, heights) in enumerate(bars):
        places = [place + (index - 1) * 0.27 for place, height in enumerate(heights) if height is not None]
        known = [height for height in heights if height is not None]
        color = ("0.6", *seaborn.color_palette("deep", 2))[index]
        axes.bar(places, known, 0.25, color=color, label=label)
        for place, height in enumerate(heights):
            if height is None:
                axes.text(
                    place + (index - 1) * 0.27, 0.02, "nothing fits", rotation=90, ha="center", va="bottom",
                    size="x-small", transform=axes.get_xaxis_transform(),
                )  # fmt: skip
    for place, cell in enumerate(cells):
        if cell.ours is not None and cell.range_low is not None and cell.range_high is not None:
            axes.vlines(place, cell.range_low, cell.range_high, color="black", linewidth=1.2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: show(value, "parameters" if value >= 1e6 else "", 1))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(range(len(cells)), [cell.column for cell in cells])
    axes.xaxis.grid(visible=False)
