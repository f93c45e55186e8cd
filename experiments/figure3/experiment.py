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

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpipe_bench.experiments.figure3.sentences import sentences
from gpipe_bench.experiments.measuring.speed_models import V1_SUBJECTS
from gpipe_bench.experiments.measuring.step_results import devices, measure, results
from gpipe_bench.experiments.measuring.tables.replay_error import UNKNOWN, next_error, replayed_spread
from gpipe_bench.experiments.measuring.tables.step_text import (
    SMOKE,
    interval,
    percent,
    published,
    replay_errors,
)
from gpipe_bench.experiments.measuring.timed_experiment import timed_experiment, timing_job
from gpipe_bench.experiments.published import cases as predictions
from gpipe_bench.experiments.published.entries import as_published, prediction_text, timed
from gpipe_bench.experiments.published.hypotheses import hypotheses_of
from gpipe_bench.experiments.report.drawing import picture
from gpipe_bench.experiments.report.timelines import kept_timelines
from gpipe_bench.harness.experiment import Case, Outcome, PaperTable, Plot, RunOptions
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.report.grid import Grid, numbers
from gpipe_bench.harness.report.table import text_table
from gpipe_bench.harness.verdict import Comparison, Entry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpipe_bench.experiments.measuring.configuration import Configuration

NUM_MICROBATCHES = 16  # v1 Table 1; the figure's own is not stated
TIMED_MICROBATCHES = 4  # that really run
STAGES = (1, 2, 4, 8)
BASELINES = {"resnet101": 1, "amoebanet": 2}
"""k of the naive-k that a model's speeds are divided by."""
ROUNDS = {"smoke": 1, "short": 1, "full": 2}  # there and back, two samples each
ESTIMATE_S = {"smoke": 10.0, "short": 80.0, "full": 120.0}
COLORS = {
    "paper (TPU)": "#0173b2",
    "torchgpipe (P40)": "#949494",
    "ours, replayed": "#029e73",
    "ours, measured": "#de8f05",
    "bound": "#d9d9d9",
}
"""Of who made a number; the same in every panel."""
TABLES = {name: f"figure3-{name}" for name in V1_SUBJECTS}


def cases(options: RunOptions) -> list[Case]:
    steps = [Case({"model": name}, ESTIMATE_S[options.profile]) for name in V1_SUBJECTS]
    return steps + predictions.cases("figure3", options)


def run(case: Case, options: RunOptions) -> Outcome:
    if predictions.is_prediction(case):
        from gpipe_bench.experiments.figure3.predicted import predict

        return predictions.run(predict, case, options)
    name = str(case.key["model"])
    subject = V1_SUBJECTS[name]
    plan = configurations(
        name,
        subject.sizes[options.profile].batch_size,
        smoke=options.profile == "smoke",
        real=devices(options.device),
    )
    job, facts = timing_job(subject, plan, ROUNDS[options.profile], options)
    quantities, details = results(
        [(each, laid_out_with(each)) for each in plan], measure(job), options.device
    )
    return Outcome(tuple(quantities), {**facts, **details})


def configurations(name: str, batch_size: int, *, smoke: bool, real: int) -> list[Configuration]:
    """The baseline first, to which all others are relative. `real` is the number of devices at hand."""
    from gpipe_bench.experiments.measuring.configuration import Configuration

    base = BASELINES[name]
    examples = TIMED_MICROBATCHES * max(1, batch_size // 2)
    found = [
        Configuration(base, 1, batch_size, "never", runs_for_real=base == real > 1, label=f"naive-{base}")
    ]
    return found + [
        Configuration(k, TIMED_MICROBATCHES, examples, runs_for_real=k == real > 1, label=f"pipeline-{k}")
        for k in (STAGES[:2] if smoke else STAGES)
        if k >= base
    ]


def laid_out_with(configuration: Configuration) -> tuple[int, ...]:
    """The wanted number of micro-batches first, then the one that really runs."""
    if configuration.num_microbatches == 1:
        return (1,)
    return NUM_MICROBATCHES, configuration.num_microbatches


def cells(records: Sequence[Record]) -> list[Entry]:
    here = timed(records)
    found = [cell for record in here if record.status == "done" for cell in _cells(here, record)]
    return found + sentences(here) + as_published(records)


def _cells(records: Sequence[Record], record: Record) -> Iterator[Entry]:
    name = str(record.case["model"])
    error = next_error(records, name)
    scale = record.details["scale"]
    note = (f"A scaled model ({scale}), M = {NUM_MICROBATCHES}; " if scale else "") + (
        "the paper's batch and M are not stated"
    )
    printed = {(cell.row, cell.column) for cell in published(TABLES[name]).values()}
    for label, facts in record.details["cells"].items():
        quantity = record.quantity("normalised throughput", **facts["key"])
        spread = replayed_spread(quantity, error, "as the step grows")
        for row in ("normalized throughput", "normalized throughput by the text"):
            if quantity is not None and (row, label) in printed:
                yield Entry(
                    table=TABLES[name],
                    row=row,
                    column=label,
                    quantity=quantity,
                    record=record,
                    note=note,
                    spread=spread,
                    not_comparable=SMOKE if record.profile == "smoke" else "" if spread else UNKNOWN,
                )


def tables(records: Sequence[Record], comparisons: list[Comparison]) -> str:
    verdicts = {c.place: c.verdict for c in comparisons if c.question == "here"}
    parts = []
    for record in timed(records):
        if record.status != "done":
            continue
        table = TABLES[str(record.case["model"])]
        known = published(table)
        lines = []
        for label, facts in record.details["cells"].items():
            row = "normalized throughput"
            paper, peer = known.get(("paper", row, label)), known.get(("torchgpipe", row, label))
            measured = record.quantity("normalised real throughput", **facts["key"])
            lines.append(
                [
                    label,
                    "-" if paper is None else paper.printed,
                    "-" if peer is None else peer.printed,
                    interval(record.quantity("normalised throughput", **facts["key"]), facts["why"]),
                    "-" if measured is None else interval(measured),
                    interval(record.quantity("normalised bound throughput", **facts["key"])),
                    percent(record.quantity("share of the balanced step", **facts["key"])),
                    verdicts.get((table, row, label), "-"),
                ]
            )
        scale = record.details["scale"]
        title = (
            f"{record.details['title']}: throughput, {next(iter(record.details['cells']))} is 1"
            + (f"; scaled to this machine: {scale}" if scale else "")
            + f"\n  naive-k: one micro-batch, nothing recomputed; pipeline-k: M = {NUM_MICROBATCHES} if not "
            f"said otherwise, all recomputed; actions timed with M = {TIMED_MICROBATCHES}"
        )
        headers = [
            "",
            "paper",
            "torchgpipe",
            "ours, replayed",
            "ours, measured",
            "bound",
            "of bound",
            "verdict",
        ]
        parts.append(Grid(title=title, columns=headers, lines=lines, right=numbers(headers)).text())
    parts += [replay_errors(timed(records)), prediction_text(records)]
    if comparisons:
        parts.append(text_table(comparisons))
    return "\n\n".join(part for part in parts if part)


def figures(records: Sequence[Record]) -> list[Plot]:
    """Bars per model, the paper's beside ours."""
    done = [record for record in timed(records) if record.status == "done"]
    if not done:
        return []
    return [
        picture(
            name="figure3",
            caption="Figure 3 of the first version: speed-up over the number of partitions",
            alt="Ours beside the paper's and torchgpipe's speed-ups for each number of partitions.",
            draw=partial(_bars, done),
        )
    ]


def _bars(done: Sequence[Record]) -> Figure:
    import pandas
    import seaborn
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8 * len(done), 3.6), layout="constrained")
    for axes, record in zip(figure.subplots(1, len(done), squeeze=False)[0], done, strict=True):
        known = published(TABLES[str(record.case["model"])])
        rows: list[tuple[str, str, float | None]] = []
        for label, facts in record.details["cells"].items():
            if facts["num_microbatches"] == TIMED_MICROBATCHES:
                continue  # laid out only to be held against the real step
            values = {
                "paper (TPU)": known.get(("paper", "normalized throughput", label)),
                "torchgpipe (P40)": known.get(("torchgpipe", "normalized throughput", label)),
            }
            rows += [(label, who, cell.value) for who, cell in values.items() if cell is not None]
            for who, what in (
                ("ours, replayed", "throughput"),
                ("ours, measured", "real throughput"),
                ("bound", "bound throughput"),
            ):
                quantity = record.quantity(f"normalised {what}", **facts["key"])
                if quantity is not None:
                    rows.append((label, who, quantity.value))
        frame = pandas.DataFrame(rows, columns=["", "who", "throughput"])
        seaborn.barplot(frame, x="", y="throughput", hue="who", palette=COLORS, ax=axes)
        scale = record.details["scale"]
        axes.set_title(record.details["title"] + (f"\nscaled: {scale}" if scale else ""), fontsize=9)
        axes.set_ylabel(f"throughput, {next(iter(record.details['cells']))} is 1")
        axes.legend(title="", fontsize=7, loc="upper left")
    return figure


PAPER_TABLES = {
    "figure3-amoebanet": PaperTable(
        title="Figure 3(a) of the first version: AmoebaNet-D (4, 512) speed-up",
        short="Figure 3, AmoebaNet-D",
        about="Throughput over partitions, relative to naive-2.",
    ),
    "figure3-resnet101": PaperTable(
        title="Figure 3(b) of the first version: ResNet-101 speed-up",
        short="Figure 3, ResNet-101",
        about="Throughput over partitions, relative to one device without re-materialization.",
    ),
}


EXPERIMENT = timed_experiment(
    name="figure3",
    title="Figure 3 of v1: speed-ups of ResNet-101 and AmoebaNet-D (4, 512)",
    source="arXiv v1, Figure 3",
    describe=(
        "naive-k and pipeline-k for k = 1, 2, 4 and 8: actions measured in one process and laid out on k "
        "devices, beside real steps on k = 2."
    ),
    smoke="tiny models, k up to 2",
    cases=cases,
    run=run,
    cells=cells,
    paper_tables=PAPER_TABLES,
    tables=tables,
    figures=figures,
    timelines=kept_timelines,
    hypotheses=hypotheses_of,
)
