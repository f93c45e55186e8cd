"""Grids of processes: what each way of dividing the work sends, takes and holds.

Expected: a pipeline sends a small part of what replicas send for Transformers, and not for small AmoebaNets;
steps on this machine are those of the replay; of all grids of an accelerator's, few stages are fast and full.
The machine should have nothing else to do:

    python -m experiments run grid
    python -m experiments run grid --device cuda    steps of two GPUs alone
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.grid import accelerators, machine
from gpipe_bench.experiments.grid.accelerators import CAP_GIB
from gpipe_bench.experiments.report.drawing import kept_timelines, picture
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.record import Quantity, Record, find, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.harness.verdict import Answer, Part, Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TABLE = "grid"
STAGES, REPLICAS = 8, 8  # of the sentence about scaling further
SHOWN = 6
"""The fastest grids that fit, of each number of accelerators."""
PLACE = ("dp", "pp", "tp", "level")
COLORS = {1: "#0173b2", 2: "#de8f05", 4: "#029e73", 8: "#d55e00", 16: "#cc78bc"}
"""By stages of the pipeline."""
MARKERS = {1: "o", 2: "s", 4: "^", 8: "D"}
"""By processes that share a layer."""


def cases(options: RunOptions) -> list[Case]:
    on_machine = machine.cases(options.profile, options.device)
    return on_machine if options.device == "cuda" else on_machine + accelerators.cases(options.profile)


def run(case: Case, options: RunOptions) -> Outcome:
    if case.key["part"] == accelerators.PART:
        return accelerators.run(case.key, quick=options.profile == "smoke")
    return machine.run(case.key, options.profile, options.seed)


def cells(records: Sequence[Record]) -> list[Answer]:
    found = [
        Answer(
            table=TABLE,
            row="bytes sent by a pipeline over data parallelism",
            column=str(record.details["column"]),
            source="others",
            question="as published" if part == machine.MODELLED else "here",
            quantity=record.quantity("pipeline over data parallelism"),
            spread=_over("balanced by", list(record.details.get("by_cut", {}).values())),
            record=record,
            note=f"Of the rank that sends most in a step, {how}.",
        )
        for part, how in ((machine.MODELLED, "by shape"), (machine.COUNTED, "as its process wrote them"))
        for record in of_case(records, "done", part=part)
    ]
    for name, model in accelerators.MODELS.items():
        one, many = (
            find(records, "done", part=accelerators.PART, model=name, accelerators=STAGES * replicas)
            for replicas in (1, REPLICAS)
        )
        if one is not None and many is not None:
            found.append(_scaling(one, many, model.title))
    return found


def _over(what: str, values: Sequence[float]) -> Spread | None:
    """The range over what is not said; None where nothing is open."""
    if not values:
        return None
    low, high = min(values), max(values)
    part = Part(what=what, low=low, high=high)
    return Spread(low=low, high=high, parts=(part,), combinations=len(values))


def _scaling(one: Record, many: Record, title: str) -> Answer:
    """Examples per second of eight replicas of a pipeline over those of one, over what is not stated."""

    def rates(record: Record, dp: int) -> list[float]:
        """Under every setting, the middle first."""
        spans = {tuple(each[part] for part in PLACE): each for each in record.details["ranges"]}
        return [record.details["batch_size"] / step_s for step_s in spans[dp, STAGES, 1, "dp"]["steps_s"]]

    ratios = [all_of / single for single, all_of in zip(rates(one, 1), rates(many, REPLICAS), strict=True)]
    return Answer(
        table=TABLE,
        row="throughput of 8 replicas of a pipeline over one",
        column=f"{title}, K={STAGES}",
        source="others",
        question="as published",
        quantity=Quantity("throughput", ratios[0], "ratio", "modelled"),
        spread=_over("share of the peak and the link", ratios),
        record=many,
        note="As many examples per replica; a roofline's operations laid out by the replay.",
        not_comparable="The smoke profile has a tiny model." if many.profile == "smoke" else "",
    )


def tables(records: Sequence[Record]) -> str:
    found = (_traffic(records), _steps(records), *_accelerators(records))
    return "\n\n".join(numbers_text(*each) for each in found if each[-1])


def _values(record: Record) -> dict[Any, Any]:
    """Numbers by name, then the values of their keys."""
    return {(each.name, *each.key.values()): each.value for each in record.quantities}


def _traffic(records: Sequence[Record]) -> tuple[str, list[str], list[list[str]]]:
    lines = []
    for part, how in ((machine.MODELLED, "modelled"), (machine.COUNTED, "measured")):
        for record in of_case(records, "done", part=part):
            found = _values(record)
            shapes = [found.get(("bytes by shape", way)) for way in ("pp", "dp")]
            lines.append(
                [
                    str(record.details["column"]),
                    how,
                    *(f"{found['bytes sent', way] / 1e6:,.2f}" for way in ("pp", "dp")),
                    f"{found['pipeline over data parallelism',]:.3f}",
                    ", ".join("-" if each is None else f"{each / 1e6:,.2f}" for each in shapes),
                ]
            )
    title = (
        "MB that the rank that sends most sends in one step, float32\n"
        "  pipeline   activations forward and their gradients back\n"
        "  data par.  the sum of the gradients over as many replicas"
    )
    return title, ["", "provenance", "pipeline", "data par.", "ratio", "both by shape"], lines


def _steps(records: Sequence[Record]) -> tuple[str, list[str], list[list[str]]]:
    lines = []
    for part, of in ((machine.STEPS, "a Transformer"), (machine.WAITING, "layers that wait")):
        for record in of_case(records, "done", part=part):
            found = _values(record)
            behind = found.get(("replayed step, sums behind the last backward",))
            lines.append(
                [
                    f"dp {record.case['dp']} x pp {record.case['pp']}"
                    + " on GPUs" * ("device" in record.case),
                    of,
                    f"{found['step',]:.1f}",
                    f"{found['replayed step',]:.1f}",
                    f"{found['replayed over measured',]:.3f}",
                    "-" if behind is None else f"{behind:.1f}",
                ]
            )
    columns = ["", "of", "measured", "replayed", "ratio", "without overlap"]
    return "Steps on this machine in ms, beside their replay", columns, lines


def _accelerators(records: Sequence[Record]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    for record in of_case(records, "done", part=accelerators.PART):
        found = _values(record)
        spans = {tuple(each[part] for part in PLACE): each for each in record.details["ranges"]}
        steps = sorted((value, key[1:]) for key, value in found.items() if key[0] == "step")
        lines = [
            [
                *map(str, place),
                str(spans[place]["M"]),
                f"{step_s:.3f}",
                f"{min(spans[place]['steps_s']):.2f} to {max(spans[place]['steps_s']):.2f}",
                f"{found['peak memory', *place]:.2f}",
            ]
            for step_s, place in steps
            if found["peak memory", *place] <= CAP_GIB
        ]
        title = (
            f"{record.details['title']} on {record.case['accelerators']} accelerators "
            f"({record.details['accelerator']}), {record.details['batch_size']} examples: the fastest of "
            f"{len(steps)} ways that fit 16 GiB\n"
            "  (modelled: a roofline's operations laid out by the replay; the range is over the share of\n"
            "  the peak, the bandwidth and the latency of the link; dp: all replicas have all parameters)"
        )
        yield title, ["dp", "pp", "tp", "parameters", "M", "step (s)", "range", "GiB"], lines[:SHOWN]


def figures(records: Sequence[Record]) -> list[Plot]:
    found = of_case(records, "done", part=accelerators.PART)
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
    ][: bool(found)]


def _draw(records: Sequence[Record]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    names = [name for name in accelerators.MODELS if any(r.case["model"] == name for r in records)]
    counts = sorted({int(str(record.case["accelerators"])) for record in records})
    figure = Figure(figsize=(3.6 * len(counts) + 1.2, 3.1 * len(names) + 0.4), layout="constrained")
    panels = figure.subplots(len(names), len(counts), squeeze=False, sharey="row")
    for row, name in zip(panels, names, strict=True):
        for axes, count in zip(row, counts, strict=True):
            record = find(records, model=name, accelerators=count)
            if record is not None:
                _panel(axes, record)
        row[0].set_ylabel("seconds of a step", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("GiB of the fullest accelerator", fontsize=8)
    grey = "#555555"
    shared: dict[str, Any] = {"linestyle": "none", "markersize": 5.5}
    points = [(color, "o", color, f"pp {stages}") for stages, color in COLORS.items()]
    points += [(grey, marker, grey, f"tp {parts}") for parts, marker in MARKERS.items()]
    points += [(grey, "o", grey, "dp, all parameters each"), (grey, "o", "none", "dp divided (ZeRO-2)")]
    handles = [
        Line2D([], [], color=color, marker=marker, markerfacecolor=fill, label=label, **shared)
        for color, marker, fill, label in points
    ]
    handles.append(Line2D([], [], color="black", linewidth=0.8, linestyle=":", label=f"{CAP_GIB:g} GiB"))
    figure.legend(handles=handles, loc="outside right upper", fontsize=7, frameon=False)
    return figure


def _panel(axes: Axes, record: Record) -> None:
    found = _values(record)
    for (what, dp, pp, tp, level), step_s in found.items():
        if what == "step" and level != "ZeRO-3":  # left of its neighbours by little and above them by much
            axes.plot(
                found["peak memory", dp, pp, tp, level], step_s, marker=MARKERS[tp], color=COLORS[pp],
                markersize=5.5, markerfacecolor=COLORS[pp] if level == "dp" else "none",
                zorder=3 if level == "dp" else 2,
            )  # fmt: skip
    axes.axvline(CAP_GIB, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(labelsize=7, which="both")
    where = f"{record.details['title']}, {record.case['accelerators']} accelerators"
    axes.set_title(f"{where},\n{record.details['batch_size']} examples", fontsize=8)


EXPERIMENT = Experiment(
    name="grid",
    title="Grids of processes: pipelines, replicas and divided layers together",
    source="beyond the paper; its sentence on data parallelism, and a web page's on traffic",
    describe=(
        "Bytes sent by a pipeline and by replicas, by shape and counted; steps of small grids beside their "
        "replay; step time and memory of every (dp, pp, tp) of 8, 64 and 512 accelerators."
    ),
    profiles={
        "smoke": "tiny models, 8 accelerators",
        "short": "everything, 15 steps of each grid on this machine",
        "full": "the same",
    },
    cases=cases,
    run=run,
    cells=cells,
    tables=tables,
    figures=figures,
    timelines=kept_timelines,
    paper_tables=("grid",),
    options=("seed",),
)
