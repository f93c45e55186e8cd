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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from types import MappingProxyType
from typing import cast

from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.links import FREE, Between, Bucket, Gather, Link
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.simulate import ActionTimes, duration_of, replay
from gpipe_bench.pipeline.plan.timeline import Event, Span, Timeline

PARTS = (
    "computation", "recompute", "weight update", "setup", "communication", "load imbalance", "bubble",
)  # fmt: skip
"""The reasons, named as in the paper, from work to waiting."""
COLLECTIVES = "collectives"
"""One more where there are any: gathering, summing over replicas and inside tensor-parallel layers."""


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


def breakdown(
    schedule: Schedule,
    action_s: ActionTimes,
    link: Between = FREE,
    *,
    activation_bytes: Sequence[float] = (),
    gradient_bytes: Sequence[float] = (),
    setup_s: Sequence[float] = (),
    update_s: Sequence[float] = (),
    early_recompute: bool = True,
    gathers: Sequence[Sequence[Gather]] = (),
    reductions: Sequence[Sequence[Bucket]] = (),
    collective_s: ActionTimes | None = None,
    portals: Mapping[Edge, tuple[float, float]] = MappingProxyType({}),
) -> Breakdown:
    """Attributes every device-second of the replayed step. Arguments and errors are those of `replay`."""
    duration_s = duration_of(action_s)
    work = {action: _exact(f"duration of {action}", duration_s(action)) for action in schedule}
    inside = _exact_collectives(collective_s, schedule)
    leaving = [
        [Bucket(_exact("ready", b.ready), _exact("takes_s", b.takes_s)) for b in buckets]
        for buckets in reductions
    ]
    fetched = [
        [Gather(_exact("needed", g.needed), _exact("takes_s", g.takes_s)) for g in each] for each in gathers
    ]
    on_a_grid = bool(fetched or leaving or inside)
    setup = [_exact("setup_s", seconds) for seconds in setup_s]
    update = [_exact("update_s", seconds) for seconds in update_s]

    def lay_out(
        actions: dict[Action, float],
        through: Between,
        before: Sequence[float],
        after: Sequence[float],
        *,
        with_collectives: bool = False,
    ) -> Timeline:
        return replay(
            schedule,
            actions.__getitem__,
            through,
            activation_bytes=[_exact("activation_bytes", size) for size in activation_bytes],
            gradient_bytes=[_exact("gradient_bytes", size) for size in gradient_bytes],
            setup_s=before,
            update_s=after,
            early_recompute=early_recompute,
            gathers=fetched if with_collectives else (),
            reductions=leaving if with_collectives else (),
            collective_s=inside.__getitem__ if inside and with_collectives else None,
            portals={
                line: (_exact("portals", there), _exact("portals", back))
                for line, (there, back) in portals.items()
            },
        )

    step = lay_out(work, _exact_link(link), setup, update, with_collectives=True)
    free = lay_out(work, FREE, setup, update, with_collectives=True)
    alone = lay_out(work, FREE, setup, update) if on_a_grid else free
    ready = lay_out(work, FREE, (), update)
    even = lay_out(even_stages(work, schedule), FREE, (), _even_updates(update, schedule))

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
    if on_a_grid:
        seconds[COLLECTIVES] = waiting_inside + waiting_for_others
    return Breakdown(seconds, schedule.num_workers, _in_floats(step))


def _exact_collectives(collective_s: ActionTimes | None, schedule: Schedule) -> dict[Action, float] | None:
    if collective_s is None:
        return None
    waits_s = duration_of(collective_s)
    return {action: _exact(f"collectives of {action}", waits_s(action)) for action in schedule}


def even_stages(work: Mapping[Action, float], schedule: Schedule) -> dict[Action, float]:
    """The same total work, with the same kind of work on a micro-batch taking every worker equally long, and
    each of a worker's stages as long as its others.
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


def _even_updates(update: Sequence[float], schedule: Schedule) -> list[float]:
    total, homes = sum(update), [schedule.worker(stage) for stage in range(len(update))]
    return [total / schedule.num_workers / homes.count(home) for home in homes]


def _lost(to: Timeline, instead: Timeline, idle: Fraction, known: Fraction = Fraction(0)) -> Fraction:
    """Device-seconds by which one step is longer than the other, less the known ones; at most those idle."""
    longer = to.num_workers * (Fraction(to.makespan_s) - Fraction(instead.makespan_s))
    return min(max(longer - known, Fraction(0)), idle)


def _exact(what: str, value: float) -> float:
    """The value as a fraction. The replay computes with what it is given, and calls it a float."""
    if not 0 <= value < inf:
        raise ValueError(f"{what} is {value}; it must be finite and not negative")
    return cast(float, Fraction(value))


def _in_floats(step: Timeline) -> Timeline:
    """For drawing and storing."""
    return replace(
        step,
        events=tuple(Event(e.action, float(e.start_s), float(e.end_s)) for e in step.events),
        work=tuple(Span(s.name, s.stage, float(s.start_s), float(s.end_s)) for s in step.work),
        messages=tuple(Span(s.name, s.stage, float(s.start_s), float(s.end_s)) for s in step.messages),
        collectives=tuple(Span(s.name, s.stage, float(s.start_s), float(s.end_s)) for s in step.collectives),
    )


def _exact_link(given: Between) -> Between:
    return _of_fractions(given) if isinstance(given, Link) else lambda a, b: _of_fractions(given(a, b))


def _of_fractions(link: Link) -> Link:
    if link == FREE:
        return link
    bandwidth = link.bandwidth_bytes_per_s
    return replace(
        link,
        latency_s=_exact("latency_s", link.latency_s),
        bandwidth_bytes_per_s=bandwidth if bandwidth == inf else _exact("bandwidth_bytes_per_s", bandwidth),
    )


def _total(values: Iterable[float]) -> Fraction:
    return sum((Fraction(value) for value in values), Fraction(0))
