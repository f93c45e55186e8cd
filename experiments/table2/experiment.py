"""Table 2: normalised throughput of AmoebaNet-D (18, 256) and Transformer-48 over K and M.

Expected: throughput grows with M until the bubble is gone, and with K almost linearly for the Transformer,
whose layers are alike; AmoebaNet's cells are not, so its stages cannot be even.

    python -m experiments run table2

Every action is measured in whole steps, with all stages in one process, and laid out on K devices
(`replayed`); where there are as many devices as stages the step is also run on them (`measured`), and the
difference is the replay's error. K = 4 runs for real too, in four processes that share the cores: that proves
order and memory, and no time. One table at a fixed mini-batch, so that only K and M differ, and one with
the mini-batch fitted to a memory cap, as the paper did; they are not mixed. All cells of a model take turns
in one run.

A case of its own predicts the paper's table for the paper's accelerators and sizes (`as published`), over
everything that the paper leaves open (experiments/published).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.measuring.speed_models import SUBJECTS, Size, Subject
from gpipe_bench.experiments.measuring.step_results import devices, measure, results
from gpipe_bench.experiments.measuring.timed_experiment import timed_experiment, timing_job
from gpipe_bench.experiments.published import cases as predictions
from gpipe_bench.experiments.published.hypotheses import hypotheses_of
from gpipe_bench.experiments.report.timelines import kept_timelines
from gpipe_bench.experiments.table2.figures import figures
from gpipe_bench.experiments.table2.tables import cells, tables
from gpipe_bench.harness.experiment import Case, Outcome, PaperTable, RunOptions

if TYPE_CHECKING:
    from gpipe_bench.experiments.measuring.configuration import Configuration

STAGES = (2, 4, 8)
MICROBATCHES = (1, 4, 32)
SMOKE_STAGES = (2, 4)
SMOKE_MICROBATCHES = (1, 4)
ROUNDS = {
    "smoke": {"fixed": 1, "fitted": 1},
    "short": {"fixed": 1, "fitted": 2},
    "full": {"fixed": 2, "fitted": 2},
}
"""There and back: every configuration takes two turns in a round, and each is a sample."""
ESTIMATE_S = {"smoke": (8.0, 8.0), "short": (95.0, 75.0), "full": (150.0, 150.0)}
BATCHES = ("fixed", "fitted")
SHARED_CORES = "on shared cores"
SHARED_ESTIMATE_S = 20.0
FITTED_MICROBATCHES = 2  # that are run where the mini-batch is fitted


def cases(options: RunOptions) -> list[Case]:
    smoke = options.profile == "smoke"
    steps = [
        Case({"model": name, "batch": batch}, ESTIMATE_S[options.profile][BATCHES.index(batch)])
        for batch in BATCHES
        for name in SUBJECTS
        if not smoke or (batch, name) != ("fitted", "amoebanet")  # ten seconds of profiling
    ]
    shared = [Case({"model": name, "batch": SHARED_CORES}, SHARED_ESTIMATE_S) for name in SUBJECTS]
    if smoke or options.engine not in (None, "ours"):
        shared = []
    return steps + shared + predictions.cases("table2", options)


def run(case: Case, options: RunOptions) -> Outcome:
    if predictions.is_prediction(case):
        from gpipe_bench.experiments.table2.predicted import predict

        return predictions.run(predict, case, options, ("share_of_peak",))
    subject = SUBJECTS[str(case.key["model"])]
    batch = str(case.key["batch"])
    if batch == SHARED_CORES:
        from gpipe_bench.experiments.table2.shared_cores import run as run_on_shared_cores

        size = subject.sizes[options.profile]
        found, facts = run_on_shared_cores(subject.model, size.options)
        return Outcome(tuple(found), {"title": subject.title, "scale": size.scale, **facts})
    plan, batch_facts = _plan(subject, subject.sizes[options.profile], batch, options)
    job, facts = timing_job(
        subject, (configuration for configuration, _ in plan), ROUNDS[options.profile][batch], options
    )
    quantities, details = results(plan, measure(job), options.device)
    return Outcome(tuple(quantities), {**facts, "model": subject.model, **batch_facts, **details})


def _plan(
    subject: Subject, size: Size, batch: str, options: RunOptions
) -> tuple[list[tuple[Configuration, tuple[int, ...]]], dict[str, Any]]:
    """What is run, and the numbers of micro-batches each is laid out with."""
    from gpipe_bench.experiments.measuring.configuration import Configuration

    smoke = options.profile == "smoke"
    stages, counts = (SMOKE_STAGES, SMOKE_MICROBATCHES) if smoke else (STAGES, MICROBATCHES)
    num_devices = devices(options.device)
    if batch == "fixed":
        return [
            (Configuration(k, m, size.batch_size, runs_for_real=k == num_devices), (m,))
            for k in stages
            for m in counts
        ], {"batch_size": size.batch_size}
    from gpipe_bench.experiments.table2.fitted_batch import fitted_microbatch

    fitted: dict[tuple[int, int], list[int]] = {}
    peaks: dict[str, int] = {}
    for k in stages:
        for m in counts:
            examples, peak = fitted_microbatch(subject.model, size.options, k, m, size.cap_bytes)
            fitted.setdefault((k, examples), []).append(m)
            peaks[f"K={k} M={m}"] = peak
    plan = [
        (Configuration(k, FITTED_MICROBATCHES, FITTED_MICROBATCHES * examples), tuple(ms))
        for (k, examples), ms in fitted.items()
    ]
    return plan, {"cap_bytes": size.cap_bytes, "modelled_peak_bytes": peaks}


PAPER_TABLES = {
    "table2-amoebanet": PaperTable(
        title="Table 2, AmoebaNet-D (18, 256): normalized throughput",
        short="Table 2, AmoebaNet-D",
        about="Training throughput over stages K and micro-batches M, relative to K=2, M=1.",
    ),
    "table2-transformer": PaperTable(
        title="Table 2, Transformer-48: normalized throughput",
        short="Table 2, Transformer",
        about="Training throughput over stages K and micro-batches M, relative to K=2, M=1.",
    ),
    "table2-bound": PaperTable(
        title="Table 2: what theory allows",
        short="Table 2, bound",
        about="What GPipe's schedule gives with equal stages, F : B : R = 1 : 2 : 1 and a free link.",
    ),
}


EXPERIMENT = timed_experiment(
    name="table2",
    title="Table 2: normalised throughput over K and M",
    source="arXiv v5, Table 2",
    describe=(
        "AmoebaNet-D (18, 256) and Transformer-48 on 2, 4 and 8 stages with 1, 4 and 32 micro-batches: "
        "actions measured in one process and laid out on K devices, beside real steps on K = 2."
    ),
    smoke="tiny models, K up to 4, M up to 4",
    cases=cases,
    run=run,
    cells=cells,
    paper_tables=PAPER_TABLES,
    tables=tables,
    figures=figures,
    timelines=kept_timelines,
    hypotheses=hypotheses_of,
)
