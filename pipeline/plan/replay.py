"""A schedule laid out in time from the durations of its actions, without running it.

Answers what a step would take on K devices where there are fewer, and what it would take under other
circumstances: a free link, even stages. A discrete-event simulation, in the order of time: whenever an action
ends, its message enters the link, and the stages that waited for either go on.

    worker 0  F0 F1 ....... B1 B0         a worker takes its row in order; an action starts when the worker is
    link        \\  \\      /  /           free and its message is there; messages of one direction queue up,
    worker 1     F0 F1 B1 B0              while both workers compute

A worker that holds several stages takes the actions of all in one row, and what it sends to itself is there
at once. What a stage gathers is fetched from the beginning of the step on; its reductions over its replicas
leave inside its last backward, one after the other on a link of their own, and the worker's update waits for
all. What it leaves out: workers that slow each other down
(memory, shared cores, messages and reductions on one link), replicas that are not equally fast, and jitter.
So where a step can be measured, measure it too and look at the difference. Only the standard library is
imported; times may be fractions or integers, and then all results are exact.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import inf
from types import MappingProxyType
from typing import TypeVar

from gpipe_bench.pipeline.plan.edges import Edge
from gpipe_bench.pipeline.plan.links import FREE, Between, Link
from gpipe_bench.pipeline.plan.reductions import Bucket, Gather
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.simulation import Simulation
from gpipe_bench.pipeline.plan.timeline import Timeline

# A backward computes two products where a forward computes one; a recomputation is a forward.
SLOTS: dict[Kind, float] = {Kind.F: 1, Kind.R: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}

T = TypeVar("T")

ActionTimes = (
    Callable[[Action], float]
    | Mapping[Kind, float]
    | Mapping[tuple[int, Kind], float]
    | Mapping[tuple[int, Kind, int], float]
)
"""Seconds of an action: a function, or a mapping by kind, (stage, kind) or (stage, kind, micro-batch)."""


def replay(
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
) -> Timeline:
    """The timeline of `schedule` when an action takes `action_s` seconds.

    Args:
        link: what is between any two workers that exchange messages, or a function of the two that says it;
            messages take no time by default.
        activation_bytes: of one micro-batch over each of the K - 1 boundaries, needed unless the link's
            bandwidth is infinite.
        gradient_bytes: the same for the way back; as many as forward if not given.
        setup_s: per stage, before the first action of its worker: dividing and reshaping the inputs.
        update_s: per stage, after the last action of its worker: the optimizer.
        early_recompute: False makes a recomputation wait for the gradient, as engines do that recompute
            inside the backward pass.
        gathers: per stage, the parameters that are fetched from other ranks for its first forward, in the
            order in which they are needed.
        reductions: per stage, the buckets of its gradients that are summed over replicas, in the order in
            which they leave (plan/reductions.py makes them).
        collective_s: what an action waits for collectives of its own, beyond `action_s`: parameters that are
            gathered in every pass, sums of tensor-parallel layers.
        portals: bytes of one micro-batch that go past stages, by their line, and of their gradients on the
            way back (plan/portals.py makes lines). They use the link between the two workers, before the
            output where there is one.

    Returns:
        Actions as `events`, set-up and update as `work`, `messages` unless the link is free, gathers and
        reductions as `collectives`.

    Raises:
        ValueError: a duration is missing, negative or not finite; sizes don't fit the schedule; the schedule
            deadlocks.
    """
    step = Simulation(
        schedule,
        _together(action_s, collective_s),
        link,
        _per_boundary("activation_bytes", activation_bytes, schedule, link),
        _per_boundary("gradient_bytes", gradient_bytes or activation_bytes, schedule, link),
        _per_stage("setup_s", setup_s, schedule),
        _per_stage("update_s", update_s, schedule),
        early_recompute,
        _of_each_stage("gathers", gathers, schedule),
        _of_each_stage("reductions", reductions, schedule),
        _of_lines(portals, schedule),
    )
    with _collector_paused():
        return step.run()


def duration_of(action_s: ActionTimes) -> Callable[[Action], float]:
    """The seconds of an action as a function; the most specific entry of a mapping counts.

    The function raises ValueError for an action that the mapping does not know.
    """
    if callable(action_s):
        return action_s
    times: Mapping[object, float] = action_s  # type: ignore[assignment]  # the keys are told apart below
    known: dict[tuple[int, Kind], float] = {}

    def duration(action: Action) -> float:
        if action in times:
            return times[action]
        key = (action.stage, action.kind)
        if key not in known:
            for candidate in (key, action.kind):
                if candidate in times:
                    known[key] = times[candidate]
                    break
            else:
                raise ValueError(
                    f"no duration for {action}; give one for {action.kind.value!r} or for "
                    f"({action.stage}, {action.kind.value!r})"
                )
        return known[key]

    return duration


def _together(action_s: ActionTimes, collective_s: ActionTimes | None) -> Callable[[Action], float]:
    alone_s = duration_of(action_s)
    if collective_s is None:
        return alone_s
    waiting_s = duration_of(collective_s)
    return lambda action: alone_s(action) + waiting_s(action)


def _of_lines(
    portals: Mapping[Edge, tuple[float, float]], schedule: Schedule
) -> Mapping[Edge, tuple[float, float]]:
    for line, sizes in portals.items():
        if not 0 <= line.source < line.target < schedule.num_stages:
            raise ValueError(
                f"a line of portals leads from stage {line.source} to stage {line.target}; a schedule of "
                f"{schedule.num_stages} stages has lines to later stages only"
            )
        if len(sizes) != 2 or not all(0 <= size < inf for size in sizes):
            raise ValueError(f"portals has {sizes} for line {line.number}; give bytes there and back")
    return portals


@contextmanager
def _collector_paused() -> Iterator[None]:
    """The garbage collector would walk through hundreds of thousands of new objects again and again, none of
    which is in a cycle; that doubles the time of a large replay.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _per_boundary(what: str, values: Sequence[float], schedule: Schedule, link: Between) -> Sequence[float]:
    boundaries = schedule.num_stages - 1
    homes = map(schedule.worker, range(schedule.num_stages))
    links = {link} if isinstance(link, Link) else {link(a, b) for a, b in pairwise(homes) if a != b}
    slow = next((each.name for each in links if each.bandwidth_bytes_per_s < inf), None)
    if not values and (slow is None or not boundaries):
        return [0] * boundaries
    if len(values) != boundaries:
        raise ValueError(
            f"{what} has {len(values)} entries for {boundaries} boundaries between {schedule.num_stages} "
            f"stages; link {slow or 'free'!r} needs the bytes of one micro-batch over each"
        )
    return _checked(what, values)


def _per_stage(what: str, values: Sequence[float], schedule: Schedule) -> Sequence[float]:
    return _checked(what, _of_each_stage(what, values, schedule))


def _of_each_stage(what: str, values: Sequence[T], schedule: Schedule) -> Sequence[T]:
    if values and len(values) != schedule.num_stages:
        raise ValueError(
            f"{what} has {len(values)} entries for {schedule.num_stages} stages; give one per stage"
        )
    return values


def _checked(what: str, values: Sequence[float]) -> Sequence[float]:
    for index, value in enumerate(values):
        if not 0 <= value < inf:
            raise ValueError(f"{what}[{index}] is {value}; it must be finite and not negative")
    return values
