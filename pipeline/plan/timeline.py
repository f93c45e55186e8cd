"""The timeline of a step: the common result of running a schedule and of replaying one.

Plain data, compared action by action: one event per action, in seconds from the start of the step. Makespan
and bubble are computed from it. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .schedule import Action, stages_of


class Event(NamedTuple):
    """One action's start and end, in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Span(NamedTuple):
    """Other time in a step: work of a stage ("setup", "update"), a message from `stage` ("0F1->1"), or one of
    its collectives ("gather 0", "reduce 0").
    """

    name: str
    stage: int
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """The events of one step, ordered by start.

    `provenance` is "measured" or "replayed"; `devices` names the device of each stage; `conditions` says what
    was held fixed (threads, pinned cores). `work` keeps a stage busy like an action. `messages` and
    `collectives` (gathers for a stage's first forward, sums of its gradients over replicas) occupy links, not
    stages; the step ends after its collectives. `placement` is the schedule's.
    """

    events: tuple[Event, ...]
    num_stages: int
    provenance: str = "measured"
    devices: tuple[str, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)
    work: tuple[Span, ...] = ()
    messages: tuple[Span, ...] = ()
    placement: tuple[int, ...] = ()
    collectives: tuple[Span, ...] = ()

    @classmethod
    def of(
        cls,
        events: Iterable[Event],
        num_stages: int,
        provenance: str = "measured",
        devices: Iterable[str] = (),
        conditions: Mapping[str, str] | None = None,
        placement: tuple[int, ...] = (),
    ) -> Timeline:
        """Orders the events and moves the earliest start to 0."""
        ordered = sorted(events, key=lambda event: (event.start_s, event.action))
        origin_s = ordered[0].start_s if ordered else 0.0
        shifted = tuple(Event(a, start_s - origin_s, end_s - origin_s) for a, start_s, end_s in ordered)
        return cls(
            shifted, num_stages, provenance, tuple(devices), dict(conditions or {}), placement=placement
        )

    @property
    def num_workers(self) -> int:
        return max(self.placement) + 1 if self.placement else self.num_stages

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages that `worker` holds."""
        return tuple(stages_of(self.placement, worker))

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        spans = (*self.work, *self.collectives)
        ends_s = [*[event.end_s for event in self.events], *[span.end_s for span in spans]]
        return max(ends_s, default=0.0)

    def of_stage(self, stage: int) -> tuple[Event, ...]:
        """The events of one stage, in order."""
        return tuple(event for event in self.events if event.action.stage == stage)

    def of_worker(self, worker: int) -> tuple[Event, ...]:
        """The events of all stages of one worker, in order."""
        mine = set(self.stages_of(worker))
        return tuple(event for event in self.events if event.action.stage in mine)

    def busy_s(self, stage: int) -> float:
        """Seconds that the stage spends in actions and other work."""
        events_s = sum(event.duration_s for event in self.of_stage(stage))
        return events_s + sum(span.duration_s for span in self.work if span.stage == stage)

    @property
    def idle_s(self) -> float:
        """Idle device-seconds: workers x makespan, without actions and other work."""
        busy_s = sum(event.duration_s for event in self.events) + sum(span.duration_s for span in self.work)
        return self.num_workers * self.makespan_s - busy_s

    @property
    def bubble(self) -> float:
        """Idle share of workers x makespan, 0 to 1. With equal stages, no recomputation and a free link it is
        the paper's (K - 1) / (M + K - 1) (section 2.3).
        """
        total_s = self.num_workers * self.makespan_s
        return self.idle_s / total_s if total_s else 0.0

    def to_data(self) -> dict[str, Any]:
        """The timeline as lists and numbers, for a record; `from_data` reads it back."""
        return {
            "num_stages": self.num_stages,
            "provenance": self.provenance,
            "devices": list(self.devices),
            "conditions": dict(self.conditions),
            "events": [[str(event.action), event.start_s, event.end_s] for event in self.events],
            "work": [list(span) for span in self.work],
            "messages": [list(span) for span in self.messages],
            **({"placement": list(self.placement)} if self.placement else {}),
            **({"collectives": [list(span) for span in self.collectives]} if self.collectives else {}),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Timeline:
        """Reads what `to_data` returns."""
        names = ("work", "messages", "collectives")
        spans = {name: tuple(Span(*span) for span in data.get(name, ())) for name in names}
        return cls(
            tuple(Event(Action.parse(action), *times_s) for action, *times_s in data["events"]),
            data["num_stages"],
            data["provenance"],
            tuple(data["devices"]),
            dict(data["conditions"]),
            placement=tuple(data.get("placement", ())),
            **spans,
        )


def draw(timeline: Timeline) -> str:
    """Draws a timeline in whole slots, such as `replay(schedule, SLOTS)`, as workers x slots, with a dot
    where idle; if a worker holds several stages, slots name the stage too, as in `2F0`:

        stage 0 | F0 F1 .  .  B1 B1 B0 B0
        stage 1 | .  F0 F1 B1 B1 B0 B0
    """
    several = bool(timeline.placement)

    def short(action: Action) -> str:
        return str(action) if several else f"{action.kind.value}{action.microbatch}"

    width = max((len(short(event.action)) for event in timeline.events), default=0)
    margin = len(str(timeline.num_workers - 1))
    lines = []
    for worker in range(timeline.num_workers):
        slots: list[str] = []
        for event in timeline.of_worker(worker):
            slots += ["."] * (round(event.start_s) - len(slots))
            slots += [short(event.action)] * round(event.duration_s)
        grid = " ".join(slot.ljust(width) for slot in slots).rstrip()
        lines.append(f"{'worker' if several else 'stage'} {worker:>{margin}} | {grid}")
    return "\n".join(lines)
