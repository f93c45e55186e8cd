"""Costs of a model on this machine, from its timed layers (`probes`).

A stage takes less than its layers one by one, because each action costs something once: cold caches after
another kind of work, and the engine's own. How much follows from the same layers timed as stages of their own
and as K real stages, one in each process. With S(K) the seconds of all K stages in one kind of action:

    S(K) = work + K x action      so      action = (S(L) - S(K)) / (L - K)

and a layer's own seconds are what was timed less `action`, scaled to add up to the K stages.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from statistics import median
from typing import Any

from gpipe_bench.pipeline import launch
from gpipe_bench.pipeline.plan.links import Link

from .candidate import LEVELS
from .costs import FIRST, ONCE, Costs, Run, SizeCosts
from .model import Model
from .probes import Bench, Probed, ProbeJob, ProbeRun, probe
from .request import Request

MOST_SIZES = 4
"""Most micro-batch sizes that are timed; if there are more, the smallest, the largest and some between."""
ROUNDS = 4
"""Rounds of probes; each takes a step of every size in every way."""


def timed(
    model: Model,
    request: Request,
    sizes: Sequence[int],
    rounds: int = ROUNDS,
    *,
    sharded: bool = True,
    shown: bool = False,
) -> Costs:
    """Costs of a model at some of these micro-batch sizes, as this machine takes them. ValueError for one's
    own model without a loss, or in bfloat16, which are not timed; for no rounds.

    Args:
        model, request: what is asked
        sizes: of micro-batches, of which at most MOST_SIZES are timed
        rounds: of probes
        sharded: whether parameters may be divided
        shown: whether somebody is told how far it is
    """
    if rounds < 1:
        raise ValueError(f"--probe-rounds {rounds}: give 1 or more")
    if request.precision != "float32" or request.compiled:
        raise ValueError(
            f"--precision {request.precision}{' --compiled' * request.compiled}: layers are timed here in "
            "float32 and as they are; name an accelerator with --device-type for others"
        )
    source = model.source
    if not source.has_loss or source.is_foreign:
        raise ValueError(
            f"{model.name} returns no loss or no layers to be timed: return (layers, inputs, target, "
            "loss_fn), or name an accelerator with --device-type"
        )
    sizes = sizes_worth(sizes, request)
    few = sorted({sizes[round(i * (len(sizes) - 1) / (MOST_SIZES - 1))] for i in range(MOST_SIZES)})
    processes = min(request.accelerators, len(os.sched_getaffinity(0)))
    profiles = partial(model.profile_of, precision=request.precision)
    job = ProbeJob(source, tuple(few), rounds, request.optimizer, sharded=sharded, shown=shown)
    costs = measured(launch(_probe, processes, job), "this machine", profiles)
    less = "" if processes == request.accelerators else f", of {request.accelerators} that are asked about"
    return replace(
        costs,
        sizes={size: each.with_blocks(model.blocks) for size, each in costs.sizes.items()},
        provenance={**costs.provenance, "processes": f"{processes} timed{less}"},
    )


def sizes_worth(sizes: Sequence[int], request: Request) -> list[int]:
    """Returns the sizes that allow two micro-batches or more: one alone keeps one worker busy at a time."""
    if request.accelerators == 1:
        return sorted(sizes)
    return sorted(size for size in sizes if 2 * size <= request.batch_size) or sorted(sizes)


def _probe(job: ProbeJob) -> Probed:
    return probe(Bench(job))


def measured(found: Sequence[Probed], where: str = "", profiles: Callable[..., Any] | None = None) -> Costs:
    """The costs that all processes together have found.

    Args:
        found: of each process, in their order
        where: the machine, for the provenance
        profiles: as `Costs` says
    """
    first = found[0]
    by_way: dict[str, list[ProbeRun]] = defaultdict(list)
    for run in (run for each in found for run in each.runs):
        by_way["parts" if run.level else run.way].append(run)
    fine, coarse, whole, parts = (by_way[way] for way in ("fine", "coarse", "whole", "parts"))
    numbers = Counter((run.size, run.way) for run in first.runs if run.way != "whole").values()
    ends = " to ".join(map(str, dict.fromkeys((min(numbers) // 2, max(numbers) // 2))))
    timed_as = f"measured, {len(found)} processes at once, {ends} rounds"
    timed_as += where and f" on {where}"
    gap_s = median([gap for run in coarse for gap in run.gaps_s] or [0.0])
    messages = [each for run in coarse for each in run.messages]
    step_s = median([run.beyond_s for run in first.runs if run.way == "coarse"] or [0.0])
    sizes = {}
    for size in first.activation_bytes:
        at = {way: [run for run in runs if run.size == size] for way, runs in by_way.items()}
        shards_s = {}
        for level in LEVELS:
            if own := [run for run in at.get("parts", ()) if run.level == level]:
                once_s = max(0.0, median(run.beyond_s for run in own) - step_s)
                shards_s[level] = {**_by_kind(own), ONCE: once_s}
        layers_s, action_s = _apart(_by_stage(at.get("fine", ())), _by_stage(at.get("coarse", ())))
        sizes[size] = SizeCosts(
            layers_s=layers_s,
            action_s=action_s,
            whole_s=_by_kind(at.get("whole", ())),
            shards_s=shards_s,
            activation_bytes=first.activation_bytes[size],
            gradient_bytes=first.gradient_bytes[size],
        )
    update_s, shard_update_s = (
        _medians((layer, seconds) for run in runs for layer, seconds in run.update_s)
        for runs in ((*fine, *coarse), parts)
    )
    layers = range(len(first.parameter_bytes))
    return Costs(
        sizes=sizes,
        update_s=tuple(update_s.get(layer, 0.0) for layer in layers),
        parameter_bytes=first.parameter_bytes,
        shard_update_s=tuple(shard_update_s.get(layer, 0.0) for layer in layers) if parts else (),
        timed_shards=len(found) if parts else 0,
        gap_s=gap_s,
        step_s=step_s,
        link=_link(messages, gap_s) if messages else None,
        sum_link=_sum_link(whole, len(found), sum(map(sum, first.parameter_bytes)), step_s),
        jitter=_jitter(found),
        provenance={
            "layers": timed_as, "links": timed_as if messages else "none: one process", "update": timed_as,
        },
        profiles=profiles,
    )  # fmt: skip


def _medians(samples: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Returns the median of the samples of each key."""
    found: dict[Any, list[float]] = defaultdict(list)
    for key, sample in samples:
        found[key].append(sample)
    return {key: median(values) for key, values in found.items()}


def _by_kind(runs: Iterable[ProbeRun]) -> dict[str, float]:
    """Returns the median seconds of each kind of action on all layers."""
    return _medians((action.kind, action.seconds) for run in runs for action in run.actions)


def _by_stage(runs: Iterable[ProbeRun]) -> dict[str, list[float]]:
    """Returns the median seconds of every stage, for each kind of action."""
    medians = _medians(((a.stage, a.kind), a.seconds) for run in runs for a in run.actions)
    found: dict[str, list[float]] = defaultdict(list)
    for (_, kind), seconds in sorted(medians.items()):
        found[kind].append(seconds)
    return found


def _apart(
    fine: Mapping[str, Sequence[float]], coarse: Mapping[str, Sequence[float]]
) -> tuple[dict[str, Sequence[float]], dict[str, float]]:
    """Seconds of layers and of an action, from those of layers and of real stages."""
    layers_s: dict[str, Sequence[float]] = {**fine}
    action_s: dict[str, float] = {}
    for kind in sorted(filter(coarse.__contains__, fine), key=lambda kind: kind.endswith(FIRST)):
        seconds, plain, together = fine[kind], kind.removesuffix(FIRST), sum(coarse[kind])
        if kind == plain:
            action_s[kind] = max(0.0, (sum(seconds) - together) / (len(seconds) - len(coarse[kind])))
        own = [max(0.0, each - action_s[plain]) for each in seconds]
        total, wanted = sum(own), together - len(coarse[kind]) * action_s[plain]
        scale = wanted / total if total > 0 and wanted > 0 else 1.0
        layers_s[kind] = tuple(each * scale for each in own)
    return layers_s, action_s


def _link(messages: Iterable[tuple[float, float]], gap_s: float) -> Link:
    """The link that explains the messages: a latency beyond the gap between two actions, and a bandwidth."""
    points = sorted(_medians(messages).items())
    (small, short_s), (large, long_s) = points[0], points[-1]
    bandwidth = (large - small) / (long_s - short_s) if large > small and long_s > short_s else inf
    latency_s = short_s if bandwidth == inf else short_s - small / bandwidth
    return Link(
        "between processes", max(0.0, latency_s - gap_s), bandwidth,
        source="measured: from the end of an action to the start of one that waited for it",
    )  # fmt: skip


def _sum_link(replicas: Sequence[ProbeRun], processes: int, num_bytes: float, step_s: float) -> Link | None:
    """The link whose ring sums this model's gradients in the measured time; None without replicas."""
    if not replicas or not num_bytes:
        return None
    seconds = median(max(run.beyond_s - step_s, 1e-9) for run in replicas)
    return Link(
        "sums over processes", 0.0, 2 * (processes - 1) / processes * num_bytes / seconds,
        source="measured: the last backward of replicas, over the one before",
    )  # fmt: skip


def _jitter(found: Sequence[Probed]) -> tuple[Run, ...]:
    """Returns how long the actions of each two-stage step took, relative to their medians, by process."""
    coarse = [{run.run: run for run in each.runs if run.way == "coarse"} for each in found]
    medians = [
        _medians(((run.size, a.kind, a.stage), a.seconds) for run in runs.values() for a in run.actions)
        for runs in coarse
    ]
    return tuple(
        tuple(
            tuple(a.seconds / usual[runs[number].size, a.kind, a.stage] for a in runs[number].actions)
            for runs, usual in zip(coarse, medians, strict=True)
        )
        for number in sorted(coarse[0])
    )
