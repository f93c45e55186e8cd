"""Whether a plan is right: predicted before, run after, and the choice's regret.

Expected: on two processes of a quiet machine the predicted steps are within a few percent of those that ran,
in the same order, and the configuration that the plan puts first is the fastest of those that ran or nearly;
peaks are within a percent. About half an hour on two laptop cores, which should have nothing else to do:

    python -m experiments run plan
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.beyond.plan import exact, on_paper, steps
from gpipe_bench.experiments.beyond.plan.rules import (
    EXACT_WITHIN,
    INSIDE_SHARE,
    MOST_WIDTH,
    RULES,
    Compared,
    by_model,
    found,
    order_of,
    regret,
)
from gpipe_bench.experiments.beyond.plan.steps import MODELS
from gpipe_bench.experiments.paper.timed.side_by_side import measured, trust_of
from gpipe_bench.experiments.report.drawing import COLORS, picture
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.report.grid import Grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30
SECONDS = {
    steps.PART: {"smoke": 16.0, "short": 200.0, "full": 560.0},
    exact.PEAKS: {"smoke": 8.0, "short": 25.0, "full": 25.0},
    exact.WAITING: {"smoke": 24.0, "short": 60.0, "full": 70.0},
}


def cases(options: RunOptions) -> list[Case]:
    profile, smoke = options.profile, options.profile == "smoke"
    asked = [
        Case({"part": part, "model": model}, SECONDS[part][profile])
        for part in (steps.PART, exact.PEAKS)
        for model in MODELS[profile]
    ]
    asked.append(Case({"part": exact.WAITING}, SECONDS[exact.WAITING][profile]))
    if not smoke:
        scales = on_paper.SCALES.items()
        asked += [Case({"part": on_paper.AT_SCALE, "model": name}, each.seconds) for name, each in scales]
        asked.append(Case({"part": on_paper.PUBLISHED_STEPS}, on_paper.SECONDS))
    return asked + [
        Case({"part": on_paper.ELSEWHERE, "source": source}, seconds)
        for source, seconds in on_paper.ORDER_S.items()
        if not smoke or seconds <= 2
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    key: dict[str, Any] = case.key
    match key["part"]:
        case steps.PART:
            return steps.run(key, options)
        case exact.PEAKS:
            return exact.run_peaks(key, options)
        case exact.WAITING:
            return exact.run_waiting(options)
        case on_paper.AT_SCALE:
            return on_paper.run_at_scale(key["model"])
        case on_paper.PUBLISHED_STEPS:
            return on_paper.run_published()
    return on_paper.run_order(key["source"])


# What was predicted beside what was measured, what that comes to, and what was asked of it


def tables(records: Sequence[Record]) -> str:
    """The rules, a block for each model, the peaks, what waits, and what is on paper."""
    done = {
        part: of_case(records, "done", part=part)
        for part in (steps.PART, exact.PEAKS, exact.WAITING, on_paper.ELSEWHERE)
    }
    grids = [
        _rules(done[steps.PART], done[exact.PEAKS]),
        *map(_model, done[steps.PART]),
        _peaks(done[exact.PEAKS]),
        *map(_waiting, done[exact.WAITING]),
        _elsewhere(done[on_paper.ELSEWHERE]),
        *map(_at_scale, of_case(records, "done", part=on_paper.AT_SCALE)),
        *map(_published, of_case(records, "done", part=on_paper.PUBLISHED_STEPS)),
    ]
    shown = [grid.text() for grid in grids if grid.lines]
    return "\n\n".join(shown) or "Plans against what ran: nothing on record"


def _rules(ran: Sequence[Record], counted: Sequence[Record]) -> Grid:
    """Over everything that is not void."""
    configurations = [each for record in ran for each in steps.compared(record)]
    peaks = [each for record in counted for each in exact.peaks(record)]
    numbers = found(configurations, peaks) if configurations else {}
    lines = []
    for rule in RULES if configurations else ():
        show = "{:.0f}".format if rule.bound >= 1 else "{:.2f}".format if rule.at_least else _percent
        value = numbers.get(rule.number)
        lines.append(
            [
                rule.what,
                f"{'>=' if rule.at_least else '<='} {show(rule.bound)}",
                "-" if value is None else show(value),
                "not run" if value is None else "yes" if rule.holds(value) else "NO",
            ]
        )
    return Grid(
        title="Plans against what ran: what was asked, and what was found",
        columns=["", "asked", "found", "holds?"],
        lines=lines,
        notes=[
            "Errors are of the step's median at the speed that the machine had when the layers were "
            "timed; by the clock they are in the tables below."
        ],
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _model(record: Record) -> Grid:
    details = record.details
    places, ranking, costs = details["plan"]["places"], details["plan"]["ranking"], details["costs"]
    known: dict[Any, Any] = {(each.name, *each.key.values()): each for each in record.metrics}
    lines = []
    for place, number in enumerate(places):
        name = ranking[number]["name"]
        predicted, step, clock = (
            known[what, name] for what in (steps.PREDICTED, steps.STEP, steps.BY_THE_CLOCK)
        )
        lines.append(
            [
                f"{number + 1}{'' if place < details['chosen'] else ' (other)'}",
                name,
                f"{predicted.value:.1f} [{predicted.low:.0f}, {predicted.high:.0f}]",
                measured(step),
                *(f"{100 * (predicted.value / each.value - 1):+.1f} %" for each in (step, clock)),
            ]
        )
    own = steps.compared(record)
    summary = f"{order_of(own):.2f}, regret {_percent(regret(own))}" if len(own) > 1 else ""
    drift = ", ".join(f"{each.value:.2f}" for each in record.metrics if each.name == "drift")
    return Grid(
        title=f"{details['title']}, {details['scale']}, mini-batch of {details['batch_size']}, two processes",
        columns=["rank", "configuration", "predicted (ms)", "measured (ms) [95 %]", "error", "by the clock"],
        lines=lines,
        notes=[
            f"{len(ranking)} planned in {costs['plan_s']:.1f} s after {costs['probes_s']:.0f} s of probes; "
            + (f"rank correlation {summary}" if summary else "nothing to compare"),
            "; ".join([*trust_of(record), f"drift {drift}"]),
            *([f"void: {details['void']}; measure again"] if details.get("void") else []),
        ],
    )


def _peaks(records: Sequence[Record]) -> Grid:
    models = by_model([each for record in records for each in exact.peaks(record)])
    lines = [
        [
            model,
            str(len(own)),
            *(
                f"{100 * max(errors, key=abs):+.2f} %"
                for errors in zip(*((e.error, e.of_any) for e in own), strict=True)
            ),
        ]
        for model, own in models.items()
    ]
    return Grid(
        title="Peak bytes, predicted against counted over two processes: the largest error",
        columns=["model", "configurations", "of the fullest worker", "of any worker"],
        lines=lines,
        notes=[
            "Both are what a worker's device would hold: storages, and the buffers that messages come "
            "into, which lie here in memory that two processes map. What ranks tell one another beside "
            "them, a few hundred bytes, is counted and not predicted."
        ],
    )


def _waiting(record: Record) -> Grid:
    lines = []
    for metric in record.metrics:
        step: Any = record.metric(exact.STEP, **metric.key)
        if metric.name == exact.PREDICTED and metric.value:
            error = metric.value / step.value - 1
            again = ", recomputed" if metric.key["remat"] == "always" else ""
            lines.append(
                [
                    f"{metric.key['schedule']}, M = {metric.key['M']}{again}",
                    f"{metric.value:.1f}",
                    measured(step),
                    f"{100 * error:+.2f} %",
                    "yes" if abs(error) <= EXACT_WITHIN else "NO",
                ]
            )
    return Grid(
        title=f"Stages that wait {record.details['slot_ms']:.0f} ms per slot: times that are known exactly",
        columns=["schedule", "predicted (ms)", "measured (ms) [95 %]", "error", f"<= {EXACT_WITHIN:.0%}"],
        lines=lines,
    )


def _elsewhere(records: Sequence[Record]) -> Grid:
    lines = []
    for each in (order for record in records for order in record.details["orders"]):
        orders = (zip(each[what], each["names"], strict=True) for what in ("speeds", "predicted"))
        lines.append(
            [
                each["group"],
                *(" > ".join(name for _, name in sorted(order, key=lambda one: -one[0])) for order in orders),
                f"{each['correlation']:.2f}",
                _percent(each["regret"]),
            ]
        )
    return Grid(
        title="What others measured, in the order of our predictions (modelled), the fastest first",
        columns=["source", "measured there", "predicted here", "rank correlation", "regret"],
        lines=lines,
        notes=["Regret: how much longer a step of what we would have chosen took there than of the best."],
    )


def _at_scale(record: Record) -> Grid:
    """Of one model: what others did first, then the fastest first."""
    details = record.details
    lines = [
        [
            row["name"] or "planned", row["K"],
            f"{row['dp']}, {row['fsdp']} of them ZeRO-{row['fsdp_level']}" if row["fsdp"] > 1 else row["dp"],
            row["tp"], row["schedule"], row["M"], f"{row['recomputed']}/{row['stages']}",
            f"{row['step_s']:.1f} [{row['low_s']:.1f}, {row['high_s']:.1f}]",
            f"{row['measured_s']:.1f}" if row.get("measured_s") else "-",
            f"{row['peak_bytes'] / GIB:.1f}" + ("" if row["fits"] else " (too much)"),
        ]
        for row in (*details["done"], *sorted(details["grids"], key=lambda row: row["step_s"]))
    ]  # fmt: skip
    words = ["K", "dp", "tp", "schedule", "M", "recomputed"]
    return Grid(
        title=f"{details['title']}, mini-batch of {details['batch_size']}, on paper (modelled)",
        columns=["", *words, "step (s) [range]", "measured (s)", "GiB"],
        lines=lines,
        notes=[
            f"{details['num_parameters']:,} parameters; {details['tried']} ways laid out, "
            f"{details['skipped']} left out by their bounds; recomputed: stages of all",
            *(f"{row['name']}: {row['source']}" for row in details["done"]),
        ],
        right=frozenset({1, 3, 5}),
    )


def _published(record: Record) -> Grid:
    """Published steps beside the range that is predicted of each."""
    rows = record.details["steps"]
    inside = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in rows]
    widest = max(row["high_s"] / row["low_s"] for row in rows)
    enough = "yes" if sum(inside) >= INSIDE_SHARE * len(rows) and widest <= MOST_WIDTH else "NO"
    return Grid(
        title="Published steps of the largest models, on paper (modelled)",
        columns=["", "measured (s)", "predicted (s) [range]", "inside"],
        lines=[
            [
                row["name"], f"{row['measured_s']:.2f}",
                f"{row['step_s']:.2f} [{row['low_s']:.2f}, {row['high_s']:.2f}]", "yes" if each else "NO",
            ]
            for row, each in zip(rows, inside, strict=True)
        ],
        notes=[
            f"{sum(inside)} of {len(rows)} inside, the widest range a factor of {widest:.2f}; asked: "
            f"{INSIDE_SHARE:.0%} of them, and at most {MOST_WIDTH:g}: {enough}",
            *(f"{row['name']}: {row['source']}; not in the prediction: {row['differs']}" for row in rows),
        ],
        right=frozenset({1}),
    )  # fmt: skip


BAND = 0.12
"""The worst error that was asked for, either way."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Told apart with any eyes (Okabe and Ito)."""
TICKS_MS = (5, 10, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000)
TICKS_S = (1, 2, 3, 5, 7, 10, 15, 20, 25, 30, 35, 40, 50, 60, 70, 80, 100, 150, 200, 300, 500, 1000)


def figures(records: Sequence[Record]) -> list[Plot]:
    """The plots of what is on record."""
    found = [each for r in of_case(records, "done", part=steps.PART) for each in steps.compared(r)]
    scales = of_case(records, "done", part=on_paper.AT_SCALE)
    return [
        picture(
            name="plan-predicted",
            caption="Steps that ran on two processes against their predictions, made before any of them ran",
            alt=(
                "A panel for each model: a point for each configuration near the diagonal, filled for the "
                "plan's best five and square for replicas; the grey band is an error of 12 % either way."
            ),
            draw=partial(_draw_predicted, by_model(found)),
        )
    ][: bool(found)] + [
        picture(
            name="plan-at-scale",
            caption="The step of the largest models over (dp, tp, K), on paper, beside what others did",
            alt=(
                "A panel for each model: seconds of a step over K, a line for each size of tensor "
                "parallelism with the range of the roofline; diamonds are what others did, predicted, "
                "and crosses what they measured."
            ),
            draw=partial(_draw_at_scale, scales),
        )
    ][: bool(scales)]


def _draw_predicted(models: dict[str, list[Compared]]) -> Figure:
    """A panel per model, both axes in milliseconds, logarithmic: shards take several times as long."""
    from matplotlib.figure import Figure

    columns = min(len(models), 2)
    rows = -(-len(models) // columns)
    figure = Figure(figsize=(3.6 * columns, 3.5 * rows), layout="constrained")
    for place, (model, own) in enumerate(models.items()):
        axes = figure.add_subplot(rows, columns, place + 1)
        values = [1e3 * value for each in own for value in (each.predicted_s, each.measured_s)]
        line = [0.9 * min(values), 1.05 * max(values)]
        low, high = ([x * (1 + off) for x in line] for off in (-BAND, BAND))
        axes.fill_between(line, low, high, color="0.92", linewidth=0)
        axes.plot(line, line, color="0.6", linewidth=0.8)
        for chosen, replicas in ((True, False), (True, True), (False, False), (False, True)):
            points = [each for each in own if (each.chosen, each.name.startswith("dp")) == (chosen, replicas)]
            if points or not replicas:
                axes.plot(
                    [1e3 * each.predicted_s for each in points], [1e3 * each.measured_s for each in points],
                    linestyle="none", marker="s" if replicas else "o", markersize=5, color=COLORS["B"],
                    markerfacecolor=COLORS["B"] if chosen else "white",
                    label=("the plan's best" if chosen else "others") + ", replicas" * replicas,
                )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=line, ylim=line)
        axes.set(xlabel="predicted (ms)", ylabel="measured (ms)")
        ticks = [tick for tick in TICKS_MS if line[0] <= tick <= line[1]]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [str(tick) for tick in ticks])
            axis.set_ticks([], minor=True)
        summary = (
            f"\nrank correlation {order_of(own):.2f}, regret {100 * regret(own):.1f} %" if own[1:] else ""
        )
        axes.set_title(model + summary, fontsize="medium")
        axes.legend(loc="upper left", frameon=False, fontsize="small")
    return figure


def _draw_at_scale(records: Sequence[Record]) -> Figure:
    """A panel for each model: the step over K, a line for each size of tensor parallelism."""
    import pandas
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(records), 3.8), layout="constrained")
    for panel, record in enumerate(records, start=1):
        axes = figure.add_subplot(1, len(records), panel)
        grids, done = (pandas.DataFrame(record.details[what]) for what in ("grids", "done"))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for place, (tp, mine) in enumerate(grids.sort_values("K").groupby("tp")):
            color = COLOURS[place % len(COLOURS)]
            axes.plot(mine.K, mine.step_s, color=color, marker="o", markersize=4, label=f"tp {tp}")
            axes.fill_between(mine.K, mine.low_s, mine.high_s, color=color, alpha=0.12, linewidth=0)
            for row in mine.itertuples():
                axes.annotate(  # of neighbouring lines one has its numbers above, the other one below
                    f"{row.dp}", (row.K, row.step_s), xytext=(0, -11 if place % 2 else 5),
                    textcoords="offset points", fontsize=6, color=color, ha="center",
                )  # fmt: skip
        axes.plot(
            done.K,
            done.step_s,
            "D",
            markersize=5,
            color="black",
            markerfacecolor="none",
            label="others, predicted",
        )
        measured = done[done.measured_s > 0]
        if len(measured):
            axes.plot(measured.K, measured.measured_s, "x", color="black", label="others, measured")
        low_s, high_s = axes.get_ylim()
        shown_s = [tick for tick in TICKS_S if low_s <= tick <= high_s]
        axes.set_yticks(shown_s, [str(tick) for tick in shown_s])
        axes.set_yticks([], minor=True)
        ticks = sorted({*grids.K, *done.K})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set(xlabel="K, workers of a pipeline (small numbers: dp)", ylabel="step (s), modelled")
        axes.set_title(record.details["title"], fontsize="small")
        axes.legend(frameon=False, fontsize="x-small")
    return figure


EXPERIMENT = Experiment(
    name="plan",
    title="Plans against what ran: the prediction's error and the choice's regret",
    source="beyond the paper; arXiv 2401.10241, torchtitan, Primus, torchgpipe",
    describe=(
        "Layers are timed, all ways to train on two processes predicted, the best five and five others run: "
        "error, rank correlation, regret, peaks; published configurations in the order of our predictions; "
        "the step over (dp, tp, K) of the largest models on paper, and published steps of such models."
    ),
    profiles={
        "smoke": "one tiny model, three configurations",
        "short": "six models scaled to two cores, ten configurations of each",
        "full": "the same with two to three times as many rounds",
    },
    cases=cases,
    run=run,
    cells=lambda records: [],  # the paper plans nothing
    tables=tables,
    figures=figures,
    docs="docs/plan.md",
    options=("device", "seed"),
)
