"""What a case of timed steps comes to: numbers and details, and how far the replay errs.

A replay leaves things out, so it errs, and mostly to one side. Some of the steps that it lays out run on real
devices in the same rounds, and their errors say where the next one will be. Two or three steps say next to
nothing of the next one, so each model of a timed table also takes a dozen steps with a device for each stage
at each of several numbers of micro-batches, beside the steps that they are laid out from. No torch is needed
to read this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from gpipe_bench.experiments.paper.timed.replay import Samples, TimedActions, lay_out, shares_of
from gpipe_bench.experiments.paper.timed.workloads import Job
from gpipe_bench.harness.record import Metric, Provenance, Scalar, from_samples
from gpipe_bench.harness.rounds import Usage, used_by_others
from gpipe_bench.pipeline.plan.links import LINKS, Link
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.timeline import Timeline

GPU_LINK = "nvlink4"
SHARED_MEMORY_LATENCY_S = 40e-6  # of a message between two processes; `run engine` measures it

Rates = Sequence[tuple[Mapping[str, Scalar], Sequence[float]]]
"""Examples per second of each turn, by the key of what is timed."""


@dataclass
class Steps:
    """Findings of one process for one configuration. `turns` is empty where the engine keeps no timeline or
    cannot run all stages in a process, `real_s` where it was not run for real; `why` says why.
    """

    partition: Partition = ()
    turns: list[TimedActions] = field(default_factory=list)  # two per round, there and back
    real_s: list[float] = field(default_factory=list)  # with one stage here, the optimizer's step included
    counts: dict[str, int] = field(default_factory=dict)  # actions of a step by kind
    why: str = ""
    out_of_memory: str = ""  # the error, where a device had no room for a step; then it has no numbers


class Found(NamedTuple):
    """Findings of one process."""

    steps: tuple[Steps, ...]  # in the order of the configurations
    layers_s: dict[int, tuple[float, ...]]
    """Forward, recomputation and backward of each layer, by micro-batch size."""
    num_parameters: int
    copy_bytes_per_s: float
    conditions: dict[str, str]
    usage: Usage  # over all rounds
    link: Link | None = None  # between accelerators, where it could be measured
    memory: Mapping[str, int] = {}  # of an accelerator's allocator, at most


def results(job: Job, found: Sequence[Found]) -> tuple[list[Metric], dict[str, Any]]:
    """Numbers and details of all configurations; ratios are within a round, to the first configuration. A
    real step is held against the one that is laid out with as many micro-batches as really ran.

    Throughput is compared within a round, in which all configurations took turns there and back. Such rounds
    are long and few, so each direction gives a ratio of its own: a machine that drifts moves the two apart,
    the median lies between them, and the interval says how far they are from each other.
    """
    link = link_of(found, job.device)
    throughput, real = [], []
    metrics: list[Metric] = []
    cells: dict[str, Any] = {}
    for index, configuration in enumerate(job.configurations):
        steps = [each.steps[index] for each in found]
        timed = by_turn(steps)
        counts = configuration.counts or (configuration.num_microbatches,)
        for count in counts:
            ran = count == configuration.num_microbatches
            key: dict[str, Scalar] = {"K": configuration.num_stages, "M": count}
            name = f"K={configuration.num_stages} M={count}"
            if configuration.label:
                key = {"configuration": configuration.label, "M": count}
                name = configuration.label + ("" if count == counts[0] else f" M={count}")
            examples = configuration.batch_size if ran else count * configuration.microbatch_size
            facts: dict[str, Any] = {
                "key": key,
                "num_stages": configuration.num_stages,
                "num_microbatches": count,
                "batch_size": examples,
                "counts": steps[0].counts,
                "why": steps[0].why,
                "out_of_memory": steps[0].out_of_memory,
            }
            laid_out_s = [lay_out(each, link, count).makespan_s for each in timed]
            if timed:
                throughput.append((key, [examples / s for s in laid_out_s]))
                whole = joined(timed)
                facts |= {
                    "actions": whole.to_data(),
                    "as_timed": {"shares": shares_of(whole, link, count)},
                }
                step_ms = [1e3 * s for s in laid_out_s]
                metrics.append(from_samples("step", step_ms, "ms", key=key, provenance="replayed"))
            if steps[0].real_s and ran:
                real_s = [
                    max(samples)
                    for samples in zip(*(each.real_s for each in steps if each.real_s), strict=True)
                ]
                real.append((key, [examples / s for s in real_s]))
                metrics.append(from_samples("real step", [1e3 * s for s in real_s], "ms", key=key))
                if timed:
                    metrics.append(replay_error(laid_out_s, real_s, key))
            cells[name] = facts
    base = next(iter(cells.values()))["key"]
    metrics += normalised("throughput", throughput, _of(throughput, base), "replayed")
    metrics += normalised("real throughput", real, _of(real, base), "measured")
    return metrics, {
        **job.facts(),
        "cells": cells,
        "link": {"name": link.name, "source": link.source, "latency_s": link.latency_s,
                 "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s},
        "layers_ms": {str(size): [1e3 * s for s in seconds] for size, seconds in found[0].layers_s.items()},
        "num_parameters": found[0].num_parameters,
        **conditions_of(found),
    }  # fmt: skip


def conditions_of(found: Sequence[Found]) -> dict[str, Any]:
    """Conditions under which the processes of a case ran."""
    return {
        "processes": len(found),
        "conditions": [each.conditions for each in found],
        "used_by_others": used_by_others([each.usage for each in found]),
        **({"memory": [dict(each.memory) for each in found]} if found[0].memory else {}),
    }


def link_of(found: Sequence[Found], device: str) -> Link:
    """Link between the stages: this machine's memory, whose bandwidth was measured; between GPUs what was
    measured there, or a preset where there is one alone.
    """
    if device == "cuda":
        return found[0].link or LINKS[GPU_LINK]
    return Link(
        "shared memory",
        SHARED_MEMORY_LATENCY_S,
        min(each.copy_bytes_per_s for each in found),
        source="measured: a copy in memory, all processes at once",
    )


def replay_error(laid_out_s: Sequence[float], real_s: Sequence[float], key: Mapping[str, Scalar]) -> Metric:
    """How much longer the laid-out steps are than the same steps on real devices, as a share."""
    errors = [laid_out / ran - 1 for laid_out, ran in zip(laid_out_s, real_s, strict=True)]
    note = "replayed step / measured step - 1, turn by turn"
    return from_samples("replay error", errors, "ratio", key=key, note=note)


def normalised(name: str, rates: Rates, base: Sequence[float] | None, provenance: Provenance) -> list[Metric]:
    """Examples per second, and relative to the base, turn by turn, where it has such a throughput."""
    found = []
    for key, samples in rates:
        of = partial(from_samples, key=key, provenance=provenance)
        found.append(of(name, samples, "samples/s"))
        if base is not None:
            relative = [ours / theirs for ours, theirs in zip(samples, base, strict=True)]
            found.append(of(f"normalised {name}", relative, "ratio"))
    return found


def _of(rates: Rates, wanted: Mapping[str, Scalar]) -> Sequence[float] | None:
    return next((samples for key, samples in rates if key == wanted), None)


def samples_of(timelines: Sequence[Timeline]) -> Samples:
    """Durations by (stage, kind) of several measured steps."""
    found: dict[tuple[int, Kind], list[float]] = {}
    for timeline in timelines:
        for event in timeline.events:
            found.setdefault((event.action.stage, event.action.kind), []).append(event.duration_s)
    return {key: tuple(samples) for key, samples in found.items()}


def joined(several: Sequence[TimedActions]) -> TimedActions:
    """The same configuration measured several times, as one with more samples."""
    first = several[0]
    return replace(
        first,
        samples_s={key: tuple(s for each in several for s in each.samples_s[key]) for key in first.samples_s},
        update_s=tuple(median(values) for values in zip(*(each.update_s for each in several), strict=True)),
        setup_s=median([each.setup_s for each in several]),
    )


def by_turn(steps: Sequence[Steps]) -> list[TimedActions]:
    """One set of action times per turn of a configuration, samples of all processes together."""
    return [joined(of_processes) for of_processes in zip(*(each.turns for each in steps), strict=True)]


def check_ran(timeline: Timeline, schedule: Schedule, stage: int | None = None) -> dict[str, int]:
    """How many actions of each kind a measured step really had, of all stages or of the one that ran here.

    RuntimeError if they are not the schedule's, because a benchmark that forgot its micro-batches or its
    recomputation has measured something else.
    """
    wanted = sorted(schedule if stage is None else schedule.actions[stage])
    found = sorted(event.action for event in timeline.events)
    if found != wanted:
        odd = sorted(set(wanted) ^ set(found)) or found
        where = "the step" if stage is None else f"stage {stage}"
        raise RuntimeError(
            f"{where} ran {len(found)} actions where {schedule.name} with {schedule.num_stages} stages and "
            f"{schedule.num_microbatches} micro-batches has {len(wanted)}; look at {odd[0]}"
        )
    kinds = [action.kind for action in found]
    return {kind.name: kinds.count(kind) for kind in Kind if kind in kinds}
