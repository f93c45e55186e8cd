"""One figure: step time and memory of every grid of 8, 64 and 512 accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpipe_bench.experiments.grid import accelerators
from gpipe_bench.experiments.grid.text import value
from gpipe_bench.experiments.report.drawing import picture
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import Record, of_case

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {1: "#0173b2", 2: "#de8f05", 4: "#029e73", 8: "#d55e00", 16: "#cc78bc"}
"""By stages of the pipeline."""
MARKERS = {1: "o", 2: "s", 4: "^", 8: "D"}
"""By processes that share a layer."""
CAP_GIB = accelerators.MEMORY_BYTES / 2**30


def figures(records: Sequence[Record]) -> list[Plot]:
    found = of_case(records, "done", part=accelerators.PART)
    if not found:
        return []
    return [
        picture(
            name="grid-accelerators",
            caption=(
                "Step time and memory of every (dp, pp, tp) of 8, 64 and 512 accelerators, modelled by a "
                "roofline and laid out by the replay"
            ),
            alt=(
                "A panel for each model and number of accelerators, memory to the right, step time upwards. "
                "Pipelines of few stages are fast and full; more stages need less memory and more time. "
                "Hollow points have the parameters divided among replicas, and lie to the left of the filled."
            ),
            draw=partial(_draw, found),
        )
    ]


def _draw(records: Sequence[Record]) -> Figure:
    from matplotlib.figure import Figure

    names = [name for name in accelerators.MODELS if any(r.case["model"] == name for r in records)]
    counts = sorted({int(str(record.case["accelerators"])) for record in records})
    figure = Figure(figsize=(3.6 * len(counts) + 1.2, 3.1 * len(names) + 0.4), layout="constrained")
    grid = figure.subplots(len(names), len(counts), squeeze=False, sharey="row")
    for record in records:
        row, column = (
            names.index(str(record.case["model"])),
            counts.index(int(str(record.case["accelerators"]))),
        )
        _panel(grid[row][column], record)
        if column == 0:
            grid[row][column].set_ylabel("seconds of a step", fontsize=8)
        if row + 1 == len(names):
            grid[row][column].set_xlabel("GiB of the fullest accelerator", fontsize=8)
    _legend(figure)
    return figure


def _panel(axes: Axes, record: Record) -> None:
    for step in record.quantities:
        if step.name != "step":
            continue
        color, marker = COLORS[int(str(step.key["pp"]))], MARKERS[int(str(step.key["tp"]))]
        if step.key["level"] == "ZeRO-3":
            continue  # left of its neighbours by little and above them by much: in the table
        peak = value(record, "peak memory", **step.key)
        filled = step.key["level"] == "dp"
        axes.plot(
            [peak or 0.0], [step.value or 0.0], marker=marker, color=color, linestyle="none", markersize=5.5,
            markerfacecolor=color if filled else "none", markeredgewidth=1.0, zorder=3 if filled else 2,
        )  # fmt: skip
    axes.axvline(CAP_GIB, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(labelsize=7, which="both")
    axes.set_title(
        f"{record.details['title']}, {record.case['accelerators']} accelerators,\n"
        f"{record.details['batch_size']} examples",
        fontsize=8,
    )  # fmt: skip


def _legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    def point(color: str, marker: str, label: str, *, filled: bool = True) -> Line2D:
        return Line2D(
            [], [], color=color, marker=marker, linestyle="none", label=label, markersize=5.5,
            markerfacecolor=color if filled else "none",
        )  # fmt: skip

    shown = [point(color, "o", f"pp {stages}") for stages, color in COLORS.items()]
    shown += [point("#555555", marker, f"tp {parts}") for parts, marker in MARKERS.items()]
    shown += [
        point("#555555", "o", "dp, all parameters each"),
        point("#555555", "o", "dp divided (ZeRO-2)", filled=False),
        Line2D([], [], color="black", linewidth=0.8, linestyle=":", label=f"{CAP_GIB:g} GiB"),
    ]
    figure.legend(handles=shown, loc="outside right upper", fontsize=7, frameon=False)
