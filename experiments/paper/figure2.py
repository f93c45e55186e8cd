"""Figure 2 and the formulas of section 2: what a pipeline wastes and keeps.

Expected: the replay's bubble equals (K-1)/(M+K-1) exactly, less where recomputation starts early; activations
follow O(N + (L/K)(N/M)). No GPU is needed:

    python -m experiments run figure2

Schedules are laid out with equal stages, a free link and forward : recompute : backward = 1 : 1 : 2, time
counted in forwards of one micro-batch on one stage, so everything is a whole number and "equal" means equal
(`modelled`). Nothing here is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_bench.experiments.drawing import legend, paint, paper_style
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.paper import SENTENCES
from gpipe_bench.harness.record import Metric, Record, Scalar, find, frame, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.harness.verdict import Part, Result, Spread
from gpipe_bench.pipeline.plan.named import gpipe, naive, one_f_one_b
from gpipe_bench.pipeline.plan.schedule import Kind, Remat, Schedule, most_alive_of
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.plan.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNIT = "forwards"
DRAWN_STAGES, DRAWN_MICROBATCHES = 4, (4, 8)
SHOWN_MICROBATCHES = (4, 8, 16, 32, 128)
STAGES, MICROBATCHES, PER_STAGE = (2, 4, 8, 16), (1, 4, 8, 32, 128), (1, 2, 3, 4, 8)  # the last are M / K
COUNTED = ((24, 32, 2), (24, 32, 4), (24, 32, 8), (48, 32, 8), (24, 1, 1))  # L, M, K of the paper's formula
SIZES = {"amoebanet-b": "amoebanet-b", "transformer-seq2seq": "nmt-models"}
"""Models whose parameters no other table of the paper counts, and their tables."""


class Variant(NamedTuple):
    """A schedule as drawn and counted; `formula` is that of its bubble."""

    title: str
    schedule: Callable[[int, int, Remat], Schedule]
    remat: Remat
    formula: str = "(K-1)/(M+K-1)"
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


_EARLY = "GPipe, recomputing early"
VARIANTS: dict[str, Variant] = {
    "naive": Variant(
        "naive: the mini-batch in one piece", naive, "never", "(K-1)/K", microbatches_at_once=True
    ),
    "gpipe": Variant("GPipe without re-materialization", gpipe, "never"),
    "gpipe-late": Variant(
        "GPipe, recomputing when the gradient is there", gpipe, "always", early_recompute=False
    ),
    "gpipe-early": Variant(f"{_EARLY} (the paper's)", gpipe, "always", "3(K-1)/(3(M+K-1)+M)"),
    "gpipe-kept": Variant(f"{_EARLY}, last micro-batch kept", gpipe, "except_last", "3(K-1)/(3(M+K-1)+M-1)"),
    "1f1b": Variant("1F1B without re-materialization", one_f_one_b, "never"),
}
"""Variants in the order in which they are shown, by the name that cases and records use."""


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    drawn = product(DRAWN_MICROBATCHES[:1] if smoke else DRAWN_MICROBATCHES, VARIANTS)
    found = [Case({"part": "chart", "schedule": name, "num_microbatches": m}, 0.02) for m, name in drawn]
    found += [Case({"part": "bubble", "num_stages": k}, 0.02 * k) for k in (STAGES[:3] if smoke else STAGES)]
    found += [
        Case({"part": "formula", "num_layers": layers, "num_microbatches": m, "num_stages": k}, 0.01)
        for layers, m, k in COUNTED
    ]
    return found + [Case({"part": "size", "model": model, "size": size}, 0.4) for model, size in _zoo()]


def run(case: Case, options: RunOptions) -> Outcome:
    key: dict[str, Any] = case.key
    match key["part"]:
        case "chart":
            m, variant = key["num_microbatches"], VARIANTS[key["schedule"]]
            timeline = variant.replay(DRAWN_STAGES, m)
            metrics = [
                Metric("step", timeline.makespan_s, "number", "modelled", note=UNIT),
                Metric("bubble", float(timeline.bubble), "ratio", "modelled"),
                Metric("graphs alive on the first stage", variant.graphs_alive(DRAWN_STAGES, m), "number",
                       "modelled", note="micro-batches"),
            ]  # fmt: skip
            return Outcome(tuple(metrics), {"num_stages": DRAWN_STAGES, "timeline": timeline.to_data()})
        case "bubble":
            return _bubble(key["num_stages"])
        case "formula":
            schedule = gpipe(key["num_stages"], key["num_microbatches"], "always")
            found = peak_activations(schedule, key["num_layers"])
            metric = Metric("peak activations / N", float(found), "number", "modelled")
            return Outcome((metric,), {"fraction": str(found)})
    import torch

    from gpipe_bench.models import MODELS as ZOO
    from gpipe_bench.models import count_parameters

    with torch.device("meta"):
        model = ZOO[key["model"]](**_zoo()[key["model"], key["size"]])
    return Outcome((Metric("parameters", count_parameters(model), "parameters", "modelled"),))


def _bubble(k: int) -> Outcome:
    """Closed form and replay of every schedule over M, as fractions."""
    counts = sorted({*MICROBATCHES, *(ratio * k for ratio in PER_STAGE)})
    metrics, fractions, differing = [], {}, 0
    for (name, variant), m in product(VARIANTS.items(), counts):
        closed, replayed = variant.closed_form(k, m), variant.bubble(k, m)
        differing += closed != replayed
        fractions[f"{name} M={m}"] = {"closed form": str(closed), "replay": str(replayed)}
        at: dict[str, Scalar] = {"schedule": name, "M": m}
        metrics.append(Metric("bubble", float(replayed), "ratio", "modelled", key=at))
    off = Metric("fractions that differ from the closed form", differing, "number", "modelled")
    return Outcome((*metrics, off), {"num_microbatches": counts, "fractions": fractions})


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


def _zoo() -> Mapping[tuple[str, str], dict[str, Any]]:
    """Configurations that the paper counts in its text, by model and size as the paper writes it."""
    from gpipe_bench.models.zoo import CONFIGURATIONS

    def size(layers: int, filters: int = 0, ffn_dim: int = 0, num_heads: int = 0, **_: Any) -> str:
        return f"({layers}, {filters})" if filters else f"T({layers}, {ffn_dim}, {num_heads})"

    return {
        (name, size(options["num_layers"], options.get("num_filters", 0), **options)): options
        for name, options in CONFIGURATIONS
        if name in SIZES and "preset" not in options
    }


# Answers: formulas that the paper's text gives, and sizes


def cells(records: Sequence[Record]) -> list[Result]:
    """Formulas first, what says something in words of them, then sizes."""
    bubbles = of_case(records, "done", part="bubble")
    return [*_formulas(of_case(records, "done")), *_early_over_late(bubbles), *_sizes(records)]


def _formulas(records: Sequence[Record]) -> Iterator[Result]:
    for record in records:
        key = record.case
        answer = partial(Result, table="formulas", question="as published", record=record)
        if key["part"] == "bubble" and key["num_stages"] in (2, 4, 8):
            for m in (1, 4, 32):
                yield answer(
                    row=f"bubble (K-1)/(M+K-1) at M={m}", column=f"K={key['num_stages']}",
                    metric=record.metric("bubble", schedule="gpipe", M=m),
                    note="GPipe without re-materialization, equal stages, a free link.",
                )  # fmt: skip
        if key["part"] == "formula":
            at = f"at L={key['num_layers']}, M={key['num_microbatches']}"
            yield answer(
                row=f"activation memory (N + L/K N/M) / N {at}", column=f"K={key['num_stages']}",
                metric=record.metric("peak activations / N"),
                note="Counted over the schedule's actions, where every layer's activations weigh the same.",
            )  # fmt: skip


def _early_over_late(bubbles: Sequence[Record]) -> Iterator[Result]:
    """Ratio of the bubble with early recomputation to that with late, over all K > 1 and M on record."""
    ratios: list[float] = []
    for record in bubbles:
        for each in record.metrics:
            late = record.metric("bubble", schedule="gpipe-late", M=each.key.get("M"))
            if each.key.get("schedule") == "gpipe-early" and late is not None and each.value and late.value:
                ratios.append(float(each.value) / float(late.value))
    if ratios:
        low, high = min(ratios), max(ratios)
        yield Result(
            table=SENTENCES, row="bubble with early recomputation over late", column="largest over K and M",
            question="as published", metric=Metric("bubble, early over late", high, "ratio", "modelled"),
            spread=Spread(low=low, high=high, parts=(Part(what="K and M", low=low, high=high),)),
            note=f"Equal stages, a free link, forward : backward = 1 : 2; {len(ratios)} pairs of K and M.",
        )  # fmt: skip


def _sizes(records: Sequence[Record]) -> Iterator[Result]:
    for record in of_case(records, "done", part="size"):
        model, size = str(record.case["model"]), str(record.case["size"]).replace(", ", ",")
        row, column = ("parameters", "v5") if model == "amoebanet-b" else (size, "parameters")
        yield Result(
            table=SIZES[model], row=row, column=column, question="as published",
            metric=record.metric("parameters"), record=record,
        )  # fmt: skip


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
    counts = sorted({*numbers.columns.get_level_values(0)})
    lines = []
    for name in (name for name in VARIANTS if name in numbers.index):
        of = [(numbers.at[name, (m, what)], say) for m in counts for what, say in shown.items()]
        lines.append([VARIANTS[name].title, *("-" if math.isnan(value) else say(value) for value, say in of)])
    headers = ["schedule", *(name for m in counts for name in (f"M={m}: step", "idle", "graphs"))]
    title = (
        f"The schedules drawn, K = {DRAWN_STAGES} (modelled): step in forwards of one micro-batch on one "
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
        f"Bubble, K = {DRAWN_STAGES}: the closed form above, the replay below it (modelled)\n"
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
            caption=f"The schedules of Figure 2 for M = {m}, modelled",
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
        f"K = {DRAWN_STAGES}, M = {records[0].case['num_microbatches']}; modelled: equal stages, free link, "
        "forward : recompute : backward = 1 : 1 : 2",
        fontsize=9,
    )
    return figure


EXPERIMENT = Experiment(
    name="figure2",
    title="Figure 2 and the formulas: schedules and bubbles",
    source="arXiv v5, Figure 2 and section 2",
    describe=("The schedules as Gantt charts, their bubbles by formula and by replay, and peak activations."),
    profiles={
        "smoke": "charts at M = 4, bubbles up to K = 8",
        "short": "everything; no device is needed",
        "full": "the same as short",
    },
    cases=cases,
    run=run,
    cells=cells,
    paper_tables=("formulas",),
    revision=2,
    tables=tables,
    figures=figures,
)
