"""Figure 2 and the formulas of section 2: the bubble of schedules, and their activation memory.

Expected: the replay's bubble equals (K-1)/(M+K-1) exactly, or less if recomputation starts early; activations
follow O(N + (L/K)(N/M)). No GPU is needed:

    python -m experiments run figure2

Schedules are replayed with equal stages, a free link and forward : recompute : backward = 1 : 1 : 2, time in
forwards of one micro-batch on one stage (`modelled`). Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.paper import SENTENCES
from gpipe_bench.harness.record import Metric, Record, Scalar, find, frame, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.harness.verdict import Result, Spread
from gpipe_bench.pipeline.plan.named import gpipe, naive, one_f_one_b
from gpipe_bench.pipeline.plan.schedule import Remat, Schedule, most_alive_of
from gpipe_bench.pipeline.plan.simulate import SLOTS, replay
from gpipe_bench.pipeline.plan.timeline import Timeline

from ..drawing import charts, paper_style

SECONDS = {"chart": 0.02, "bubble": 0.15, "formula": 0.01}  # seconds of a case, by part
UNIT = "forwards"
DRAWN_STAGES, DRAWN_MICROBATCHES = 4, (4, 8)
SHOWN_MICROBATCHES = (4, 8, 16, 32, 128)
STAGES, MICROBATCHES, PER_STAGE = (2, 4, 8, 16), (1, 4, 8, 32, 128), (1, 2, 3, 4, 8)  # PER_STAGE: M / K
COUNTED = ((24, 32, 2), (24, 32, 4), (24, 32, 8), (48, 32, 8), (24, 1, 1))  # L, M, K of the paper's formula


class Variant(NamedTuple):
    """A schedule to draw and count, and the closed form of its bubble for K and M."""

    title: str
    make: Callable[[int, int, Remat], Schedule]
    remat: Remat = "never"
    formula: str = "(K-1)/(M+K-1)"
    closed_form: Callable[[int, int], Fraction] = lambda k, m: Fraction(k - 1, m + k - 1)
    early_recompute: bool = True
    microbatches_at_once: bool = False  # the mini-batch is one micro-batch

    def step(self, k: int, m: int) -> tuple[Timeline, int]:
        """The replay of M forwards, and the most micro-batches whose graph the first stage keeps."""
        scale = m if self.microbatches_at_once else 1
        schedule, slots = self.make(k, m // scale, self.remat), {kind: scale * n for kind, n in SLOTS.items()}
        timeline = replay(schedule, slots, early_recompute=self.early_recompute)
        return timeline, scale * most_alive_of(schedule.row(0))

    def bubble(self, k: int, m: int) -> Fraction:
        """The idle share of the replayed step, exact."""
        timeline, _ = self.step(k, m)
        return Fraction(timeline.idle_s) / Fraction(k * timeline.makespan_s)


# Recomputation fills no idle time in the drain: it lengthens the step, by a forward for each other stage, but
# does not add idle time.
VARIANTS: dict[str, Variant] = {
    "naive": Variant(
        "naive: the mini-batch in one piece", naive, formula="(K-1)/K",
        closed_form=lambda k, m: Fraction(k - 1, k), microbatches_at_once=True,
    ),
    "gpipe": Variant("GPipe without re-materialization", gpipe),
    "gpipe-late": Variant(
        "GPipe, recomputing when the gradient is there", gpipe, "always", early_recompute=False
    ),
    "gpipe-early": Variant(
        "GPipe, recomputing early (the paper's)", gpipe, "always", "3(K-1)/(3(M+K-1)+M)",
        lambda k, m: Fraction(3 * (k - 1), 3 * (m + k - 1) + m),
    ),
    "gpipe-kept": Variant(
        "GPipe, recomputing early, last micro-batch kept", gpipe, "except_last", "3(K-1)/(3(M+K-1)+M-1)",
        lambda k, m: Fraction(3 * (k - 1), 3 * (m + k - 1) + m - 1),
    ),
    "1f1b": Variant("1F1B without re-materialization", one_f_one_b),
}  # fmt: skip
"""Variants in display order, by their names in cases and records."""


def cases(options: RunOptions) -> list[Case]:
    keys: list[dict[str, Any]] = [
        *({"part": "chart", "schedule": name, "num_microbatches": m}
          for m, name in product(DRAWN_MICROBATCHES, VARIANTS)),
        *({"part": "bubble", "num_stages": k} for k in STAGES),
        *({"part": "formula", "num_layers": n, "num_microbatches": m, "num_stages": k}
          for n, m, k in COUNTED),
    ]  # fmt: skip
    return [Case(key, SECONDS[str(key["part"])]) for key in keys]


def run(case: Case, options: RunOptions) -> Outcome:
    key: dict[str, Any] = case.key
    match key["part"]:
        case "chart":
            timeline, alive = VARIANTS[key["schedule"]].step(DRAWN_STAGES, key["num_microbatches"])
            metrics = (
                Metric("step", timeline.makespan_s, "number", "modelled", note=UNIT),
                Metric("bubble", float(timeline.bubble), "ratio", "modelled"),
                Metric("graphs alive on the first stage", alive, "number", "modelled", note="micro-batches"),
            )
            return Outcome(metrics, {"num_stages": DRAWN_STAGES, "timeline": timeline.to_data()})
        case "bubble":
            return _bubble(key["num_stages"])
    # The stage keeps an input per micro-batch in flight, and L / K layers of each with a graph; both are most
    # when the drain begins: the paper's O(N + (L/K)(N/M)) with constants of 1, over N.
    k, m = key["num_stages"], key["num_microbatches"]
    schedule, of_graph = gpipe(k, m, "always"), Fraction(key["num_layers"], k)
    peaks = [schedule.in_flight(n) + of_graph * most_alive_of(schedule.row(n)) for n in range(k)]
    metric = Metric("peak activations / N", float(max(peaks) / m), "number", "modelled")
    return Outcome((metric,), {"fraction": str(max(peaks) / m)})


def _bubble(k: int) -> Outcome:
    """The bubble of every schedule over M, by closed form and replay, as fractions."""
    metrics, fractions = [], {}
    for (name, variant), m in product(VARIANTS.items(), sorted({*MICROBATCHES, *(r * k for r in PER_STAGE)})):
        closed, replayed = variant.closed_form(k, m), variant.bubble(k, m)
        fractions[f"{name} M={m}"] = {"closed form": str(closed), "replay": str(replayed)}
        metrics.append(Metric("bubble", float(replayed), "ratio", "modelled", key={"schedule": name, "M": m}))
    return Outcome(tuple(metrics), {"fractions": fractions})


# Results for formulas in the paper's text


def cells(records: Sequence[Record]) -> list[Result]:
    """Results for the formulas, then for the sentence about them."""
    answer = partial(Result, question="as published")
    bubbles, formulas = (of_case(records, "done", part=part) for part in ("bubble", "formula"))
    found = [
        answer(
            table="formulas", row=f"bubble (K-1)/(M+K-1) at M={m}", column=f"K={k}", record=record,
            metric=record.metric("bubble", schedule="gpipe", M=m),
            note="GPipe without re-materialization, equal stages, a free link.",
        )
        for record, m in product(bubbles, (1, 4, 32)) if (k := record.case["num_stages"]) in (2, 4, 8)
    ]  # fmt: skip
    found += [
        answer(
            table="formulas", column=f"K={key['num_stages']}", record=record,
            row="activation memory (N + L/K N/M) / N "
            f"at L={key['num_layers']}, M={key['num_microbatches']}",
            metric=record.metric("peak activations / N"),
            note="Counted over the schedule's actions, where every layer's activations weigh the same.",
        )
        for record in formulas for key in [record.case]
    ]  # fmt: skip
    if bubbles:
        rates = frame(bubbles).query("metric == 'bubble'")
        grid = rates.pivot(index=["num_stages", "M"], columns="schedule", values="value")
        ratios = grid["gpipe-early"] / grid["gpipe-late"]
        found.append(
            answer(
                table=SENTENCES, row="bubble with early recomputation over late",
                column="largest over K and M", spread=Spread.of("K and M", ratios),
                metric=Metric("bubble, early over late", float(ratios.max()), "ratio", "modelled"),
                note="Equal stages, a free link, forward : backward = 1 : 2; "
                f"{len(ratios)} pairs of K and M.",
            )
        )  # fmt: skip
    return found


# Text and figures


def tables(records: Sequence[Record]) -> str:
    """The drawn schedules, their bubbles as fractions for one K, and whether the other K agree."""
    steps, bubbles = (of_case(records, "done", part=part) for part in ("chart", "bubble"))
    drawn, shown = [], find(bubbles, num_stages=DRAWN_STAGES)
    counts = sorted({int(record.case["num_microbatches"] or 0) for record in steps})
    for name, variant in VARIANTS.items() if steps else ():
        drawn.append([variant.title])
        for record in (find(steps, schedule=name, num_microbatches=m) for m in counts):
            if record is None:
                drawn[-1] += ["-", "-", "-"]
                continue
            step, bubble, alive = (each.value or 0 for each in record.metrics)
            drawn[-1] += [f"{step:g}", f"{100 * bubble:.1f} %", f"{alive:g}"]
    fractions, of_shown = [], shown.details["fractions"] if shown is not None else {}
    for name, variant in VARIANTS.items() if of_shown else ():
        pairs = [of_shown[f"{name} M={m}"] for m in SHOWN_MICROBATCHES]
        replayed = [each["replay"] for each in pairs]
        fractions += [
            [variant.title, variant.formula, *(each["closed form"] for each in pairs)],
            ["", "replay", *replayed],
            ["", "", *(f"{100 * float(Fraction(each)):.1f} %" for each in replayed)],
        ]
    every = [pair for each in bubbles for pair in each.details["fractions"].values()]
    found = [
        numbers_text(
            f"The schedules drawn, K = {DRAWN_STAGES} (modelled): step in forwards of one micro-batch on one "
            "stage,\nidle share of the device time, most micro-batches whose graph the first stage keeps",
            ["schedule", *(name for m in counts for name in (f"M={m}: step", "idle", "graphs"))],
            drawn,
        ),
        numbers_text(
            f"Bubble, K = {DRAWN_STAGES}: the closed form above, the replay below it (modelled)\n"
            f"Over K = {', '.join(str(each.case['num_stages']) for each in bubbles)}, replay and closed form "
            f"are equal in {sum(each['replay'] == each['closed form'] for each in every)} of {len(every)} "
            "fractions",
            ["schedule", "closed form", *(f"M={m}" for m in SHOWN_MICROBATCHES)],
            fractions,
        ),
    ]
    return "\n\n".join(filter(None, found))


def figures(records: Sequence[Record]) -> list[Plot]:
    """The schedules on one time axis, a figure for each M."""
    drawn: dict[Scalar, dict[str, Timeline]] = {}
    for record in of_case(records, "done", part="chart"):
        of_count = drawn.setdefault(record.case["num_microbatches"], {})
        title = VARIANTS[str(record.case["schedule"])].title
        of_count[title] = Timeline.from_data(record.details["timeline"])
    return [
        Plot(
            name=f"figure2-schedules-m{m}",
            caption=f"The schedules of Figure 2 for K = {DRAWN_STAGES}, M = {m}, modelled with equal stages, "
            "a free link and forward : recompute : backward = 1 : 1 : 2",
            alt="Gantt charts of the schedules: stages from top to bottom, time from left to right.",
            draw=partial(charts, shown, f"{UNIT} of one micro-batch"),
            style=paper_style,
        )
        for m, shown in drawn.items()
    ]


EXPERIMENT = Experiment(
    name="figure2",
    title="Figure 2 and the formulas: schedules and bubbles",
    source="arXiv v5, Figure 2 and section 2",
    describe="The schedules as Gantt charts, their bubbles by formula and by replay, and peak activations.",
    profiles={"smoke": "everything; no device is needed", "short": "the same", "full": "the same"},
    cases=cases,
    run=run,
    cells=cells,
    paper_tables=("formulas",),
    revision=2,
    tables=tables,
    figures=figures,
)
