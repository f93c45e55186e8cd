"""What the actions of a step took where it really ran, laid out on as many devices as it has stages, and how
far the replay errs.

A replay is only as good as its action times, so they come from whole steps of the pipeline (warm caches, the
right micro-batch, one thread per stage) and keep their samples. It leaves things out, so it errs, and mostly
to one side; some of the steps that it lays out run on real devices in the same rounds, and their errors say
where the next one will be. No torch is needed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

from gpipe_bench.experiments.timed.workloads import Job
from gpipe_bench.harness.record import Provenance, Quantity, Scalar
from gpipe_bench.harness.rounds import Usage, used_by_others
from gpipe_bench.harness.stats import from_samples
from gpipe_bench.pipeline.plan.links import FREE, LINKS, Link
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.partition import Partition
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import replay
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.planner.breakdown import Breakdown, breakdown, even_stages

GPU_LINK = "nvlink4"
SHARED_MEMORY_LATENCY_S = 40e-6  # of a message between two processes; `run engine` measures it
MOST_DRAWN = 300  # actions of a timeline that is kept in the record
HIDDEN = 0.05
"""Communication counts as hidden while it makes a step at most this share longer than a free link."""
_LOWEST, _HIGHEST = 1e3, 1e15  # bytes per second between which a bandwidth that hides is looked for

Samples = dict[tuple[int, Kind], tuple[float, ...]]
Rates = Sequence[tuple[Mapping[str, Scalar], Sequence[float]]]
"""Examples per second of each turn, by the key of what is timed."""


@dataclass(frozen=True)
class TimedActions:
    """One configuration's action times: `samples_s` by (stage, kind), over micro-batches, steps and
    processes.

    `update_s` is the optimizer's step on each stage, `setup_s` the division of the mini-batch on the first;
    bytes are those of one micro-batch over each of the K - 1 boundaries.
    """

    partition: tuple[range, ...]
    num_microbatches: int
    remat: str
    samples_s: Samples
    update_s: tuple[float, ...]
    setup_s: float
    activation_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    schedule: str = "gpipe"

    @property
    def num_stages(self) -> int:
        return len(self.partition)

    def medians_s(self) -> dict[tuple[int, Kind], float]:
        return {key: median(samples) for key, samples in self.samples_s.items()}

    def spread(self) -> float:
        """Median over (stage, kind) of the interquartile range, relative to the median."""
        return median([_interquartile(samples) for samples in self.samples_s.values()])

    def program(self, num_microbatches: int | None = None) -> Schedule:
        """The schedule of a step, of as many micro-batches as were timed if not said otherwise."""
        return SCHEDULES[self.schedule](
            self.num_stages, num_microbatches or self.num_microbatches, self.remat
        )

    def times(self, link: Link) -> dict[str, Any]:
        """What a replay of the program is given."""
        return {
            "action_s": self.medians_s(),
            "link": link,
            "activation_bytes": self.activation_bytes,
            "gradient_bytes": self.gradient_bytes,
            "setup_s": [self.setup_s] + [0.0] * (self.num_stages - 1),
            "update_s": self.update_s,
        }

    def to_data(self) -> dict[str, Any]:
        """As a record keeps it; action times in milliseconds, medians and extremes."""
        return {
            "partition": [[span.start, span.stop] for span in self.partition],
            "num_microbatches": self.num_microbatches,
            "remat": self.remat,
            "schedule": self.schedule,
            "actions_ms": {
                f"{stage}{kind.value}": {
                    "median": 1e3 * median(samples),
                    "low": 1e3 * min(samples),
                    "high": 1e3 * max(samples),
                    "samples": len(samples),
                }
                for (stage, kind), samples in sorted(self.samples_s.items())
            },
            "update_ms": [1e3 * seconds for seconds in self.update_s],
            "setup_ms": 1e3 * self.setup_s,
            "activation_bytes": list(self.activation_bytes),
            "gradient_bytes": list(self.gradient_bytes),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> TimedActions:
        """What `to_data` wrote; each (stage, kind) has its median as the only sample."""
        return cls(
            tuple(range(start, stop) for start, stop in data["partition"]),
            data["num_microbatches"],
            data["remat"],
            {
                (int(name[:-1]), Kind(name[-1])): (1e-3 * found["median"],)
                for name, found in data["actions_ms"].items()
            },
            tuple(1e-3 * value for value in data["update_ms"]),
            1e-3 * data["setup_ms"],
            tuple(data["activation_bytes"]),
            tuple(data["gradient_bytes"]),
            data["schedule"],
        )


def lay_out(timed: TimedActions, link: Link = FREE, num_microbatches: int | None = None) -> Timeline:
    """The step on K devices: medians of the measured actions, laid out along the schedule."""
    return replay(timed.program(num_microbatches), **timed.times(link))


def balanced(timed: TimedActions, num_microbatches: int | None = None) -> Timeline:
    """The bound: the same total work of each kind, spread evenly over the stages, over a free link."""
    medians, program = timed.medians_s(), timed.program(num_microbatches)
    even = even_stages({action: medians[action.stage, action.kind] for action in program}, program)
    update_s = mean(timed.update_s) if timed.update_s else 0.0
    return replay(program, even.__getitem__, update_s=[update_s] * timed.num_stages)


def take_apart(timed: TimedActions, link: Link, num_microbatches: int | None = None) -> Breakdown:
    """Where the device-seconds of the laid-out step go; the parts add up to exactly 1."""
    return breakdown(timed.program(num_microbatches), **timed.times(link))


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


def _interquartile(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    middle = median(ordered)
    low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4 - (len(ordered) % 4 == 0)]
    return (high - low) / middle if middle else 0.0


@dataclass
class Steps:
    """What one process found for one configuration. `turns` is empty where the engine keeps no timeline or
    cannot run all stages in a process, `real_s` where it was not run for real; `why` says why.
    """

    partition: Partition = ()
    turns: list[TimedActions] = field(default_factory=list)  # two per round, there and back
    in_process_s: list[float] = field(default_factory=list)  # whole steps with all stages in this process
    real_s: list[float] = field(default_factory=list)  # with one stage here, the optimizer's step included
    real_timeline: Timeline | None = None  # of this process's stage, of the last such step
    counts: dict[str, int] = field(default_factory=dict)  # actions of a step by kind
    why: str = ""
    out_of_memory: str = ""  # the error, where a device had no room for a step; then it has no numbers


class Found(NamedTuple):
    """What one process found."""

    steps: tuple[Steps, ...]  # in the order of the configurations
    layers_s: dict[int, tuple[float, ...]]
    """Forward, recomputation and backward of each layer, by micro-batch size."""
    num_parameters: int
    copy_bytes_per_s: float
    conditions: dict[str, str]
    usage: Usage  # over all rounds
    link: Link | None = None  # between accelerators, where it could be measured
    memory: Mapping[str, int] = {}  # of an accelerator's allocator, at most


def results(job: Job, found: Sequence[Found]) -> tuple[list[Quantity], dict[str, Any]]:
    """Numbers and details of all configurations; ratios are within a round, to the first configuration. A
    real step is held against the one that is laid out with as many micro-batches as really ran.

    Throughput is compared within a round, in which all configurations took turns there and back. Such rounds
    are long and few, so each direction gives a ratio of its own: a machine that drifts moves the two apart,
    the median lies between them, and the interval says how far they are from each other.
    """
    link = link_of(found, job.device)
    throughput, bound, real = [], [], []
    quantities: list[Quantity] = []
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
                even_s = [balanced(each, count).makespan_s for each in timed]
                throughput.append((key, [examples / s for s in laid_out_s]))
                bound.append((key, [examples / s for s in even_s]))
                whole = joined(timed)
                step = lay_out(whole, link, count)
                facts |= {
                    "actions": whole.to_data(),
                    "spread": whole.spread(),
                    "timeline": step.to_data() if len(step.events) <= MOST_DRAWN else None,
                }
                shares = [even / laid_out for even, laid_out in zip(even_s, laid_out_s, strict=True)]
                quantities += [
                    from_samples("step", [1e3 * s for s in laid_out_s], "ms", key=key,
                                 provenance="replayed", higher_is_better=False),
                    from_samples("share of the balanced step", shares, "ratio", key=key,
                                 provenance="replayed", higher_is_better=True),
                ]  # fmt: skip
            if steps[0].real_s and ran:
                real_s = [max(samples) for samples in zip(*(each.real_s for each in steps), strict=True)]
                real.append((key, [examples / s for s in real_s]))
                quantities.append(
                    from_samples("real step", [1e3 * s for s in real_s], "ms", key=key,
                                 higher_is_better=False)
                )  # fmt: skip
                if timed:
                    quantities.append(replay_error(laid_out_s, real_s, key))
                facts["real_busy_share"] = [
                    _busy(each.real_timeline) for each in steps if each.real_timeline is not None
                ]
            cells[name] = facts
    base = next(iter(cells.values()))["key"]
    quantities += normalised("throughput", throughput, _of(throughput, base), "replayed")
    quantities += normalised("bound throughput", bound, _of(throughput, base), "replayed")
    quantities += normalised("real throughput", real, _of(real, base), "measured")
    return quantities, {
        **job.facts(),
        "cells": cells,
        "link": {"name": link.name, "source": link.source, "latency_s": link.latency_s,
                 "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s},
        "layers_ms": {str(size): [1e3 * s for s in seconds] for size, seconds in found[0].layers_s.items()},
        "num_parameters": found[0].num_parameters,
        **conditions_of(found),
    }  # fmt: skip


def conditions_of(found: Sequence[Found]) -> dict[str, Any]:
    """Under what the processes of a case ran."""
    return {
        "processes": len(found),
        "conditions": [each.conditions for each in found],
        "used_by_others": used_by_others([each.usage for each in found]),
        **({"memory": [dict(each.memory) for each in found]} if found[0].memory else {}),
    }


def link_of(found: Sequence[Found], device: str) -> Link:
    """What joins the stages: this machine's memory, whose bandwidth was measured; between GPUs what was
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


def replay_error(laid_out_s: Sequence[float], real_s: Sequence[float], key: Mapping[str, Scalar]) -> Quantity:
    """How much longer the laid-out steps are than the same steps on real devices, as a share."""
    errors = [laid_out / ran - 1 for laid_out, ran in zip(laid_out_s, real_s, strict=True)]
    note = "replayed step / measured step - 1, turn by turn"
    return from_samples("replay error", errors, "ratio", key=key, note=note)


def normalised(
    name: str, rates: Rates, base: Sequence[float] | None, provenance: Provenance
) -> list[Quantity]:
    """Examples per second, and relative to the base, turn by turn, where it has such a throughput."""
    found = []
    for key, samples in rates:
        of = partial(from_samples, key=key, provenance=provenance, higher_is_better=True)
        found.append(of(name, samples, "samples/s"))
        if base is not None:
            relative = [ours / theirs for ours, theirs in zip(samples, base, strict=True)]
            found.append(of(f"normalised {name}", relative, "ratio"))
    return found


def _of(rates: Rates, wanted: Mapping[str, Scalar]) -> Sequence[float] | None:
    return next((samples for key, samples in rates if key == wanted), None)


def _busy(timeline: Timeline) -> float:
    """The share of a stage's own span that its actions filled."""
    busy_s = sum(event.duration_s for event in timeline.events)
    return busy_s / timeline.makespan_s if timeline.makespan_s else 0.0


# How fast a link must be


def slowdowns(timed: TimedActions, bandwidths: Sequence[float], latency_s: float = 0.0) -> list[float]:
    """Throughput over each bandwidth (bytes per second, per direction), relative to that over a free link."""
    free_s = lay_out(timed).makespan_s
    return [free_s / lay_out(timed, Link("swept", latency_s, each)).makespan_s for each in bandwidths]


def hidden_from(timed: TimedActions, latency_s: float = 0.0) -> float | None:
    """The least bandwidth in bytes per second over which communication is hidden, to a percent.

    None where the latency alone is too much.
    """

    def hides(bandwidth: float) -> bool:
        return slowdowns(timed, [bandwidth], latency_s)[0] >= 1 / (1 + HIDDEN)

    if not hides(_HIGHEST):
        return None
    low, high = math.log(_LOWEST), math.log(_HIGHEST)
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if hides(math.exp(middle)) else (middle, high)
    return math.exp(high)


def same_share(link: Link, slower: float, larger: float) -> Link:
    """The link over which messages take the share of the time that they take over `link`, for a model whose
    actions take `slower` times as long and whose messages are `larger` times as large.
    """
    return Link(
        f"{link.name}, same share of the time",
        link.latency_s * slower,
        link.bandwidth_bytes_per_s * larger / slower,
        link.shares_directions,
        source=f"{link.name} ({link.source}), slowed down with the computation",
    )
