"""Whether a plan is right: predicted before, run after, and the choice's regret.

Expected: on two processes of a quiet machine the predicted steps are within a few percent of those that ran,
in the same order, and the configuration that the plan puts first is the fastest of those that ran or nearly;
peaks are within a percent. About half an hour on two laptop cores, which should have nothing else to do:

    python -m experiments run plan
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpipe_bench.experiments.plan import exact, on_paper, steps
from gpipe_bench.experiments.plan.shown import figures, tables
from gpipe_bench.experiments.plan.steps import MODELS
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.verdict import Answer

SECONDS = {
    steps.PART: {"smoke": 16.0, "short": 200.0, "full": 560.0},
    exact.PEAKS: {"smoke": 8.0, "short": 25.0, "full": 25.0},
    exact.WAITING: {"smoke": 24.0, "short": 60.0, "full": 70.0},
}


def cases(options: RunOptions) -> list[Case]:
    profile, smoke = options.profile, options.profile == "smoke"
    found = [
        Case({"part": part, "model": model}, SECONDS[part][profile])
        for part in (steps.PART, exact.PEAKS)
        for model in MODELS[profile]
    ]
    found.append(Case({"part": exact.WAITING}, SECONDS[exact.WAITING][profile]))
    if not smoke:
        scales = on_paper.SCALES.items()
        found += [Case({"part": on_paper.AT_SCALE, "model": name}, each.seconds) for name, each in scales]
        found.append(Case({"part": on_paper.PUBLISHED_STEPS}, on_paper.SECONDS))
    return found + [
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


def cells(records: Sequence[Record]) -> list[Answer]:
    """None: the paper plans nothing."""
    return []


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
    cells=cells,
    tables=tables,
    figures=figures,
    docs="docs/plan.md",
    options=("device", "seed"),
)
