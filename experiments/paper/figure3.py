"""Figure 3 of the paper's first version: speed-ups of ResNet-101 and of AmoebaNet-D (4, 512).

Expected: re-materialization costs ResNet-101 on one device a fifth to a quarter; a pipeline overtakes the
naive split on two devices and grows with K.

    python -m experiments run figure3

naive-k: k stages, the whole mini-batch at once, nothing recomputed. pipeline-k: k stages, 16 micro-batches of
half that size each, since the paper chose every batch for throughput, everything recomputed. Actions are
timed in whole steps of 4 micro-batches with all stages in one process and laid out on k devices (`replayed`);
k = 2 also runs on two (`measured`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpipe_bench.experiments.paper.timed import claims
from gpipe_bench.experiments.paper.timed.workloads import (
    CUTS_ESTIMATE_S,
    PROFILES,
    VERSION1,
    Configuration,
    Job,
    Workload,
    real_cases,
)
from gpipe_bench.experiments.registry import ENGINES
from gpipe_bench.experiments.report.drawing import kept_timelines, picture
from gpipe_bench.harness import reproduced
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, Plot, RunOptions
from gpipe_bench.harness.record import Record, from_samples, of_case
from gpipe_bench.harness.report.grid import numbers_text
from gpipe_bench.harness.verdict import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_MICROBATCHES = 16  # v1 Table 1; the figure's own is not stated
TIMED_MICROBATCHES = 4  # that really run
STAGES = (1, 2, 4, 8)
BASELINES = {"resnet101": 1, "amoebanet": 2}
"""k of the naive-k that a model's speeds are divided by."""
CUT = "amoebanet"  # the model of the sentence that is judged over the paper's cuts
ROUNDS = {"smoke": 1, "short": 1, "full": 2}  # there and back, two samples each
ESTIMATE_S = {"smoke": 10.0, "short": 80.0, "full": 120.0}
REAL_MICROBATCHES = (1, 2, 4)
REAL_ESTIMATES_S = (170.0, 170.0)  # of ResNet-101 and AmoebaNet-D
ROW = "normalized throughput"
RECOMPUTATION = "recomputation"
COLORS = {
    "paper (TPU)": "#0173b2",
    "torchgpipe (P40)": "#949494",
    "ours, replayed": "#029e73",
    "ours, measured": "#de8f05",
    "bound": "#d9d9d9",
}
"""Of who made a number; the same in every panel."""


def cases(options: RunOptions) -> list[Case]:
    estimate_s = ESTIMATE_S[options.profile]
    steps = [Case({"model": name}, estimate_s + CUTS_ESTIMATE_S * (name == CUT)) for name in VERSION1]
    if options.device == "cuda":  # first what a minute on one GPU decides
        steps.insert(0, Case({"part": RECOMPUTATION, "model": "resnet101"}, 40.0))
    others = real_cases(VERSION1, REAL_ESTIMATES_S, options)
    return steps + others + reproduced.cases("figure3", options)


def run(case: Case, options: RunOptions) -> Outcome:
    if reproduced.is_computed(case):
        from gpipe_bench.experiments.paper import reproduction

        return reproduction.run("figure3", case)
    from gpipe_bench.experiments.paper.predicted.sizes import cuts_of_the_paper, paper_size
    from gpipe_bench.experiments.paper.timed.results import results
    from gpipe_bench.experiments.paper.timed.steps import measure, num_devices, run_real

    name = str(case.key["model"])
    sizes = VERSION1[name]
    workload = sizes[options.profile]
    match case.key.get("part"):
        case part if part == RECOMPUTATION:
            return with_and_without(workload, name, options)
        case "replay error":
            size = max(1, workload.batch_size // 2)
            return run_real(workload, REAL_MICROBATCHES, options, microbatch_size=size)
    stages = STAGES[:2] if options.profile == "smoke" else STAGES
    plan = configurations(name, workload.batch_size, stages, num_devices(options.device))
    job = Job(workload, plan, ROUNDS[options.profile], options.engine or "ours", options.device)
    metrics, details = results(job, measure(job))
    if name == CUT:
        paper = paper_size("figure3", name, options)
        cuts_of_the_paper(f"figure3-{name}", workload, paper, STAGES[1:]).add_to(details)
    return Outcome(tuple(metrics), details)


def with_and_without(workload: Workload, name: str, options: RunOptions) -> Outcome:
    """Steps of one stage with re-materialization and without, for real and in turns: nothing is laid out.
    Micro-batches are as large with it as the mini-batch is without, or their efficiency would count, too.
    """
    from gpipe_bench.experiments.paper.timed.results import results
    from gpipe_bench.experiments.paper.timed.steps import measure

    plan = (
        Configuration(1, 1, workload.batch_size, "never", label="naive-1"),
        Configuration(1, TIMED_MICROBATCHES, TIMED_MICROBATCHES * workload.batch_size, label="pipeline-1"),
    )
    job = Job(workload, plan, ROUNDS[options.profile], options.engine or "ours", options.device)
    found = measure(job)
    metrics, details = results(job, found)
    rates = {}
    for index, each in enumerate(plan):
        samples = [s for process in found for s in process.steps[index].in_process_s]
        if samples:
            key = {"configuration": each.label}
            rates[each.label] = [each.batch_size / s for s in samples]
            metrics.append(from_samples("whole step", [1e3 * s for s in samples], "ms", key=key))
    if len(rates) == len(plan):
        naive, pipeline = rates.values()
        ratio = [ours / one for ours, one in zip(pipeline, naive, strict=True)]
        note = "examples per second with re-materialization over those without"
        metrics.append(from_samples("with over without", ratio, "ratio", note=note))
    return Outcome(tuple(metrics), details)


def configurations(name: str, batch_size: int, stages: Sequence[int], real: int) -> tuple[Configuration, ...]:
    """The baseline first, to which all others are relative. `real` is the number of devices at hand."""
    base, count = BASELINES[name], TIMED_MICROBATCHES
    of = partial(Configuration, num_microbatches=count, batch_size=count * max(1, batch_size // 2))
    return (
        Configuration(base, 1, batch_size, "never", base == real > 1, label=f"naive-{base}"),
        *(
            of(k, runs_for_real=k == real > 1, counts=(NUM_MICROBATCHES, count), label=f"pipeline-{k}")
            for k in stages
            if k >= base
        ),
    )


def _done(records: Sequence[Record]) -> dict[str, Record]:
    return claims.by_model(claims.of_steps(records), VERSION1)


def _places(model: str, record: Record) -> dict[str, tuple[str, str, str]]:
    """Where each configuration on record stands in the paper."""
    return {label: (f"figure3-{model}", ROW, label) for label in record.details["cells"]}


def cells(records: Sequence[Record]) -> list[Result]:
    """An entry for each number of the figure and for the sentences about it."""
    done = _done(records)
    found = [cell for model, record in done.items() for cell in _cells(records, model, record)]
    found += [claim for model, record in done.items() for claim in _sentences(records, model, record)]
    return found + reproduced.answers(records)


def _cells(records: Sequence[Record], model: str, record: Record) -> Iterator[Result]:
    scale = record.details["scale"]
    note = (f"A scaled model ({scale}), M = {NUM_MICROBATCHES}; " if scale else "") + (
        "the paper's batch and M are not stated"
    )
    printed = {(row, column) for _, row, column in claims.published(f"figure3-{model}")}
    for table, row, label in _places(model, record).values():
        metric = record.metric("normalised throughput", **record.details["cells"][label]["key"])
        for place in ((table, row, label), (table, f"{row} by the text", label)):
            if metric is not None and place[1:] in printed:
                made = claims.made_of(record, label)
                yield claims.entry(
                    records, record, place, metric, note, moves="as the step grows", context=made
                )


def _sentences(records: Sequence[Record], model: str, record: Record) -> Iterator[Result]:
    """What v1 says: an almost linear speed-up, and a quarter more time for recomputation."""
    of = {
        label: record.metric("normalised throughput", **facts["key"])
        for label, facts in record.details["cells"].items()
    }
    if model == CUT:
        row, names = "AmoebaNet-D (4, 512): share of a linear speed-up", ("pipeline-8", "naive-2")
        note = "Throughput with 8 stages over naive-2's, over four"
        yield from claims.sentence_over_cuts(
            records, record, row, "pipeline-8 over naive-2", names, [of.get(name) for name in names],
            lambda many, few: many / few / 4, note,
        )  # fmt: skip
    else:
        row, column = "extra time by recomputation", "pipeline-1 / naive-1, ResNet-101"
        pair = of.get("naive-1"), of.get("pipeline-1")
        found = claims.derived("extra time", lambda naive, one: 100 * (naive / one - 1), *pair, unit="%")
        note = "Seconds of a step with re-materialization over those without, less one"
        yield from claims.sentence(records, record, row, column, found, note)


def tables(records: Sequence[Record]) -> str:
    """What is behind the numbers, and how far the replay and the predictions err."""
    parts = [
        claims.throughput_text(record, _title(record), _places(model, record))
        for model, record in _done(records).items()
    ]
    parts += [
        _recomputation(records),
        claims.replay_errors(reproduced.timed(records)),
    ]
    return "\n\n".join(part for part in parts if part)


def _recomputation(records: Sequence[Record]) -> str:
    """What re-materialization costs on one device, beside the figure's bar of it."""
    lines = []
    for record in of_case(records, part=RECOMPUTATION):
        cells: Mapping[str, Mapping[str, str]] = record.details.get("cells", {})
        lost = "; ".join(facts["out_of_memory"] for facts in cells.values() if facts["out_of_memory"])
        ratio = record.metric("with over without")
        printed = claims.published(f"figure3-{record.case['model']}")["paper", ROW, "pipeline-1"].printed
        said = claims.interval(ratio, record.reason or lost)
        lines.append([record.details.get("title", record.case["model"]), printed, said])
    title = "One device: throughput with re-materialization over that without (measured)"
    return numbers_text(title, ["", "paper", "ours"], lines)


def _title(record: Record) -> str:
    scale = record.details["scale"]
    return (
        f"{record.details['title']}: throughput, {next(iter(record.details['cells']))} is 1"
        + (f"; scaled to this machine: {scale}" if scale else "")
        + f"\n  naive-k: one micro-batch, nothing recomputed; pipeline-k: M = {NUM_MICROBATCHES} if not "
        f"said otherwise, all recomputed; actions timed with M = {TIMED_MICROBATCHES}"
    )


def figures(records: Sequence[Record]) -> list[Plot]:
    """Bars per model, the paper's beside ours."""
    done = _done(records)
    bars = picture(
        name="figure3",
        caption="Figure 3 of the first version: speed-up over the number of partitions",
        alt="Ours beside the paper's and torchgpipe's speed-ups for each number of partitions.",
        draw=partial(_bars, done),
    )
    return [bars] if done else []


def _bars(done: Mapping[str, Record]) -> Figure:
    import pandas
    import seaborn
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8 * len(done), 3.6), layout="constrained")
    every = figure.subplots(1, len(done), squeeze=False)[0]
    for axes, (model, record) in zip(every, done.items(), strict=True):
        known, rows = claims.published(f"figure3-{model}"), []
        y = f"throughput, {next(iter(record.details['cells']))} is 1"
        for label, facts in record.details["cells"].items():
            if facts["num_microbatches"] == TIMED_MICROBATCHES:
                continue  # laid out only to be held against the real step
            values = [known.get((source, ROW, label)) for source in ("paper", "torchgpipe")] + [
                record.metric(f"normalised {what}throughput", **facts["key"])
                for what in ("", "real ", "bound ")
            ]
            rows += [
                {"": label, "who": who, y: each.value}
                for who, each in zip(COLORS, values, strict=True)
                if each is not None
            ]
        seaborn.barplot(pandas.DataFrame(rows), x="", y=y, hue="who", palette=COLORS, ax=axes)
        axes.set_title(claims.scaled(record.details), fontsize=9)
        axes.legend(title="", fontsize=7, loc="upper left")
    return figure


EXPERIMENT = Experiment(
    name="figure3",
    title="Figure 3 of v1: speed-ups of ResNet-101 and AmoebaNet-D (4, 512)",
    source="arXiv v1, Figure 3",
    describe=(
        "naive-k and pipeline-k for k = 1, 2, 4 and 8: actions measured in one process and laid out on k "
        "devices, beside real steps on k = 2."
    ),
    profiles=PROFILES | {"smoke": "tiny models, k up to 2"},
    cases=cases,
    run=run,
    cells=cells,
    reproduction=reproduced.text,
    paper_tables=("figure3-amoebanet", "figure3-resnet101"),
    tables=tables,
    figures=figures,
    timelines=kept_timelines,
    options=("device", "engine"),
    engines=tuple(ENGINES),
)
