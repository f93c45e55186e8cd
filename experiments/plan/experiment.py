"""Whether a plan is right: predicted before, run after, and the choice's regret.

Expected: on two processes of a quiet machine the predicted steps are within a few percent of those that ran,
in the same order, and the configuration that the plan puts first is the fastest of those that ran or nearly;
peaks are within a percent. About half an hour on two laptop cores, which should have nothing else to do:

    python -m experiments run plan
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.experiments.plan.at_scale import case as at_scale
from gpipe_bench.experiments.plan.at_scale import steps as published_steps
from gpipe_bench.experiments.plan.elsewhere import case as elsewhere
from gpipe_bench.experiments.plan.figures import figures
from gpipe_bench.experiments.plan.models import MODELS
from gpipe_bench.experiments.plan.running import peaks, steps, waiting
from gpipe_bench.experiments.plan.text import tables
from gpipe_bench.harness.experiment import Case, Experiment, Outcome, RunOptions
from gpipe_bench.harness.record import Record
from gpipe_bench.harness.verdict import Entry

SECONDS = {
    steps.PART: {"smoke": 16.0, "short": 200.0, "full": 560.0},
    peaks.PART: {"smoke": 8.0, "short": 25.0, "full": 25.0},
    waiting.PART: {"smoke": 24.0, "short": 60.0, "full": 70.0},
}


def cases(options: RunOptions) -> list[Case]:
    profile = options.profile
    found = [
        Case({"part": part, "model": model}, SECONDS[part][profile])
        for part in (steps.PART, peaks.PART)
        for model in MODELS[profile]
    ]
    found.append(Case({"part": waiting.PART}, SECONDS[waiting.PART][profile]))
    if profile != "smoke":
        found += [
            Case({"part": at_scale.PART, "model": name}, scale.seconds)
            for name, scale in at_scale.SCALES.items()
        ]
        found.append(Case({"part": published_steps.PART}, published_steps.SECONDS))
    return found + [
        Case({"part": elsewhere.PART, "source": source}, seconds)
        for source, seconds in elsewhere.SECONDS.items()
        if profile != "smoke" or seconds <= 2
    ]


def run(case: Case, options: RunOptions) -> Outcome:
    match case.key["part"]:
        case steps.PART:
            return steps.run(case.key, options)
        case peaks.PART:
            return peaks.run(case.key, options)
        case waiting.PART:
            return waiting.run(case.key, options)
        case at_scale.PART:
            return at_scale.run(case.key)
        case published_steps.PART:
            return published_steps.run()
    return elsewhere.run(case.key)


def cells(records: Sequence[Record]) -> list[Entry]:
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
