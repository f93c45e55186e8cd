"""What the actions of a step took where it really ran, laid out on as many devices as it has stages.

A replay is only as good as its action times, so they come from whole steps of the pipeline (warm caches, the
right micro-batch, one thread per stage) and keep their samples. No torch is needed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from gpipe_bench.pipeline.plan.links import FREE, Link
from gpipe_bench.pipeline.plan.named import SCHEDULES
from gpipe_bench.pipeline.plan.schedule import Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import replay
from gpipe_bench.pipeline.plan.timeline import Timeline
from gpipe_bench.planner.predict import Breakdown, breakdown, even_stages

Samples = dict[tuple[int, Kind], tuple[float, ...]]


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

    def program(self, num_microbatches: int | None = None) -> Schedule:
        """The schedule of a step, of as many micro-batches as were timed if not said otherwise."""
        return SCHEDULES[self.schedule](
            self.num_stages, num_microbatches or self.num_microbatches, self.remat
        )

    def times(self, link: Link) -> dict[str, Any]:
        """Arguments of a replay of the program."""
        return {
            "action_s": self.medians_s(),
            "link": link,
            "activation_bytes": self.activation_bytes,
            "gradient_bytes": self.gradient_bytes,
            "setup_s": [self.setup_s] + [0.0] * (self.num_stages - 1),
            "update_s": self.update_s,
        }

    def to_data(self) -> dict[str, Any]:
        """The actions as a record keeps them; times in milliseconds, medians and extremes."""
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
        """The actions that `to_data` wrote; each (stage, kind) has its median as the only sample."""
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
    """Shares of the laid-out step's device-seconds, by what they are spent on; they add up to exactly 1."""
    return breakdown(timed.program(num_microbatches), **timed.times(link))


def shares_of(timed: TimedActions, link: Link, num_microbatches: int | None = None) -> dict[str, float]:
    """The same as plain numbers."""
    return {part: float(share) for part, share in take_apart(timed, link, num_microbatches).shares.items()}


SAME_SHARE = "PCIe, same share"
"""What results call PCIe slowed down by `same_share`."""


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
