"""Steps of two stages on two devices at several numbers of micro-batches: how far the replay errs.

A replayed number is only as good as what is known of the replay's error, and two or three steps say next to
nothing of the next one. So each model of a timed table takes a dozen steps for real at each of several M,
beside the steps that they are laid out from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpipe_bench.experiments.timed.replay import results
from gpipe_bench.experiments.timed.workloads import Configuration, Job, Workload
from gpipe_bench.harness.experiment import Case, Outcome, RunOptions

PART = "replay error"
NUM_STAGES = 2
ROUNDS = {"smoke": 1, "short": 6, "full": 6}
"""There and back, two steps each."""


def cases(models: Iterable[str], estimates_s: Iterable[float], options: RunOptions) -> list[Case]:
    """One for each model; `estimates_s` are of the short profile on two cores."""
    smoke = options.profile == "smoke"
    return [
        Case({"part": PART, "model": model}, 5.0 if smoke else estimate_s)
        for model, estimate_s in zip(models, estimates_s, strict=True)
    ]


def run(
    workload: Workload, counts: Sequence[int], options: RunOptions, *, microbatch_size: int | None = None
) -> Outcome:
    """Takes the steps, with each of `counts` micro-batches.

    Without `microbatch_size` all have the workload's mini-batch. Skipped where there is one device alone.
    """
    from gpipe_bench.experiments.timed.steps import measure, num_devices

    if num_devices(options.device) < NUM_STAGES:
        return Outcome(status="skipped", reason=f"two stages need {NUM_STAGES} devices or cores of their own")
    counts = counts[:2] if options.profile == "smoke" else counts
    sizes = [workload.batch_size if microbatch_size is None else m * microbatch_size for m in counts]
    plan = tuple(
        Configuration(NUM_STAGES, m, size, runs_for_real=True) for m, size in zip(counts, sizes, strict=True)
    )
    job = Job(workload, plan, ROUNDS[options.profile], options.engine or "ours", options.device)
    quantities, details = results(job, measure(job))
    return Outcome(tuple(quantities), details)
