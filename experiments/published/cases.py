"""The case of an experiment that predicts what its table of the paper should show."""

from __future__ import annotations

from gpipe_bench.experiments.published.entries import PART
from gpipe_bench.harness.experiment import Case, Outcome, RunOptions

ESTIMATE_S = {
    ("table2", "amoebanet"): 25.0,
    ("table2", "transformer"): 8.0,
    ("table3", "amoebanet"): 22.0,
    ("table3", "transformer"): 6.0,
    ("figure3", "resnet101"): 14.0,
    ("figure3", "amoebanet"): 20.0,
    ("table4", "resnet101"): 16.0,
}
SMOKE_S = 5.0


def cases(experiment: str, options: RunOptions) -> list[Case]:
    """One for each model of the experiment that is predicted."""
    smoke = options.profile == "smoke"
    return [
        Case({"part": PART, "model": model}, SMOKE_S if smoke else estimate_s)
        for (name, model), estimate_s in ESTIMATE_S.items()
        if name == experiment
    ]


def is_prediction(case: Case) -> bool:
    """Whether the case predicts, rather than times."""
    return case.key.get("part") == PART


def run(experiment: str, case: Case, options: RunOptions) -> Outcome:
    """Predicts one model's numbers. In the smoke profile, of a tiny model and in the middle alone."""
    from gpipe_bench.experiments.published import overheads, throughput, torchgpipe
    from gpipe_bench.experiments.published.outcome import outcome

    predict = {**throughput.PREDICTIONS, "table4": overheads.table4}[experiment]
    quick = options.profile == "smoke"
    prediction = predict(str(case.key["model"]), quick=quick)
    quantities, details = outcome(prediction, ("share_of_peak",) if experiment == "table2" else ())
    if not quick:
        details["elsewhere"] = torchgpipe.middles()
    return Outcome(tuple(quantities), details)
