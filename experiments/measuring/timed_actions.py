"""What the actions of a step took where it really ran, ready to be laid out on as many devices as it has
stages.

A replay is only as good as its action times, so they come from whole steps of the pipeline (warm caches, the
right micro-batch, one thread per stage) and keep their samples. This is the plain data between the
measurement (`step_timing`, which needs torch) and everything that is computed from it: laid-out steps,
balanced steps, breakdowns. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from gpipe_bench.pipeline.plan.breakdown import Breakdown, breakdown, even_stages
from gpipe_bench.pipeline.plan.links import FREE, Link
from gpipe_bench.pipeline.plan.replay import replay
from gpipe_bench.pipeline.plan.schedule import SCHEDULES, Action, Kind, Schedule
from gpipe_bench.pipeline.plan.timeline import Timeline

Times = dict[tuple[int, Kind], float]


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
    samples_s: dict[tuple[int, Kind], tuple[float, ...]]
    update_s: tuple[float, ...]
    setup_s: float
    activation_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    schedule: str = "gpipe"

    @property
    def num_stages(self) -> int:
        return len(self.partition)

    def medians_s(self) -> Times:
        return {key: median(samples) for key, samples in self.samples_s.items()}

    def spread(self) -> float:
        """Median over (stage, kind) of the interquartile range, relative to the median."""
        return median([_interquartile(samples) for samples in self.samples_s.values()])

    def program(self, num_microbatches: int | None = None) -> Schedule:
        return SCHEDULES[self.schedule](
            self.num_stages, num_microbatches or self.num_microbatches, self.remat
        )

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
    def from_data(cls, data: dict[str, Any]) -> TimedActions:
        """What `to_data` wrote; each (stage, kind) has its median as the only sample."""
        samples: dict[tuple[int, Kind], tuple[float, ...]] = {
            (int(name[:-1]), Kind(name[-1])): (1e-3 * found["median"],)
            for name, found in data["actions_ms"].items()
        }
        return cls(
            tuple(range(start, stop) for start, stop in data["partition"]),
            data["num_microbatches"],
            data["remat"],
            samples,
            tuple(1e-3 * value for value in data["update_ms"]),
            1e-3 * data["setup_ms"],
            tuple(data["activation_bytes"]),
            tuple(data["gradient_bytes"]),
            data["schedule"],
        )


def lay_out(
    timed: TimedActions,
    link: Link = FREE,
    *,
    times_s: Times | None = None,
    num_microbatches: int | None = None,
    early_recompute: bool = True,
) -> Timeline:
    """The step on K devices: medians of the measured actions, laid out along the schedule."""
    return replay(
        timed.program(num_microbatches),
        timed.medians_s() if times_s is None else times_s,
        link,
        activation_bytes=timed.activation_bytes,
        gradient_bytes=timed.gradient_bytes,
        setup_s=_setup(timed),
        update_s=timed.update_s,
        early_recompute=early_recompute,
    )


def balanced(timed: TimedActions, num_microbatches: int | None = None) -> Timeline:
    """The bound: the same total work of each kind, spread evenly over the stages, over a free link."""
    medians, program = timed.medians_s(), timed.program(num_microbatches)
    even = even_stages({action: medians[action.stage, action.kind] for action in program}, program)
    update_s = mean(timed.update_s) if timed.update_s else 0.0
    return replay(program, even.__getitem__, update_s=[update_s] * timed.num_stages)


def take_apart(timed: TimedActions, link: Link = FREE) -> Breakdown:
    """Where the device-seconds of the laid-out step go; the parts add up to exactly 1."""
    return breakdown(
        timed.program(),
        timed.medians_s(),
        link,
        activation_bytes=timed.activation_bytes,
        gradient_bytes=timed.gradient_bytes,
        setup_s=_setup(timed),
        update_s=timed.update_s,
    )


def samples_of(timelines: Sequence[Timeline]) -> dict[tuple[int, Kind], tuple[float, ...]]:
    """Durations by (stage, kind) of several measured steps."""
    found: dict[tuple[int, Kind], list[float]] = {}
    for timeline in timelines:
        for event in timeline.events:
            found.setdefault((event.action.stage, event.action.kind), []).append(event.duration_s)
    return {key: tuple(samples) for key, samples in found.items()}


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
    return {kind.name: sum(action.kind is kind for action in found) for kind in Kind if _has(found, kind)}


def _has(actions: Sequence[Action], kind: Kind) -> bool:
    return any(action.kind is kind for action in actions)


def _setup(timed: TimedActions) -> list[float]:
    return [timed.setup_s] + [0.0] * (timed.num_stages - 1)


def _interquartile(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    middle = median(ordered)
    low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4 - (len(ordered) % 4 == 0)]
    return (high - low) / middle if middle else 0.0
