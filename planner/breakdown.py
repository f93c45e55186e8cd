"""Where the time of a step goes: every device-second of workers x makespan has one reason.

Idle time carries no label. A stage that waits may wait for a slow link, for a fuller stage, or because any
pipeline fills and drains; a profiler cannot tell. So the same step is laid out again under circumstances that
lack one reason at a time, and the difference is what that reason costs (the paper's overhead breakdown, v1
Figure 4, v5 section 3.1):

    the step itself      - what its actions, its weight update and its set-up fill is known
    with a free link     - the difference is communication
    without collectives  - the difference, with the collectives inside actions, is a grid's price: collectives
    without set-up       - the difference, less the set-up itself, is waiting for it: counted as set-up
    with even stages     - every stage takes the mean: the difference is load imbalance
    what is still idle   - bubble

Uneven stages can happen to be faster than even ones (a light last stage, recomputing little, ends the step of
a single micro-batch sooner); then nothing is lost to imbalance, and the bubble is what is idle. All
arithmetic is on fractions: the parts add up exactly. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from typing import Any

from gpipe_bench.pipeline.plan.links import FREE, Between, Link
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import ActionTimes, duration_of, replay
from gpipe_bench.pipeline.plan.timeline import Timeline

PARTS = (
    "computation", "recompute", "weight update", "setup", "communication", "load imbalance", "bubble",
)  # fmt: skip
"""The reasons, named as in the paper, from work to waiting."""
COLLECTIVES = "collectives"
"""One more reason if there are collectives: gathers, sums over replicas and inside tensor-parallel layers."""


@dataclass(frozen=True)
class Breakdown:
    """Device-seconds of one step by reason, exact; `seconds` has an entry for each of PARTS, and
    for COLLECTIVES where the step has any.

    `timeline` is the step that was taken apart.
    """

    seconds: dict[str, Fraction]
    num_workers: int
    timeline: Timeline

    @property
    def shares(self) -> dict[str, Fraction]:
        """Shares of workers x makespan; they add up to exactly 1. All zero for a step that takes no time."""
        total = sum(self.seconds.values(), Fraction(0))
        return {part: value / total if total else Fraction(0) for part, value in self.seconds.items()}

    @property
    def makespan_s(self) -> float:
        return float(sum(self.seconds.values(), Fraction(0)) / self.num_workers)


def breakdown(schedule: Schedule, action_s: ActionTimes, link: Between = FREE, **beside: Any) -> Breakdown:
    """Attributes every device-second of the replayed step. Arguments, those `beside` the link too, and errors
    are those of `replay`.
    """
    timeline = replay(schedule, action_s, link, **beside)  # which refuses what cannot be
    duration_s, waits_s = duration_of(action_s), beside.pop("collective_s", None)
    work: dict[Action, Any] = {action: Fraction(duration_s(action)) for action in schedule}
    ends: dict[str, Any] = {n: [*map(Fraction, beside.pop(n, ()))] for n in ("setup_s", "update_s")}
    setup, update = ends.values()
    grid: dict[str, Any] = {
        name: [
            [type(one)(*(Fraction(getattr(one, field)) for field in one.__slots__)) for one in each]
            for each in beside.pop(name)
        ]
        for name in ("gathers", "reductions")
        if beside.get(name)
    }
    if waits_s is not None:
        inside_s = duration_of(waits_s)
        grid["collective_s"] = {action: Fraction(inside_s(action)) for action in schedule}
    for name in ("activation_bytes", "gradient_bytes"):
        beside[name] = [*map(Fraction, beside.get(name, ()))]
    sizes = beside.pop("portals", {}).items()
    beside["portals"] = {line: (Fraction(there), Fraction(back)) for line, (there, back) in sizes}

    def lay_out(
        actions: Mapping[Action, Any], through: Between, before: Any, after: Any, **more: Any
    ) -> Timeline:
        """Lays the step out with times that are exact fractions, whatever types `replay` declares."""
        return replay(
            schedule, actions.__getitem__, through, setup_s=before, update_s=after, **beside, **more
        )

    step = lay_out(work, _exact_link(link), setup, update, **grid)
    free = lay_out(work, FREE, setup, update, **grid)
    alone = lay_out(work, FREE, setup, update) if grid else free
    ready = lay_out(work, FREE, (), update)
    homes = [schedule.worker(stage) for stage in range(len(update))]
    even_update = [sum(update) / schedule.num_workers / homes.count(home) for home in homes]
    even = lay_out(even_stages(work, schedule), FREE, (), even_update)

    recompute = _total(seconds for action, seconds in work.items() if action.kind is Kind.R)
    set_up = _total(setup)
    idle = Fraction(step.idle_s)
    communication = _lost(step, free, idle)
    # What actions wait for inside is not idle; with a slow link they begin later, and may wait for less.
    waiting_inside = _total(event.duration_s for event in step.events) - _total(work.values())
    known = _total(event.duration_s for event in free.events) - _total(work.values())
    waiting_for_others = _lost(free, alone, idle - communication, known=known)
    rest = idle - communication - waiting_for_others
    waiting_for_setup = _lost(alone, ready, rest, known=set_up)
    imbalance = _lost(ready, even, rest - waiting_for_setup)
    seconds = {
        "computation": _total(work.values()) - recompute,
        "recompute": recompute,
        "weight update": _total(update),
        "setup": set_up + waiting_for_setup,
        "communication": communication,
        "load imbalance": imbalance,
        "bubble": rest - waiting_for_setup - imbalance,
    }
    if grid:
        seconds[COLLECTIVES] = waiting_inside + waiting_for_others
    return Breakdown(seconds, schedule.num_workers, timeline)


def even_stages(work: Mapping[Action, float], schedule: Schedule) -> dict[Action, float]:
    """Spreads the same total work evenly: the same kind of work on a micro-batch takes every worker equally
    long, and each of a worker's stages as long as its others.
    """
    alike: dict[tuple[Kind, int], list[Action]] = {}
    for action in work:
        alike.setdefault((action.kind, action.microbatch), []).append(action)
    found: dict[Action, float] = {}
    for group in alike.values():
        total = sum(work[action] for action in group)
        homes = [schedule.worker(action.stage) for action in group]
        found |= {
            action: total / len(set(homes)) / homes.count(home)
            for action, home in zip(group, homes, strict=True)
        }
    return {action: found[action] for action in work}


def _lost(to: Timeline, instead: Timeline, idle: Fraction, known: Fraction = Fraction(0)) -> Fraction:
    """Device-seconds by which one step is longer than the other, less the known ones; at most those idle."""
    longer = to.num_workers * (Fraction(to.makespan_s) - Fraction(instead.makespan_s))
    return min(max(longer - known, Fraction(0)), idle)


def _exact_link(given: Between) -> Between:
    if not isinstance(given, Link):
        return lambda a, b: _exact_link(given(a, b))  # type: ignore[return-value]  # of one link it is one
    if given == FREE:
        return given
    latency_s, bandwidth = given.latency_s, given.bandwidth_bytes_per_s
    exact: Any = [Fraction(latency_s), bandwidth if bandwidth == inf else Fraction(bandwidth)]
    return replace(given, latency_s=exact[0], bandwidth_bytes_per_s=exact[1])


def _total(values: Iterable[float]) -> Fraction:
    return sum((Fraction(value) for value in values), Fraction(0))
