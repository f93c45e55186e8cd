"""A schedule laid out in time from the durations of its actions, without running it.

Answers what a step would take on K devices where there are fewer, and what it would take under other
circumstances: a free link, even stages. A discrete-event simulation, in the order of time: whenever an action
ends, its message enters the link, and the stages that waited for either go on.

    stage 0   F0 F1 ....... B1 B0         a stage takes its row in order; an action starts when the stage is
    link        \\  \\      /  /           free and its message is there; messages of one direction queue up,
    stage 1      F0 F1 B1 B0              while both stages compute

What it leaves out: stages that slow each other down (memory, shared cores), and jitter. So where a step can
be measured, measure it too and look at the difference. Only the standard library is imported; times may be
fractions or integers, and then all results are exact.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from math import inf
from operator import attrgetter

from gpipe_bench.pipeline.plan.links import FREE, Link
from gpipe_bench.pipeline.plan.schedule import Action, Kind, Schedule
from gpipe_bench.pipeline.plan.timeline import Event, Span, Timeline

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
    link: Link = FREE,
    *,
    activation_bytes: Sequence[float] = (),
    gradient_bytes: Sequence[float] = (),
    setup_s: Sequence[float] = (),
    update_s: Sequence[float] = (),
    early_recompute: bool = True,
) -> Timeline:
    """The timeline of `schedule` when an action takes `action_s` seconds.

    Args:
        link: what every boundary between two stages has; messages take no time by default.
        activation_bytes: of one micro-batch over each of the K - 1 boundaries, needed unless the link's
            bandwidth is infinite.
        gradient_bytes: the same for the way back; as many as forward if not given.
        setup_s: per stage, before its first action: dividing and reshaping the inputs.
        update_s: per stage, after its last action: the optimizer.
        early_recompute: False makes a recomputation wait for the gradient, as engines do that recompute
            inside the backward pass.

    Returns:
        Actions as `events`, set-up and update as `work`, `messages` unless the link is free.

    Raises:
        ValueError: a duration is missing, negative or not finite; sizes don't fit the schedule; the schedule
            deadlocks.
    """
    step = _Step(
        schedule,
        duration_of(action_s),
        link,
        _per_boundary("activation_bytes", activation_bytes, schedule, link),
        _per_boundary("gradient_bytes", gradient_bytes or activation_bytes, schedule, link),
        _per_stage("setup_s", setup_s, schedule),
        _per_stage("update_s", update_s, schedule),
        early_recompute,
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
    exact = any(isinstance(key, tuple) and len(key) == 3 for key in times)
    known: dict[tuple[int, Kind], float] = {}

    def duration(action: Action) -> float:
        if exact and (action.stage, action.kind, action.microbatch) in times:
            return times[action.stage, action.kind, action.microbatch]
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


def _per_boundary(what: str, values: Sequence[float], schedule: Schedule, link: Link) -> Sequence[float]:
    boundaries = schedule.num_stages - 1
    if not values and (link.bandwidth_bytes_per_s == inf or not boundaries):
        return [0] * boundaries
    if len(values) != boundaries:
        raise ValueError(
            f"{what} has {len(values)} entries for {boundaries} boundaries between {schedule.num_stages} "
            f"stages; link {link.name!r} needs the bytes of one micro-batch over each"
        )
    return _checked(what, values)


def _per_stage(what: str, values: Sequence[float], schedule: Schedule) -> Sequence[float]:
    if values and len(values) != schedule.num_stages:
        raise ValueError(
            f"{what} has {len(values)} entries for {schedule.num_stages} stages; give one per stage"
        )
    return _checked(what, values)


def _checked(what: str, values: Sequence[float]) -> Sequence[float]:
    for index, value in enumerate(values):
        if not 0 <= value < inf:
            raise ValueError(f"{what}[{index}] is {value}; it must be finite and not negative")
    return values


class _Stage:
    """Where a stage is in its row, and what has arrived for it."""

    __slots__ = (
        "done", "events", "free_s", "gradients_s", "index", "inputs_s", "is_first", "is_last", "next", "rest",
        "running",
    )  # fmt: skip

    def __init__(self, index: int, num_stages: int, row: Sequence[Action], free_s: float) -> None:
        self.index = index
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.rest = iter(row)
        self.next = next(self.rest, None)
        self.running = False  # an action has been started, and its end is in the heap
        self.free_s = free_s
        self.events: list[Event] = []
        self.inputs_s: dict[int, float] = {}  # arrival by micro-batch
        self.gradients_s: dict[int, float] = {}
        self.done: dict[int, Kind] = {}  # the last action done on each micro-batch


class _Step:
    """The state of one simulation. A stage is running, waiting for a message, or through."""

    def __init__(
        self,
        schedule: Schedule,
        duration_s: Callable[[Action], float],
        link: Link,
        activation_bytes: Sequence[float],
        gradient_bytes: Sequence[float],
        setup_s: Sequence[float],
        update_s: Sequence[float],
        early_recompute: bool,
    ) -> None:
        self.schedule, self.duration_s, self.link = schedule, duration_s, link
        self.early_recompute = early_recompute
        self.setup_s, self.update_s = setup_s, update_s
        self.stages = [
            _Stage(index, schedule.num_stages, row, setup_s[index] if setup_s else 0)
            for index, row in enumerate(schedule.actions)
        ]
        self.graph_from = [
            Kind.R if schedule.recomputes(microbatch) else Kind.F
            for microbatch in range(schedule.num_microbatches)
        ]
        self.heap: list[tuple[float, int]] = []
        self.messages: list[Span] = []
        # A queue per boundary and direction, or per boundary: how long a message takes it, when it is free.
        self.activations_take_s = [link.occupied_s(num_bytes) for num_bytes in activation_bytes]
        self.gradients_take_s = [link.occupied_s(num_bytes) for num_bytes in gradient_bytes]
        self.activations_free_s: list[float] = [0] * len(activation_bytes)
        self.gradients_free_s = (
            self.activations_free_s if link.shares_directions else list(self.activations_free_s)
        )

    def run(self) -> Timeline:
        stages, heap = self.stages, self.heap
        for stage in stages:
            self._go_on(stage)
        while heap:
            stage = stages[heappop(heap)[1]]
            stage.running = False
            self._hand_over(stage, stage.events[-1])
            self._go_on(stage)
        self._check_finished()
        events = [event for stage in stages for event in stage.events]
        events.sort(key=attrgetter("start_s"))  # equal starts stay ordered by stage
        return Timeline(
            tuple(events),
            self.schedule.num_stages,
            provenance="replayed",
            conditions={} if self.link == FREE else {"link": self.link.name},
            work=self._work(),
            messages=tuple(self.messages),
        )

    def _go_on(self, stage: _Stage) -> None:
        """Start the stage's next action if all it needs is known; the start may lie ahead."""
        action = stage.next
        if action is None or stage.running:
            return
        kind, microbatch = action.kind, action.microbatch
        arrival_s: float | None = 0
        if kind is Kind.F:
            if not stage.is_first:
                arrival_s = stage.inputs_s.get(microbatch)
        else:
            before = Kind.F if kind is Kind.R else Kind.I if kind is Kind.W else self.graph_from[microbatch]
            if stage.done.get(microbatch) is not before:  # the stage's own work comes first
                return
            if not stage.is_last and (
                kind is Kind.B or kind is Kind.I or (kind is Kind.R and not self.early_recompute)
            ):
                arrival_s = stage.gradients_s.get(microbatch)
        if arrival_s is None:
            return
        duration_s = self.duration_s(action)
        if not 0 <= duration_s < inf:
            raise ValueError(f"{action} takes {duration_s} s; a duration must be finite and not negative")
        start_s = stage.free_s if stage.free_s > arrival_s else arrival_s
        end_s = stage.free_s = start_s + duration_s
        stage.events.append(Event(action, start_s, end_s))
        stage.next = next(stage.rest, None)
        stage.running = True
        heappush(self.heap, (end_s, stage.index))

    def _hand_over(self, stage: _Stage, event: Event) -> None:
        """The action has ended: its message enters the link as soon as that is free."""
        action, end_s = event.action, event.end_s
        kind, microbatch = action.kind, action.microbatch
        stage.done[microbatch] = kind
        if kind is Kind.F and not stage.is_last:
            boundary, target = stage.index, self.stages[stage.index + 1]
            take_s, free_s, arrivals_s = self.activations_take_s, self.activations_free_s, target.inputs_s
        elif (kind is Kind.B or kind is Kind.I) and not stage.is_first:
            boundary, target = stage.index - 1, self.stages[stage.index - 1]
            take_s, free_s, arrivals_s = self.gradients_take_s, self.gradients_free_s, target.gradients_s
        else:
            return
        if self.link is FREE:
            arrivals_s[microbatch] = end_s
        else:
            start_s = free_s[boundary] if free_s[boundary] > end_s else end_s
            free_s[boundary] = start_s + take_s[boundary]
            arrival_s = arrivals_s[microbatch] = free_s[boundary] + self.link.latency_s
            name = f"{stage.index}{kind}{microbatch}->{target.index}"
            self.messages.append(Span(name, stage.index, start_s, arrival_s))
        self._go_on(target)

    def _work(self) -> tuple[Span, ...]:
        setup = [Span("setup", stage, 0, seconds) for stage, seconds in enumerate(self.setup_s)]
        update = [
            Span("update", stage.index, stage.free_s, stage.free_s + seconds)
            for stage, seconds in zip(self.stages, self.update_s, strict=False)
        ]
        return tuple(span for span in (*setup, *update) if span.duration_s)

    def _check_finished(self) -> None:
        stuck = [str(stage.next) for stage in self.stages if stage.next is not None]
        if stuck:
            raise ValueError(
                f"schedule {self.schedule.name!r} deadlocks: {', '.join(stuck)} wait for work that is never "
                "done; plan.validate says what is missing"
            )
