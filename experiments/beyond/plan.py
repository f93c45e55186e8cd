"""Whether a plan is right: predicted before, run after, and the choice's regret.

Expected: on two processes of a quiet machine the predicted steps are within a few percent of those that ran,
in the same order, and the configuration that the plan puts first is the fastest of those that ran or nearly.
About half an hour on two laptop cores, which should have nothing else to do:

    python -m experiments run plan

The best five of each plan run, and five others (`plan_steps.py`); steps that others measured on hundreds of
accelerators are predicted on paper (`published_steps.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpipe_bench.experiments.beyond import published_steps
from gpipe_bench.experiments.beyond.side_by_side import measured, trust_of
from gpipe_bench.experiments.beyond.trainings import BY_THE_CLOCK, MODELS, PART, PREDICTED, STEP
from gpipe_bench.experiments.drawing import COLORS, picture
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.record import Record, of_case
from gpipe_bench.harness.report.grid import Grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


SECONDS = {"smoke": 16.0, "short": 200.0, "full": 560.0}


def cases(options: RunOptions) -> list[Case]:
    seconds, models = SECONDS[options.profile], MODELS[options.profile]
    asked = [Case({"part": PART, "model": model}, seconds) for model in models]
    parts = () if options.profile == "smoke" else (published_steps.PART, published_steps.SWEEPS)
    return [*asked, *(Case({"part": part}, published_steps.SECONDS) for part in parts)]


def run(case: Case, options: RunOptions) -> Outcome:
    if case.key["part"] != PART:
        return published_steps.run(str(case.key["part"]))
    from gpipe_bench.experiments.beyond import plan_steps

    planned = MODELS[options.profile][str(case.key["model"])]
    return plan_steps.run(planned, options.seed, options.device)


# Comparison of predictions with measurements, its summary, and the rules that it should meet

RULES = (
    ("configurations that ran, not void", "configurations", ">=", 30),
    ("models among them", "models", ">=", 6),
    ("error of the step time, median", "median_error", "<=", 0.05),
    ("error of the step time, worst", "worst_error", "<=", 0.12),
    ("rank correlation, median over models", "rank_correlation", ">=", 0.9),
    ("regret, median over models", "median_regret", "<=", 0.03),
    ("regret, worst of a model", "worst_regret", "<=", 0.03),
)
"""Numbers of `found` and their bounds: for two cores, over all configurations of all models that are not
void, and asked before any prediction was compared with a step."""


def ran(records: Sequence[Record]) -> DataFrame:
    """A row for each configuration that ran, in the order of its plan: milliseconds that were predicted and
    measured, and the error of the prediction, with its sign.
    """
    from pandas import DataFrame

    rows = []
    for record in of_case(records, "done", part=PART):
        details = record.details
        for place, number in enumerate(details["plan"]["places"]):
            name = details["plan"]["ranking"][number]["name"]
            predicted, step, clock = (
                record.metric(what, configuration=name) for what in (PREDICTED, STEP, BY_THE_CLOCK)
            )
            assert predicted is not None
            assert step is not None
            assert clock is not None
            rows.append(
                {
                    "model": details["title"], "void": bool(details.get("void")), "rank": number + 1,
                    "chosen": place < details["chosen"], "name": name, "predicted": predicted.value,
                    "low": predicted.low, "high": predicted.high, "measured": step.value,
                    "interval": measured(step), "clock": clock.value,
                }
            )  # fmt: skip
    table = DataFrame(rows)
    if rows:
        table["error"], table["clock"] = (table.predicted / table[of] - 1 for of in ("measured", "clock"))
    return table


def choices(ran: DataFrame) -> DataFrame:
    """For each model: Spearman's rank correlation of what was predicted with what was measured (0 where all
    are equal), and the regret, how much longer the one predicted to be the fastest took than the fastest.
    """
    models = ran.groupby("model", sort=False)
    first = ran.loc[models.predicted.idxmin()].set_index("model").measured
    ranks = models[["predicted", "measured"]].rank()
    order = ranks.groupby(ran.model, sort=False).apply(lambda own: own.predicted.corr(own.measured))
    return order.fillna(0.0).to_frame("rank correlation").assign(regret=first / models.measured.min() - 1)


def found(ran: DataFrame) -> dict[str, float]:
    """All that the rules are about, over everything that is not void."""
    own, errors = choices(ran), ran.error.abs()
    return {
        "configurations": len(ran), "models": len(own), "median_error": errors.median(),
        "worst_error": errors.max(), "rank_correlation": own["rank correlation"].median(),
        "median_regret": own.regret.median(), "worst_regret": own.regret.max(),
    }  # fmt: skip


def tables(records: Sequence[Record]) -> str:
    """The rules, a block for each model, and what others measured."""
    steps_ran = ran(records)
    judged = steps_ran[~steps_ran.void] if len(steps_ran) else steps_ran
    grids = [
        *([_rules(found(judged))] if len(judged) else []),
        *(_model(record, ran([record])) for record in of_case(records, "done", part=PART)),
        *map(published_steps.table, of_case(records, "done", part=published_steps.PART)),
        *map(_sweeps, of_case(records, "done", part=published_steps.SWEEPS)),
    ]
    return "\n\n".join(grid.text() for grid in grids) or "Plans against what ran: nothing on record"


def percent(value: float, form: str = ".1f") -> str:
    """`1.9 %`"""
    return f"{100 * value:{form}} %"


def _rules(numbers: dict[str, float]) -> Grid:
    lines = []
    for what, number, sign, bound in RULES:
        show = "{:.0f}".format if bound >= 1 else "{:.2f}".format if sign == ">=" else percent
        value = numbers[number]
        holds = value >= bound if sign == ">=" else value <= bound
        lines.append([what, f"{sign} {show(bound)}", show(value), "yes" if holds else "NO"])
    return Grid(
        title="Plans against what ran: what was asked, and what was found",
        columns=["", "asked", "found", "holds?"],
        lines=lines,
        notes=[
            "Errors are of the step's median at the speed that the machine had when the layers were "
            "timed; by the clock they are in the tables below."
        ],
    )


def _model(record: Record, ran: DataFrame) -> Grid:
    details, void = record.details, record.details.get("void")
    costs, summary = details["costs"], "nothing to compare"
    if len(ran) > 1 and not void:
        own = choices(ran).iloc[0]
        summary = f"rank correlation {own['rank correlation']:.2f}, regret {percent(own.regret)}"
    drift = ", ".join(f"{each.value:.2f}" for each in record.metrics if each.name == "drift")
    return Grid(
        title=f"{details['title']}, {details['scale']}, mini-batch of {details['batch_size']}, two processes",
        columns=["rank", "configuration", "predicted (ms)", "measured (ms) [95 %]", "error", "by the clock"],
        lines=[
            [
                f"{row.rank}{'' if row.chosen else ' (other)'}", row.name,
                f"{row.predicted:.1f} [{row.low:.0f}, {row.high:.0f}]", row.interval,
                percent(row.error, "+.1f"), percent(row.clock, "+.1f"),
            ]
            for row in ran.itertuples(index=False)
        ],
        notes=[
            f"{len(details['plan']['ranking'])} planned in {costs['plan_s']:.1f} s after "
            f"{costs['probes_s']:.0f} s of probes; {summary}",
            "; ".join([*trust_of(record), f"drift {drift}"]),
            *([f"void: {void}; measure again"] if void else []),
        ],
    )  # fmt: skip


def _sweeps(record: Record) -> Grid:
    """Whether the fastest way of others was the one that is predicted to be; seconds an example, since ways
    of one sweep may have had different mini-batches.
    """
    from pandas import DataFrame

    rows = DataFrame(record.details["steps"]).rename(columns={"sweep": "model"})
    rows["predicted"], rows["measured"] = rows.step_s / rows.batch_size, rows.measured_s / rows.batch_size
    rows["inside"] = (rows.low_s <= rows.measured_s) & (rows.measured_s <= rows.high_s)
    of_each = rows.groupby("model", sort=False).inside.agg(["size", "sum"]).join(choices(rows))
    return Grid(
        title="Sweeps of others, in the order of our predictions (modelled)",
        columns=["", "ways", "inside", "rank correlation", "regret"],
        lines=[
            [name, ways, inside, f"{order:.2f}", percent(regret)]
            for name, ways, inside, order, regret in of_each.itertuples()
        ],
        notes=["Regret: how much longer a step of the way predicted to be the fastest took there."],
        right=frozenset({1, 2, 3, 4}),
    )


BAND = 0.12
"""The worst error that was asked for, either way."""
TICKS_MS = (5, 10, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000)


def figures(records: Sequence[Record]) -> list[Plot]:
    """A panel for each model, where any ran and was not void."""
    shown = picture(
        name="plan-predicted",
        caption="Steps that ran on two processes against their predictions, made before any of them ran",
        alt=(
            "A panel for each model: a point for each configuration near the diagonal, filled for the "
            "plan's best five and square for replicas; the grey band is an error of 12 % either way."
        ),
        draw=partial(_draw, records),
    )
    done = of_case(records, "done", part=PART)
    return [shown] if any(not record.details.get("void") for record in done) else []


def _draw(records: Sequence[Record]) -> Figure:
    """Both axes in milliseconds, logarithmic: shards take several times as long."""
    from matplotlib.figure import Figure

    every = ran(records)
    models = every[~every.void].groupby("model", sort=False)
    columns = min(len(models), 2)
    rows = -(-len(models) // columns)
    figure = Figure(figsize=(3.6 * columns, 3.5 * rows), layout="constrained")
    for place, (model, own) in enumerate(models):
        axes = figure.add_subplot(rows, columns, place + 1)
        values = own[["predicted", "measured"]].to_numpy()
        line = [0.9 * values.min(), 1.05 * values.max()]
        low, high = ([x * (1 + off) for x in line] for off in (-BAND, BAND))
        axes.fill_between(line, low, high, color="0.92")
        axes.plot(line, line, color="0.6", linewidth=0.8)
        for (others, replicas), points in own.groupby([~own.chosen, own.name.str.startswith("dp")]):
            axes.plot(
                points.predicted, points.measured, linestyle="none", marker="s" if replicas else "o",
                markersize=5, color=COLORS["B"], markerfacecolor="white" if others else COLORS["B"],
                label=("others" if others else "the plan's best") + ", replicas" * replicas,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=line, ylim=line)
        axes.set(xlabel="predicted (ms)", ylabel="measured (ms)")
        ticks = [tick for tick in TICKS_MS if line[0] <= tick <= line[1]]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [str(tick) for tick in ticks])
            axis.set_ticks([], minor=True)
        axes.set_title(model, fontsize="medium")
        axes.legend(loc="upper left", frameon=False, fontsize="small")
    return figure


EXPERIMENT = Experiment(
    name="plan",
    title="Plans against what ran: the prediction's error and the choice's regret",
    source="beyond the paper",
    describe=(
        "Layers are timed, all ways to train on two processes predicted, the best five and five others run: "
        "error, rank correlation, regret; and published steps of the largest models on paper."
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
