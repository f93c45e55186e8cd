"""The case of an experiment that predicts what its table of the paper should show."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpipe_bench.experiments.published.entries import PART
from gpipe_bench.harness.experiment import Case, Outcome, RunOptions

if TYPE_CHECKING:
    from gpipe_bench.experiments.published.settings import Prediction

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


def run(
    predict: Callable[..., Prediction], case: Case, options: RunOptions, not_tried: tuple[str, ...] = ()
) -> Outcome:
    """Predicts one model's numbers. In the smoke profile, of a tiny model and in the middle alone.

    Args:
        predict: of a model by name
        case: of `cases`
        options: the profile counts
        not_tried: settings of which hypotheses take the middle alone
    """
    from gpipe_bench.experiments.published import torchgpipe
    from gpipe_bench.experiments.published.outcome import outcome

    quick = options.profile == "smoke"
    quantities, details = outcome(predict(str(case.key["model"]), quick=quick), not_tried)
    if not quick:
        details["elsewhere"] = torchgpipe.middles()
    return Outcome(tuple(quantities), details)
