"""Replays a schedule: lays it out in time from the durations of its actions, without running it.

A discrete-event simulation: when an action ends, its message enters the link, and stages that waited for
either continue.

    worker 0  F0 F1 ....... B1 B0         a worker takes its row in order; an action starts when the worker is
    link        \\  \\      /  /           free and its message is there; messages of one direction queue up,
    worker 1     F0 F1 B1 B0              while both workers compute

Messages from a worker to itself take no time. A stage's gathers begin with the step. Its reductions over
replicas start within its last backward, in turn on a link of their own, and the worker's update waits for
all. Left out are workers that slow each other down (memory, shared cores, messages and reductions on one
link), replicas of unequal speed, and jitter: measure a step where you can. Only the standard library is
imported; results are exact for fractions and integers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from operator import attrgetter
from typing import Any

from .links import FREE, Between, Bucket, Gather, Link
from .schedule import Action, Kind, Schedule
from .timeline import Event, Span, Timeline
from .walk import Walk, receivers

# A backward computes two products where a forward computes one; a recomputation is a forward.
SLOTS: dict[Kind, float] = {Kind.F: 1, Kind.R: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}

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
) -> Timeline:
    """The timeline of `schedule` if each action takes `action_s` seconds.

    Args:
        link: the link between any two workers, or a function of two workers that returns it; by default
            messages take no time.
        activation_bytes: of one micro-batch over each of the K - 1 boundaries; required unless the link's
            bandwidth is infinite.
        gradient_bytes: of one micro-batch back over each boundary; default: `activation_bytes`.
        setup_s: per stage, seconds before the first action of its worker: dividing and reshaping inputs.
        update_s: per stage, seconds after the last action of its worker: the optimizer.
        early_recompute: False makes a recomputation wait for the gradient, as in engines that recompute
            inside the backward.
        gathers: per stage, parameters that it gathers from other ranks for its first forward, in the order of
            need.
        reductions: per stage, buckets of its gradients to sum over replicas, in the order in which they are
            sent.
        collective_s: seconds that an action waits for its own collectives, beyond `action_s`: gathers in
            every pass, sums of tensor-parallel layers.

    Returns:
        A timeline with actions as `events`, set-up and update as `work`, `messages` unless the link is free,
        gathers and reductions as `collectives`.

    Raises:
        ValueError: a duration is missing, negative or not finite; sizes don't fit the schedule; the schedule
            deadlocks.
    """
    duration_s = duration_of(action_s)
    if collective_s is not None:
        alone_s, waiting_s = duration_s, duration_of(collective_s)

        def duration_s(action: Action) -> float:
            return alone_s(action) + waiting_s(action)

    stages = range(schedule.num_stages)
    step = _Simulation(
        schedule,
        duration_s,
        link,
        _per_boundary("activation_bytes", activation_bytes, schedule, link),
        _per_boundary("gradient_bytes", gradient_bytes or activation_bytes, schedule, link),
        _checked("setup_s", _per_stage("setup_s", setup_s or [0] * len(stages), schedule)),
        _checked("update_s", _per_stage("update_s", update_s or [0] * len(stages), schedule)),
        early_recompute,
    )
    step.gather(_per_stage("gathers", gathers, schedule))
    # The last action of each stage, and the buckets that are sent within it.
    last = [schedule.row(stage)[-1] for stage in stages]
    step.buckets = dict(zip(last, _per_stage("reductions", reductions, schedule), strict=False))
    # Garbage collections would scan hundreds of thousands of new objects, none in a cycle: twice the time for
    # a large replay.
    with no_collections():
        return step.run()


@contextmanager
def no_collections() -> Iterator[None]:
    """Disables garbage collection: objects and tensors' storages then die with their last reference, not at a
    random later time, and no collection scans torch's objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def duration_of(action_s: ActionTimes) -> Callable[[Action], float]:
    """Returns the seconds of an action as a function; the most specific entry of a mapping is used.

    The function raises ValueError for an action that the mapping does not know.
    """
    if callable(action_s):
        return action_s
    times: Mapping[object, float] = action_s  # type: ignore[assignment]  # the keys are told apart below

    def duration(action: Action) -> float:
        for key in (action, action[:2], action.kind):
            if key in times:
                return times[key]
        raise ValueError(
            f"no duration for {action}; give one for {action.kind.value!r} or for "
            f"({action.stage}, {action.kind.value!r})"
        )

    return duration


class _Simulation:
    """The state of one replay; `replay` describes and checks the arguments."""

    def __init__(
        self,
        schedule: Schedule,
        duration_s: Callable[[Action], float],
        link: Between,
        activation_bytes: Sequence[float],
        gradient_bytes: Sequence[float],
        setup_s: Sequence[float],
        update_s: Sequence[float],
        early_recompute: bool,
    ) -> None:
        self.schedule, self.duration_s, self.link = schedule, duration_s, link
        self.activation_bytes, self.gradient_bytes = activation_bytes, gradient_bytes
        self.setup_s, self.update_s = setup_s, update_s
        workers = range(schedule.num_workers)
        self.free_s = [sum(setup_s[stage] for stage in schedule.stages_of(worker)) for worker in workers]
        self.reduced_s: list[float] = [0 for _ in workers]  # the end of a worker's last reduction
        self.events: list[list[Event]] = [[] for _ in workers]
        self.running = [False for _ in workers]  # whether an action runs, whose end is in the heap
        self.walk = Walk(schedule)
        self.heap: list[tuple[float, int]] = []
        self.messages: list[Span] = []
        self.collectives: list[Span] = []
        # By sending and receiving stage: the receiving worker, the link, seconds per message, and when the
        # link is free, in a list that others may share; empty where messages take no time.
        self.channels: dict[tuple[int, int], tuple[int, Link, float, list[float]]] = {}
        self.queues_s: dict[tuple[int, int], list[float]] = {}
        self.targets = receivers(schedule)
        self.arrivals_s: dict[Action, float] = {}  # when each action's message arrives
        # By recomputation that waits for a gradient: the backward that needs this gradient.
        back = [] if early_recompute else [a for a in self.targets.values() if a.kind is not Kind.F]
        self.waiting = {action._replace(kind=Kind.R): action for action in back}
        # By first forward of a stage: after which share of it each gather is needed, and the gather's end.
        self.fetched: dict[Action, list[tuple[float, float]]] = {}
        self.buckets: dict[Action, Sequence[Bucket]] = {}

    def gather(self, gathers: Sequence[Sequence[Gather]]) -> None:
        """Lays out the gathers of each worker, one after another from the start of the step."""
        for worker in range(self.schedule.num_workers) if gathers else ():
            end_s: float = 0
            for stage in self.schedule.stages_of(worker):
                first = next(action for action in self.schedule.row(stage) if action.kind is Kind.F)
                for number, gather in enumerate(gathers[stage]):
                    start_s, end_s = end_s, end_s + gather.takes_s
                    self.collectives.append(Span(f"gather {number}", stage, start_s, end_s))
                    self.fetched.setdefault(first, []).append((gather.needed, end_s))

    def _channel(self, stage: int, target: int) -> tuple[int, Link, float, list[float]]:
        ends = self.schedule.worker(stage), self.schedule.worker(target)
        if self.link is FREE or ends[0] == ends[1]:
            return ends[1], FREE, 0, []
        link = self.link if isinstance(self.link, Link) else self.link(*ends)
        shared = (min(ends), max(ends)) if link.shares_directions else ends
        num_bytes = self.activation_bytes[stage] if stage < target else self.gradient_bytes[target]
        return ends[1], link, link.occupied_s(num_bytes), self.queues_s.setdefault(shared, [0])

    def run(self) -> Timeline:
        """`ValueError` if an action cannot start, or if its duration is negative or not finite."""
        for worker in range(len(self.events)):
            self._go_on(worker)
        while self.heap:
            worker = heappop(self.heap)[1]
            self.running[worker] = False
            self._hand_over(worker, self.events[worker][-1])
            self._go_on(worker)
        if any(self.walk.next):
            raise self.walk.stopped()
        events = [event for events in self.events for event in events]
        events.sort(key=attrgetter("start_s"))  # equal starts stay ordered by worker
        links = [self.link] if isinstance(self.link, Link) else [each[1] for each in self.channels.values()]
        names = dict.fromkeys(link.name for link in links if link != FREE)
        return Timeline(
            tuple(events),
            self.schedule.num_stages,
            provenance="replayed",
            conditions={"link": ", ".join(names)} if names else {},
            work=self._work(),
            messages=tuple(self.messages),
            placement=self.schedule.placement,
            collectives=tuple(self.collectives),
        )

    def _go_on(self, worker: int) -> None:
        """Start the worker's next action if its needs are met; the start may lie in the future."""
        if self.running[worker] or not self.walk.is_ready(worker):
            return
        action = self.walk.next[worker]
        assert action is not None, "it is ready"
        needs = self.waiting.get(action, action) if self.waiting else action
        if needs is not action and needs not in self.arrivals_s:
            return
        start_s, arrival_s = self.free_s[worker], self.arrivals_s.get(needs, 0)
        if arrival_s > start_s:
            start_s = arrival_s
        duration_s = self.duration_s(action)
        if not 0 <= duration_s < inf:
            raise ValueError(f"{action} takes {duration_s} s; a duration must be finite and not negative")
        late_s: float = 0  # waits for gathers inside the first forward
        for share, there_s in self.fetched.get(action, ()) if self.fetched else ():
            late_s += max(0, there_s - (start_s + late_s + share * duration_s))
        end_s = start_s + late_s + duration_s
        self.free_s[worker] = end_s
        self.events[worker].append(Event(action, start_s, end_s))
        self.walk.take(worker)
        self.running[worker] = True
        heappush(self.heap, (end_s, worker))

    def _hand_over(self, worker: int, event: Event) -> None:
        """Called when an action ends: its message enters the link as soon as the link is free."""
        action, start_s, end_s = event
        self.walk.finish(action)
        # Buckets are sent within the stage's last backward, each when it is ready and the one before is done.
        for number, bucket in enumerate(self.buckets.get(action, ())):
            leaves_s = max(start_s + bucket.ready * event.duration_s, self.reduced_s[worker])
            self.reduced_s[worker] = leaves_s + bucket.takes_s
            self.collectives.append(Span(f"reduce {number}", action.stage, leaves_s, self.reduced_s[worker]))
        target = self.targets.get(action)
        if target is None:
            return
        ends = action.stage, target.stage
        channel = self.channels.get(ends)
        if channel is None:
            channel = self.channels[ends] = self._channel(*ends)
        there, link, takes_s, queue_s = channel
        arrival_s = end_s
        if queue_s:
            leaves_s = queue_s[0] if queue_s[0] > end_s else end_s
            queue_s[0] = leaves_s + takes_s
            arrival_s = queue_s[0] + link.latency_s
            self.messages.append(Span(f"{action}->{target.stage}", action.stage, leaves_s, arrival_s))
        self.arrivals_s[target] = arrival_s
        self._go_on(there)

    def _work(self) -> tuple[Span, ...]:
        """The spans of all set-ups, then of all updates."""
        found = []
        for worker in range(len(self.events)):
            before_s: float = 0
            after_s = max(self.free_s[worker], self.reduced_s[worker])
            for stage in self.schedule.stages_of(worker):
                found.append(Span("setup", stage, before_s, before_s + self.setup_s[stage]))
                before_s = found[-1].end_s
                found.append(Span("update", stage, after_s, after_s + self.update_s[stage]))
                after_s = found[-1].end_s
        found.sort(key=attrgetter("name"))
        return tuple(span for span in found if span.duration_s)


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


def _per_stage(what: str, values: Sequence[Any], schedule: Schedule) -> Sequence[Any]:
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
