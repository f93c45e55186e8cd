"""The schedules of Figure 2, and what their records show: tables and figures, from the records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from math import isnan, nan
from typing import TYPE_CHECKING, NamedTuple

from gpipe_bench.experiments.drawing import legend, paint, paper_style
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import Record, Scalar, find, frame, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.pipeline.plan.named import gpipe, naive, one_f_one_b
from gpipe_bench.pipeline.plan.remat import Remat
from gpipe_bench.pipeline.plan.schedule import Schedule
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.plan.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNIT = "forwards"
GIB = 2**30
SHOWN_STAGES = 4
SHOWN_MICROBATCHES = (4, 8, 16, 32, 128)
MOST_STAGES = 8
"""Most stages of the paper's Table 2, which says that M >= 4K is enough. Bubbles are drawn up to this K; more
lines would hide each other."""


class Variant(NamedTuple):
    """A schedule as drawn and counted; `formula` is that of its bubble."""

    title: str
    schedule: Callable[[int, int, Remat], Schedule]
    remat: Remat
    formula: str
    early_recompute: bool = True
    microbatches_at_once: bool = False  # the whole mini-batch goes through as one micro-batch

    def closed_form(self, num_stages: int, num_microbatches: int) -> Fraction:
        """Idle share of the device time by the formula."""
        others = num_stages - 1
        if self.microbatches_at_once:
            return Fraction(others, num_stages)
        if self.remat == "never" or not self.early_recompute:
            return Fraction(others, num_microbatches + others)
        # Recomputation fills no gap of the drain, so it adds to the step and not to the idle time.
        recomputed = num_microbatches - (self.remat == "except_last")
        idle = 3 * others  # a forward and a backward each
        return Fraction(idle, 3 * num_microbatches + idle + recomputed)

    def replay(self, num_stages: int, num_microbatches: int) -> Timeline:
        """The step of a mini-batch that is worth M forwards, in forwards."""
        scale = num_microbatches if self.microbatches_at_once else 1
        return replay(
            self.schedule(num_stages, num_microbatches // scale, self.remat),
            {kind: slots * scale for kind, slots in SLOTS.items()},
            early_recompute=self.early_recompute,
        )

    def bubble(self, num_stages: int, num_microbatches: int) -> Fraction:
        """Idle share of the replayed step, exact."""
        timeline = self.replay(num_stages, num_microbatches)
        return Fraction(timeline.idle_s) / Fraction(num_stages * timeline.makespan_s)

    def graphs_alive(self, num_stages: int, num_microbatches: int) -> int:
        """Most micro-batches whose graph the first stage keeps at a time."""
        live = self.replay(num_stages, num_microbatches).live_activations(0)
        return max(count for _, count in live) * (num_microbatches if self.microbatches_at_once else 1)


_FORMULA, _EARLY = "(K-1)/(M+K-1)", "GPipe, recomputing early"
VARIANTS: dict[str, Variant] = {
    "naive": Variant(
        "naive: the mini-batch in one piece", naive, "never", "(K-1)/K", microbatches_at_once=True
    ),
    "gpipe": Variant("GPipe without re-materialization", gpipe, "never", _FORMULA),
    "gpipe-late": Variant(
        "GPipe, recomputing when the gradient is there", gpipe, "always", _FORMULA, early_recompute=False
    ),
    "gpipe-early": Variant(f"{_EARLY} (the paper's)", gpipe, "always", "3(K-1)/(3(M+K-1)+M)"),
    "gpipe-kept": Variant(f"{_EARLY}, last micro-batch kept", gpipe, "except_last", "3(K-1)/(3(M+K-1)+M-1)"),
    "1f1b": Variant("1F1B without re-materialization", one_f_one_b, "never", _FORMULA),
}
"""Variants in the order in which they are shown, by the name that cases and records use."""


def tables(records: Sequence[Record]) -> str:
    """Tables of the values that the figures draw."""
    parts = [
        table(found)
        for part, table in (
            ("chart", _steps),
            ("bubble", _fractions),
            ("memory", _sizes),
        )
        if (found := of_part(records, part))
    ]
    return "\n\n".join(part for part in parts if part)


def figures(records: Sequence[Record]) -> list[Plot]:
    """Every figure the records suffice for."""
    plots = [
        Plot(
            name=f"figure2-schedules-m{count}",
            caption=f"The schedules of Figure 2 for M = {count}, replayed",
            alt="Gantt charts of the schedules: stages from top to bottom, time from left to right.",
            draw=partial(_charts, of_case(records, "done", part="chart", num_microbatches=count)),
            style=paper_style,
        )
        for count in dict.fromkeys(record.case["num_microbatches"] for record in of_part(records, "chart"))
    ]
    drawn: tuple[tuple[str, Callable[[Sequence[Record]], Figure], str, str], ...] = (
        (
            "bubble",
            _bubbles,
            "Idle share of the device time over the number of micro-batches",
            "For each K the idle share falls as M grows; replayed marks lie on the lines of the closed form, "
            "and at M = 4K it is below 20 percent.",
        ),
        (
            "memory",
            _memory,
            "Activation memory by the paper's formula and by the memory model",
            "Stacked bars of boundary inputs, saved activations and transients per number of stages, formula "
            "beside memory model.",
        ),
    )
    return plots + [
        Plot(name=f"figure2-{part}", caption=caption, alt=alt, draw=partial(draw, found), style=paper_style)
        for part, draw, caption, alt in drawn
        if (found := of_part(records, part))
    ]


def of_part(records: Sequence[Record], part: str) -> list[Record]:
    """The finished records of one part, in order; fewer stages first."""
    found = of_case(records, "done", part=part)
    return sorted(found, key=lambda r: (str(r.case.get("model", "")), int(str(r.case.get("num_stages", 0)))))


def _value(record: Record | None, name: str, **key: Scalar) -> float:
    """Value of the metric; NaN where there is none."""
    metric = record.metric(name, **key) if record is not None else None
    return nan if metric is None or metric.value is None else metric.value


def _said(number: float, form: str = "g") -> str:
    return "-" if isnan(number) else format(number, form)


def _percent(number: float) -> str:
    return "-" if isnan(number) else f"{100 * number:.1f} %"


def _stages(record: Record) -> int:
    return int(str(record.case["num_stages"]))


# Tables -----------------------------------------------------------------------------------------------------


def _steps(found: Sequence[Record]) -> str:
    """The drawn steps: how long, how idle, how much is kept."""
    counts = list(dict.fromkeys(record.case["num_microbatches"] for record in found))
    headers = ["schedule"]
    for count in counts:
        headers += [f"M={count}: step", "idle", "graphs"]
    lines = []
    for name, variant in VARIANTS.items():
        line = [variant.title]
        for count in counts:
            record = find(found, schedule=name, num_microbatches=count)
            alive = _said(_value(record, "graphs alive on the first stage"))
            line += [_said(_value(record, "step")), _percent(_value(record, "bubble")), alive]
        lines.append(line)
    title = (
        f"The schedules drawn, K = {SHOWN_STAGES} (replayed): step in forwards of one micro-batch on one "
        "stage,\nidle share of the device time, most micro-batches whose graph the first stage keeps"
    )
    return numbers_text(title, headers, lines)


def _fractions(found: Sequence[Record]) -> str:
    """Closed form and replay as fractions for one K, and whether all others agree."""
    record = find(found, num_stages=SHOWN_STAGES)
    if record is None:
        return ""
    lines = []
    for name, variant in VARIANTS.items():
        pairs = [record.details["fractions"][f"{name} M={count}"] for count in SHOWN_MICROBATCHES]
        lines += [
            [variant.title, variant.formula, *(each["closed form"] for each in pairs)],
            ["", "replay", *(each["replay"] for each in pairs)],
            ["", "", *(_percent(float(Fraction(each["replay"]))) for each in pairs)],
        ]
    total = sum(len(each.details["fractions"]) for each in found)
    differing = sum(_value(each, "fractions that differ from the closed form") for each in found)
    title = (
        f"Bubble, K = {SHOWN_STAGES}: the closed form above, the replay below it (replayed)\n"
        f"Over K = {', '.join(str(_stages(each)) for each in found)}, replay and closed form are equal in "
        f"{total - differing:g} of {total} fractions"
    )
    headers = ["schedule", "closed form", *(f"M={count}" for count in SHOWN_MICROBATCHES)]
    return numbers_text(title, headers, lines)


def _sizes(found: Sequence[Record]) -> str:
    """Formula and memory model side by side."""
    lines = []
    for record in found:
        layers, stages = record.details["num_layers"], _stages(record)
        for count in record.details["num_microbatches"]:
            names = ("kept without re-materialization", "formula", "peak activations")
            kept, formula, peak = (_value(record, name, M=count) for name in names)
            units = (1 + layers / stages / count) / layers
            transients = record.details["bytes"][f"M={count}"]["transients"]
            shares = map(_percent, (units, formula / kept, peak / kept))
            sizes = (f"{size / GIB:.2f}" for size in (formula, peak, transients, kept))
            lines.append([record.details["title"], stages, count, *shares, *sizes])
    size = found[0].details["batch_size"]
    title = (
        f"Activations at the fullest moment of the fullest stage, N = {size}, re-materialization, float32 "
        "(modelled)\nas shares of O(N L), what one device keeps without a pipeline and re-materialization:\n"
        "  formula       (N + (L/K)(N/M)) / (N L), constants of 1\n"
        "  own bytes     the same with the model's bytes: inputs of N + activations of N/M examples\n"
        "  memory model  all that is alive, transients of a backward pass included"
    )
    headers = [
        "model", "K", "M", "formula", "own bytes", "memory model", "GiB: own", "memory model", "transients",
        "O(N L)",
    ]  # fmt: skip
    return numbers_text(title, headers, lines)


# Figures ----------------------------------------------------------------------------------------------------


def _charts(records: Sequence[Record]) -> Figure:
    """The schedules of one M below each other; the pipelined ones on one time axis."""
    from matplotlib.figure import Figure

    by_name = {name: find(records, schedule=name) for name in VARIANTS}
    drawn = {name: record for name, record in by_name.items() if record is not None}
    timelines = {name: Timeline.from_data(record.details["timeline"]) for name, record in drawn.items()}
    spans = {name: each.makespan_s for name, each in timelines.items()}
    longest = max([spans[name] for name in drawn if not VARIANTS[name].microbatches_at_once], default=0)
    num_stages = max(timeline.num_stages for timeline in timelines.values())
    figure = Figure(figsize=(7.2, 1.28 * len(drawn) + 0.9), layout="constrained")
    rows = figure.subplots(len(drawn), 1, squeeze=False)
    for axes, (name, record) in zip(rows[:, 0], drawn.items(), strict=True):
        own_scale = VARIANTS[name].microbatches_at_once or not longest
        width = spans[name] if own_scale else longest
        paint(axes, timelines[name], unit_s=1, width=width)
        axes.set_xlim(0, width)
        axes.grid(False)
        if not own_scale and axes is not rows[-1, 0]:
            axes.tick_params(labelbottom=False)
        alive = _value(record, "graphs alive on the first stage")
        kept = "1 graph" if alive == 1 else f"{alive:g} graphs"
        facts = f"{spans[name]:g} {UNIT}, {_value(record, 'bubble'):.1%} idle, {kept} on stage 0"
        if own_scale and longest:
            facts += " (own time scale)"
        axes.set_title(VARIANTS[name].title, loc="left", fontsize=8.5, fontweight="bold", pad=3)
        axes.set_title(facts, loc="right", fontsize=8, pad=3)
    rows[-1, 0].set_xlabel(f"time ({UNIT} of one micro-batch on one stage)")
    legend(figure, timelines.values())
    figure.suptitle(
        f"K = {num_stages}, M = {records[0].case['num_microbatches']}; replayed: equal stages, free link, "
        "forward : recompute : backward = 1 : 1 : 2",
        fontsize=9,
    )
    return figure


def _bubbles(records: Sequence[Record]) -> Figure:
    """Closed form as a line, replay as marks, over M for every K."""
    import pandas
    import seaborn
    from matplotlib.figure import Figure

    ways = {"gpipe": "no re-materialization", "gpipe-early": "recomputing early"}
    stages = [k for record in records if (k := _stages(record)) <= MOST_STAGES]
    counts = range(1, max(SHOWN_MICROBATCHES) + 1)
    closed = pandas.DataFrame(
        [
            (f"K = {k}", ways[name], m, float(VARIANTS[name].closed_form(k, m)))
            for k, name, m in product(stages, ways, counts)
        ],
        columns=["stages", "schedule", "M", "idle"],
    )
    found = frame(records).query("metric == 'bubble' and num_stages in @stages and schedule in @ways.keys()")
    replayed = pandas.DataFrame(
        {
            "stages": [f"K = {k}" for k in found.num_stages],
            "schedule": [*map(ways.get, found.schedule)],
            "M": found.M.astype(int),
            "idle": found.value,
        }
    )
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axes = figure.subplots()
    look = {"x": "M", "y": "idle", "hue": "stages", "style": "schedule", "palette": "colorblind", "ax": axes}
    seaborn.lineplot(closed, linewidth=1.1, **look)
    seaborn.scatterplot(replayed, markers=["o", "^"], s=26, legend=False, zorder=3, **look)
    rule = found[(found.schedule == "gpipe") & (4 * found.num_stages == found.M)]
    axes.scatter(
        rule.M.astype(int), rule.value, s=90, label="M = 4K", facecolors="none", edgecolors="0.3", zorder=4
    )
    axes.axhline(0.2, color="0.4", linewidth=0.8, linestyle=":")
    axes.annotate("20 %", (1.02, 0.205), fontsize=7.5, color="0.3", va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := [2**n for n in range(8)], [str(tick) for tick in ticks])
    axes.set(xlim=(0.93, 140), ylim=(0, 1), xlabel="micro-batches M", ylabel="idle share of the device time")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_title("Bubble: closed form (lines) and replay (marks)", fontsize=9.5)
    axes.legend(fontsize=7.5)
    seaborn.despine(figure)
    return figure


def _memory(records: Sequence[Record]) -> Figure:
    """Formula and memory model as stacked bars for every K, at the most micro-batches."""
    import seaborn
    from matplotlib.figure import Figure

    boundary, saved, transients = seaborn.color_palette("colorblind")[:3]
    parts = (
        (-0.2, "formula_boundary", boundary, "//", "N inputs of the stage"),
        (-0.2, "formula_activations", saved, "//", "saved for N/M examples"),
        (0.2, "boundary", boundary, "", "boundary inputs"),
        (0.2, "activations", saved, "", "saved activations"),
        (0.2, "transients", transients, "", "transients"),
    )
    models = list(dict.fromkeys(record.case["model"] for record in records))
    figure = Figure(figsize=(3.6 * len(models), 3.3), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        found = of_case(records, model=model)
        details = found[0].details
        count = details["num_microbatches"][-1]
        for place, record in enumerate(found):
            bases = {-0.2: 0.0, 0.2: 0.0}
            for shift, part, color, hatch, label in parts:
                height = record.details["bytes"][f"M={count}"][part] / GIB
                axes.bar(
                    place + shift, height, 0.38, bases[shift], color=color, hatch=hatch, edgecolor="white",
                    linewidth=0.4, label=label if place == 0 else None,
                )  # fmt: skip
                bases[shift] += height
        kept = _value(found[0], "kept without re-materialization", M=count) / GIB
        facts = f"N = {details['batch_size']}, M = {count}; O(N L): {kept:.0f} GiB"
        axes.set_title(f"{details['title']}\n{facts}", fontsize=8.5)
        axes.set_xticks(range(len(found)), [f"K={_stages(record)}" for record in found])
        axes.set_ylabel("GiB per device")
        axes.grid(False, axis="x")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(
        "Activations at the fullest moment of the fullest stage, modelled\n"
        "hatched: O(N + (L/K)(N/M)) with the model's own bytes; plain: memory model",
        fontsize=9 if len(models) > 1 else 7,
    )
    seaborn.despine(figure)
    return figure
