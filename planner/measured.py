"""From what the processes of a measurement found to costs.

A stage takes less than its layers one by one, because each action costs something once: the first operations
after another kind of work find cold caches, and the engine has its own. How much follows from the same layers
timed as stages of their own and as K real stages, one in each process. With S(K) the seconds of all K stages
in one kind of action:

    S(K) = work + K x action      so      action = (S(L) - S(K)) / (L - K)

and a layer's own seconds are what was timed less `action`. Where that would be negative, layers are instead
made longer to add up to the K stages, which wait for messages and find caches colder still. Only the standard
library and `pipeline.plan` are imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

from gpipe_bench.pipeline.plan.links import LINKS, Link
from gpipe_bench.planner.costs import FIRST, ONCE, Costs, Run, SizeCosts
from gpipe_bench.planner.request import Request
from gpipe_bench.planner.wholes import LEVELS, whole_s

if TYPE_CHECKING:
    from gpipe_bench.planner.probes import Probed, ProbeRun


def measured(
    found: Sequence[Probed], where: str = "", profiles: Callable[[int, bool, int], Any] | None = None
) -> Costs:
    """The costs that all processes together have found.

    Args:
        found: of each process, in their order
        where: the machine, for the provenance
        profiles: as `Costs` says
    """
    first = found[0]
    sizes = {
        size: _size(size, found, first.activation_bytes[size], first.gradient_bytes[size])
        for size in first.activation_bytes
    }
    coarse = [run for each in found for run in each.runs if not run.fine]
    rounds = sorted({number // 2 for number in Counter((run.size, run.fine) for run in first.runs).values()})
    ends = " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))
    timed = f"measured, {len(found)} processes at once, {ends} rounds"
    timed += where and f" on {where}"
    gap_s = median([gap for run in coarse for gap in run.gaps_s] or [0.0])
    messages = [each for run in coarse for each in run.messages]
    step_s = median([run.beyond_s for run in first.runs if not run.fine] or [0.0])
    parts = [run for each in found for run in each.wholes if run.level]
    update_s: list[list[float]] = [[] for _ in first.update_s]
    for run in parts:
        for layer, seconds in run.update_s:
            update_s[layer].append(seconds)
    for size, at in sizes.items():
        sizes[size] = replace(
            at,
            shards_s={
                level: kinds
                | {
                    ONCE: max(
                        0.0, median(r.sum_s for r in parts if (r.size, r.level) == (size, level)) - step_s
                    )
                }
                for level in LEVELS
                if (kinds := whole_s(parts, size, level))
            },
        )
    return Costs(
        sizes=sizes,
        update_s=tuple(
            median([sample for each in found for sample in each.update_s[layer]] or [0.0])
            for layer in range(len(first.update_s))
        ),
        parameter_bytes=first.parameter_bytes,
        shard_update_s=tuple(median(samples or [0.0]) for samples in update_s) if parts else (),
        timed_shards=len(found) if parts else 0,
        gap_s=gap_s,
        step_s=step_s,
        link=_link(messages, gap_s) if messages else None,
        sum_link=_sum_link(found, step_s),
        jitter=_jitter(found),
        provenance={"layers": timed, "links": timed if messages else "none: one process", "update": timed},
        profiles=profiles,
    )


def as_measured(request: Request, costs: Costs) -> Request:
    """Loopback is what connects the processes of this machine; where several were timed, it was, too."""
    if costs.link is None or request.link != LINKS["loopback"]:
        return request
    return replace(request, link=costs.link)


def _size(
    size: int, found: Sequence[Probed], activation_bytes: Sequence[float], gradient_bytes: Sequence[float]
) -> SizeCosts:
    fine = _medians([run for each in found for run in each.runs if run.size == size and run.fine])
    coarse = _medians([run for each in found for run in each.runs if run.size == size and not run.fine])
    layers_s, action_s = {}, {}
    for kind in sorted(fine, key=lambda kind: kind.endswith(FIRST)):
        seconds = fine[kind]
        plain = kind.removesuffix(FIRST)
        if kind not in coarse:
            layers_s[kind] = seconds
            continue
        together = sum(coarse[kind])
        if kind == plain:
            action_s[kind] = max(0.0, (sum(seconds) - together) / (len(seconds) - len(coarse[kind])))
        layers_s[kind] = _adding_up(seconds, together, len(coarse[kind]), action_s[plain])
    return SizeCosts(
        layers_s=layers_s,
        action_s=action_s,
        whole_s=whole_s([run for each in found for run in each.wholes], size),
        activation_bytes=activation_bytes,
        gradient_bytes=gradient_bytes,
    )


def _adding_up(seconds: Sequence[float], together: float, stages: int, action: float) -> tuple[float, ...]:
    """Seconds of layers so that two stages take what they took: less an action each, then to scale."""
    own = [max(0.0, each - action) for each in seconds]
    total, wanted = sum(own), together - stages * action
    scale = wanted / total if total > 0 and wanted > 0 else 1.0
    return tuple(each * scale for each in own)


def _medians(runs: Sequence[ProbeRun]) -> dict[str, tuple[float, ...]]:
    """Of each kind, seconds of every stage."""
    samples: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        for action in run.actions:
            samples.setdefault((action.kind, action.stage), []).append(action.seconds)
    kinds = dict.fromkeys(kind for kind, _ in samples)
    stages = range(1 + max((stage for _, stage in samples), default=-1))
    return {kind: tuple(median(samples[kind, stage]) for stage in stages) for kind in kinds}


def _sum_link(found: Sequence[Probed], step_s: float) -> Link | None:
    """The link on which the ring of all processes sums this model's gradients in the time that was measured;
    None where they were no replicas.
    """
    processes = len(found)
    sums = [max(run.sum_s - step_s, 1e-9) for each in found for run in each.wholes if not run.level]
    num_bytes = sum(map(sum, found[0].parameter_bytes))
    if not sums or not num_bytes:
        return None
    return Link(
        "sums over processes", 0.0, 2 * (processes - 1) / processes * num_bytes / median(sums),
        source="measured: the last backward of replicas, over the one before",
    )  # fmt: skip


def _jitter(found: Sequence[Probed]) -> tuple[Run, ...]:
    """Of every step with two stages, what its actions took over their medians, by process."""
    medians: list[dict[tuple[int, str, int], float]] = []
    for each in found:
        samples: dict[tuple[int, str, int], list[float]] = {}
        for run in each.runs:
            for action in run.actions if not run.fine else ():
                samples.setdefault((run.size, action.kind, action.stage), []).append(action.seconds)
        medians.append({key: median(values) for key, values in samples.items()})
    number = {run.run for run in found[0].runs if not run.fine}
    by_run = [{run.run: run for run in each.runs} for each in found]
    return tuple(
        tuple(
            tuple(
                action.seconds / medians[process][of[run].size, action.kind, action.stage]
                for action in of[run].actions
            )
            for process, of in enumerate(by_run)
        )
        for run in sorted(number)
    )


def _link(messages: Sequence[tuple[float, float]], gap_s: float) -> Link:
    """What a message takes: a latency, and a bandwidth where larger ones took longer. What its sender spends
    on it is part of the gap between two actions already.
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in messages:
        by_size.setdefault(size, []).append(seconds)
    points = sorted((size, median(seconds)) for size, seconds in by_size.items())
    (small, short_s), (large, long_s) = points[0], points[-1]
    bandwidth = (large - small) / (long_s - short_s) if large > small and long_s > short_s else inf
    latency_s = short_s if bandwidth == inf else short_s - small / bandwidth
    return Link(
        "between processes", max(0.0, latency_s - gap_s), bandwidth,
        source="measured: from the end of an action to the start of one that waited for it",
    )  # fmt: skip
