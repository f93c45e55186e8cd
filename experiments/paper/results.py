"""Turns timed steps into results: replays, metrics, and the replay's error.

Action times come from whole steps of the pipeline and keep their samples. Replays err, so some of the
replayed steps also run on real devices, in the same rounds: their errors give the range of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_bench.harness.record import Metric, Provenance, Scalar, from_samples
from gpipe_bench.harness.reproduction import load_reproduction
from gpipe_bench.harness.rounds import Usage, used_by_others
from gpipe_bench.pipeline.plan.links import FREE, LINKS, Link
from gpipe_bench.pipeline.plan.named import gpipe
from gpipe_bench.pipeline.plan.partition import Partition, partition
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import replay
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.planner.accelerators import P100_16
from gpipe_bench.planner.predict import Breakdown, breakdown

from .workloads import NUM_MICROBATCHES, Configuration, Job

if TYPE_CHECKING:
    from .full_size import FullSize

Samples = dict[tuple[int, Kind], tuple[float, ...]]


@dataclass(frozen=True)
class TimedActions:
    """Action times of one configuration: `samples_s` by (stage, kind), over micro-batches, steps and
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

    @property
    def num_stages(self) -> int:
        return len(self.partition)

    def medians_s(self) -> dict[tuple[int, Kind], float]:
        return {key: median(samples) for key, samples in self.samples_s.items()}

    def program(self, num_microbatches: int | None = None) -> Schedule:
        """The schedule of a step, by default with the timed number of micro-batches."""
        return gpipe(self.num_stages, num_microbatches or self.num_microbatches, self.remat)

    def times(self, link: Link) -> dict[str, Any]:
        """Arguments for a replay of the program."""
        return {
            "action_s": self.medians_s(), "link": link, "activation_bytes": self.activation_bytes,
            "gradient_bytes": self.gradient_bytes,
            "setup_s": [self.setup_s] + [0.0] * (self.num_stages - 1), "update_s": self.update_s,
        }  # fmt: skip

    def to_data(self) -> dict[str, Any]:
        """The action times for a record, in milliseconds: medians and extremes."""
        return {
            "partition": [[span.start, span.stop] for span in self.partition],
            "num_microbatches": self.num_microbatches,
            "remat": self.remat,
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


def lay_out(timed: TimedActions, link: Link = FREE, num_microbatches: int | None = None) -> Timeline:
    """The step on K devices: a replay with medians of the measured actions."""
    return replay(timed.program(num_microbatches), **timed.times(link))


def take_apart(timed: TimedActions, link: Link, num_microbatches: int | None = None) -> Breakdown:
    """Shares of the replayed step's device-seconds, by use; they sum to exactly 1."""
    return breakdown(timed.program(num_microbatches), **timed.times(link))


# Numbers and details of a case

GPU_LINK = "nvlink4"
SHARED_MEMORY_LATENCY_S = 40e-6  # of a message between two processes, measured by `run engine`

Rates = Sequence[tuple[Mapping[str, Scalar], Sequence[float]]]
"""Examples per second in each turn, by key of the configuration."""


@dataclass
class Steps:
    """Findings of one process for one configuration. `turns` is empty if the engine keeps no timeline or
    cannot run all stages in a process, `real_s` if no real step ran; `why` says why.
    """

    partition: Partition = ()
    turns: list[TimedActions] = field(default_factory=list)  # two per round
    real_s: list[float] = field(default_factory=list)  # with one stage here, including the optimizer's step
    counts: dict[str, int] = field(default_factory=dict)  # actions of a step by kind
    why: str = ""
    out_of_memory: str = ""  # the error of a step that did not fit; then there are no numbers


class Found(NamedTuple):
    """Findings of one process."""

    steps: tuple[Steps, ...]  # in the order of the configurations
    copy_bytes_per_s: float
    conditions: dict[str, str]
    usage: Usage  # over all rounds
    link: Link | None = None  # between accelerators, if measured
    gpu: Mapping[str, Any] = {}  # clocks before and after, peak memory


def results(job: Job, found: Sequence[Found]) -> tuple[list[Metric], dict[str, Any]]:
    """Metrics and details of all configurations; ratios are relative to the first configuration. A real step
    is compared with the replay of as many micro-batches as it ran.

    Throughput is compared within a round, in which all configurations take turns there and back. Rounds are
    long and few, so each direction gives a ratio: if the machine drifts the two differ.
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
            cells[name] = facts = {
                "key": key, "num_stages": configuration.num_stages, "num_microbatches": count,
                "batch_size": examples, "counts": steps[0].counts, "why": steps[0].why,
                "out_of_memory": steps[0].out_of_memory,
            }  # fmt: skip
            laid_out_s = [lay_out(each, link, count).makespan_s for each in timed]
            if timed:
                throughput.append((key, [examples / s for s in laid_out_s]))
                whole = joined(timed)
                shares = take_apart(whole, link, count).shares
                facts["actions"] = whole.to_data()
                facts["as_timed"] = {"shares": {part: float(share) for part, share in shares.items()}}
                step_ms = [1e3 * s for s in laid_out_s]
                metrics.append(from_samples("step", step_ms, "ms", key=key, provenance="replayed"))
            if steps[0].real_s and ran:
                of_processes = zip(*(each.real_s for each in steps if each.real_s), strict=True)
                real_s = [max(samples) for samples in of_processes]
                real.append((key, [examples / s for s in real_s]))
                metrics.append(from_samples("real step", [1e3 * s for s in real_s], "ms", key=key))
                if timed:  # error of the replay, relative to real steps
                    errors = [
                        laid_out / ran_s - 1 for laid_out, ran_s in zip(laid_out_s, real_s, strict=True)
                    ]
                    note = "replayed step / measured step - 1, turn by turn"
                    metrics.append(from_samples("replay error", errors, "ratio", key=key, note=note))
    base = next(iter(cells.values()))["key"]
    metrics += normalised("throughput", throughput, base, "replayed")
    metrics += normalised("real throughput", real, base, "measured")
    metrics += control_of(found)
    return metrics, {
        **job.facts(),
        "cells": cells,
        "link": {"name": link.name, "source": link.source, "latency_s": link.latency_s,
                 "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s},
        **conditions_of(found),
    }  # fmt: skip


def conditions_of(found: Sequence[Found]) -> dict[str, Any]:
    """The conditions under which a case's processes ran."""
    return {
        "processes": len(found),
        "conditions": [each.conditions for each in found],
        "used_by_others": used_by_others([each.usage for each in found]),
        **({"gpu": [dict(each.gpu) for each in found]} if found[0].gpu else {}),
    }


def control_of(found: Sequence[Found]) -> list[Metric]:
    """The first configuration against itself: not 1 if the machine changed, as by falling clocks."""
    for of_processes in zip(*(each.steps for each in found), strict=True):
        step_s = [lay_out(each).makespan_s for each in by_turn(of_processes)]
        if ratios := [first / second for first, second in zip(step_s[::2], step_s[1::2], strict=False)]:
            note = "its first turn of a round / second"
            return [from_samples("control", ratios, "ratio", provenance="replayed", note=note)]
    return []


def link_of(found: Sequence[Found], device: str) -> Link:
    """The link between stages: this machine's memory, with measured bandwidth; between GPUs the measured
    link, or a preset if there is one GPU.
    """
    if device == "cuda":
        return found[0].link or LINKS[GPU_LINK]
    return Link(
        "shared memory",
        SHARED_MEMORY_LATENCY_S,
        min(each.copy_bytes_per_s for each in found),
        source="measured: a copy in memory, all processes at once",
    )


def normalised(name: str, rates: Rates, base: Mapping[str, Scalar], provenance: Provenance) -> list[Metric]:
    """Examples per second, and relative to those of the key `base`, turn by turn, if it has any."""
    found, theirs = [], next((samples for key, samples in rates if key == base), None)
    for key, samples in rates:
        of = partial(from_samples, key=key, provenance=provenance)
        found.append(of(name, samples, "samples/s"))
        if theirs is not None:
            relative = [one / other for one, other in zip(samples, theirs, strict=True)]
            found.append(of(f"normalised {name}", relative, "ratio"))
    return found


def samples_of(timelines: Sequence[Timeline]) -> Samples:
    """Durations by (stage, kind) of several measured steps."""
    found: dict[tuple[int, Kind], list[float]] = {}
    for timeline in timelines:
        for event in timeline.events:
            found.setdefault((event.action.stage, event.action.kind), []).append(event.duration_s)
    return {key: tuple(samples) for key, samples in found.items()}


def joined(several: Sequence[TimedActions]) -> TimedActions:
    """Joins measurements of the same configuration into one with more samples."""
    first = several[0]
    return replace(
        first,
        samples_s={key: tuple(s for each in several for s in each.samples_s[key]) for key in first.samples_s},
        update_s=tuple(median(values) for values in zip(*(each.update_s for each in several), strict=True)),
        setup_s=median([each.setup_s for each in several]),
    )


def by_turn(steps: Sequence[Steps]) -> list[TimedActions]:
    """Action times for each turn of a configuration, with the samples of all processes."""
    return [joined(of_processes) for of_processes in zip(*(each.turns for each in steps), strict=True)]


def check_ran(timeline: Timeline, schedule: Schedule, stage: int | None = None) -> dict[str, int]:
    """The number of actions of each kind in a measured step, of all stages or of the stage that ran here.

    RuntimeError if they are not the schedule's: an engine that omits micro-batches or recomputation measures
    something else.
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


# Steps replayed over links (Table 3): over PCIe as it is, and slowed down with the computation. A scaled
# model on this machine and the paper's model on a P100 have the schedule and the balance of stages in common,
# but not the ratio of message to action times. So the scaled model's link is slowed down by as much as its
# actions are, per byte; that factor needs the P100's speed, which is modelled, and the share of its peak that
# real programs reach, which is declared.

SAME_SHARE = "PCIe, same share"
"""Name in results of PCIe slowed down."""
PCIE = LINKS["pcie3-host"]


def replayed(
    plan: Sequence[Configuration], found: Sequence[Found], paper: FullSize, batch_size: int
) -> tuple[list[Metric], dict[str, Any]]:
    """Replays of this machine's actions over PCIe, over PCIe slowed down like the actions, and over a free
    link: throughput, also relative to the first K if it has steps. `batch_size` is the paper's.
    """
    rounds = {
        configuration.num_stages: [replace(each, num_microbatches=NUM_MICROBATCHES) for each in timed]
        for index, configuration in enumerate(plan)
        if (timed := by_turn([each.steps[index] for each in found]))
    }
    out_of_memory = {
        f"K={configuration.num_stages}": steps.out_of_memory
        for configuration, steps in zip(plan, found[0].steps, strict=True)
        if steps.out_of_memory
    }
    if not rounds:
        raise MemoryError(next(iter(out_of_memory.values())))
    whole = {k: joined(several) for k, several in rounds.items()}
    share = float(str(load_reproduction().of("table3-amoebanet")["share_of_peak"].value))
    slowed = _slowed(whole, paper, batch_size // NUM_MICROBATCHES, share)
    metrics, ours = list[Metric](), NUM_MICROBATCHES * plan[0].microbatch_size
    for name, link in {"PCIe": PCIE, SAME_SHARE: slowed, "free link": FREE}.items():
        rates: Rates = [
            ({"link": name, "K": k}, [ours / lay_out(timed, link).makespan_s for timed in several])
            for k, several in rounds.items()
        ]
        metrics += normalised("throughput", rates, {"link": name, "K": plan[0].num_stages}, "replayed")
    metrics += control_of(found)
    stages = {
        f"K={k}": {
            "num_stages": k, "actions": of.to_data(),
            "mean_forward_ms": 1e3 * mean([of.medians_s()[stage, Kind.F] for stage in range(k)]),
        }
        for k, of in whole.items()
    }  # fmt: skip
    return metrics, {
        "batch_size": ours,
        "assumption": (
            f"a P100's programs are taken to run at {share:.0%} of its arithmetic, and no faster than its "
            "memory allows"
        ),
        "judged": SAME_SHARE,
        "stages": stages,
        "slowed_link": {"latency_s": slowed.latency_s, "bandwidth_bytes_per_s": slowed.bandwidth_bytes_per_s},
        "counts": {f"K={c.num_stages}": found[0].steps[i].counts for i, c in enumerate(plan)},
        "out_of_memory": out_of_memory,
        **conditions_of(found),
    }


def _slowed(timed: Mapping[int, TimedActions], paper: FullSize, examples: int, share_of_peak: float) -> Link:
    """PCIe slowed down so that this machine's messages take the same share of the time as the paper's.

    Times are sums over stages, bytes over cuts; the paper's are those of a micro-batch in float32 on a P100,
    with stages of equal forwards.
    """
    layers = paper.seconds(P100_16, "float32", examples, share_of_peak)
    forward_s = [layer.forward for layer in layers]
    theirs_s = 2 * sum(forward_s) + sum(layer.backward for layer in layers)
    slower = mean([sum(each.medians_s().values()) / theirs_s for each in timed.values()])
    sizes = []
    for num_stages, each in timed.items():
        ends = [stage.stop - 1 for stage in partition(forward_s, num_stages)[:-1]]
        sizes.append(
            sum(each.activation_bytes) / sum(paper.sent_bytes(end, examples, "float32") for end in ends)
        )
    return Link(
        f"{PCIE.name}, same share of the time", PCIE.latency_s * slower,
        PCIE.bandwidth_bytes_per_s * mean(sizes) / slower, PCIE.shares_directions,
        source=f"{PCIE.name} ({PCIE.source}), slowed down with the computation",
    )  # fmt: skip
