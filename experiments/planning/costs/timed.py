"""Seconds of layers on this machine, in as many processes as it has devices or cores, at the same time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from gpipe_bench.experiments.planning.costs.bench import Bench, ProbeJob
from gpipe_bench.experiments.planning.costs.costs import Costs
from gpipe_bench.experiments.planning.costs.measured import measured
from gpipe_bench.experiments.planning.costs.probes import Probed, probe
from gpipe_bench.experiments.planning.models import Model
from gpipe_bench.experiments.planning.request import Request
from gpipe_bench.experiments.planning.subjects import OfTheZoo, OneOfYours, Subject
from gpipe_bench.pipeline import launch

MOST_SIZES = 5
"""Of micro-batches that are timed; of more, those in the middle and the ends."""
ROUNDS = 5


def timed(model: Model, request: Request, sizes: Sequence[int]) -> Costs:
    """Costs of a model at some of these micro-batch sizes, as this machine takes them.

    Raises:
        ValueError: one's own model without a loss, or in bfloat16, which are not timed.
    """
    if request.precision != "float32" or request.compiled:
        raise ValueError(
            f"--precision {request.precision}{' --compiled' * request.compiled}: this machine's layers are "
            "timed in float32 and as they are; name an accelerator with --device-type for others"
        )
    few = sorted({sizes[round(i * (len(sizes) - 1) / (MOST_SIZES - 1))] for i in range(MOST_SIZES)})
    processes = min(request.accelerators, len(os.sched_getaffinity(0)))
    job = ProbeJob(_subject(model), tuple(few), ROUNDS, request.optimizer)
    found = launch(_probe, processes, job)
    costs = measured(
        found, "this machine",
        lambda size, split, tp: model.profile_of(size, request.precision, split_backward=split, tp=tp),
    )  # fmt: skip
    less = "" if processes == request.accelerators else f", of {request.accelerators} that are asked about"
    return replace(costs, provenance={**costs.provenance, "processes": f"{processes} timed{less}"})


def _probe(job: ProbeJob) -> Probed:
    return probe(Bench(job))


def _subject(model: Model) -> Subject:
    if model.source.options is not None:
        return OfTheZoo(model.source.called, model.source.options)
    if not model.source.has_loss or model.source.is_foreign:
        raise ValueError(
            f"{model.name} returns no loss or no layers, and its steps are to be timed: return (layers, "
            "inputs, target, loss_fn), or name an accelerator with --device-type"
        )
    return OneOfYours(model.name)
