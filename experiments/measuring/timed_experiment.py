"""An experiment that times whole steps of a model: what table 2, table 4 and figure 3 have in common.

They time the same steps in the same way and differ in the configurations and in what they make of the
numbers. Profiles, options and engines, and the facts of a record, must then not differ either.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.engines.setup import ENGINES
from gpipe_bench.experiments.measuring.speed_models import Subject
from gpipe_bench.harness.experiment import Experiment, RunOptions

if TYPE_CHECKING:
    from gpipe_bench.experiments.measuring.configuration import Configuration
    from gpipe_bench.experiments.measuring.step_timing import StepJob


def timed_experiment(*, smoke: str, **own: Any) -> Experiment:
    """An `Experiment` with `own` fields. `smoke` says what is run in that profile."""
    return Experiment(
        profiles={
            "smoke": smoke,
            "short": "models scaled to two cores, with the paper's numbers of layers",
            "full": "the paper's models, for GPUs",
        },
        options=("device", "engine"),
        engines=tuple(ENGINES),
        **own,
    )


def timing_job(
    subject: Subject, configurations: Iterable[Configuration], rounds: int, options: RunOptions
) -> tuple[StepJob, dict[str, Any]]:
    """What the processes of a case are given, and what its record says of it."""
    from gpipe_bench.experiments.measuring.step_timing import StepJob

    size = subject.sizes[options.profile]
    job = StepJob(
        subject.model, size.options, tuple(configurations), rounds, options.engine or "ours", options.device
    )
    return job, {
        "title": subject.title, "scale": size.scale, "options": size.options, "engine": job.engine,
        "rounds": rounds,
    }  # fmt: skip
