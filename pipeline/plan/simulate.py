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
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from operator import attrgetter
from types import MappingProxyType
from typing import TypeVar

from .edges import Edge
from .links import FREE, Between, Bucket, Gather, Link
from .schedule import Action, Kind, Schedule
from .timeline import Event, Span, Timeline
from .walk import Walk

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
            which they leave.
        collective_s: what an action waits for collectives of its own, beyond `action_s`: parameters that are
            gathered in every pass, sums of tensor-parallel layers.
        portals: bytes of one micro-batch that go past stages, by their line, and of their gradients on the
            way back. They use the link between the two workers, before the
            output where there is one.

    Returns:
        Actions as `events`, set-up and update as `work`, `messages` unless the link is free, gathers and
        reductions as `collectives`.

    Raises:
        ValueError: a duration is missing, negative or not finite; sizes don't fit the schedule; the schedule
            deadlocks.
    """
    duration_s = duration_of(action_s)
    if collective_s is not None:
        alone_s, waiting_s = duration_s, duration_of(collective_s)

        def duration_s(action: Action) -> float:
            return alone_s(action) + waiting_s(action)

    step = _Simulation(
        schedule,
        duration_s,
        link,
        _per_boundary("activation_bytes", activation_bytes, schedule, link),
        _per_boundary("gradient_bytes", gradient_bytes or activation_bytes, schedule, link),
        _checked("setup_s", _per_stage("setup_s", setup_s, schedule)),
        _checked("update_s", _per_stage("update_s", update_s, schedule)),
        early_recompute,
        _per_stage("gathers", gathers, schedule),
        _per_stage("reductions", reductions, schedule),
        _of_lines(portals, schedule),
    )
    # The garbage collector would walk through hundreds of thousands of new objects again and again, none of
    # which is in a cycle; that doubles the time of a large replay.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return step.run()
    finally:
        if was_enabled:
            gc.enable()


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


class _WorkerState:
    """When a worker is free, and what it has taken."""

    __slots__ = ("events", "free_s", "index", "reduced_s", "running")

    def __init__(self, index: int, free_s: float) -> None:
        self.index = index
        self.running = False  # an action has been started, and its end is in the heap
        self.free_s = free_s
        self.reduced_s: float = 0  # the end of its last reduction
        self.events: list[Event] = []


class _Messages:
    """The messages from one stage to another: activations, gradients or those of a line of portals."""

    __slots__ = ("arrivals_s", "link", "queue_s", "takes_s", "target", "worker")

    def __init__(
        self, target: _StageState, link: Link, num_bytes: float, queue_s: list[float] | None
    ) -> None:
        self.target, self.worker = target.index, target.worker
        self.link, self.takes_s = link, link.occupied_s(num_bytes)
        # When the link is free again, which others share; None where messages are there at once.
        self.queue_s = queue_s
        self.arrivals_s: dict[int, float] = {}  # by micro-batch


class _StageState:
    """When messages come to a stage, and where its own go."""

    __slots__ = ("index", "needs", "sends", "worker")

    def __init__(self, index: int, worker: _WorkerState) -> None:
        self.index, self.worker = index, worker
        self.needs: dict[Kind, list[dict[int, float]]] = {kind: [] for kind in Kind}
        self.sends: dict[Kind, list[_Messages]] = {kind: [] for kind in Kind}
        self.needs[Kind.I], self.sends[Kind.I] = self.needs[Kind.B], self.sends[Kind.B]


class _Simulation:
    """The state of one replay; `replay` says what the arguments mean, and has checked them."""

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
        gathers: Sequence[Sequence[Gather]],
        reductions: Sequence[Sequence[Bucket]],
        portals: Mapping[Edge, tuple[float, float]],
    ) -> None:
        self.schedule, self.duration_s, self.link = schedule, duration_s, link
        self.setup_s, self.update_s = setup_s, update_s
        self.workers = [
            _WorkerState(index, sum(setup_s[stage] for stage in schedule.stages_of(index)) if setup_s else 0)
            for index in range(schedule.num_workers)
        ]
        self.stages = [
            _StageState(index, self.workers[schedule.worker(index)]) for index in range(schedule.num_stages)
        ]
        self.walk = Walk(schedule)
        self.heap: list[tuple[float, int]] = []
        self.messages: list[Span] = []
        self.links: dict[tuple[int, int], Link] = {}
        self.queues_s: dict[tuple[int, int], list[float]] = {}
        self._join(activation_bytes, gradient_bytes, early_recompute, portals)
        self.collectives = self._gathered(gathers)
        # For the first forward of a stage: the share after which it needs each fetch, and the fetch's end.
        self.fetched: dict[Action, list[tuple[float, float]]] = {}
        for stage, fetched in enumerate(gathers):
            first = next((action for action in schedule.row(stage) if action.kind is Kind.F), None)
            ends = [span.end_s for span in self.collectives if span.stage == stage]
            if first is not None and fetched:
                needed = [each.needed for each in fetched]
                self.fetched[first] = list(zip(needed, ends, strict=True))
        # The last action of a stage that makes gradients of parameters, and what leaves inside it.
        self.buckets: dict[Action, Sequence[Bucket]] = {
            action: buckets for stage, buckets in enumerate(reductions) for action in schedule.row(stage)[-1:]
        }

    def _join(
        self,
        activation_bytes: Sequence[float],
        gradient_bytes: Sequence[float],
        early_recompute: bool,
        portals: Mapping[Edge, tuple[float, float]],
    ) -> None:
        """The edges between stages: what each action waits for, and what it sends."""
        stages, pairs = self.stages, [*pairwise(self.stages)]
        for (stage, behind), size in zip(pairs, activation_bytes, strict=True):
            edge = self._edge(stage, behind, size)
            stage.sends[Kind.F].append(edge)
            behind.needs[Kind.F].append(edge.arrivals_s)
        for (before, stage), size in zip(pairs, gradient_bytes, strict=True):
            edge = self._edge(stage, before, size)
            stage.sends[Kind.B].append(edge)
            before.needs[Kind.B].append(edge.arrivals_s)
            if not early_recompute:
                before.needs[Kind.R].append(edge.arrivals_s)
        for line, (there, back) in portals.items():  # they leave before the output
            source, target = stages[line.source], stages[line.target]
            edge = self._edge(source, target, there)
            source.sends[Kind.F].insert(-1, edge)
            target.needs[Kind.F].append(edge.arrivals_s)
            edge = self._edge(target, source, back)
            target.sends[Kind.B].insert(0, edge)
            source.needs[Kind.B].append(edge.arrivals_s)

    def _edge(self, source: _StageState, target: _StageState, num_bytes: float) -> _Messages:
        ends, link = (source.worker.index, target.worker.index), self.link
        if not isinstance(link, Link):
            if ends not in self.links:
                self.links[ends] = FREE if ends[0] == ends[1] else link(*ends)
            link = self.links[ends]
        if self.link is FREE or ends[0] == ends[1]:
            return _Messages(target, link, num_bytes, None)
        if link.shares_directions and ends[0] > ends[1]:
            ends = (ends[1], ends[0])
        return _Messages(target, link, num_bytes, self.queues_s.setdefault(ends, [0]))

    def run(self) -> Timeline:
        """`ValueError` where an action cannot start or takes no time that can be."""
        workers, heap = self.workers, self.heap
        for worker in workers:
            self._go_on(worker)
        while heap:
            worker = workers[heappop(heap)[1]]
            worker.running = False
            self._hand_over(worker.events[-1])
            self._go_on(worker)
        stuck = [str(action) for action in self.walk.next if action is not None]
        if stuck:
            raise ValueError(
                f"schedule {self.schedule.name!r} deadlocks: {', '.join(stuck)} wait for work that is never "
                "done; plan.schedule.validate says what is missing"
            )
        events = [event for worker in workers for event in worker.events]
        events.sort(key=attrgetter("start_s"))  # equal starts stay ordered by worker
        links = [self.link] if isinstance(self.link, Link) else [*self.links.values()]
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

    def _go_on(self, worker: _WorkerState) -> None:
        """Start the worker's next action if all it needs is known; the start may lie ahead."""
        if worker.running or not self.walk.is_ready(worker.index):
            return
        action = self.walk.next[worker.index]
        assert action is not None, "it is ready"
        index, kind, microbatch = action
        stage = self.stages[index]
        arrival_s: float = 0
        for arrivals_s in stage.needs[kind]:
            there_s = arrivals_s.get(microbatch)
            if there_s is None:
                return
            if there_s >= arrival_s:
                arrival_s = there_s
        duration_s = self.duration_s(action)
        if not 0 <= duration_s < inf:
            raise ValueError(f"{action} takes {duration_s} s; a duration must be finite and not negative")
        start_s = worker.free_s if worker.free_s > arrival_s else arrival_s
        end_s = start_s + duration_s
        if action in self.fetched:
            # It waits inside for what it needs at each share of it.
            late_s: float = 0
            for share, there_s in self.fetched[action]:
                at_s = start_s + late_s + share * duration_s
                if there_s > at_s:
                    late_s += there_s - at_s
            end_s = start_s + late_s + duration_s
        worker.free_s = end_s
        worker.events.append(Event(action, start_s, end_s))
        self.walk.take(worker.index)
        worker.running = True
        heappush(self.heap, (end_s, worker.index))

    def _hand_over(self, event: Event) -> None:
        """The action has ended: its messages enter their links as soon as these are free."""
        action, _, end_s = event
        index, kind, microbatch = action
        stage = self.stages[index]
        self.walk.finish(action)
        if action in self.buckets:
            self._reduce(stage, event)
        for edge in stage.sends[kind]:
            queue_s, arrival_s = edge.queue_s, end_s
            if queue_s is not None:
                start_s = queue_s[0] if queue_s[0] > end_s else end_s
                queue_s[0] = start_s + edge.takes_s
                arrival_s = queue_s[0] + edge.link.latency_s
                self.messages.append(Span(f"{action}->{edge.target}", index, start_s, arrival_s))
            edge.arrivals_s[microbatch] = arrival_s
            self._go_on(edge.worker)

    def _reduce(self, stage: _StageState, event: Event) -> None:
        """The stage's buckets have left inside its last backward: one by one, as each was there."""
        worker = stage.worker
        for number, bucket in enumerate(self.buckets[event.action]):
            ready_s = event.start_s + bucket.ready * event.duration_s
            start_s = ready_s if ready_s > worker.reduced_s else worker.reduced_s
            worker.reduced_s = start_s + bucket.takes_s
            self.collectives.append(Span(f"reduce {number}", stage.index, start_s, worker.reduced_s))

    def _gathered(self, gathers: Sequence[Sequence[Gather]]) -> list[Span]:
        """Lays out the stages' parameter fetches from the start of the step, in sequence on each worker."""
        found = []
        for worker in self.workers if gathers else ():
            end_s: float = 0
            for stage in self.schedule.stages_of(worker.index):
                for number, gather in enumerate(gathers[stage]):
                    start_s, end_s = end_s, end_s + gather.takes_s
                    found.append(Span(f"gather {number}", stage, start_s, end_s))
        return found

    def _work(self) -> tuple[Span, ...]:
        """Set-ups, then updates."""
        found = []
        for worker in self.workers:
            before_s: float = 0
            after_s = worker.free_s if worker.free_s > worker.reduced_s else worker.reduced_s
            for stage in self.schedule.stages_of(worker.index):
                if self.setup_s:
                    found.append(Span("setup", stage, before_s, before_s + self.setup_s[stage]))
                    before_s = found[-1].end_s
                if self.update_s:
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


def _per_stage(what: str, values: Sequence[T], schedule: Schedule) -> Sequence[T]:
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
