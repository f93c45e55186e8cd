"""Figure 3 of the paper's first version: speed-ups of ResNet-101 and of AmoebaNet-D (4, 512).

Expected: re-materialization costs ResNet-101 on one device a fifth to a quarter; a pipeline overtakes the
naive split on two devices and grows with K.

    python -m experiments run figure3

naive-k: k stages, the whole mini-batch at once, nothing recomputed. pipeline-k: k stages, 16 micro-batches of
half that size each, everything recomputed. Actions are timed in whole steps of 4 micro-batches and laid out
on k devices (`replayed`); every k that there are devices for also runs on them (`measured`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report import reproduced
from gpipe_bench.harness.verdict import Result

from ..drawing import picture
from ..registry import ENGINES
from . import evidence
from .workloads import PROFILES, VERSION1, Configuration, real_cases

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

NUM_MICROBATCHES = 16  # of v1's Table 1; v1 does not state Figure 3's
TIMED_MICROBATCHES = 4  # of the steps that run; their actions are laid out as NUM_MICROBATCHES
STAGES = (1, 2, 4, 8)
BASELINES = {"resnet101": 1, "amoebanet": 2}
"""k of the naive-k that a model's speeds are divided by."""
ROUNDS = {"smoke": 1, "short": 1, "full": 2}  # each in order and in reverse: two samples
ESTIMATE_S = {"smoke": 10.0, "short": 80.0, "full": 120.0}
REAL_MICROBATCHES = (1, 2, 4)
REAL_ESTIMATES_S = (170.0, 170.0)  # of ResNet-101 and AmoebaNet-D
ROW = "normalized throughput"  # of results/paper.csv; records write "normalised throughput"
BARS = {
    evidence.PAPER: "#0173b2", "torchgpipe": "#949494", evidence.COMPUTED: "#d9d9d9",
    evidence.OURS: "#029e73", evidence.RAN: "#de8f05",
}  # fmt: skip
"""Colours by source of a number; the same in every panel."""


def cases(options: RunOptions) -> list[Case]:
    estimate_s = ESTIMATE_S[options.profile]
    steps = [Case({"model": name}, estimate_s) for name in VERSION1]
    others = real_cases(VERSION1, REAL_ESTIMATES_S, options)
    return steps + others + reproduced.cases("figure3", options)


def run(case: Case, options: RunOptions) -> Outcome:
    if reproduced.is_computed(case):
        from . import reproduction

        return reproduction.run("figure3", case)
    from .steps import num_devices, run_real, timed

    name = str(case.key["model"])
    workload = VERSION1[name][options.profile]
    if "part" in case.key:
        size = max(1, workload.batch_size // 2)
        return run_real(workload, REAL_MICROBATCHES, options, microbatch_size=size)
    stages = STAGES[:2] if options.profile == "smoke" else STAGES
    plan = configurations(name, workload.batch_size, stages, num_devices(options.device))
    _, metrics, details = timed(workload, plan, ROUNDS[options.profile], options)
    return Outcome(tuple(metrics), details)


def configurations(name: str, batch_size: int, stages: Sequence[int], real: int) -> tuple[Configuration, ...]:
    """The naive split first, then the pipelines. `real` is the number of devices of this machine."""
    base, count = BASELINES[name], TIMED_MICROBATCHES
    pipeline = partial(Configuration, num_microbatches=count, batch_size=count * max(1, batch_size // 2))
    return (
        Configuration(base, 1, batch_size, "never", 1 < base <= real, label=f"naive-{base}"),
        *(
            pipeline(k, runs_for_real=1 < k <= real, counts=(NUM_MICROBATCHES, count), label=f"pipeline-{k}")
            for k in stages
            if k >= base
        ),
    )


def cells(records: Sequence[Record]) -> list[Result]:
    """A result for each bar, and for the text's sentence that recomputation takes a quarter more time."""
    found: list[Result] = []
    for record in evidence.by_model(evidence.of_steps(records), VERSION1).values():
        speeds = {
            name: record.metric("normalised throughput", **facts["key"])
            for name, facts in record.details["cells"].items()
        }
        (base, *_), scale = speeds, record.details["scale"] or "at the full size"
        note = f"Run here: {scale}, M = {NUM_MICROBATCHES}, Table 1's; the paper states no batch and no M."
        for name, metric in speeds.items():
            count = record.details["cells"][name]["num_microbatches"]
            if metric is not None and count != TIMED_MICROBATCHES:
                place = _place(record, name)
                found.append(evidence.beside(records, record, place, metric, note, "a quotient"))
        if base == "naive-1":
            pair, at = (speeds[base], speeds.get("pipeline-1")), "pipeline-1 / naive-1, ResNet-101"
            extra = evidence.derived("extra time", lambda a, b: 100 * (a / b - 1), *pair, unit="%")
            note = "Seconds of a step with re-materialization over those without, less one"
            found += evidence.sentence(records, record, (reproduced.EXTRA, at), extra, note, "an increase")
    return found + reproduced.answers(records)


def _place(record: Record, name: str) -> reproduced.Place:
    return f"figure3-{record.case['model']}", ROW, name


def tables(records: Sequence[Record]) -> str:
    """Tables of the throughput, and of how far the replay errs."""
    numbers = evidence.long(records, _place)
    note = (
        f"  naive-k: one micro-batch, nothing recomputed; pipeline-k: M = {NUM_MICROBATCHES} if not said "
        f"otherwise, all recomputed; actions timed with M = {TIMED_MICROBATCHES}"
    )
    shown = [
        evidence.throughput(bars, f"{title}: throughput, {bars.cell.iloc[0]} is 1", note)
        for title, bars in _steps(numbers).groupby("title", sort=False)
    ]
    return "\n\n".join(filter(None, [*shown, evidence.replay_errors(numbers)]))


def _steps(numbers: DataFrame) -> DataFrame:
    """Drops the steps that only measure the replay's error."""
    return numbers if numbers.empty or "part" not in numbers else numbers[numbers.part.isna()]


def figures(records: Sequence[Record]) -> list[Plot]:
    """Bars for each model, the paper's beside ours."""
    bars = picture(
        name="figure3",
        caption="Figure 3 of the first version: speed-up over the number of partitions; ours computed, with "
        "its error",
        alt="Ours beside the paper's and torchgpipe's speed-ups for each number of partitions.",
        draw=partial(_bars, records),
    )
    return [bars] if evidence.by_model(evidence.of_steps(records), VERSION1) else []


def _bars(records: Sequence[Record]) -> Figure:
    import seaborn
    from matplotlib.figure import Figure

    numbers = _steps(evidence.long(records, _place))
    shown = numbers[numbers.metric.isin(BARS) & (numbers.M != TIMED_MICROBATCHES) & numbers.value.notna()]
    models = evidence.with_ends(shown).groupby("title", sort=False)
    figure = Figure(figsize=(4.8 * len(models), 3.6), layout="constrained")
    for axes, (_, bars) in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        sources = [source for source in BARS if source in {*bars.metric}]
        seaborn.barplot(
            bars, x="cell", y="value", hue="metric", hue_order=sources, palette=BARS, ax=axes,
            err_kws={"linewidth": 1}, capsize=0.3, **evidence.TO_THE_ENDS,
        )  # fmt: skip
        axes.set(xlabel="", ylabel=f"throughput, {bars.cell.iloc[0]} is 1")
        axes.set_title(evidence.scaled(bars.title.iloc[0], bars.scale.iloc[0]), fontsize=9)
        axes.legend(title="", fontsize=7.5, loc="upper left")
    return figure


EXPERIMENT = Experiment(
    name="figure3",
    title="Figure 3 of v1: speed-ups of ResNet-101 and AmoebaNet-D (4, 512)",
    source="arXiv v1, Figure 3",
    describe=(
        "naive-k and pipeline-k for k = 1, 2, 4 and 8: actions measured in one process and laid out on k "
        "devices, beside real steps on k = 2."
    ),
    profiles=PROFILES | {"smoke": "tiny models, k up to 2; one model computed"},
    cases=cases,
    run=run,
    cells=cells,
    reproduction=reproduced.text,
    paper_tables=("figure3-amoebanet", "figure3-resnet101"),
    tables=tables,
    figures=figures,
    options=("device", "engine"),
    engines=tuple(ENGINES),
)
