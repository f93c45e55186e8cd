"""Seconds of layers on this machine, in as many processes as it has devices or cores, at the same time.

What was timed once is kept in a folder, and taken again for the same model on the same machine: see `kept`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from gpipe_bench.pipeline import launch
from gpipe_bench.planner import kept
from gpipe_bench.planner.bench import Bench, ProbeJob
from gpipe_bench.planner.costs import Costs
from gpipe_bench.planner.measured import measured
from gpipe_bench.planner.model import Model, OfTheZoo, OneOfYours, Subject
from gpipe_bench.planner.probes import Probed, probe
from gpipe_bench.planner.request import Request
from gpipe_bench.planner.spending import About, Budget, sizes_worth

MOST_SIZES = 5
"""Of micro-batches that are timed; of more, those in the middle and the ends."""
ROUNDS = 12
PROBE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How layers are timed.

    Args:
        seconds: that the probes may take; one round of the smallest micro-batches is taken in any case
        folder: where costs are kept between calls; nowhere if None
        fresh: whether what is kept there is timed anew
        shown: whether somebody is told how far it is
        sharded: whether parameters may be divided
        worth: what the best ways depend on, by rough costs; everything if None

    Raises:
        ValueError: seconds that are not above 0.
    """

    seconds: float = PROBE_S
    folder: Path | None = None
    fresh: bool = False
    shown: bool = False
    sharded: bool = True
    worth: Callable[[Costs], set[About]] | None = None

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"--probe-s {self.seconds:g}: give seconds above 0, such as {PROBE_S:g}")


def timed(
    model: Model,
    request: Request,
    sizes: Sequence[int],
    timing: Timing,
    started: Callable[..., list[Probed]] = launch,
) -> Costs:
    """Costs of a model at some of these micro-batch sizes, as this machine takes them.

    `started` is told what runs in how many processes, with what.

    Raises:
        ValueError: one's own model without a loss, or in bfloat16, which are not timed.
    """
    if request.precision != "float32" or request.compiled:
        raise ValueError(
            f"--precision {request.precision}{' --compiled' * request.compiled}: this machine's layers are "
            "timed in float32 and as they are; name an accelerator with --device-type for others"
        )
    sizes = sizes_worth(sizes, request)
    few = sorted({sizes[round(i * (len(sizes) - 1) / (MOST_SIZES - 1))] for i in range(MOST_SIZES)})
    processes = min(request.accelerators, len(os.sched_getaffinity(0)))
    subject = _subject(model)

    def profiles(size: int, split: bool, tp: int) -> Any:
        return model.profile_of(size, request.precision, split_backward=split, tp=tp)

    facts: dict[str, Any] = {}
    if timing.folder is not None:
        facts = kept.facts(
            model, request, sizes=few, processes=processes, seconds=timing.seconds, sharded=timing.sharded
        )
        if not timing.fresh and (found := kept.read(timing.folder, facts, profiles)) is not None:
            costs, since = found
            when = datetime.fromtimestamp(since).astimezone().isoformat(" ", "minutes")
            said = f"{costs.provenance['layers']}; kept since {when}, --fresh times anew"
            return replace(costs, provenance={**costs.provenance, "layers": said})
    job = ProbeJob(
        subject, tuple(few), ROUNDS, request.optimizer, sharded=timing.sharded,
        budget=Budget(timing.seconds, timing.shown),
        matters=timing.worth and partial(_matters, timing.worth),
    )  # fmt: skip
    costs = measured(started(_probe, processes, job), "this machine", profiles)
    less = "" if processes == request.accelerators else f", of {request.accelerators} that are asked about"
    costs = replace(costs, provenance={**costs.provenance, "processes": f"{processes} timed{less}"})
    if out := [size for size in few if size not in costs.sizes]:
        words = f"micro-batches of {', '.join(map(str, out))}: no time in {timing.seconds:g} s, see --probe-s"
        costs = replace(costs, provenance={**costs.provenance, "left out": words})
    if timing.folder is not None:
        kept.write(timing.folder, facts, costs)
    return costs


def _probe(job: ProbeJob) -> Probed:
    return probe(Bench(job))


def _matters(worth: Callable[[Costs], set[About]], found: Sequence[Probed]) -> set[About]:
    return worth(measured(found))


def _subject(model: Model) -> Subject:
    if model.source.options is not None:
        return OfTheZoo(model.source.called, model.source.options)
    if not model.source.has_loss or model.source.is_foreign:
        raise ValueError(
            f"{model.name} returns no loss or no layers, and its steps are to be timed: return (layers, "
            "inputs, target, loss_fn), or name an accelerator with --device-type"
        )
    return OneOfYours(model.name)
