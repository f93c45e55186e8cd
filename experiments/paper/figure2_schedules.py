"""The schedules of Figure 2 and what each wastes and keeps, exact: all stages take one time.

As text and as pictures, from records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gpipe_bench.experiments.drawing import legend, paint, paper_style
from gpipe_bench.harness.experiment import Plot
from gpipe_bench.harness.record import Record, find, frame, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.pipeline.plan.named import gpipe, naive, one_f_one_b
from gpipe_bench.pipeline.plan.schedule import Kind, Remat, Schedule, most_alive_of
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.plan.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNIT = "forwards"
DRAWN_STAGES = 4
SHOWN_MICROBATCHES = (4, 8, 16, 32, 128)


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
        scale = num_microbatches if self.microbatches_at_once else 1
        return most_alive_of(self.schedule(num_stages, num_microbatches // scale, self.remat).row(0)) * scale


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


def peak_activations(schedule: Schedule, num_layers: int) -> Fraction:
    """Most activations alive on a stage, where those of one layer for the whole mini-batch are 1.

    Counted over the actions: a boundary input per micro-batch in flight, and the L / K layers of every
    micro-batch whose graph exists. The paper's O(N + (L/K)(N/M)) with constants of 1, divided by N.
    """
    layers_per_stage = Fraction(num_layers, schedule.num_stages)
    peak = Fraction(0)
    for row in schedule.actions:
        inputs, graphs = 0, 0
        for action in row:
            inputs += action.kind is Kind.F
            makes_graph = Kind.R if schedule.recomputes(action.microbatch, action.stage) else Kind.F
            graphs += action.kind is makes_graph
            peak = max(peak, inputs + layers_per_stage * graphs)
            if action.kind is Kind.B:
                inputs, graphs = inputs - 1, graphs - 1
    return peak / schedule.num_microbatches


# Text and figures


def tables(records: Sequence[Record]) -> str:
    """The schedules that are drawn, and their bubbles as fractions."""
    charts, bubbles = (of_case(records, "done", part=part) for part in ("chart", "bubble"))
    return "\n\n".join(filter(None, [_steps(charts), _fractions(bubbles)]))


def _percent(number: float) -> str:
    return f"{100 * number:.1f} %"


def _steps(found: Sequence[Record]) -> str:
    """The drawn steps: how long, how idle, how much is kept."""
    if not found:
        return ""
    numbers = frame(found).pivot(index="schedule", columns=["num_microbatches", "metric"], values="value")
    shown = {"step": "{:g}".format, "bubble": _percent, "graphs alive on the first stage": "{:g}".format}
    texts = numbers.reindex([name for name in VARIANTS if name in numbers.index])
    counts = sorted({*numbers.columns.get_level_values(0)})
    columns = [
        texts[m, name].map(say, na_action="ignore").fillna("-") for m in counts for name, say in shown.items()
    ]
    lines = [[VARIANTS[name].title, *texts] for name, *texts in zip(texts.index, *columns, strict=True)]
    headers = ["schedule", *(name for m in counts for name in (f"M={m}: step", "idle", "graphs"))]
    title = (
        f"The schedules drawn, K = {DRAWN_STAGES} (replayed): step in forwards of one micro-batch on one "
        "stage,\nidle share of the device time, most micro-batches whose graph the first stage keeps"
    )
    return numbers_text(title, headers, lines)


def _fractions(found: Sequence[Record]) -> str:
    """Closed form and replay as fractions for one K, and whether all others agree."""
    shown = find(found, num_stages=DRAWN_STAGES)
    if shown is None:
        return ""
    lines = []
    for name, variant in VARIANTS.items():
        pairs = [shown.details["fractions"][f"{name} M={m}"] for m in SHOWN_MICROBATCHES]
        lines += [
            [variant.title, variant.formula, *(each["closed form"] for each in pairs)],
            ["", "replay", *(each["replay"] for each in pairs)],
            ["", "", *(_percent(float(Fraction(each["replay"]))) for each in pairs)],
        ]
    every = [pair for each in found for pair in each.details["fractions"].values()]
    title = (
        f"Bubble, K = {DRAWN_STAGES}: the closed form above, the replay below it (replayed)\n"
        f"Over K = {', '.join(str(each.case['num_stages']) for each in found)}, replay and closed form are "
        f"equal in {sum(pair['replay'] == pair['closed form'] for pair in every)} of {len(every)} fractions"
    )
    return numbers_text(title, ["schedule", "closed form", *(f"M={m}" for m in SHOWN_MICROBATCHES)], lines)


def figures(records: Sequence[Record]) -> list[Plot]:
    """The schedules, a picture for each M."""
    charts = of_case(records, "done", part="chart")
    return [
        Plot(
            name=f"figure2-schedules-m{m}",
            caption=f"The schedules of Figure 2 for M = {m}, replayed",
            alt="Gantt charts of the schedules: stages from top to bottom, time from left to right.",
            draw=partial(_charts, of_case(charts, num_microbatches=m)),
            style=paper_style,
        )
        for m in dict.fromkeys(record.case["num_microbatches"] for record in charts)
    ]


def _charts(records: Sequence[Record]) -> Figure:
    """The schedules of one M below each other; the pipelined ones on one time axis."""
    from matplotlib.figure import Figure

    drawn = {name: record for name in VARIANTS if (record := find(records, schedule=name)) is not None}
    timelines = {name: Timeline.from_data(record.details["timeline"]) for name, record in drawn.items()}
    spans = {name: each.makespan_s for name, each in timelines.items()}
    longest = max([spans[name] for name in drawn if not VARIANTS[name].microbatches_at_once], default=0)
    figure = Figure(figsize=(7.2, 1.28 * len(drawn) + 0.9), layout="constrained")
    rows = figure.subplots(len(drawn), 1, squeeze=False)[:, 0]
    for axes, (name, record) in zip(rows, drawn.items(), strict=True):
        own_scale = VARIANTS[name].microbatches_at_once or not longest
        width = spans[name] if own_scale else longest
        paint(axes, timelines[name], unit_s=1, width=width)
        axes.set_xlim(0, width)
        axes.grid(False)
        if not own_scale and axes is not rows[-1]:
            axes.tick_params(labelbottom=False)
        alive = {each.name: each.value for each in record.metrics}["graphs alive on the first stage"]
        facts = f"{spans[name]:g} {UNIT}, {timelines[name].bubble:.1%} idle, "
        facts += f"{alive:g} graph{'s' * (alive != 1)} on stage 0"
        facts += " (own time scale)" if own_scale and longest else ""
        axes.set_title(VARIANTS[name].title, loc="left", fontsize=8.5, fontweight="bold", pad=3)
        axes.set_title(facts, loc="right", fontsize=8, pad=3)
    rows[-1].set_xlabel(f"time ({UNIT} of one micro-batch on one stage)")
    legend(figure, timelines.values())
    figure.suptitle(
        f"K = {DRAWN_STAGES}, M = {records[0].case['num_microbatches']}; replayed: equal stages, free link, "
        "forward : recompute : backward = 1 : 1 : 2",
        fontsize=9,
    )
    return figure
