"""Tests the planner: predicts steps, runs them, and computes the regret of its choice.

Expected: on two processes of an idle machine, predicted steps are within a few per cent of measured ones and
in the same order, and the plan's first configuration is the fastest that ran, or nearly. About half an hour
on two laptop cores:

    python -m experiments run plan

The best five configurations of each plan run, and five others (`plan_steps.py`). Steps that others measured
on many accelerators (results/published-steps.toml) are predicted as they were stated, from a roofline and
nominal links: modelled numbers, whose range is that of the share of the peak. Of a sweep (ways to train one
model on one cluster, which others tried in turn) a plan only needs the right order.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from gpipe_bench.harness import PUBLISHED
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.record import Metric, Record, of_case
from gpipe_bench.harness.report.grid import Grid as Table
from gpipe_bench.harness.rounds import measured, trust_of
from gpipe_bench.pipeline.plan.partition import partition
from gpipe_bench.planner.candidate import Grid, Prediction, Way
from gpipe_bench.planner.collectives import forward_kind
from gpipe_bench.planner.predict import predict
from gpipe_bench.planner.request import Request, link_named

from ..drawing import picture
from .trainings import BY_THE_CLOCK, MODELS, PART, PREDICTED, STEP

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from gpipe_bench.planner.costs import Costs
    from gpipe_bench.planner.model import Model

PUBLISHED_STEPS, SWEEPS = "published steps", "published sweeps"
SECONDS = {"smoke": 16.0, "short": 150.0, "full": 560.0}
"""Approximate seconds of a model's case, by profile."""
ON_PAPER_S = 20.0  # approximate seconds of each of the two cases on paper


def cases(options: RunOptions) -> list[Case]:
    seconds, models = SECONDS[options.profile], MODELS[options.profile]
    asked = [Case({"part": PART, "model": model}, seconds) for model in models]
    on_paper = () if options.profile == "smoke" else (PUBLISHED_STEPS, SWEEPS)
    return [*asked, *(Case({"part": part}, ON_PAPER_S) for part in on_paper)]


def run(case: Case, options: RunOptions) -> Outcome:
    if case.key["part"] == PUBLISHED_STEPS:
        return run_published([(step.name, step) for step in steps()])
    if case.key["part"] == SWEEPS:
        return run_published(
            [
                (f"{name}, {number}: {step.way}", step)
                for name, ways in sweeps().items()
                for number, step in enumerate(ways, start=1)
            ]
        )
    from . import plan_steps

    planned = MODELS[options.profile][str(case.key["model"])]
    return plan_steps.run(planned, options.seed, options.device)


# Predictions compared with measurements, their summary, and rules for it

RULES = (
    ("configurations that ran, not void", "configurations", ">=", 30),
    ("models among them", "models", ">=", 6),
    ("error of the step time, median", "median_error", "<=", 0.05),
    ("error of the step time, worst", "worst_error", "<=", 0.12),
    ("rank correlation, median over models", "rank_correlation", ">=", 0.9),
    ("regret, median over models", "median_regret", "<=", 0.03),
    ("regret, worst of a model", "worst_regret", "<=", 0.03),
)
"""Bounds of numbers in `found`, for two cores and all configurations that are not void, fixed before any
prediction was compared."""


def ran(records: Sequence[Record]) -> DataFrame:
    """A row for each configuration that ran, in the order of its plan: predicted and measured milliseconds,
    and the prediction's signed error.
    """
    from pandas import DataFrame

    rows = []
    for record in of_case(records, "done", part=PART):
        details, void = record.details, bool(record.details.get("void"))
        for place, number in enumerate(details["plan"]["places"]):
            name = details["plan"]["ranking"][number]["name"]
            of_name = {each.name: each for each in record.metrics if each.key.get("configuration") == name}
            predicted, step = of_name[PREDICTED], of_name[STEP]
            rows.append(
                {
                    "model": details["title"], "void": void, "rank": number + 1,
                    "chosen": place < details["chosen"], "name": name, "predicted": predicted.value,
                    "low": predicted.low, "high": predicted.high, "measured": step.value,
                    "interval": measured(step), "clock": of_name[BY_THE_CLOCK].value,
                }
            )  # fmt: skip
    table = DataFrame(rows)
    if rows:
        table["error"], table["clock"] = (table.predicted / table[of] - 1 for of in ("measured", "clock"))
    return table


def choices(ran: DataFrame) -> DataFrame:
    """For each model: Spearman's rank correlation of predicted and measured times (0 if one is constant), and
    the regret, how much longer the configuration predicted to be fastest took than the fastest.
    """
    models = ran.groupby("model", sort=False)
    first = ran.loc[models.predicted.idxmin()].set_index("model").measured
    ranks = models[["predicted", "measured"]].rank()
    order = ranks.groupby(ran.model, sort=False).apply(lambda own: own.predicted.corr(own.measured))
    return order.fillna(0.0).to_frame("rank correlation").assign(regret=first / models.measured.min() - 1)


def found(ran: DataFrame) -> dict[str, float]:
    """The numbers that the rules bound, over all that is not void."""
    own, errors = choices(ran), ran.error.abs()
    return {
        "configurations": len(ran), "models": len(own), "median_error": errors.median(),
        "worst_error": errors.max(), "rank_correlation": own["rank correlation"].median(),
        "median_regret": own.regret.median(), "worst_regret": own.regret.max(),
    }  # fmt: skip


def tables(records: Sequence[Record]) -> str:
    """The rules, a table for each model, and others' steps."""
    steps_ran = ran(records)
    judged = steps_ran[~steps_ran.void] if len(steps_ran) else steps_ran
    grids = [
        *([_rules(found(judged))] if len(judged) else []),
        *(_model(record, ran([record])) for record in of_case(records, "done", part=PART)),
        *map(_published, of_case(records, "done", part=PUBLISHED_STEPS)),
        *map(_sweeps, of_case(records, "done", part=SWEEPS)),
    ]
    return "\n\n".join(grid.text() for grid in grids) or "Plans against what ran: nothing on record"


def percent(value: float, form: str = ".1f") -> str:
    """`1.9 %`"""
    return f"{100 * value:{form}} %"


def _holds(holds: bool) -> str:
    return "yes" if holds else "NO"


def _rules(numbers: dict[str, float]) -> Table:
    lines = []
    for what, number, sign, bound in RULES:
        show = "{:.0f}".format if bound >= 1 else "{:.2f}".format if sign == ">=" else percent
        value = numbers[number]
        holds = value >= bound if sign == ">=" else value <= bound
        lines.append([what, f"{sign} {show(bound)}", show(value), _holds(holds)])
    note = (
        "Errors are of the step's median at the speed that the machine had when the layers were timed; by "
        "the clock they are in the tables below."
    )
    title = "Plans against what ran: what was asked, and what was found"
    return Table(title=title, columns=["", "asked", "found", "holds?"], lines=lines, notes=[note])


def _model(record: Record, ran: DataFrame) -> Table:
    details, void = record.details, record.details.get("void")
    costs, summary = details["costs"], "nothing to compare"
    if len(ran) > 1 and not void:
        own = choices(ran).iloc[0]
        summary = f"rank correlation {own['rank correlation']:.2f}, regret {percent(own.regret)}"
    drift = ", ".join(f"{each.value:.2f}" for each in record.metrics if each.name == "drift")
    return Table(
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


# Figure

BAND = 0.12  # the bound of the worst error, up and down
TICKS_MS = (5, 10, 20, 50, 100, 200, 500, 1000)


def figures(records: Sequence[Record]) -> list[Plot]:
    """The figure, if there is a record that is not void."""
    shown = picture(
        name="plan-predicted",
        caption="Steps that ran on two processes against their predictions, made before any of them ran",
        alt=(
            "A point for each configuration near the diagonal, in its model's colour, a dot for the plan's "
            "best, a cross for others; the grey band is an error of 12 % either way."
        ),
        draw=partial(_draw, records),
    )
    done = of_case(records, "done", part=PART)
    return [shown] if any(not record.details.get("void") for record in done) else []


def _draw(records: Sequence[Record]) -> Figure:
    """Both axes are logarithmic, in milliseconds: sharded steps take several times as long."""
    import seaborn
    from matplotlib.figure import Figure

    every = ran(records)
    shown = every[~every.void]
    kinds = shown.chosen.map({True: "the plan's best", False: "others"}).rename("configuration")
    figure = Figure(figsize=(7.2, 5), layout="constrained")
    axes = figure.add_subplot()
    values = shown[["predicted", "measured"]].to_numpy()
    line = [0.9 * values.min(), 1.05 * values.max()]
    low, high = ([x * (1 + off) for x in line] for off in (-BAND, BAND))
    axes.fill_between(line, low, high, color="0.92")
    axes.plot(line, line, color="0.6", linewidth=0.8)
    seaborn.scatterplot(
        shown, x="predicted", y="measured", hue="model", style=kinds,
        style_order=("the plan's best", "others"), ax=axes,
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="predicted (ms)", ylabel="measured (ms)")
    axes.minorticks_off()
    axes.set(xticks=TICKS_MS, xticklabels=TICKS_MS, yticks=TICKS_MS, yticklabels=TICKS_MS)
    axes.set(xlim=line, ylim=line)
    seaborn.move_legend(axes, "center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


# Steps that others measured

PATH = PUBLISHED / "published-steps.toml"
HOST = 8  # accelerators per host, in all of them
RECOMPUTED = {0.0: "never", 0.5: "selective", 1.0: "blocks"}
"""Name in `--remat` of a share of recomputation."""
MEMORY_ERROR = 0.1
"""Allowed relative error of a predicted peak, for fragmentation and for what a selective checkpoint keeps;
fixed before any was predicted."""
INSIDE_SHARE, MOST_WIDTH = 0.75, 1.6
"""Least share of steps within their predicted range, and largest ratio of its ends; fixed before any was
predicted."""


def as_stated(costs: Costs, request: Request, way: Way, remat: str) -> Prediction:
    """Predicts a way whose partition balances work; bytes are counted if the costs have profiles."""
    seconds = costs.at(way.microbatch_size).layers_s
    ahead_s, back_s = seconds[forward_kind(seconds)], seconds["B"]
    cut = partition([a + b for a, b in zip(ahead_s, back_s, strict=True)], way.num_stages)
    candidate = way.candidate(cut, (remat,) * way.num_stages)
    return predict(candidate, costs, request, parts=False)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A published step: a row of results/published-steps.toml, which describes the fields."""

    name: str
    source: str
    device: str
    accelerators: int
    link: str
    batch_size: int
    recomputed: float
    attention: str
    differs: str
    shape: str = ""
    builder: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    between: str = ""
    cards: int = HOST
    per_host: int = HOST
    precision: str = "bfloat16"
    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    level: int = 0
    tp: int = 1
    schedule: str = "1f1b"
    stages_per_worker: int = 1
    num_microbatches: int = 1
    fuses: bool = False
    speed: float = 0.0
    step_s: float = 0.0
    memory_gib: float = 0.0

    @property
    def way(self) -> str:
        """Name within its sweep: `pp 2 dp 4 tp 1 M 8 a100`."""
        return f"pp {self.pp} dp {self.dp * self.fsdp} tp {self.tp} M {self.num_microbatches} {self.device}"

    @property
    def measured_s(self) -> float:
        if self.step_s:
            return self.step_s
        return self.batch_size * int(self.model().inputs.tensors[0].shape[1]) / self.accelerators / self.speed

    def model(self) -> Model:
        """The model on the meta device, with the attention that the published step used."""
        from gpipe_bench.models import SHAPES
        from gpipe_bench.planner.model import built

        builder, options = SHAPES[self.shape] if self.shape else (self.builder, self.options)
        return replace(built(self.name, builder, options, self.batch_size), attention=self.attention)

    def predicted(self) -> tuple[float, float, float]:
        """Predicted seconds of the step, and the ends of their range."""
        costs, request, way = self._costs()
        costs = replace(costs, profiles=None)
        none, every = (as_stated(costs, request, way, remat) for remat in ("never", "always"))
        middle, low, high = (
            (1 - self.recomputed) * getattr(none, end) + self.recomputed * getattr(every, end)
            for end in ("step_s", "low_s", "high_s")
        )
        return middle, low, high

    def peak_gib(self) -> float:
        """Largest peak of an accelerator, for recomputation that `plan` has a name for."""
        return as_stated(*self._costs(), RECOMPUTED[self.recomputed]).peak / 2**30

    def _costs(self) -> tuple[Costs, Request, Way]:
        from gpipe_bench.planner.accelerators import accelerator
        from gpipe_bench.planner.roofline import by_roofline

        request = Request(
            accelerators=self.accelerators, device_type=self.device, memory_bytes=2**60,
            batch_size=self.batch_size, precision=self.precision, link=link_named(self.link, self.device),
            between=link_named(self.between, self.device) if self.between else None, cards=self.cards,
            hosts=max(1, self.accelerators // self.per_host),
        )  # fmt: skip
        size = self.batch_size // (self.dp * self.fsdp * self.num_microbatches)
        on = replace(accelerator(self.device, self.precision), fuses=self.fuses)
        costs = by_roofline(self.model(), request, (size,), on)
        grid = Grid(self.pp, self.dp, self.fsdp, self.level, self.tp)
        return costs, request, Way(grid, self.schedule, self.stages_per_worker, self.num_microbatches, size)


@cache
def steps() -> tuple[Step, ...]:
    return tuple(Step(**row) for row in tomllib.loads(PATH.read_text(encoding="utf-8"))["step"])


@cache
def sweeps() -> dict[str, tuple[Step, ...]]:
    """The sweeps in results/published-steps.toml, by name: steps of one model on one cluster."""
    rows = tomllib.loads(PATH.read_text(encoding="utf-8")).get("sweep", ())
    return {row["name"]: tuple(Step(**row | way) for way in row.pop("ways")) for row in rows}


def run_published(named: Sequence[tuple[str, Step]]) -> Outcome:
    rows: list[dict[str, Any]] = [
        {"name": name, "source": step.source, "differs": step.differs, "measured_s": step.measured_s}
        | {"sweep": step.name, "batch_size": step.batch_size}
        | dict(zip(("step_s", "low_s", "high_s"), step.predicted(), strict=True))
        | ({"memory_gib": step.memory_gib, "peak_gib": step.peak_gib()} if step.memory_gib else {})
        for name, step in named
    ]
    metrics = [
        Metric(
            STEP, row["step_s"], "s", "modelled", key={"name": row["name"]}, low=row["low_s"],
            high=row["high_s"],
        )
        for row in rows
    ]  # fmt: skip
    return Outcome(tuple(metrics), {"steps": rows})


def _published(record: Record) -> Table:
    """Each step beside its predicted range."""
    rows, lines = record.details["steps"], []
    inside = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in rows]
    widest = max(row["high_s"] / row["low_s"] for row in rows)
    enough = sum(inside) >= INSIDE_SHARE * len(rows) and widest <= MOST_WIDTH
    for row, is_inside in zip(rows, inside, strict=True):
        predicted = f"{row['step_s']:.2f} [{row['low_s']:.2f}, {row['high_s']:.2f}]"
        line = [row["name"], f"{row['measured_s']:.2f}", predicted, _holds(is_inside), "", "", ""]
        if "memory_gib" in row:
            error = row["peak_gib"] / row["memory_gib"] - 1
            peak = f"{row['peak_gib']:.1f} ({error:+.0%})"
            line[4:] = [f"{row['memory_gib']:.1f}", peak, _holds(abs(error) <= MEMORY_ERROR)]
        lines.append(line)
    return Table(
        title="Published steps of the largest models, on paper (modelled)",
        columns=["", "measured (s)", "predicted (s) [range]", "inside", "GiB", "predicted", "inside"],
        lines=lines,
        notes=[
            f"{sum(inside)} of {len(rows)} inside, the widest range a factor of {widest:.2f}; asked: "
            f"{INSIDE_SHARE:.0%} of them, and at most {MOST_WIDTH:g}: {_holds(enough)}",
            f"memory, where it was published: inside is at most {MEMORY_ERROR:.0%} away",
            *(f"{row['name']}: {row['source']}; not in the prediction: {row['differs']}" for row in rows),
        ],
        right=frozenset({1, 4}),
    )


def _sweeps(record: Record) -> Table:
    """Whether the way predicted to be fastest was the fastest; in seconds per example, since ways of a sweep
    may differ in mini-batch.
    """
    from pandas import DataFrame

    rows = DataFrame(record.details["steps"]).rename(columns={"sweep": "model"})
    rows["predicted"], rows["measured"] = rows.step_s / rows.batch_size, rows.measured_s / rows.batch_size
    rows["inside"] = (rows.low_s <= rows.measured_s) & (rows.measured_s <= rows.high_s)
    of_each = rows.groupby("model", sort=False).inside.agg(["size", "sum"]).join(choices(rows))
    return Table(
        title="Sweeps of others, in the order of our predictions (modelled)",
        columns=["", "ways", "inside", "rank correlation", "regret"],
        lines=[
            [name, ways, inside, f"{order:.2f}", percent(regret)]
            for name, ways, inside, order, regret in of_each.itertuples()
        ],
        notes=["Regret: how much longer a step of the way predicted to be the fastest took there."],
        right=frozenset({1, 2, 3, 4}),
    )


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
