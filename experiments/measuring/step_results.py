"""From what the processes of a timing case found to numbers: steps laid out, steps that ran, and their
difference.

Throughput is compared within a round, in which all configurations took turns there and back. Such rounds are
long and few, so each direction gives a ratio of its own: a machine that drifts moves the two apart, the
median lies between them, and the interval says how far they are from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from gpipe_bench.experiments.measuring.processes import run_processes
from gpipe_bench.experiments.measuring.timed_actions import TimedActions, balanced, lay_out
from gpipe_bench.harness.environment import usable_cores
from gpipe_bench.harness.record import Provenance, Quantity, Scalar
from gpipe_bench.harness.rounds import used_by_others
from gpipe_bench.harness.stats import from_samples
from gpipe_bench.pipeline.plan.links import LINKS, Link

if TYPE_CHECKING:
    from gpipe_bench.experiments.measuring.configuration import Configuration, Steps
    from gpipe_bench.experiments.measuring.step_timing import Found, StepJob

GPU_LINK = "nvlink4"
SHARED_MEMORY_LATENCY_S = (
    40e-6  # of a message between two processes; `run engine` measures it with its engine
)
MOST_DRAWN = 300  # actions of a timeline that is kept in the record

Throughputs = list[tuple[Mapping[str, Scalar], list[float]]]
"""Examples per second of each round, by the key of the cell."""


def devices(device: str) -> int:
    """Processes that time side by side: one per device, two cores of a CPU, at most two."""
    if device == "cuda":
        from gpipe_bench.pipeline.devices import count

        return min(count("cuda"), 2)
    return min(usable_cores(), 2)


def measure(job: StepJob) -> list[Found]:
    """Runs the processes of a case, one thread each and, on CPUs, pinned. `MemoryError` where no
    configuration fits.
    """
    from gpipe_bench.experiments.measuring.step_timing import work

    found: list[Found] = run_processes(work, devices(job.device), job, device=job.device)
    if all(steps.without_numbers for steps in found[0].steps):  # processes give up together
        raise MemoryError(found[0].steps[0].out_of_memory)
    return found


def results(
    plan: Sequence[tuple[Configuration, tuple[int, ...]]], found: Sequence[Found], device: str
) -> tuple[list[Quantity], dict[str, Any]]:
    """Numbers and details of all configurations; ratios are within a round, to the first configuration.

    `plan` has each configuration and the numbers of micro-batches its step is laid out with, the wanted one
    first; a real step is held against the one with as many as really ran.
    """
    link = link_of(found, device)
    throughput: Throughputs = []  # examples per second, by configuration and turn
    bound: Throughputs = []
    real: Throughputs = []
    quantities: list[Quantity] = []
    details: dict[str, Any] = {}
    for index, (configuration, counts) in enumerate(plan):
        steps = [each.steps[index] for each in found]
        timed_turns = by_turn(steps)
        for count in counts:
            name, key = _name(configuration, count, counts), _key(configuration, count)
            examples = count * configuration.microbatch_size
            if configuration.num_microbatches == count:
                examples = configuration.batch_size
            facts: dict[str, Any] = {
                "key": key,
                "num_stages": configuration.num_stages,
                "num_microbatches": count,
                "batch_size": examples,
                "counts": steps[0].counts,
                "why": steps[0].why,
                "out_of_memory": steps[0].out_of_memory,
            }
            if timed_turns:
                laid_out = [lay_out(timed, link, num_microbatches=count).makespan_s for timed in timed_turns]
                even = [balanced(timed, count).makespan_s for timed in timed_turns]
                throughput.append((key, [examples / step_s for step_s in laid_out]))
                bound.append((key, [examples / step_s for step_s in even]))
                timed = joined(timed_turns)
                step = lay_out(timed, link, num_microbatches=count)
                facts |= {
                    "actions": timed.to_data(),
                    "spread": timed.spread(),
                    "timeline": step.to_data() if len(step.events) <= MOST_DRAWN else None,
                }
                shares = [bound_s / step_s for bound_s, step_s in zip(even, laid_out, strict=True)]
                quantities += [
                    _replayed("step", key, [1e3 * step_s for step_s in laid_out], "ms", False),
                    _replayed("share of the balanced step", key, shares, "ratio", True),
                ]
            if steps[0].real_s and count == configuration.num_microbatches:
                real_s = [max(samples) for samples in zip(*(each.real_s for each in steps), strict=True)]
                real.append((key, [configuration.batch_size / step_s for step_s in real_s]))
                quantities.append(
                    from_samples(
                        "real step", [1e3 * s for s in real_s], "ms", key=key, higher_is_better=False
                    )
                )
                if timed_turns:
                    error = [laid / ran - 1 for laid, ran in zip(laid_out, real_s, strict=True)]
                    quantities.append(
                        from_samples(
                            "replay error", error, "ratio", key=key,
                            note="replayed step / measured step - 1, turn by turn",
                        )
                    )  # fmt: skip
                timelines = [each.real_timeline for each in steps if each.real_timeline is not None]
                facts["real_busy_share"] = busy_share(timelines)
            details[name] = facts
    first = next(iter(details.values()))["key"]
    laid_out_base, real_base = (
        next((samples for key, samples in each if key == first), None) for each in (throughput, real)
    )
    quantities += normalised("throughput", throughput, laid_out_base, "replayed")
    quantities += normalised("bound throughput", bound, laid_out_base, "replayed")
    quantities += normalised("real throughput", real, real_base, "measured")
    shared = {
        "cells": details,
        "link": {"name": link.name, "source": link.source, "latency_s": link.latency_s,
                 "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s},
        "layers_ms": {str(size): [1e3 * s for s in seconds] for size, seconds in found[0].layers_s.items()},
        "num_parameters": found[0].num_parameters,
        "processes": len(found),
        "conditions": [each.conditions for each in found],
        "used_by_others": used_by_others([each.usage for each in found]),
    }  # fmt: skip
    return quantities, shared


def _key(configuration: Configuration, count: int) -> dict[str, Scalar]:
    """What tells a cell's numbers apart from those of the others."""
    if configuration.label:
        return {"configuration": configuration.label, "M": count}
    return {"K": configuration.num_stages, "M": count}


def _name(configuration: Configuration, count: int, counts: Sequence[int]) -> str:
    """The cell for people."""
    if not configuration.label:
        return f"K={configuration.num_stages} M={count}"
    return configuration.label if count == counts[0] else f"{configuration.label} M={count}"


def by_turn(steps: Sequence[Steps]) -> list[TimedActions]:
    """One set of action times per turn of a configuration, samples of all processes together."""
    return [joined(of_processes) for of_processes in zip(*(each.turns for each in steps), strict=True)]


def joined(several: Sequence[TimedActions]) -> TimedActions:
    """The same configuration measured several times, as one with more samples."""
    first = several[0]
    samples = {key: tuple(s for each in several for s in each.samples_s[key]) for key in first.samples_s}
    updates = tuple(median(values) for values in zip(*(each.update_s for each in several), strict=True))
    return replace(
        first, samples_s=samples, update_s=updates, setup_s=median([each.setup_s for each in several])
    )


def link_of(found: Sequence[Found], device: str) -> Link:
    """What joins the stages: this machine's memory, whose bandwidth was measured; on GPUs a preset."""
    if device == "cuda":
        return LINKS[GPU_LINK]
    return Link(
        "shared memory",
        SHARED_MEMORY_LATENCY_S,
        min(each.copy_bytes_per_s for each in found),
        source="measured: a copy in memory, all processes at once",
    )


def busy_share(timelines: Sequence[Any]) -> list[float]:
    """Of each stage, the share of its process's own span that its actions filled."""
    shares = []
    for timeline in timelines:
        busy = sum(event.duration_s for event in timeline.events)
        shares.append(busy / timeline.makespan_s if timeline.makespan_s else 0.0)
    return shares


def normalised(
    name: str, throughput: Throughputs, base: Sequence[float] | None, provenance: Provenance
) -> list[Quantity]:
    """Examples per second, and relative to the base, turn by turn, where it has such a throughput."""
    found = []
    for key, samples in throughput:
        found.append(
            from_samples(name, samples, "samples/s", key=key, provenance=provenance, higher_is_better=True)
        )
        if base is not None:
            ratios = [ours / theirs for ours, theirs in zip(samples, base, strict=True)]
            found.append(
                from_samples(
                    f"normalised {name}",
                    ratios,
                    "ratio",
                    key=key,
                    provenance=provenance,
                    higher_is_better=True,
                )
            )
    return found


def _replayed(
    name: str, key: Mapping[str, Scalar], samples: Sequence[float], unit: str, higher_is_better: bool
) -> Quantity:
    return from_samples(
        name, samples, unit, key=key, provenance="replayed", higher_is_better=higher_is_better
    )
