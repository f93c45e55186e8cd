"""Table 3 drawn: throughput over the bandwidth of the link, modelled at the paper's size, and replayed and
measured at this machine's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.measuring.bandwidths import HIDDEN, hidden_from, slowdowns, spread_evenly
from gpipe_bench.experiments.measuring.timed_actions import TimedActions
from gpipe_bench.experiments.report.drawing import picture
from gpipe_bench.experiments.table3.tables import TABLES, stage_counts
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import Record, find
from gpipe_bench.pipeline.plan.links import LINKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOW, HIGH = 0.1e9, 1000e9  # bytes per second
PER_DECADE = 12
SHOWN_LINKS = {"ethernet-10g": "10G", "pcie3-host": "PCIe 3", "infiniband-hdr": "HDR", "nvlink2": "NVLink 2"}


def figures(records: Sequence[Record]) -> list[Plot]:
    """What there are records for."""
    drawings: dict[str, Callable[[], Figure]] = {}
    found, machine, linked = (
        {model: find(records, "done", part=part, model=model) for model in TABLES}
        for part in ("paper size", "steps", "link")
    )
    if any(found.values()):
        known = [record for record in found.values() if record is not None]
        drawings["table3-bandwidth"] = partial(_paper_size, known)
    if any(machine.values()) or any(linked.values()):
        drawings["table3-this-machine"] = partial(_this_machine, machine, linked)
    return [
        picture(
            name=name,
            caption="Table 3: throughput over the bandwidth of the link",
            alt=(
                "Curves of throughput over bandwidth on a logarithmic axis, with the point where "
                "communication stops being hidden."
            ),
            draw=draw,
        )
        for name, draw in drawings.items()
    ]


def _panels(count: int) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * count + 0.6, 4.0), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False, sharey=True)[0]


def _paper_size(records: Sequence[Record]) -> Figure:
    """The paper's models on P100s over links from 0.1 to 1000 GB/s."""
    figure, every = _panels(len(records))
    for axes, record in zip(every, records, strict=True):
        swept = spread_evenly(LOW, HIGH, PER_DECADE)
        for color, k in zip(_colors(record), stage_counts(record), strict=True):
            timed = TimedActions.from_data(record.details["stages"][f"K={k}"]["actions"])
            _curve(axes, timed, swept, color, f"K = {k}")
        for name, label in SHOWN_LINKS.items():
            place = LINKS[name].bandwidth_bytes_per_s
            axes.axvline(place / 1e9, color="0.55", linewidth=0.8, linestyle=":")
            axes.annotate(label, (place / 1e9, 0.02), rotation=90, fontsize=7, color="0.35", ha="right")
        _label(axes, record.details["title"])
        axes.set_xlim(LOW / 1e9, HIGH / 1e9)
    every[0].set_ylabel("throughput, relative to a free link")
    figure.suptitle(
        "The paper's size on P100s, modelled, M = 32\n"
        f"dots: over faster links a step is at most {HIDDEN:.0%} longer than over a free one",
        fontsize=9,
    )
    return figure


def _this_machine(machine: dict[str, Record | None], linked: dict[str, Record | None]) -> Figure:
    """The scaled models: replayed for all K, and K = 2 measured over the limited link."""
    models = [model for model in TABLES if machine[model] or linked[model]]
    figure, every = _panels(len(models))
    for axes, model in zip(every, models, strict=True):
        record, link = machine[model], linked[model]
        known = record or link
        assert known is not None
        timings = {}
        if record is not None:
            for k in stage_counts(record):
                data = record.details["stages"][f"K={k}"]["actions"]
                timings[k] = TimedActions.from_data(data)
        least = [hidden for timed in timings.values() if (hidden := hidden_from(timed)) is not None]
        points = link.details["points"] if link is not None else []
        seen = [*least, *(point["bandwidth_bytes_per_s"] for point in points)]
        low = 10 ** math.floor(math.log10(min(seen) / 3))
        high = 10 ** math.ceil(math.log10(max(seen) * 3))
        swept = spread_evenly(low, high, PER_DECADE)
        if record is not None:
            for color, (k, timed) in zip(_colors(record), timings.items(), strict=True):
                _curve(axes, timed, swept, color, f"K = {k}, M = {timed.num_microbatches}", 1e6)
        if link is not None:
            _measured(axes, link, swept)
        _label(axes, f"{known.details['title']}\n{known.details['scale']}", "MB/s")
        axes.set_xlim(low / 1e6, high / 1e6)
    every[0].set_ylabel("throughput, relative to a free link")
    figure.suptitle(
        "This machine's models: replayed (lines; dots: hidden from here on)\n"
        "and measured over a rate-limited link (squares, with the replay's error)",
        fontsize=9,
    )
    return figure


def _measured(axes: Any, link: Record, swept: Sequence[float]) -> None:
    """The replay with as many micro-batches as really ran, the measured points and the error of each."""
    timed = TimedActions.from_data(link.details["actions"])
    axes.plot(
        [each / 1e6 for each in swept], slowdowns(timed, swept), color="black", linewidth=1.2, linestyle="--",
        label=f"K = 2, M = {timed.num_microbatches}",
    )  # fmt: skip
    points = link.details["points"]
    places = [point["bandwidth_bytes_per_s"] / 1e6 for point in points]
    heights = [point["throughput"] for point in points]
    axes.plot(places, heights, "s", color="black", fillstyle="none", markersize=6, label="measured")
    for place, height, point in zip(places, heights, points, strict=True):
        error = link.quantity("replay error", messages_per_forward=point["multiple"])
        if error is not None and error.value is not None:
            axes.annotate(
                f"{100 * error.value:+.0f} %",
                (place, height),
                (4, -11),
                textcoords="offset points",
                fontsize=7,
            )


def _curve(
    axes: Any, timed: TimedActions, swept: Sequence[float], color: Any, label: str, unit: float = 1e9
) -> None:
    axes.plot([each / unit for each in swept], slowdowns(timed, swept), color=color, label=label)
    least = hidden_from(timed)
    if least is not None and swept[0] <= least <= swept[-1]:
        axes.plot([least / unit], slowdowns(timed, [least]), "o", color=color, markersize=6)


def _label(axes: Any, title: str, unit: str = "GB/s") -> None:
    axes.set_xscale("log")
    axes.set_ylim(0, 1.05)
    axes.set_xlabel(f"bandwidth of the link, {unit} per direction")
    axes.set_title(title, fontsize=9)
    axes.legend(loc="lower right", fontsize=7.5)


def _colors(record: Record) -> Any:
    import seaborn

    return seaborn.color_palette("viridis", len(stage_counts(record)))
